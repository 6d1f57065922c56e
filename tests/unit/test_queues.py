"""Options of a queue, and its end."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger
from tests.support.waiting import wait_for


def configure(connection: Connection, options: Any, queue: str = "q") -> Any:
    """The options in force."""
    row = connection.execute("select queen.configure_queue(%s, %s)", [queue, Jsonb(options)]).fetchone()
    assert row is not None
    return row[0]


def test_options_in_force(db: Database, admin: Connection) -> None:
    per_queue = dict(db.rows("select key, value from queen.settings where per_queue"))
    assert configure(admin, {}) == per_queue
    mine = configure(admin, {"delivery_max_attempts": 7, "retention": "3 days", "retention_force": True})
    assert mine == {**per_queue, "delivery_max_attempts": "7", "retention": "3 days", "retention_force": "true"}
    # Merged, not replaced; null restores what the setting says, now and later.
    mine = configure(admin, {"retention": None, "start_at": "new"})
    assert mine == {**per_queue, "delivery_max_attempts": "7", "retention_force": "true", "start_at": "new"}
    admin.execute("select queen.configure('retention', '9 days')")
    assert configure(admin, {})["retention"] == "9 days"
    assert configure(admin, {}, "another")["delivery_max_attempts"] == per_queue["delivery_max_attempts"]


def test_bad_options_change_nothing(db: Database, admin: Connection) -> None:
    configure(admin, {"delivery_max_attempts": 7})
    for options, named in (
        ({"no_such": 1}, "no_such"),
        ({"sweep_mode": "lease"}, "sweep_mode"),
        ({"delivery_max_attempts": 0}, "delivery_max_attempts"),
        ({"delivery_max_attempts": "many"}, "delivery_max_attempts"),
        ({"delivery_max_attempts": 1.5}, "delivery_max_attempts"),
        ({"delivery_max_attempts": [1]}, "delivery_max_attempts"),
        ({"retention": "soon"}, "retention"),
        ({"retention": "-1 day"}, "retention"),
        ({"start_at": "end"}, "start_at"),
        ({"retention_force": "maybe"}, "retention_force"),
        ({"txn_window": "1 hour", "no_such": 1}, "no_such"),
    ):
        with pytest.raises(psycopg.Error) as caught:
            configure(admin, options)
        assert caught.value.sqlstate == "22023", options
        assert named in str(caught.value.diag.message_primary), options
        assert caught.value.diag.message_hint, options
    assert db.value("select options from queen.queues") == {"delivery_max_attempts": 7}


def rows_of(db: Database, queue: str) -> dict[str, int]:
    """How many rows of a queue each table has, found by what its columns are called."""
    found = {}
    pids = "(select p.id from queen.log_partitions p join queen.queues q on q.id = p.queue_id where q.name = %(queue)s)"
    conditions = {
        "queue": "queue = %(queue)s",
        "queue_id": "queue_id in (select id from queen.queues where name = %(queue)s)",
        "partition_id": f"partition_id in {pids}",
    }
    columns = db.rows(
        "select c.relname, a.attname from pg_class c join pg_attribute a on a.attrelid = c.oid"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r' and a.attname = any (%s)",
        list(conditions),
    )
    for table, column in columns:
        query = f"select count(*) from queen.{table} where {conditions[column]}"
        count = db.superuser.execute(query, {"queue": queue}).fetchone()
        assert count is not None
        found[f"{table}.{column}"] = count[0]
    return found


def test_drop_queue_leaves_nothing(db: Database, admin: Connection) -> None:
    for queue in ("q", "kept"):
        options = '{"delivery_max_attempts": 1, "pending_max": 10001}'
        admin.execute("select queen.configure_queue(%s, %s)", [queue, options])
        for part in ("a", "b"):
            admin.execute(
                "select queen.push_many(%s, array['1', '2']::jsonb[], %s, array[%s, null])", [queue, part, part]
            )
        ((lease,),) = admin.execute(
            "select distinct lease_id from queen.pop(%s, 'g', 1, partition => 'a')", [queue]
        ).fetchall()
        admin.execute("select queen.nack(%s, 'g', 'a', %s)", [queue, lease])
        admin.execute("select queen.pop(%s, 'h')", [queue])
        admin.execute("select queen.seek(%s, 'h', 0)", [queue])
        for key, delay in (("due", "0"), ("far", "1 year")):
            admin.execute("select queen.schedule(%s, %s, '1', %s::interval, partition => 'c')", [queue, key, delay])
        admin.execute("select queen.pause_queue(%s)", [queue])
        # One is leased, one behind a held partition: nobody's hands protect it.
        db.execute("select queen.log_timers_claim()")
        db.execute(
            "insert into queen.log_busy values"
            " ('00000000-0000-0000-0000-000000000001', %s, 'c', now(), now(), now(), now())",
            queue,
        )
    before = rows_of(db, "kept")
    assert min(rows_of(db, "q").values()) > 0, rows_of(db, "q")
    pids = [
        pid
        for (pid,) in db.rows(
            "select id from queen.log_partitions where queue_id = (select id from queen.queues where name = 'q')"
        )
    ]
    row = admin.execute("select queen.drop_queue('q')").fetchone()
    assert row is not None
    told = row[0]
    assert (told["queue"], told["existed"]) == ("q", True)
    assert (told["timers"], told["partitions"], told["groups"], told["dead_letters"]) == (2, 2, 2, 1)
    assert told["messages"] == 4
    left = rows_of(db, "q")
    # The sweeper removes these.
    assert left.pop("log_busy.queue") in (0, 1)
    assert left.pop("queue_pauses.queue") == 1
    assert db.value("select count(*) from queen.paused_queues where queue = 'q'") == 0
    assert set(left.values()) == {0}, left
    for table in ("log_segments", "log_txns", "log_consumers"):
        assert db.value(f"select count(*) from queen.{table} where partition_id = any (%s)", pids) == 0
    assert rows_of(db, "kept") == before
    row = admin.execute("select queen.drop_queue('q')").fetchone()
    assert row is not None
    assert (row[0]["existed"], row[0]["timers"]) == (False, 0)


def test_a_queue_of_timers_alone_is_dropped_too(db: Database, admin: Connection) -> None:
    admin.execute("select queen.schedule('q', 'k', '1', '1 h')")
    row = admin.execute("select queen.drop_queue('q')").fetchone()
    assert row is not None
    assert row[0]["timers"] == 1
    assert db.value("select count(*) from queen.log_timers") == 0


def test_a_reborn_queue_begins_anew(db: Database, admin: Connection) -> None:
    admin.execute("select queen.push('q', '1', txn => 't')")
    admin.execute("select queen.pop('q', 'g', auto_ack => true)")
    admin.execute("select queen.configure_queue('q', '{\"start_at\": \"new\"}')")
    admin.execute("select queen.drop_queue('q')")
    again = admin.execute("select status, \"offset\" from queen.push('q', '2', txn => 't')").fetchone()
    assert again == ("queued", 1)
    assert admin.execute("select payload from queen.pop('q', 'g')").fetchall() == [(2,)]


@pytest.mark.slow
def test_the_sweeper_is_not_disturbed(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """Queues are dropped, also in open transactions, while timers for them and for others come due."""
    ledger = Ledger(db)
    sweeper(0, 2)
    sweeper(1, 2)
    ledger.schedule("kept", 600, due="now() + i * interval '4 ms'", partition="'p' || i % 4")
    dropper = session("ada_admin", autocommit=False)
    for turn in range(8):
        db.execute(
            "select count(*) from generate_series(1, 50) i cross join lateral"
            " queen.schedule('doomed', 'k' || i, '1', (i * 5 || ' ms')::interval, partition => 'p' || i % 3) s"
        )
        dropper.run("select pg_sleep(0.1)")
        dropper.run("select queen.drop_queue('doomed')")
        dropper.run("select pg_sleep(0.1)")
        if turn % 2:
            dropper.connection.rollback()
        else:
            dropper.connection.commit()
    wait_for(lambda: ledger.pending("queue = 'kept'") == 0, 10)
    dropper.run("select queen.drop_queue('doomed')")
    dropper.connection.commit()
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 10)
    assert db.value("select coalesce(sum(errors), 0) from queen.sweep_stats") <= 8
    kept = "select id from queen.queues where name = 'kept'"
    assert db.value(f"select sum(last_offset) from queen.log_partitions where queue_id = ({kept})") == 600
