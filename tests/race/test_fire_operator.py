"""What an operator may do to a sweeper and to its tables: it comes back, or the next one finds nothing in its way."""

from __future__ import annotations

import contextlib
import time

import psycopg
import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger, percentile, report
from tests.support.waiting import wait_for


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
@pytest.mark.parametrize("how", ["access exclusive", "exclusive", "share"])
def test_lock_table_for_seconds(
    db: Database, sweeper: StartSweeper, session: StartSession, mode: str, how: str
) -> None:
    """The workers neither die nor hold anyone up, spend no attempt, and go on after it."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    workers = [sweeper(0, 2), sweeper(1, 2)]
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 2)
    ledger.schedule("q", 200, due="now() + interval '100 ms' + i * interval '5 ms'", partition="'p' || i % 4")
    time.sleep(0.5)
    operator = session(autocommit=False)
    operator.run(f"lock table queen.log_timers in {how} mode")
    reader = session()
    seconds = 2.5 if how == "access exclusive" else 1.2
    until = time.monotonic() + seconds
    longest = 0.0
    while time.monotonic() < until:
        # The queue of the lock is not blocked for good by a worker that waits in it: readers of other tables and,
        # under a lock that allows it, of this one get through between two tries.
        begun = time.monotonic()
        reader.run("select count(*) from queen.log_segments")
        if how != "access exclusive":
            reader.run("select count(*) from queen.log_timers")
        longest = max(longest, time.monotonic() - begun)
        time.sleep(0.01)
    assert longest < 0.5
    assert all(worker.alive for worker in workers)
    operator.connection.rollback()
    ended = db.value("select clock_timestamp()")
    ledger.schedule("q", 100, key="'after' || i", due="now() + interval '100 ms' + i * interval '5 ms'")
    ledger.wait_until_empty(10)
    ledger.check(in_order=mode == "lock")
    assert (
        db.value("select extract(epoch from max(created_at) - %s) from delivered where deliver_at < %s", ended, ended)
        < 1
    )
    late = ledger.lateness(f"deliver_at > '{ended}'")
    assert percentile(late, 95) < 300, report("after the lock", late)
    assert all(worker.alive for worker in workers)
    if how == "access exclusive":
        # It was seen, and it is told.
        wait_for(lambda: db.value("select sum(errors) from queen.sweep_stats") > 0)
        assert "lock timeout" in db.value("select max(last_error) from queen.sweep_stats")


def stop_there(db: Database, place: str) -> None:
    """Passes from now on stop for a minute at `place`, and show it by an advisory lock, 77."""
    db.execute(
        "create or replace function public.stop_there() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock(77); perform pg_sleep(60); return coalesce(new, old); end $$"
    )
    db.execute(f"create trigger stop_there {place} for each row execute function public.stop_there()")


@pytest.mark.parametrize("mode", ["lock", "lease"])
@pytest.mark.parametrize("function", ["pg_cancel_backend", "pg_terminate_backend"])
def test_a_sweeper_ended_in_the_middle_leaves_nothing_behind(
    db: Database, sweeper: StartSweeper, session: StartSession, function: str, mode: str
) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    ledger.schedule("q", 1, key="'first'")
    db.execute("select queen.fire_due()")
    stop_there(db, "after insert on queen.log_segments")
    ledger.schedule("q", 300, partition="'p' || i % 3")
    first = session("ada_admin")
    call = first.start("call queen.sweep('1 hour')")
    held = "select from pg_locks where locktype = 'advisory' and objid = 77 and granted and pid = %s"
    wait_for(lambda: db.rows(held, first.pid), what="the sweeper is in the middle of a pass")
    db.execute(f"select {function}(%s)", first.pid)
    with pytest.raises((psycopg.errors.QueryCanceled, psycopg.OperationalError)):
        call.result(10)
    wait_for(
        lambda: (
            not db.rows(
                "select from pg_locks where pid = %s and mode <> 'AccessShareLock' and locktype = 'relation'", first.pid
            )
        )
    )
    assert (ledger.pending(), ledger.delivered()) == (300, 1)
    db.execute("drop trigger stop_there on queen.log_segments")
    begun = time.monotonic()
    if mode == "lease":
        # The lease of the dead one is the only trace, and it runs out by itself: here at once.
        db.execute("update queen.log_timers set claimed_until = now() where claim_token is not null")
    sweeper()
    ledger.wait_until_empty()
    assert time.monotonic() - begun < 5
    assert db.rows("select distinct attempts, last_error from queen.log_timers") == []
    assert db.value("select count(*) from queen.log_dlq") == 0
    ledger.check()


def test_ended_again_and_again(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """Cancelled and terminated at random moments of a backlog; each timer is delivered once."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_max_rows', '200')")
    ledger.schedule("q", 6000, due="now() + (i % 200) * interval '10 ms'", partition="'p' || i % 6")
    for turn in range(16):
        worker = session("ada_admin")
        call = worker.start("call queen.sweep('1 hour')")
        time.sleep(0.12)
        db.execute(f"select {'pg_cancel_backend' if turn % 2 else 'pg_terminate_backend'}(%s)", worker.pid)
        with contextlib.suppress(psycopg.Error):
            call.result(10)
    assert ledger.delivered() > 0
    sweeper()
    ledger.wait_until_empty()
    ledger.check()


