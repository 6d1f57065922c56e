"""The server dies in the middle of a fire. Each test has a server of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping

import psycopg
import pytest

from tests.support.database import Database
from tests.support.lateness import Ledger
from tests.support.servers import Server, install_extension
from tests.support.sessions import Session
from tests.support.waiting import wait_for
from tools.cluster import ClusterError

StartServer = Callable[[Mapping[str, str]], Server]


@pytest.fixture
def own_db(own_server: StartServer) -> Iterator[Database]:
    """A database on a server that may be crashed. fsync is off, so what dies here are processes, not machines."""
    server = own_server({"full_page_writes": "on"})
    with server.connect() as connection:
        connection.execute("create database timers")
    database = Database(server.cluster, "timers")
    install_extension(database.superuser)
    yield database
    database.close()


def crash(database: Database, how: str, pid: int | None = None) -> None:
    """End the server, or one backend (which ends all others), the hard way; and have it back."""
    cluster = database.cluster
    if how == "immediate":
        database.restart("immediate")
        return
    postmaster = cluster.pid
    assert postmaster is not None
    witness = database.connect()
    if how == "SIGKILL of the server":
        # All of it at once: backends without a postmaster would go on until they sleep.
        others = [pid for (pid,) in database.rows("select pid from pg_stat_activity")]
        for pid in (postmaster, *others):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        wait_for(lambda: cluster.pid is None, 30, what="the server is gone")

        def back() -> bool:
            # Backends of the dead server keep its shared memory for a moment.
            with contextlib.suppress(ClusterError):
                cluster.start()
                return True
            return False

        wait_for(back, 30, what="the server is back")
    else:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    # Until it has noticed, a server whose backend died goes on answering.
    wait_for(lambda: is_dead(witness), 30, what="the crash reaches every connection")
    wait_for(lambda: reconnect(database), 30, what="the server answers")


def is_dead(connection: psycopg.Connection[tuple[object, ...]]) -> bool:
    """Whether the server has closed it."""
    try:
        connection.execute("select")
    except psycopg.OperationalError:
        return True
    return False


def reconnect(database: Database) -> bool:
    """Whether it answers; database.superuser is fresh then."""
    database._superuser = None
    with contextlib.suppress(psycopg.OperationalError):
        return bool(database.value("select not pg_is_in_recovery()"))
    return False


def begin(database: Database, statement: str) -> Session:
    """A session whose statement will not come to its end."""
    session = Session(database, "postgres")
    session.start(statement)
    return session


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
@pytest.mark.parametrize("how", ["immediate", "SIGKILL of the server", "SIGKILL of a sweeper"])
def test_a_crash_during_a_sweep_of_thousands(own_db: Database, how: str, mode: str) -> None:
    ledger = Ledger(own_db)
    own_db.execute("select queen.configure('sweep_mode', %s), queen.configure('sweep_max_rows', '150')", mode)
    ledger.schedule("q", 10_000, due="now() + (i * 7919 % 10000) * interval '0.2 ms'", partition="'p' || i % 5")
    crashes = 0
    for at in (500, 3000, 6000):
        workers = [begin(own_db, f"call queen.sweep('1 hour', {n}, 2)") for n in range(2)]
        wait_for(lambda at=at: ledger.delivered() >= at, 20)
        crash(own_db, how, workers[0].pid)
        for worker in workers:
            worker.close()
        done = ledger.delivered()
        assert ledger.pending() + done == 10_000
        crashes += done < 10_000
    assert crashes == 3
    if mode == "lease":
        # What the dead had leased is due when the leases are over: now.
        own_db.execute("update queen.log_timers set claimed_until = now() where claim_token is not null")
    worker = begin(own_db, "call queen.sweep('1 hour')")
    ledger.wait_until_empty()
    ledger.check(in_order=mode == "lock")
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["immediate", "SIGKILL of a sweeper"])
@pytest.mark.parametrize("place", ["after delete on queen.log_timers", "after insert on queen.log_txns"])
def test_a_crash_between_append_and_delete(own_db: Database, place: str, how: str) -> None:
    """Whatever was written, nothing of it is there; and then the timers fire once."""
    ledger = Ledger(own_db)
    ledger.schedule("q", 1, key="'first'")
    own_db.execute("call queen.sweep('0')")
    own_db.execute(
        "create function public.stop_there() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock(77); perform pg_sleep(60); return null; end $$"
    )
    own_db.execute(
        f"create trigger stop_there {place} for each row when (session_user = 'postgres')"
        " execute function public.stop_there()"
    )
    ledger.schedule("q", 500)
    # What a user had open goes with the crash, too.
    user = Session(own_db, "alice_producer", autocommit=False)
    user.run("select queen.push('other', '\"open\"')")
    user.run("select queen.schedule('q', 'open', '1', '0'::interval)")
    worker = begin(own_db, "call queen.sweep('1 hour')")
    held = "select from pg_locks where locktype = 'advisory' and objid = 77 and granted"
    wait_for(lambda: own_db.rows(held), what="the sweeper is in the middle of a pass")
    # Its statements are on disk before it dies: what recovery finds of them must not count.
    own_db.execute("checkpoint")
    crash(own_db, how, worker.pid)
    worker.close()
    user.close()
    assert (ledger.pending(), ledger.delivered()) == (500, 1)
    assert own_db.rows("select name, last_offset from queen.log_partitions") == [("Default", 1)]
    own_db.execute(f"drop trigger stop_there on {place.split()[-1]}")
    assert own_db.value("select queen.fire_due()") == 500
    ledger.check()


@pytest.mark.slow
def test_a_crash_around_the_archive(own_db: Database) -> None:
    """The dead letter with its payload, or the timer: never both, never neither."""
    ledger = Ledger(own_db)
    own_db.execute(
        "select queen.configure('timer_max_attempts', '2'), queen.configure('timer_backoff_base', '10 ms'),"
        " queen.configure('timer_backoff_cap', '10 ms')"
    )
    own_db.execute(
        "create function public.stop_there() returns trigger language plpgsql as"
        " $$ begin perform pg_advisory_xact_lock(77); perform pg_sleep(60); return null; end $$"
    )
    ledger.schedule("q", 400)
    own_db.execute("update queen.log_timers set txn = repeat('t', 300)")
    own_db.execute(
        "create trigger stop_there after insert on queen.log_dlq for each row when (new.message_id::text < '4')"
        " execute function public.stop_there()"
    )
    worker = begin(own_db, "call queen.sweep('1 hour')")
    held = "select from pg_locks where locktype = 'advisory' and objid = 77 and granted"
    wait_for(lambda: own_db.rows(held), what="the sweeper is archiving")
    crash(own_db, "immediate")
    worker.close()
    both = (
        "select (select count(*) from queen.log_timers), (select count(*) from queen.log_dlq),"
        " (select count(*) from queen.log_timers join queen.log_dlq using (message_id))"
    )
    assert own_db.rows(both) == [(400, 0, 0)]
    assert own_db.rows("select distinct attempts from queen.log_timers") == [(1,)]
    own_db.execute("drop trigger stop_there on queen.log_dlq")
    # Now at random moments.
    for _ in range(3):
        worker = begin(own_db, "call queen.sweep('1 hour')")
        time.sleep(0.05)
        crash(own_db, "immediate")
        worker.close()
        ((pending, letters, shared),) = own_db.rows(both)
        assert (pending + letters, shared) == (400, 0)
    worker = begin(own_db, "call queen.sweep('1 hour')")
    wait_for(lambda: own_db.rows(both) == [(0, 400, 0)])
    worker.close()
    payloads = own_db.rows("select payload from queen.dlq_list('q', max_rows => 1000)")
    assert sorted(payload for (payload,) in payloads) == list(range(1, 401))


@pytest.mark.slow
def test_a_crash_with_timers_that_stepped_out(own_db: Database) -> None:
    """The user's transaction and the sweepers go together; the timers come back in order."""
    ledger = Ledger(own_db)
    ledger.schedule("q", 1, key="'first'", due="'2020-01-01Z'")
    own_db.execute("select queen.fire_due()")
    user = Session(own_db, "alice_producer", autocommit=False)
    user.run("select queen.push('q', '1')")
    ledger.schedule("q", 1000, due="now() - i * interval '1 ms'")
    worker = begin(own_db, "call queen.sweep('1 hour')")
    wait_for(lambda: ledger.pending("visible_at <= now()") == 0)
    crash(own_db, "immediate")
    worker.close()
    user.close()
    assert ledger.pending() == 1000
    worker = begin(own_db, "call queen.sweep('1 hour')")
    begun = time.monotonic()
    ledger.wait_until_empty(15)
    print(f"back after {time.monotonic() - begun:.1f} s")
    worker.close()
    ledger.check()


@pytest.mark.slow
def test_a_lease_outlives_a_crash(own_db: Database) -> None:
    """An outside firer holds its claim across a crash of the server, and delivers with it."""
    ledger = Ledger(own_db)
    ledger.schedule("q", 50)
    arrays = "array_agg(tenant_id), array_agg(queue), array_agg(timer_key), array_agg(claim_token)"
    (claims,) = own_db.rows(f"select {arrays} from queen.log_timers_claim(lease => '10 minutes', max_rows => 20)")
    crash(own_db, "immediate")
    assert own_db.value("select queen.fire_due()") == 30
    fire = "select distinct status from queen.log_timers_fire(%s::uuid[], %s::text[], %s::text[], %s::uuid[])"
    assert own_db.rows(fire, *claims) == [("fired",)]
    # Its answer was lost in another crash.
    crash(own_db, "immediate")
    assert own_db.rows(fire, *claims) == [("stale",)]
    ledger.check(in_order=False)
