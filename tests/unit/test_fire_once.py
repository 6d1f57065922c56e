"""A timer is delivered exactly once, with its ids, by one commit, never before its time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import StartSession, StartSweeper
from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger
from tests.support.waiting import wait_for

# Where a pass can be held up: before the rows go, and on each side of what is written to the log.
PLACES = {
    "before the delete": "before delete on queen.log_timers",
    "after the delete": "after delete on queen.log_timers",
    "before the segment": "before insert on queen.log_segments",
    "after the segment": "after insert on queen.log_segments",
    "after the txns": "after insert on queen.log_txns",
}


def stop_there(db: Database, place: str) -> None:
    """Every pass from now on stops for a minute at `place`, and shows it by an advisory lock, 77."""
    db.execute(
        "create or replace function public.stop_there() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock(77); perform pg_sleep(60);"
        " return case tg_op when 'DELETE' then old else new end; end $$"
    )
    db.execute(f"create trigger stop_there {place} for each row execute function public.stop_there()")


def wait_until_there(db: Database, pid: int) -> None:
    """Wait until the backend `pid` has come to the place of stop_there."""
    held = "select from pg_locks where locktype = 'advisory' and objid = 77 and granted and pid = %s"
    wait_for(lambda: db.rows(held, pid), what=f"backend {pid} is in the middle of a pass")


def go_on(db: Database, place: str) -> None:
    """Take the trigger of stop_there away."""
    db.execute(f"drop trigger stop_there on {place.split()[-1]}")


def schedule(producer: Connection, queue: str, key: str, payload: Any, **named: Any) -> Any:
    """The verdict's message id."""
    arguments = "".join(f", {name} => %({name})s" for name in named)
    row = producer.execute(
        f"select (queen.schedule(%(q)s, %(k)s, %(p)s{arguments})).message_id",
        {"q": queue, "k": key, "p": Jsonb(payload), **named},
    ).fetchone()
    assert row is not None
    return row[0]


def test_delivered_once_with_the_id_that_schedule_returned(
    db: Database, producer: Connection, consumer: Connection, admin: Connection
) -> None:
    ids = [
        schedule(producer, "mail", "a", {"n": 1}, delay=timedelta(0)),
        schedule(producer, "mail", "b", None, delay=timedelta(days=-3)),
        schedule(producer, "mail", "c", "x", deliver_at="2001-01-01Z", txn="mine"),
    ]
    assert len(set(ids)) == 3
    assert admin.execute("select queen.fire_due()").fetchone() == (3,)
    assert admin.execute("select queen.fire_due()").fetchone() == (0,)
    assert db.value("select count(*) from queen.log_timers") == 0
    messages = consumer.execute(
        "select message_id, payload, txn, producer_sub, \"offset\" from queen.pop('mail', auto_ack => true)"
    ).fetchall()
    # By due time: 2001, three days ago, now.
    assert messages == [
        (ids[2], "x", "mine", "alice_producer", 1),
        (ids[1], None, str(ids[1]), "alice_producer", 2),
        (ids[0], {"n": 1}, str(ids[0]), "alice_producer", 3),
    ]
    for message_id, txn in ((ids[0], str(ids[0])), (ids[2], "mine")):
        sent = producer.execute("select message_id from queen.sent('mail', %s)", [txn]).fetchall()
        assert sent == [(message_id,)]


