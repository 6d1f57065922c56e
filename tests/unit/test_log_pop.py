"""Taking messages: what a pop returns, to whom, and for how long."""

from __future__ import annotations

import itertools
from datetime import timedelta

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

ROWS = 'select "partition", "offset", payload, delivery_attempt from queen.pop'


def fill(db: Database, partitions: int, messages: int) -> None:
    """Messages 1, 2, ... in partitions p1, p2, ..."""
    db.execute(
        "select count(*) from generate_series(1, %s) p cross join lateral"
        " queen.push_many('q', array(select to_jsonb(i) from generate_series(1, %s) i), 'p' || p)",
        partitions,
        messages,
    )


def test_nothing_to_take(consumer: Connection, db: Database) -> None:
    assert consumer.execute(f"{ROWS}('no queue')").fetchall() == []
    assert db.value("select count(*) from queen.queues") == 0
    db.execute("select queen.configure_queue('q', '{}')")
    assert consumer.execute(f"{ROWS}('q')").fetchall() == []
    fill(db, 1, 1)
    assert consumer.execute(f"{ROWS}('q', partition => 'no partition')").fetchall() == []


def test_a_named_partition_in_order(db: Database, consumer: Connection) -> None:
    fill(db, 2, 5)
    assert consumer.execute(f"{ROWS}('q', max_messages => 3, partition => 'p2')").fetchall() == [
        ("p2", 1, 1, 1),
        ("p2", 2, 2, 1),
        ("p2", 3, 3, 1),
    ]
    # The rest waits for the batch before it: within a partition there is one holder a group.
    assert consumer.execute(f"{ROWS}('q', partition => 'p2')").fetchall() == []


def test_any_partition_takes_from_several(db: Database, consumer: Connection) -> None:
    fill(db, 10, 3)
    rows = consumer.execute(
        'select "partition", "offset", lease_id from queen.pop(\'q\', max_messages => 30)'
    ).fetchall()
    assert len(rows) == 30
    assert len({lease for _, _, lease in rows}) == 1
    for number in range(1, 11):
        assert [offset for part, offset, _ in rows if part == f"p{number}"] == [1, 2, 3]
    # Partition by partition, each acknowledged by itself.
    assert sum(a[0] != b[0] for a, b in itertools.pairwise(rows)) == 9
    for number in range(1, 11):
        answer = consumer.execute("select status from queen.ack('q', 'default', %s, %s)", [f"p{number}", rows[0][2]])
        assert answer.fetchone() == ("acked",)
    assert consumer.execute(f"{ROWS}('q')").fetchall() == []


def test_the_first_pop_of_a_group_takes_from_all(db: Database, session: StartSession) -> None:
    """Also past what one server has locks for, and beside a first contact that is not committed."""
    db.execute("select queen.push_many('q', array['1', '2', '3']::jsonb[], 'p' || i) from generate_series(1, 300) i")
    assert db.value("select count(*) from queen.pop('q', 'g', 10000)") == 900
    first, second = session("carl_consumer", autocommit=False), session("carl_consumer")
    assert len(first.run("select 1 from queen.pop('q', 'h', 3)")) == 3
    # One in 256 partitions shares its lock with the one that the first has.
    ((count,),) = second.run("select count(*) from queen.pop('q', 'h', 10000)")
    assert 297 * 3 < count <= 299 * 3
    first.connection.commit()
    assert db.value("select count(*) from queen.pop('q', 'h', 10000)") == 897 - count


def test_groups_do_not_know_of_one_another(db: Database, consumer: Connection) -> None:
    fill(db, 1, 3)
    for group in ("a", "b", "default"):
        rows = consumer.execute(f"{ROWS}('q', %s, auto_ack => true)", [group]).fetchall()
        assert [row[1] for row in rows] == [1, 2, 3]
        assert consumer.execute(f"{ROWS}('q', %s)", [group]).fetchall() == []


def test_auto_ack_has_no_lease(db: Database, consumer: Connection, clock: Clock) -> None:
    fill(db, 1, 2)
    clock.stop()
    assert consumer.execute("select lease_id from queen.pop('q', auto_ack => true)").fetchall() == [(None,), (None,)]
    clock.advance(timedelta(days=1))
    assert consumer.execute(f"{ROWS}('q')").fetchall() == []


def test_consumers_of_a_group_share_without_waiting(db: Database, session: StartSession) -> None:
    """Also while the pops of others are not committed."""
    fill(db, 12, 2)
    db.execute(f"{ROWS}('q', 'g', 1, '1 ms')")
    seen: list[str] = []
    for number in range(4):
        user = session("carl_consumer", autocommit=False)
        user.run("set lock_timeout = '500 ms'")
        parts = {row[0] for row in user.run(f"{ROWS}('q', 'g', 6)")}
        assert len(parts) == 3, number
        seen += parts
    assert len(set(seen)) == 12
    late = session("carl_consumer")
    late.run("set lock_timeout = '500 ms'")
    assert late.run(f"{ROWS}('q', 'g', 6)") == []


def test_a_lease_that_runs_out_is_delivered_again(db: Database, consumer: Connection, clock: Clock) -> None:
    fill(db, 1, 3)
    clock.stop()
    assert [row[3] for row in consumer.execute(f"{ROWS}('q', 'g', 2, '10 s')").fetchall()] == [1, 1]
    clock.advance(timedelta(seconds=9.9))
    assert consumer.execute(f"{ROWS}('q', 'g')").fetchall() == []
    clock.advance(timedelta(seconds=0.2))
    # What comes along for the first time says so.
    assert [row[1:] for row in consumer.execute(f"{ROWS}('q', 'g')").fetchall()] == [(1, 1, 2), (2, 2, 2), (3, 3, 1)]


def test_a_pop_is_bounded_in_bytes(db: Database, consumer: Connection) -> None:
    db.execute("select queen.configure('pop_max_bytes', '3000')")
    for part in range(6):
        for _ in range(3):
            db.execute("select queen.push('q', to_jsonb(repeat('x', 900)), %s)", f"p{part}")
    rows = consumer.execute(f"{ROWS}('q', 'g', 1000, auto_ack => true)").fetchall()
    assert 1 <= len(rows) <= 4
    # At least one message, however large.
    db.execute("select queen.push('large', to_jsonb(repeat('x', 90000)))")
    assert len(consumer.execute(f"{ROWS}('large')").fetchall()) == 1
    # And everything comes in the end.
    taken = len(rows)
    while more := consumer.execute(f"{ROWS}('q', 'g', 1000, auto_ack => true)").fetchall():
        taken += len(more)
    assert taken == 18


def test_a_large_batch_is_read_in_slices(db: Database, consumer: Connection) -> None:
    fill(db, 1, 1000)
    found: list[int] = []
    while rows := consumer.execute(f"{ROWS}('q', 'g', 170, auto_ack => true)").fetchall():
        found += [row[1] for row in rows]
    assert found == list(range(1, 1001))
