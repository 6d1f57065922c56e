"""A queue is dropped beside those who use it: nothing stays behind, nobody fails, and it may be born again."""

from __future__ import annotations

from pg_queen import Queen

from tests.conftest import StartSession
from tests.support.database import Connection, Database

# Not of a queue: settings, what a worker counts, and partitions that the sweeper found held.
APART = {"config", "sweep_stats", "log_busy"}


def remains(db: Database) -> dict[str, int]:
    """Rows of every table of the schema, found in the catalog, but for what is not of a queue."""
    tables = [
        name
        for (name,) in db.rows(
            "select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind in ('r', 'p')"
        )
    ]
    assert {"queues", "log_timers", "log_dlq", "log_groups", "hotlist_repairs"} <= set(tables)
    counts = {name: db.value(f"select count(*) from queen.{name}") for name in tables}
    return {name: count for name, count in counts.items() if count and name not in APART and "sweep" not in name}


def test_of_the_only_queue_no_row_stays(db: Database, admin: Connection, consumer: Connection) -> None:
    """Whatever tables there will be: with one queue in the database, each must be empty after it."""
    queen = Queen(admin)
    queen.configure_queue("q", {"delivery_max_attempts": 1})
    for part in ("a", "b"):
        queen.push_many("q", [1, 2, 3], partition=part, txns=["t " + part, None, None])
    queen.schedule("q", "far", 1, delay="1 year")
    queen.schedule("q", "due", 1, delay=0, partition="c")
    admin.execute("select queen.fire_due()")
    queen.schedule("q", "leased", 1, delay=0)
    assert len(admin.execute("select * from queen.log_timers_claim()").fetchall()) == 1
    (message,) = queen.pop("q", "g", max_messages=1, partition="a")
    assert message.lease_id is not None
    queen.nack("q", "g", "a", message.lease_id, "no")
    # Timers that could not be fired are dead letters of it too.
    db.execute(
        "insert into queen.log_dlq select (jsonb_populate_record(d, jsonb_build_object('id', gen_random_uuid(),"
        " 'consumer_group', '__timer__', 'offset', null))).* from queen.log_dlq d"
    )
    consumer.execute("select queen.pop('q', 'h', 2)")
    consumer.execute("select queen.seek('q', 'h', 1)")
    full = remains(db)
    assert set(full) >= {
        "queues",
        "log_partitions",
        "log_segments",
        "log_txns",
        "log_groups",
        "log_consumers",
        "log_dlq",
        "log_timers",
        "hotlist_repairs",
    }
    ((told,),) = admin.execute("select queen.drop_queue('q')").fetchall()
    assert told == {
        "queue": "q",
        "existed": True,
        "timers": 2,
        "partitions": 3,
        "messages": 7,
        "groups": 2,
        "dead_letters": 2,
    }
    assert remains(db) == {}


def test_a_drop_that_is_rolled_back_took_nothing(db: Database, session: StartSession) -> None:
    db.execute("select queen.push('q', '1'), queen.schedule('q', 'k', '1', '0')")
    before = remains(db)
    admin = session("ada_admin", autocommit=False)
    admin.run("select queen.drop_queue('q')")
    assert remains(db) == before
    admin.connection.rollback()
    assert db.value("select queen.fire_due()") == 1
    assert len(db.rows("select * from queen.pop('q')")) == 2


def test_the_same_name_begins_anew(db: Database, admin: Connection) -> None:
    queen = Queen(admin)
    queen.push("q", 1, partition="p", txn="t")
    (message,) = queen.pop("q", "g", partition="p")
    assert message.lease_id is not None
    queen.configure_queue("q", {"start_at": "new", "retention": "1 hour"})
    queen.drop_queue("q")

    def nothing_is_left_of_the_old_one() -> None:
        for call in (queen.ack, queen.nack):
            assert call("q", "g", "p", message.lease_id).status == "absent"
        assert queen.extend("q", "g", "p", message.lease_id, "1 minute").status == "absent"
        assert queen.dlq_list("q") == []

    nothing_is_left_of_the_old_one()
    assert queen.pop("q", "g") == []
    assert queen.sent("q", "t") == []
    # And none of these calls has given birth to it.
    assert remains(db) == {}
    again = queen.push("q", 3, partition="p", txn="t")
    assert (again.status, again.offset) == ("queued", 1)
    nothing_is_left_of_the_old_one()
    # The options are gone, so groups start at the beginning, the old one too.
    for group in ("g", "h"):
        assert [m.payload for m in queen.pop("q", group)] == [3]
    assert queen.configure_queue("q", {})["start_at"] == "beginning"


def test_who_holds_a_partition_is_waited_for(db: Database, session: StartSession) -> None:
    """A push in an open transaction is dropped with the queue; one that comes after the drop makes a new one."""
    db.execute("select queen.push('q', '1', 'a')")
    pusher = session("alice_producer", autocommit=False)
    pusher.run("select queen.push('q', '2', 'a')")
    dropper = session("ada_admin", autocommit=False)
    drop = dropper.start("select queen.drop_queue('q') ->> 'messages'")
    dropper.wait_until_blocked()
    pusher.connection.commit()
    assert drop.result(10) == [("2",)]
    late = session("alice_producer")
    push = late.start("select status, \"offset\" from queen.push('q', '3', 'a')")
    late.wait_until_blocked()
    # Others wait neither for the drop nor for who waits for it.
    other = session("alice_producer")
    other.run("set lock_timeout = '2 s'")
    other.run("select queen.push('other', '1')")
    other.run("select queen.schedule('q', 'k', '4', '0', partition => 'a')")
    popper = session("carl_consumer")
    popper.run("set lock_timeout = '2 s'")
    popper.run("select queen.pop('other')")
    dropper.connection.commit()
    assert push.result(10) == [("queued", 1)]
    assert db.value("select queen.fire_due()") == 1
    assert db.rows("select \"offset\", payload from queen.pop('q')") == [(1, 3), (2, 4)]
