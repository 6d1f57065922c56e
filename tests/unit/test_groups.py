"""Consumer groups: where they begin, how cursors are moved, and how the next pop knows."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

REPAIRS = 'select queue, consumer_group, "partition" from queen.hotlist_repairs'


def read(connection: Connection, group: str = "g", queue: str = "q") -> list[tuple[str, int]]:
    """Everything there is for the group, acknowledged at once."""
    found: list[tuple[str, int]] = []
    statement = 'select "partition", "offset" from queen.pop(%s, %s, auto_ack => true)'
    while rows := connection.execute(statement, [queue, group]).fetchall():
        found += rows
    return sorted(found)


def cool(db: Database) -> None:
    """As after a rest: no partition is hot any more, so a pop sees only cursors that are behind."""
    db.execute("update queen.log_partitions set last_created_at = last_created_at - interval '2 seconds'")
    db.execute("call queen.maintain('5 seconds')")
    assert db.value("select count(*) from queen.log_partitions where hot") == 0


@pytest.fixture
def filled(db: Database) -> Database:
    """Partitions a and b with three messages each."""
    for part in ("a", "b"):
        db.execute("select queen.push_many('q', array['1', '2', '3']::jsonb[], %s)", part)
    return db


ALL = [("a", 1), ("a", 2), ("a", 3), ("b", 1), ("b", 2), ("b", 3)]


@pytest.mark.parametrize("rested", [False, True])
def test_first_contact(filled: Database, consumer: Connection, rested: bool) -> None:
    if rested:
        cool(filled)
    assert read(consumer, "from the beginning") == ALL
    filled.execute("select queen.configure_queue('q', '{\"start_at\": \"new\"}')")
    assert read(consumer, "late") == []
    filled.execute("select queen.push('q', '4', 'a'), queen.push('q', '1', 'c')")
    if rested:
        cool(filled)
    assert read(consumer, "late") == [("a", 4), ("c", 1)]
    assert read(consumer, "from the beginning") == [("a", 4), ("c", 1)]


def test_seek_by_offset(filled: Database, consumer: Connection) -> None:
    assert read(consumer) == ALL
    cool(filled)
    assert consumer.execute("select queen.seek('q', 'g', 2, partition => 'b')").fetchone() == (1,)
    assert filled.rows(REPAIRS) == [("q", "g", "b")]
    # The very next pop sees it, and has seen to it.
    assert read(consumer) == [("b", 2), ("b", 3)]
    assert filled.rows(REPAIRS) == []
    assert consumer.execute("select queen.seek('q', 'g', 0)").fetchone() == (2,)
    assert read(consumer) == ALL
    # Forward, and beyond the end: nothing to read, and what comes is read.
    assert consumer.execute("select queen.seek('q', 'g', 0, partition => 'a')").fetchone() == (1,)
    assert consumer.execute("select queen.seek('q', 'g', 1000, partition => 'a')").fetchone() == (1,)
    assert read(consumer) == []
    filled.execute("select queen.push('q', '4', 'a')")
    assert read(consumer) == [("a", 4)]


def test_seek_by_time(db: Database, consumer: Connection, clock: Clock) -> None:
    clock.stop()
    for _ in range(4):
        db.execute("select queen.push('q', '1', 'a')")
        clock.advance(timedelta(minutes=1))
    assert read(consumer) == [("a", offset) for offset in (1, 2, 3, 4)]
    at = db.value("select max(created_at) from queen.log_segments where end_offset = 3")
    assert consumer.execute("select queen.seek('q', 'g', to_time => %s)", [at]).fetchone() == (1,)
    assert read(consumer) == [("a", 3), ("a", 4)]
    between = at - timedelta(seconds=30)
    consumer.execute("select queen.seek('q', 'g', to_time => %s, partition => 'a')", [between])
    assert read(consumer) == [("a", 3), ("a", 4)]
    consumer.execute("select queen.seek('q', 'g', to_time => '2001-01-01')")
    assert len(read(consumer)) == 4


def test_repairs_are_keyed_by_names_and_widened(filled: Database, consumer: Connection) -> None:
    read(consumer)
    read(consumer, "h")
    cool(filled)
    for part, published in (("a", "a"), ("a", "a"), ("b", None)):
        consumer.execute("select queen.seek('q', 'g', 1, partition => %s)", [part])
        assert filled.rows(REPAIRS) == [("q", "g", published)]
    consumer.execute("select queen.seek('q', 'h', 3, partition => 'a')")
    assert sorted(filled.rows(REPAIRS)) == [("q", "g", None), ("q", "h", "a")]
    assert read(consumer) == ALL
    assert read(consumer, "h") == [("a", 3)]


def test_a_seek_that_is_rolled_back_is_none(filled: Database, consumer: Connection, session: StartSession) -> None:
    read(consumer)
    cool(filled)
    user = session("carl_consumer", autocommit=False)
    user.run("select queen.seek('q', 'g', 0)")
    assert filled.rows(REPAIRS) == []
    # Until then nobody sees it, and a pop beside it neither waits nor fails.
    consumer.execute("set lock_timeout = '2 s'")
    assert read(consumer) == []
    user.connection.rollback()
    assert filled.rows(REPAIRS) == []
    assert read(consumer) == []
    user.run("select queen.seek('q', 'g', 0)")
    user.connection.commit()
    assert read(consumer) == ALL


def test_seek_takes_the_lease_away(filled: Database, consumer: Connection) -> None:
    ((lease,),) = consumer.execute(
        "select distinct lease_id from queen.pop('q', 'g', lease => '1 hour', partition => 'a')"
    ).fetchall()
    consumer.execute("select queen.seek('q', 'g', 2, partition => 'a')")
    assert consumer.execute("select status from queen.ack('q', 'g', 'a', %s)", [lease]).fetchone() == ("lease_lost",)
    assert ("a", 2) in read(consumer)


def test_drop_group(filled: Database, consumer: Connection, admin: Connection) -> None:
    assert read(consumer) == ALL
    assert read(consumer, "other") == ALL
    cool(filled)
    admin.execute("select queen.drop_group('q', 'g')")
    assert filled.value("select count(*) from queen.log_consumers where consumer_group = 'g'") == 0
    # The next pop of that name is a first contact.
    assert read(consumer) == ALL
    assert read(consumer, "other") == []


def test_what_seek_refuses(filled: Database, consumer: Connection) -> None:
    for arguments in ("", ", 1, now()", ", -1"):
        with pytest.raises(psycopg.Error) as caught:
            consumer.execute(f"select queen.seek('q', 'g'{arguments})")
        assert caught.value.sqlstate == "22023", arguments
    assert consumer.execute("select queen.seek('no queue', 'g', 0)").fetchone() == (0,)
    assert consumer.execute("select queen.seek('q', 'g', 0, partition => 'none')").fetchone() == (0,)
    assert filled.value("select count(*) from queen.queues") == 1


def test_offsets_beyond_32_and_53_bits(db: Database, consumer: Connection, producer: Connection) -> None:
    """Numbers that do not fit into an int4 or a double."""
    for part, start in (("a", 2**31 - 2), ("b", 2**53 - 2), ("c", 2**62)):
        db.execute("select queen._provision('00000000-0000-0000-0000-000000000001', 'q', %s)", part)
        db.execute(
            "update queen.log_partitions set last_offset = %s, log_start = %s, txns_start = %s where name = %s",
            *(start, start + 1, start + 1, part),
        )
        db.execute("select queen.push_many('q', array['1', '2', '3', '4']::jsonb[], %s)", part)
        offsets = [start + n for n in (1, 2, 3, 4)]
        rows = consumer.execute(
            "select \"offset\", lease_id from queen.pop('q', 'g', 3, partition => %s)", [part]
        ).fetchall()
        assert [offset for offset, _ in rows] == offsets[:3]
        lease = rows[0][1]
        ack = consumer.execute("select committed from queen.ack('q', 'g', %s, %s, %s)", [part, lease, offsets[1]])
        assert ack.fetchone() == (offsets[1],)
        consumer.execute("select queen.nack('q', 'g', %s, %s)", [part, lease])
        assert [row[1] for row in read(consumer) if row[0] == part] == offsets[2:]
        consumer.execute("select queen.seek('q', 'g', %s, partition => %s)", [offsets[3], part])
        assert read(consumer) == [(part, offsets[3])]
        producer.execute("select queen.schedule('q', %s, '5', '0', partition => %s, txn => %s)", [part, part, part])
        assert db.value("select queen.fire_due()") == 1
        sent = producer.execute('select "partition", "offset" from queen.sent(\'q\', %s)', [part]).fetchall()
        assert sent == [(part, start + 5)]
        assert read(consumer) == [(part, start + 5)]
    # And the ids of partitions and queues.
    db.execute("alter table queen.queues alter id restart with 4294967296")
    db.execute("alter table queen.log_partitions alter id restart with 9007199254740993")
    producer.execute("select queen.push('far', '1', 'p')")
    assert db.value("select max(id) from queen.log_partitions") == 9007199254740993
    assert read(consumer, queue="far") == [("p", 1)]
