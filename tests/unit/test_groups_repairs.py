"""queen.hotlist_repairs: what a backward move publishes, in its own transaction, and how the next pop honours it."""

from __future__ import annotations

import pytest

from tests.conftest import StartSession
from tests.support.database import Connection, Database

REPAIRS = 'select consumer_group, "partition" from queen.hotlist_repairs where queue = %s order by 1'


def read(connection: Connection, form: str, group: str = "g") -> list[str]:
    """One pop of each form, or of what is asked for: the partitions with something."""
    rows = connection.execute(
        f"select distinct \"partition\" from queen.{form}('q', %s, 10000, auto_ack => true) order by 1", [group]
    )
    return [part for (part,) in rows]


@pytest.fixture
def rested(db: Database) -> Database:
    """Partitions a, b and c of q, read to their end by g and h, and cool."""
    db.execute("select queen.push_many('q', array['1', '2']::jsonb[], p) from unnest('{a,b,c}'::text[]) p")
    for group in ("g", "h"):
        db.execute("select queen.pop('q', %s, auto_ack => true)", group)
    db.execute("update queen.log_partitions set last_created_at = last_created_at - interval '1 minute'")
    db.execute("call queen.maintain()")
    assert db.rows("select from queen.log_partitions where hot") == []
    assert db.rows("select from queen.log_consumers where behind") == []
    return db


@pytest.mark.parametrize("form", ["pop", "pop_segments"])
def test_published_with_the_move_and_seen_by_the_very_next_pop(
    rested: Database, consumer: Connection, session: StartSession, form: str
) -> None:
    user = session("carl_consumer", autocommit=False)
    for statement, published, parts in (
        ("select queen.seek('q', 'g', 2, partition => 'b')", "b", ["b"]),
        ("select queen.seek('q', 'g', to_time => '2001-01-01', partition => 'c')", "c", ["c"]),
        ("select queen.seek('q', 'g', 1)", None, ["a", "b", "c"]),
    ):
        assert read(consumer, form) == []
        user.run(statement)
        mine = 'select queue, consumer_group, "partition" from queen.hotlist_repairs'
        # In the transaction of the move, not before its end for others.
        assert rested.rows(REPAIRS, "q") == []
        locks = "select from pg_locks where pid = %s and relation = 'queen.hotlist_repairs'::regclass"
        assert len(rested.rows(locks, user.pid)) >= 1
        user.connection.commit()
        assert rested.rows(mine) == [("q", "g", published)]
        # Another group's pop leaves it alone.
        assert read(consumer, form, "h") == []
        assert rested.rows(mine) == [("q", "g", published)]
        assert read(consumer, form) == parts
        assert rested.rows(mine) == []


def test_a_pop_of_a_name_sees_it_too(rested: Database, consumer: Connection) -> None:
    consumer.execute("select queen.seek('q', 'g', 1)")
    rows = consumer.execute("select \"offset\" from queen.pop('q', 'g', partition => 'a', auto_ack => true)").fetchall()
    assert rows == [(1,), (2,)]
    # What it did not read itself is not lost with the repair that it took.
    assert read(consumer, "pop") == ["b", "c"]


def test_a_group_that_is_deleted(rested: Database, consumer: Connection, session: StartSession) -> None:
    admin = session("ada_admin", autocommit=False)
    assert admin.run("select queen.drop_group('q', 'g')") == [(3,)]
    assert rested.rows(REPAIRS, "q") == []
    # Until then it is where it was.
    admin.connection.rollback()
    assert read(consumer, "pop") == []
    assert admin.run("select queen.drop_group('q', 'g')") == [(3,)]
    admin.connection.commit()
    assert rested.rows(REPAIRS, "q") == [("g", None)]
    assert rested.rows("select consumer_group from queen.log_groups") == [("h",)]
    assert read(consumer, "pop") == ["a", "b", "c"]
    assert rested.rows(REPAIRS, "q") == []
    # A group that never was publishes nothing.
    assert admin.run("select queen.drop_group('q', 'nobody')") == [(0,)]
    assert admin.run("select queen.drop_group('no queue', 'g')") == [(0,)]
    admin.connection.commit()
    assert rested.rows("select from queen.hotlist_repairs") == []


