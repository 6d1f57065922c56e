"""doctor: each check is ok where things are well, says what was broken, and its hint mends it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg
import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.clock import Clock
from tests.support.database import Database
from tests.support.servers import Server, install_extension
from tests.support.waiting import wait_for

OwnCron = Callable[[Mapping[str, str]], Database]
OwnServer = Callable[[Mapping[str, str]], Server]
HERE = ["pg_cron", "jobs", "job owner", "job runs"]
ALWAYS = ["workers", "passes", "switches", "timers", "partitions", "maintenance", "python", "encryption"]


def wrong(db: Database) -> dict[str, tuple[str, str]]:
    """Detail and hint of what is not ok."""
    rows = db.rows("select name, ok, detail, hint from queen.doctor()")
    assert all(detail for _, _, detail, _ in rows)
    assert all((hint is None) == ok for _, ok, _, hint in rows), rows
    return {name: (detail, hint) for name, ok, detail, hint in rows if not ok}


def names(db: Database) -> list[str]:
    return [name for (name,) in db.rows("select name from queen.doctor()")]


@pytest.fixture
def cron(own_cron_db: OwnCron) -> Database:
    """A database with pg_cron and the jobs of two workers."""
    db = own_cron_db({})
    db.execute("select queen.start(2)")
    return db


def test_nothing_wrong(cron: Database) -> None:
    cron.restart()
    wait_for(lambda: cron.value("select workers_alive from queen.status()") >= 1, 30, what="a worker is alive")
    assert wrong(cron) == {}
    assert names(cron) == [*HERE, *ALWAYS]


def test_jobs_missing_disabled_and_of_another_server(cron: Database) -> None:
    assert "jobs" not in wrong(cron)
    breaks = {
        "select cron.unschedule('pg_queen maintenance')": '"pg_queen maintenance" is missing',
        "select cron.unschedule('pg_queen worker 0')": '"pg_queen worker 0" is missing',
        "update cron.job set active = false where jobname = 'pg_queen worker 1'": '"pg_queen worker 1" is disabled',
        "update cron.job set command = 'select 1' where jobname = 'pg_queen boot'": '"pg_queen boot" is not as',
        "update cron.job set nodename = 'old', nodeport = 7": "is for the server at old:7",
        "update cron.job set schedule = '0 3 * * *' where jobname = 'pg_queen worker 1'": "is not as queen.start makes",
    }
    for statement, says in breaks.items():
        cron.execute(statement)
        detail, hint = wrong(cron)["jobs"]
        assert says in detail
        assert hint == "select queen.start(2);"
        cron.execute(hint)
        assert "jobs" not in wrong(cron)
    cron.execute("select queen.stop()")
    detail, hint = wrong(cron)["jobs"]
    assert "no job" in detail
    cron.execute(hint)
    assert "jobs" not in wrong(cron)


def test_a_role_dropped_while_it_owns_the_jobs(own_server: OwnServer) -> None:
    server = own_server({})
    with server.connect() as connection:
        connection.execute("create extension pg_cron")
        connection.execute("create role keeper superuser login")
        connection.execute("set session authorization keeper")
        install_extension(connection)
        connection.execute("select queen.start(3)")
        connection.execute("reset session authorization")
        db = Database(server.cluster, connection.info.dbname)
        assert {"jobs", "job owner"} & set(wrong(db)) == set()
        # PostgreSQL keeps a role that owns the extension; its jobs are mere text to it.
        with pytest.raises(psycopg.errors.DependentObjectsStillExist):
            connection.execute("drop role keeper")
        connection.execute("reassign owned by keeper to postgres")
        connection.execute("drop owned by keeper")
        connection.execute("drop role keeper")
        found = wrong(db)
        detail, hint = found["job owner"]
        assert detail.startswith('"keeper", for whom 5 jobs of this database run, is no role')
        assert "no job" in found["jobs"][0]
        for statement in hint.split("; "):
            connection.execute(statement)
        assert {"jobs", "job owner"} & set(wrong(db)) == set()
        assert connection.execute("select username, count(*) from cron.job group by 1").fetchall() == [("postgres", 5)]
        db.close()


def test_an_owner_that_may_not_log_in(cron: Database) -> None:
    cron.execute("create role other superuser login")
    other = cron.connect("other")
    other.execute("alter role postgres nologin")
    try:
        rows = other.execute("select detail, hint from queen.doctor() where name = 'job owner' and not ok").fetchall()
        ((detail, hint),) = rows
        assert '"postgres"' in detail
        other.execute(hint)
        assert other.execute("select ok from queen.doctor() where name = 'job owner'").fetchone() == (True,)
    finally:
        other.execute("alter role postgres login")


def test_runs_that_failed(cron: Database) -> None:
    job = cron.value("select jobid from cron.job where jobname = 'pg_queen worker 0'")
    insert = (
        "insert into cron.job_run_details"
        " (jobid, runid, database, username, command, status, return_message, start_time, end_time)"
        " values (%s, nextval('cron.runid_seq'), 'x', 'postgres', 'CALL queen.sweep()', %s, %s, now(), now())"
    )
    for message, says in (
        ("connection failed", "pg_hba.conf"),
        ("could not start background process; more details may be available in the server log", "max_worker_processes"),
        ("ERROR: no space left", "cron.job_run_details"),
    ):
        cron.execute(insert, job, "failed", message)
        detail, hint = wrong(cron)["job runs"]
        assert message in detail
        assert says in hint
    cron.execute(insert, job, "succeeded", "1 row")
    assert "job runs" not in wrong(cron)


def test_no_pg_cron_here(db: Database, sweeper: StartSweeper, own_server: OwnServer) -> None:
    """In another database, not created, not loaded."""
    detail, hint = wrong(db)["pg_cron"]
    assert 'in database "postgres"' in detail
    assert "cron.schedule_in_database" in hint
    assert not set(HERE[1:]) & set(names(db))
    # Workers that come from there are what counts.
    sweeper()
    wait_for(lambda: db.value("select workers_alive from queen.status()") == 1)
    assert wrong(db) == {}
    for settings, says in (
        ({"shared_preload_libraries": ""}, "not loaded"),
        ({"cron.database_name": "postgres"}, "not created"),
    ):
        server = own_server(settings)
        with server.connect() as connection:
            install_extension(connection)
            other = Database(server.cluster, "postgres")
            detail, hint = wrong(other)["pg_cron"]
            assert says in detail
            assert "create extension pg_cron" in hint
            other.close()


def test_workers_switches_and_timers(db: Database, clock: Clock, sweeper: StartSweeper) -> None:
    found = wrong(db)
    assert "no worker has ever run" in found["workers"][0]
    assert "select queen.start()" in found["workers"][1]
    db.execute("select queen.schedule('q', 'k', '1', '-11 s')")
    for switch in ("schedule_enabled", "fire_enabled"):
        db.execute("select queen.configure(%s, 'false')", switch)
    found = wrong(db)
    assert "1 are due" in found["timers"][0]
    assert "switch" in found["timers"][1]
    for statement in found["switches"][1].split("; "):
        db.execute(statement)
    found = wrong(db)
    assert "switches" not in found
    assert "No worker" in found["timers"][1]
    sweeper()
    wait_for(lambda: wrong(db).keys() & {"workers", "timers"} == set(), 10)


def test_an_error_of_a_pass(db: Database) -> None:
    db.execute("call queen.sweep('10 ms')")
    assert "passes" not in wrong(db)
    db.execute("update queen.sweep_stats set last_error = 'disk is full', last_error_at = now() - interval '5 minutes'")
    detail, hint = wrong(db)["passes"]
    assert "disk is full" in detail
    db.rows(hint.rstrip(";"))
    db.execute("update queen.sweep_stats set last_error_at = now() - interval '15 minutes'")
    assert "passes" not in wrong(db)


def test_a_partition_held(db: Database, clock: Clock, session: StartSession, sweeper: StartSweeper) -> None:
    db.execute("select queen.push('q', '1')")
    holder = session("alice_producer", autocommit=False)
    holder.run("select queen.push('q', '1')")
    db.execute("select queen.schedule('q', 'k', '1', '0')")
    sweeper()
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 1)
    assert "partitions" not in wrong(db)
    db.execute("update queen.log_busy set since = since - interval '2 minutes'")
    detail, hint = wrong(db)["partitions"]
    assert 'partition "Default" of queue "q"' in detail
    assert db.rows(hint.split("; then")[0]) == []
    holder.connection.rollback()
    wait_for(lambda: "partitions" not in wrong(db), 10)


def test_maintenance_behind(db: Database) -> None:
    db.execute("select queen.push('q', '1')")
    assert "maintenance" not in wrong(db)
    db.execute("update queen.log_partitions set due_at = now() - interval '1 hour'")
    detail, hint = wrong(db)["maintenance"]
    assert "wait for it since" in detail
    db.execute(hint.split(";")[0])
    assert "maintenance" not in wrong(db)


def test_encryption_keys_missing(db: Database, tmp_path: Path) -> None:
    assert db.value("select detail from queen.doctor() where name = 'encryption'") == "no queue encrypts"
    db.execute("insert into queen.config (key, value) values ('key_file', %s)", str(tmp_path / "missing"))
    detail, hint = wrong(db)["encryption"]
    assert "cannot be read" in detail
    assert "key_file" in hint


def test_a_check_that_fails_is_a_finding(db: Database) -> None:
    """The others are shown all the same."""
    db.execute("alter function queen._workers_alive() rename to _gone")
    db.execute("alter function queen.status() rename to _status")
    rows = db.rows("select name, ok, detail from queen.doctor()")
    found = {name: detail for name, ok, detail in rows if not ok}
    assert "cannot be checked" in found["fire"]
    assert {"python", "encryption"} <= {name for name, _, _ in rows}


def test_who_may_look(db: Database) -> None:
    assert db.connect("ada_admin").execute("select count(*) from queen.doctor()").fetchone() == (9,)
    for role in ("alice_producer", "carl_consumer", "rita_reader", "nobody_role"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.connect(role).execute("select * from queen.doctor()")
