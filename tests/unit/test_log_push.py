"""Appending: offsets, order, deduplication, and who waits for whom."""

from __future__ import annotations

from datetime import timedelta

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

PUSHED = 'select status, "partition", "offset" from queen.'


def test_offsets_count_from_one_in_each_partition(db: Database, producer: Connection) -> None:
    for offset in (1, 2, 3):
        for part in ("a", "b"):
            assert producer.execute(f"{PUSHED}push('q', '1', %s)", [part]).fetchall() == [("queued", part, offset)]
    rows = producer.execute(f"{PUSHED}push_many('q', array['1', '2', '3']::jsonb[], 'a')").fetchall()
    assert rows == [("queued", "a", 4), ("queued", "a", 5), ("queued", "a", 6)]
    segments = "select base_offset, end_offset from queen.log_segments where partition_id = %s order by 1"
    (first,) = db.rows("select id from queen.log_partitions where name = 'a'")[0]
    # One segment an append, without a gap between them.
    assert db.rows(segments, first) == [(1, 1), (2, 2), (3, 3), (4, 6)]
    assert producer.execute("select count(*) from queen.push_many('q', '{}')").fetchone() == (0,)


def test_the_message_is_what_the_answer_says(db: Database, producer: Connection) -> None:
    told = producer.execute("select message_id, txn from queen.push('q', '{\"a\": 1}', txn => 'mine')").fetchall()
    told += producer.execute("select message_id, txn from queen.push_bytes('q', '\\x00ff')").fetchall()
    told += producer.execute("select message_id, txn from queen.push_many('q', array['1', '2']::jsonb[])").fetchall()
    assert [txn for _, txn in told] == ["mine", *[str(message_id) for message_id, _ in told[1:]]]
    got = db.rows("select message_id, txn, payload, payload_bytes, producer_sub from queen.pop('q')")
    assert [row[:2] for row in got] == told
    assert [row[2:] for row in got] == [
        ({"a": 1}, None, "alice_producer"),
        (None, b"\x00\xff", "alice_producer"),
        (1, None, "alice_producer"),
        (2, None, "alice_producer"),
    ]


def test_created_at_never_goes_back(db: Database, producer: Connection, clock: Clock) -> None:
    clock.stop()
    for step in (0, 5, -10, 3, 20):
        clock.advance(timedelta(seconds=step))
        producer.execute("select queen.push('q', '1')")
    times = [at for (at,) in db.rows("select created_at from queen.pop('q') order by \"offset\"")]
    assert times == sorted(times)
    assert times[1] == times[2] == times[3]
    assert times[4] - times[0] == timedelta(seconds=18)


def test_a_rolled_back_push_leaves_no_gap(db: Database, session: StartSession) -> None:
    user = session("alice_producer", autocommit=False)
    user.run("select queen.push('q', '1')")
    user.connection.commit()
    user.run("select queen.push_many('q', array['2', '3']::jsonb[])")
    user.run("select queen.push('other', '2')")
    user.connection.rollback()
    assert user.run(f"{PUSHED}push('q', '4')") == [("queued", "Default", 2)]
    user.connection.commit()
    assert db.rows("select \"offset\", payload from queen.pop('q')") == [(1, 1), (2, 4)]
    assert db.value("select count(*) from queen.queues") == 1


def test_two_sessions_and_one_partition(db: Database, session: StartSession) -> None:
    """The second waits, offsets are in the order of the commits, and no reader sees n + 1 before n."""
    first, second = session("alice_producer", autocommit=False), session("alice_producer")
    first.run("select queen.push('q', '\"first\"', 'p')")
    waiting = second.start(f"{PUSHED}push('q', '\"second\"', 'p')")
    second.wait_until_blocked()
    assert db.value("select count(*) from queen.pop('q', 'looker')") == 0
    # Another partition of the queue is nobody's business.
    third = session("alice_producer")
    first.run("select queen.push('q', '0', 'there')")
    first.connection.commit()
    assert waiting.result(10) == [("queued", "p", 2)]
    assert third.run(f"{PUSHED}push('q', '1', 'there')") == [("queued", "there", 2)]
    assert db.rows("select payload from queen.pop('q', 'g', partition => 'p')") == [("first",), ("second",)]