def test_a_deleted_group_starts_as_the_queue_says(rested: Database, consumer: Connection, admin: Connection) -> None:
    admin.execute("select queen.configure_queue('q', '{\"start_at\": \"new\"}')")
    admin.execute("select queen.drop_group('q', 'g')")
    assert read(consumer, "pop") == []
    rested.execute("select queen.push('q', '3', 'b')")
    assert consumer.execute("select \"offset\" from queen.pop('q', 'g')").fetchall() == [(3,)]


def test_a_deleted_group_keeps_back_nothing(rested: Database, admin: Connection, reader: Connection) -> None:
    rested.execute("select queen.push('q', '3', 'a')")
    rested.execute("select queen.pop('q', 'h', auto_ack => true)")
    lagging = "select distinct consumer_group from queen.lagging_groups"
    assert reader.execute(lagging).fetchall() == [("g",)]
    admin.execute("select queen.configure_queue('q', '{\"retention_consumed\": \"0 seconds\"}')")
    rested.execute("update queen.log_partitions set due_at = now() - interval '1 second'")
    rested.execute("call queen.maintain()")
    left = "select base_offset from queen.log_segments"
    assert rested.rows(left) == [(3,)]
    admin.execute("select queen.drop_group('q', 'g')")
    assert reader.execute(lagging).fetchall() == []
    rested.execute("update queen.log_partitions set due_at = now() - interval '1 second'")
    rested.execute("call queen.maintain()")
    assert rested.rows(left) == []


def test_two_moves_at_once_widen_it(rested: Database, session: StartSession, consumer: Connection) -> None:
    """The second waits for the first, and neither is lost, whichever of them rolls back."""
    for first_commits, published in ((True, None), (False, "b")):
        one, two = (session("carl_consumer", autocommit=False) for _ in range(2))
        one.run("select queen.seek('q', 'g', 1, partition => 'a')")
        moved = two.start("select queen.seek('q', 'g', 1, partition => 'b')")
        two.wait_until_blocked()
        (one.connection.commit if first_commits else one.connection.rollback)()
        assert moved.result(10) == [(1,)]
        two.connection.commit()
        assert rested.rows(REPAIRS, "q") == [("g", published)]
        assert read(consumer, "pop") == (["a", "b"] if first_commits else ["b"])


def test_a_pop_passes_by_a_move_that_is_not_committed(rested: Database, session: StartSession) -> None:
    mover = session("carl_consumer", autocommit=False)
    mover.run("select queen.seek('q', 'g', 1, partition => 'a')")
    mover.connection.commit()
    # The published repair is being widened; a pop neither waits nor takes it away.
    mover.run("select queen.seek('q', 'g', 1, partition => 'b')")
    reader = session("carl_consumer")
    reader.run("set lock_timeout = '2 s'")
    assert read(reader.connection, "pop") == ["a"]
    mover.connection.commit()
    assert read(reader.connection, "pop") == ["b"]
    assert rested.rows(REPAIRS, "q") == []


def test_a_pop_that_rolls_back_gives_the_repair_back(rested: Database, session: StartSession) -> None:
    rested.execute("select queen.seek('q', 'g', 1)")
    user = session("carl_consumer", autocommit=False)
    assert len(user.run("select * from queen.pop('q', 'g')")) == 6
    # A colleague of the same group meanwhile waits for nothing.
    other = session("carl_consumer")
    other.run("set lock_timeout = '2 s'")
    assert other.run("select * from queen.pop('q', 'g')") == []
    user.connection.rollback()
    assert rested.rows(REPAIRS, "q") == [("g", None)]
    assert len(other.run("select * from queen.pop('q', 'g')")) == 6


def test_forward_moves_publish_nothing(rested: Database, consumer: Connection) -> None:
    for arguments in ("3", "99", "to_time => 'infinity'", "to_time => now() + interval '1 hour'"):
        assert consumer.execute(f"select queen.seek('q', 'g', {arguments})").fetchone() == (3,)
        assert rested.rows(REPAIRS, "q") == []
        assert read(consumer, "pop") == []