def test_the_frame_and_the_disappearance_of_the_row_are_one_commit(db: Database, session: StartSession) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 100)
    firer = session("ada_admin", autocommit=False)
    assert firer.run("select queen.fire_due()") == [(100,)]
    assert (ledger.pending(), ledger.delivered()) == (100, 0)
    firer.connection.rollback()
    assert (ledger.pending(), ledger.delivered()) == (100, 0)
    assert db.value("select coalesce(max(last_offset), 0) from queen.log_partitions") == 0
    assert firer.run("select queen.fire_due()") == [(100,)]
    firer.connection.commit()
    assert (ledger.pending(), ledger.delivered()) == (0, 100)
    ledger.check()


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_no_snapshot_sees_a_timer_twice_or_not_at_all(db: Database, sweeper: StartSweeper, mode: str) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s), queen.configure('sweep_max_rows', '200')", mode)
    ledger.schedule("q", 8000, partition="'p' || i % 3")
    sweeper()
    both = (
        "select (select count(*) from queen.log_timers),"
        " (select coalesce(sum(end_offset - base_offset + 1), 0) from queen.log_segments)"
    )
    seen = set()
    deadline = time.monotonic() + 30
    while (counts := db.rows(both)[0]) != (0, 8000):
        assert sum(counts) == 8000
        assert time.monotonic() < deadline
        seen.add(counts)
    # Otherwise the looks came between no two commits, and showed nothing.
    assert len(seen) > 3
    ledger.check()


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("how", ["fire_due", "sweep", "sweep by lease"])
def test_a_backend_killed_in_the_middle_leaves_the_row_and_no_frame(
    db: Database, session: StartSession, sweeper: StartSweeper, place: str, how: str
) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", "lease" if how == "sweep by lease" else "lock")
    # A first one, so that the destination exists.
    ledger.schedule("q", 1, key="'first'")
    db.execute("select queen.fire_due()")
    stop_there(db, place)
    ledger.schedule("q", 20)
    if how == "fire_due":
        firer = session("ada_admin", autocommit=False)
        call = firer.start("select queen.fire_due()")
        wait_until_there(db, firer.pid)
        assert (ledger.pending(), ledger.delivered()) == (20, 1)
        firer.terminate()
        with pytest.raises(psycopg.OperationalError):
            call.result(10)
    else:
        running = sweeper()
        wait_until_there(db, running.pid)
        assert (ledger.pending(), ledger.delivered()) == (20, 1)
        running.kill()
    assert (ledger.pending(), ledger.delivered()) == (20, 1)
    go_on(db, place)
    if how == "sweep by lease":
        # What was leased is claimed again when the lease is over, not before; here it is over at once.
        assert db.value("select count(*) from queen.log_timers where claimed_until > now()") == 20
        db.execute("update queen.log_timers set claimed_until = now()")
    assert db.value("select queen.fire_due()") == 20
    ledger.check()


def test_a_backend_killed_with_a_fire_in_an_open_transaction(db: Database, session: StartSession) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 20)
    firer = session("ada_admin", autocommit=False)
    assert firer.run("select queen.fire_due()") == [(20,)]
    firer.terminate()
    # Not even the destination was born.
    assert (ledger.pending(), ledger.delivered(), db.value("select count(*) from queen.queues")) == (20, 0, 0)
    assert db.value("select queen.fire_due()") == 20
    ledger.check()


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_never_early(db: Database, sweeper: StartSweeper, mode: str) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    sweeper(0, 2)
    sweeper(1, 2)
    ledger.schedule("q", 5000, due="now() + (i * 7919 % 5000) * interval '0.4 ms'", partition="'p' || i % 5")
    ledger.wait_until_empty()
    ledger.check(in_order=mode == "lock")


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_never_early_when_the_clock_steps_back(db: Database, clock: Clock, sweeper: StartSweeper, mode: str) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    running = sweeper()
    ledger.schedule("q", 3000, due="queen._now() + i * interval '0.6 ms'", partition="'p' || i % 3")
    for _ in range(3):
        before = ledger.delivered()
        wait_for(lambda before=before: ledger.delivered() > before + 200)
        clock.advance(timedelta(seconds=-1))
        clock.run()
    ledger.wait_until_empty()
    assert running.alive
    ledger.check()


def test_a_far_timer_fires_when_the_clock_is_there(db: Database, clock: Clock, producer: Connection) -> None:
    message_id = schedule(producer, "q", "far", 1, delay=timedelta(days=3600))
    clock.advance(timedelta(days=3599, hours=23))
    assert db.value("select queen.fire_due()") == 0
    clock.advance(timedelta(hours=2))
    assert db.value("select queen.fire_due()") == 1
    assert db.rows("select message_id, payload from queen.pop('q')") == [(message_id, 1)]


