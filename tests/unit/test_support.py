"""What the other tests rely on: the server's surroundings, the fixtures, the helpers."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import LOGIN_ROLES, Database
from tests.support.servers import Server
from tests.support.waiting import wait_for
from tools.cluster import ROOT, port_is_free


def test_server_does_not_inherit_our_python(
    own_server: Callable[[Mapping[str, str]], Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    monkeypatch.setenv("VIRTUAL_ENV", "/somewhere")
    server = own_server({})
    with server.connect() as connection:
        connection.execute("create extension plpython3u")
        connection.execute(
            "create function env() returns text[] language plpython3u as"
            " $$ import os, sys, zstandard; return [*sys.path, *(f'{k}={v}' for k, v in os.environ.items())] $$"
        )
        seen = connection.execute("select unnest(env())").fetchall()
    assert not [entry for (entry,) in seen if "/somewhere" in entry or ".local/venv" in entry]


def test_server_is_private(server: Server) -> None:
    folder = Path(server.host)
    assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(psycopg.OperationalError, match=r"no password supplied|password authentication failed"):
        psycopg.connect(host="127.0.0.1", port=server.port, user="postgres", dbname="postgres", password="")


def test_server_ends_with_a_killed_process() -> None:
    program = (
        "from tests.support.servers import running_server\n"
        "import os, signal\n"
        "with running_server() as server:\n"
        "    print(server.port, server.cluster.path, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    port, path = done.stdout.split()
    wait_for(lambda: not Path(path).exists(), 30, what=f"{path} is gone")
    assert port_is_free(int(port))


def test_each_role_is_a_member_of_its_own_only(db: Database) -> None:
    for login, group in LOGIN_ROLES.items():
        with db.connect(login) as connection:
            assert connection.execute("select session_user").fetchone() == (login,)
        members = db.rows(
            "select r.rolname from pg_auth_members m join pg_roles r on r.oid = m.roleid where m.member = %s::regrole",
            login,
        )
        assert members == ([(group,)] if group else [])


@pytest.mark.parametrize("run", [1, 2])
def test_a_test_sees_nothing_of_another(db: Database, run: int) -> None:
    db.execute("create table mark (run int)")


def test_clock(db: Database, clock: Clock) -> None:
    at = datetime(2031, 5, 6, 7, 8, 9, 123456, tzinfo=timezone.utc)
    clock.set(at)
    assert clock.now() == at
    clock.advance(timedelta(days=365))
    assert clock.now() == clock.now() == at + timedelta(days=365)
    clock.run()
    first = clock.now()
    time.sleep(0.01)
    assert timedelta(milliseconds=10) <= clock.now() - first < timedelta(seconds=10)
    clock.reset()
    assert abs(clock.now() - datetime.now(timezone.utc)) < timedelta(seconds=10)
    with pytest.raises(ValueError, match="without a zone"):
        clock.set(datetime(2031, 5, 6))


def test_clock_reaches_a_session_in_an_old_snapshot(db: Database, clock: Clock) -> None:
    other = db.connect(autocommit=False)
    other.execute("set transaction isolation level repeatable read")
    other.execute("select queen._now()")
    clock.set(datetime(2031, 1, 1, tzinfo=timezone.utc))
    assert other.execute("select queen._now() = '2031-01-01Z'").fetchone() == (True,)


def test_sessions(db: Database, session: StartSession) -> None:
    db.execute("create table t (a int); insert into t values (1)")
    holder, waiter = session(autocommit=False), session()
    assert holder.run("update t set a = 2 returning a") == [(2,)]
    future = waiter.start("update t set a = a + 10 returning a")
    waiter.wait_until_blocked()
    with pytest.raises(AssertionError, match="waits for a lock"):
        holder.wait_until_blocked(timeout=0.1)
    holder.terminate()
    assert future.result(10) == [(11,)]
    sleeper = session()
    sleep = sleeper.start("select pg_sleep(60)")
    sleeper.cancel()
    with pytest.raises(psycopg.errors.QueryCanceled):
        sleep.result(10)


def test_crash_and_restart(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    database = own_cron_db({"max_connections": "50"})
    database.execute("create table kept as select 1 as a")
    database.restart("immediate")
    assert database.value("select a from kept") == 1
    assert database.value("show max_connections") == "50"


def test_pg_cron_runs_jobs(cron_db: Database) -> None:
    cron_db.execute("create table ran (at timestamptz)")
    cron_db.execute("select cron.schedule('mark', '@reboot', 'insert into ran values (now())')")
    cron_db.restart()
    wait_for(lambda: cron_db.value("select count(*) from ran"), 20)