def test_statement_timeout_counts_for_the_whole_call(db: Database, session: StartSession) -> None:
    """A role with a statement_timeout: the call ends with it, and has left all that it had done committed."""
    ledger = Ledger(db)
    ledger.schedule("q", 500, due="now() + i * interval '2 ms'")
    worker = session("ada_admin")
    worker.run("set statement_timeout = '600ms'")
    with pytest.raises(psycopg.errors.QueryCanceled):
        worker.run("call queen.sweep('1 hour')")
    assert 100 < ledger.delivered() < 500
    assert ledger.pending() + ledger.delivered() == 500
    db.execute("call queen.sweep('2 s')")
    ledger.check()


def test_maintenance_of_the_table_beside_the_sweeper(db: Database, sweeper: StartSweeper) -> None:
    """VACUUM, ANALYZE, REINDEX CONCURRENTLY, CLUSTER: ctids move, timers do not get lost."""
    ledger = Ledger(db)
    worker = sweeper()
    ledger.schedule("q", 2000, due="now() + i * interval '1 ms'", partition="'p' || i % 4")
    while ledger.pending():
        for statement in (
            "vacuum queen.log_timers",
            "analyze queen.log_timers",
            "reindex index concurrently queen.idx_log_timers_visible",
            "vacuum full queen.log_timers",
            "cluster queen.log_timers using log_timers_pkey",
        ):
            db.execute(statement)
    assert worker.alive
    ledger.check()


def test_sweep_refuses_bad_arguments_and_transactions(db: Database, admin: Connection) -> None:
    for arguments, name in (
        ("'-1 s'", "run_for"),
        ("'367 days'", "run_for"),
        ("'1 s', -1", "worker"),
        ("'1 s', 1, 1", "worker"),
        ("'1 s', null", "worker"),
        ("'1 s', 0, 0", "workers"),
        ("'1 s', 0, 65", "workers"),
        ("'1 s', 0, null", "workers"),
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'argument "{name}"') as caught:
            admin.execute(f"call queen.sweep({arguments})")
        assert caught.value.diag.message_hint
    with (
        db.connect("ada_admin", autocommit=False) as inside,
        pytest.raises(psycopg.errors.InvalidTransactionTermination),
    ):
        inside.execute("select 1")
        inside.execute("call queen.sweep('0')")


def test_one_pass(db: Database, admin: Connection) -> None:
    """run_for 0 fires what is due now, births included, and returns; and an end is an end."""
    ledger = Ledger(db)
    ledger.schedule("q", 100, partition="'p' || i % 10")
    ledger.schedule("r", 1, due="now() + interval '1 hour'")
    admin.execute("call queen.sweep('0')")
    assert ledger.pending() == 1
    begun = time.monotonic()
    admin.execute("call queen.sweep('300 ms')")
    assert 0.25 < time.monotonic() - begun < 2
    assert db.rows("select worker, fired, errors from queen.sweep_stats") == [(0, 100, 0)]