def test_queue_and_partition_are_born_at_the_fire(db: Database, session: StartSession) -> None:
    sessions = [session("alice_producer", autocommit=False) for _ in range(16)]
    verdicts = []
    for i, each in enumerate(sessions):
        # No other is committed yet, so whoever waited for one would time out here.
        verdicts += each.run(
            "select * from queen.schedule('new', %s, '1', '0'::interval, partition => %s)", f"k{i}", f"p{i % 2}"
        )
    locked = db.rows(
        "select distinct relation::regclass::text, mode from pg_locks where pid = any (%s) and relation in"
        " ('queen.queues'::regclass, 'queen.log_partitions'::regclass, 'queen.log_timers'::regclass)",
        [each.pid for each in sessions],
    )
    assert [lock for lock in locked if "Exclusive" in lock[1]] == [("queen.log_timers", "RowExclusiveLock")]
    for each in sessions:
        each.connection.commit()
    assert [verdict[1] for verdict in verdicts] == ["scheduled"] * 16
    assert db.rows("select (select count(*) from queen.queues), (select count(*) from queen.log_partitions)") == [
        (0, 0)
    ]

    # And sixteen at once that fire.
    with ThreadPoolExecutor(16) as pool:
        firers = [db.connect("ada_admin") for _ in range(16)]
        counts = [count for ((count,),) in pool.map(lambda f: f.execute("select queen.fire_due(3)").fetchall(), firers)]
    db.execute("call queen.sweep('0')")
    assert sum(counts) <= 16
    assert db.rows("select name from queen.queues") == [("new",)]
    assert db.rows('select name, last_offset from queen.log_partitions order by name collate "C"') == [
        ("p0", 8),
        ("p1", 8),
    ]
    messages = db.rows("select message_id from queen.pop('new')")
    assert sorted(messages) == sorted((verdict[5],) for verdict in verdicts)


def test_a_key_that_is_already_in_the_log_fires_again(db: Database, producer: Connection) -> None:
    first = schedule(producer, "q", "k", 1, delay=timedelta(0))
    db.execute("select queen.fire_due()")
    second = schedule(producer, "q", "k", 2, delay=timedelta(0))
    db.execute("select queen.fire_due()")
    assert db.rows("select message_id, payload from queen.pop('q')") == [(first, 1), (second, 2)]


def test_cancelled_and_scheduled_again_is_one_firing(
    db: Database, sweeper: StartSweeper, session: StartSession
) -> None:
    sweeper()
    for together in (True, False):
        ids = []
        for i in range(40):
            user = session("alice_producer", autocommit=False)
            user.run("select queen.schedule('q', %s, '\"old\"', '30 ms'::interval)", f"k{i}")
            user.connection.commit()
            (verdict,) = user.run("select (queen.cancel('q', %s)).status", f"k{i}")
            if not together:
                user.connection.commit()
            ((new_id,),) = user.run("select (queen.schedule('q', %s, '\"new\"', '0'::interval)).message_id", f"k{i}")
            time.sleep(0.001 * (i % 5))
            user.connection.commit()
            user.close()
            ids.append((new_id, verdict[0]))
        wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
        messages = db.rows("select message_id, payload from queen.pop('q', max_messages => 1000, auto_ack => true)")
        assert {message_id for message_id, payload in messages if payload == "new"} == {new_id for new_id, _ in ids}
        assert len([payload for _, payload in messages if payload == "new"]) == 40
        # Old ones only where the cancel came too late.
        assert len([payload for _, payload in messages if payload == "old"]) == len(
            [v for _, v in ids if v == "absent"]
        )


def test_replica_role_and_empty_search_path(db: Database, session: StartSession) -> None:
    db.execute("create schema decoy; create table decoy.log_timers (a int); create table decoy.queues (a int)")
    caller = session()
    caller.run("set search_path = decoy")
    caller.run("set session_replication_role = replica")
    caller.run("select queen.schedule('q', 'k', '1', '0'::interval)")
    assert caller.run("select queen.fire_due()") == [(1,)]
    caller.run("set search_path = ''")
    caller.run("select queen.schedule('q', 'k', '2', '0'::interval)")
    caller.run("call queen.sweep('0')")
    assert db.rows("select payload from queen.pop('q')") == [(1,), (2,)]


def test_fire_due_refuses_bad_numbers(admin: Connection) -> None:
    for number in ("null", "0", "-1", "100001"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="max_rows"):
            admin.execute(f"select queen.fire_due({number})")