def test_pushes_to_different_partitions_do_not_wait(session: StartSession) -> None:
    holder, other = session("alice_producer"), session("alice_producer")
    for part in ("a", "b"):
        holder.run("select queen.push('q', '0', %s)", part)
    holder.run("begin")
    holder.run("select queen.push('q', '1', 'a', 'txn a')")
    other.run("set lock_timeout = '500 ms'")
    assert other.run(f"{PUSHED}push('q', '1', 'b')") == [("queued", "b", 2)]
    assert other.run(f"{PUSHED}push_many('q', array['1']::jsonb[], 'new')") == [("queued", "new", 1)]
    holder.run("commit")


def test_a_duplicate_answers_with_the_first(db: Database, producer: Connection) -> None:
    first = producer.execute("select message_id from queen.push('q', '1', 'a', 't')").fetchall()
    same = 'select status, "partition", "offset", message_id from queen.'
    expected = ("duplicate", "a", 1, first[0][0])
    assert producer.execute(f"{same}push('q', '2', 'a', 't')").fetchall() == [expected]
    assert producer.execute(f"{same}push_bytes('q', '\\x02', 'b', 't')").fetchall() == [expected]
    many = producer.execute(
        f"{same}push_many('q', array['1', '2', '3', '4']::jsonb[], 'a', array['u', 't', 'u', null])"
    ).fetchall()
    assert [row[:3] for row in many] == [
        ("queued", "a", 2),
        ("duplicate", "a", 1),
        ("duplicate", "a", 2),
        ("queued", "a", 3),
    ]
    assert (many[1][3], many[2][3]) == (first[0][0], many[0][3])
    # Of another queue, a txn is another one; one that differs in case too.
    assert producer.execute(f"{PUSHED}push('r', '1', 'a', 't')").fetchall() == [("queued", "a", 1)]
    assert producer.execute(f"{PUSHED}push('q', '1', 'a', 'T')").fetchall() == [("queued", "a", 4)]
    assert db.value("select sum(last_offset) from queen.log_partitions") == 5


def test_the_window_of_deduplication(db: Database, producer: Connection, clock: Clock) -> None:
    db.execute("select queen.configure_queue('q', '{\"txn_window\": \"1 hour\"}')")
    clock.stop()
    producer.execute("select queen.push('q', '1', 'a', 't')")
    clock.advance(timedelta(minutes=59))
    assert producer.execute(f"{PUSHED}push('q', '2', 'a', 't')").fetchall() == [("duplicate", "a", 1)]
    clock.advance(timedelta(minutes=2))
    assert producer.execute("select count(*) from queen.sent('q', 't')").fetchone() == (0,)
    assert producer.execute(f"{PUSHED}push('q', '2', 'a', 't')").fetchall() == [("queued", "a", 2)]
    assert producer.execute("select \"offset\" from queen.sent('q', 't')").fetchall() == [(2,)]


def test_a_timer_fires_though_its_txn_was_pushed(db: Database, producer: Connection) -> None:
    """Its guarantee is that append and delete are one commit; it does not look at the window. A push after it does."""
    producer.execute("select queen.push('q', '1', txn => 't')")
    producer.execute("select queen.schedule('q', 'k', '2', '0', txn => 't')")
    assert db.value("select queen.fire_due()") == 1
    assert db.rows("select \"offset\", txn from queen.pop('q')") == [(1, "t"), (2, "t")]
    producer.execute("select queen.schedule('q', 'k', '3', '0', txn => 'u')")
    assert db.value("select queen.fire_due()") == 1
    assert producer.execute(f"{PUSHED}push('q', '4', txn => 'u')").fetchall() == [("duplicate", "Default", 3)]
