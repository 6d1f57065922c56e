"""queen.start and queen.stop, and pg_cron driving a timer from its schedule to the log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import psycopg
import pytest

from tests.support.database import Connection, Database
from tests.support.servers import Server, install_extension
from tests.support.waiting import wait_for

OwnCron = Callable[[Mapping[str, str]], Database]


def names(workers: int) -> list[str]:
    """The jobs that queen.start makes."""
    return [*(f"pg_queen worker {n}" for n in range(workers)), "pg_queen boot", "pg_queen maintenance"]


def start(connection: Connection, workers: int | None = None) -> list[str]:
    """The answer of queen.start."""
    call = "select queen.start()" if workers is None else f"select queen.start({workers})"
    return [name for (name,) in connection.execute(call).fetchall()]


def jobs(db: Database, columns: str = "jobname") -> list[Any]:
    """Jobs in the order they were made."""
    return db.rows(f"select {columns} from cron.job order by jobid")


def unusable(connection: Connection) -> tuple[str, str]:
    """Message and hint of a queen.start that cannot."""
    with pytest.raises(psycopg.Error) as caught:
        start(connection)
    assert caught.value.sqlstate == "QN001"
    assert caught.value.diag.message_primary is not None
    assert caught.value.diag.message_hint is not None
    return caught.value.diag.message_primary, caught.value.diag.message_hint


def test_pg_cron_drives_a_timer_from_schedule_to_the_log(cron_db: Database) -> None:
    libpq = cron_db.value("show cron.use_background_workers") == "off"
    with cron_db.connect("ada_admin") as admin:
        assert start(admin) == names(2)
    # pg_cron 1.4 begins on the minute; the boot job begins with the server.
    cron_db.restart()
    wait_for(lambda: cron_db.value("select workers_alive from queen.status()") >= 1, 30, what="a worker is alive")
    worker = cron_db.value(
        "select backend_type from pg_stat_activity where pid = (select max(pid) from queen.sweep_stats)"
    )
    assert (worker == "client backend") == libpq

    producer, consumer = cron_db.connect("alice_producer"), cron_db.connect("carl_consumer")
    verdict = producer.execute(
        "select * from queen.schedule('q', 'k', '{\"n\": 1}', '1 second', txn => 't')"
    ).fetchone()
    assert verdict is not None
    due = verdict[6]
    pop = "select message_id, txn, payload, producer_sub, created_at, \"offset\" from queen.pop('q', auto_ack => true)"
    (message,) = wait_for(lambda: consumer.execute(pop).fetchall(), 15, what="the message is there")
    assert message[:4] == (verdict[5], "t", {"n": 1}, "alice_producer")
    # On time: not early, and no later than some sleeps of a worker on a busy machine.
    assert 0 <= (message[4] - due).total_seconds() < 1
    assert cron_db.rows("select from queen.log_timers") == []

    def seen() -> tuple[Any, ...]:
        (row,) = cron_db.rows(
            "select jobs, fired, due, oldest_lateness::text, busy_partitions, dead_letters, pg_cron from queen.status()"
        )
        return row

    version = cron_db.value("select extversion from pg_extension where extname = 'pg_cron'")
    wait_for(lambda: seen() == (2, 1, 0, "00:00:00", 0, 0, version), 15, what="the status shows it")
    assert cron_db.value("select last_pass_at > now() - interval '15 s' from queen.status()")
    assert cron_db.rows("select * from cron.job_run_details where status = 'failed'") == []

    # And stop ends the run under way, not just the next ones.
    assert cron_db.value("select queen.stop()") == 4
    assert jobs(cron_db) == []
    pids = [pid for (pid,) in cron_db.rows("select pid from queen.sweep_stats")]
    wait_for(lambda: cron_db.value("select count(*) from pg_stat_activity where pid = any (%s)", pids) == 0, 15)
    producer.execute("select queen.schedule('q', 'later', '2', '0'::interval)")
    assert cron_db.value("select jobs + due from queen.status()") == 1
    assert consumer.execute(pop).fetchall() == []


def test_start_and_stop(own_cron_db: OwnCron) -> None:
    db = own_cron_db({})
    # Somebody else's: another name, another role, another database, a name that begins like ours.
    db.execute("create role bob login; grant usage on schema cron to bob; grant queen_admin to bob")
    db.execute("create database app")
    db.execute("select cron.schedule('nightly', '0 3 * * *', 'vacuum')")
    db.execute("select cron.schedule_in_database('pg_queen worker 1 in app', '* * * * *', 'select 1', 'app')")
    bob = db.connect("bob")
    bob.execute("select cron.schedule('bobs', '0 4 * * *', 'select 1')")
    others = jobs(db, "*")
    assert len(others) == 3

    admin = db.connect("ada_admin")
    assert admin.execute("select queen.stop()").fetchone() == (0,)
    assert start(admin) == names(2)
    ours = jobs(db, "jobid, jobname, schedule, command, database, username, active")[3:]
    assert [each[1:] for each in ours] == [
        ("pg_queen worker 0", "* * * * *", "CALL queen.sweep(null, 0, 2)", "cron", "postgres", True),
        ("pg_queen worker 1", "* * * * *", "CALL queen.sweep(null, 1, 2)", "cron", "postgres", True),
        ("pg_queen boot", "@reboot", "CALL queen.sweep(null, 2, 3)", "cron", "postgres", True),
        ("pg_queen maintenance", "* * * * *", "CALL queen.maintain()", "cron", "postgres", True),
    ]

    # Idempotent: not one job is made anew, whoever calls.
    for connection in (admin, bob, db.superuser):
        assert start(connection) == names(2)
        assert jobs(db, "jobid, jobname, schedule, command, database, username, active")[3:] == ours

    # Another number changes theirs.
    for workers in (3, 1, 16, 2):
        assert start(admin, workers) == names(workers)
        assert sorted(name for (name,) in jobs(db)[3:]) == sorted(names(workers))
        assert db.rows("select command from cron.job where jobname = 'pg_queen worker 0' and database = 'cron'") == [
            (f"CALL queen.sweep(null, 0, {workers})",)
        ]
        assert db.value("select jobs from queen.status()") == workers

    # A job that is not as it should be is put right; nodeport as after a restore on another server.
    db.execute("update cron.job set active = false where jobname = 'pg_queen worker 0' and database = 'cron'")
    db.execute("update cron.job set nodeport = 1 where jobname = 'pg_queen maintenance'")
    db.execute("update cron.job set command = 'select 1' where jobname = 'pg_queen worker 1'")
    db.execute("select cron.unschedule('pg_queen boot')")
    assert db.value("select jobs from queen.status()") == 1
    assert start(admin) == names(2)
    assert sorted(jobs(db, "jobname, schedule, command, database, username, active")[3:]) == sorted(
        each[1:] for each in ours
    )
    assert db.value("select count(*) from cron.job where nodeport = current_setting('port')::int") == 7

    # Bad numbers change nothing.
    before = jobs(db, "*")
    for number in ("null", "0", "-1", "17", "2147483647"):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='argument "workers"') as caught:
            admin.execute(f"select queen.start({number})")
        assert caught.value.diag.message_hint == "Accepted is 1 to 16."
    assert jobs(db, "*") == before

    # A rollback takes it back.
    with pytest.raises(ZeroDivisionError), db.connect("ada_admin", autocommit=False) as connection:
        connection.execute("select queen.stop()")
        raise ZeroDivisionError
    assert jobs(db, "*") == before

    assert admin.execute("select queen.stop()").fetchone() == (4,)
    assert admin.execute("select queen.stop()").fetchone() == (0,)
    assert jobs(db, "*") == others
    # Who lacks the role makes and removes none.
    for login in ("alice_producer", "carl_consumer", "rita_reader", "nobody_role"):
        for call in ("select queen.start()", "select queen.stop()"):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                db.connect(login).execute(call)
    assert jobs(db, "*") == others


def test_pg_cron_not_created(own_cron_db: OwnCron) -> None:
    db = own_cron_db({})
    db.execute("drop extension pg_cron")
    message, hint = unusable(db.superuser)
    assert message == "extension pg_cron is not created in this database"
    assert db.value("select pg_cron from queen.status()") == message
    assert db.value("select queen.stop()") == 0
    assert hint == "Run create extension pg_cron, then select queen.start()."
    db.execute("create extension pg_cron")
    assert start(db.superuser) == names(2)


def test_pg_cron_not_loaded(own_server: Callable[[Mapping[str, str]], Server]) -> None:
    server = own_server({})
    # Nothing of pg_cron in the configuration, as on a machine where nobody ever installed it.
    settings = server.cluster.data / "pg_queen.conf"
    lines = settings.read_text(encoding="utf-8").splitlines(keepends=True)
    settings.write_text(
        "".join(line for line in lines if not line.startswith(("cron.", "shared_preload_libraries"))), encoding="utf-8"
    )
    server.cluster.restart()
    with server.connect() as connection:
        install_extension(connection)
        message, hint = unusable(connection)
        assert message == "pg_cron is not loaded: shared_preload_libraries does not name it"
        for part in (
            f"postgresql-{server.cluster.programs.major}-cron",
            "shared_preload_libraries = 'pg_cron'",
            "cron.database_name = 'postgres'",
            "create extension pg_cron",
        ):
            assert part in hint
        assert connection.execute("select pg_cron, jobs from queen.status()").fetchone() == (message, 0)
        assert connection.execute("select queen.stop()").fetchone() == (0,)
        # What needs no pg_cron goes on.
        connection.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
        connection.execute("call queen.sweep('0')")
        assert connection.execute("select payload from queen.pop('q')").fetchall() == [(1,)]


def test_pg_cron_in_another_database(own_cron_db: OwnCron) -> None:
    cron = own_cron_db({})
    cron.execute('create database "My ""App"""')
    app = Database(cron.cluster, 'My "App"')
    install_extension(app.superuser)
    try:
        message, hint = unusable(app.connect("ada_admin"))
        assert message == 'pg_cron keeps its jobs in database "cron"'
        assert app.value("select pg_cron from queen.status()") == message
        assert app.value("select queen.stop()") == 0

        # The hint, word for word, in that database; and the jobs of that database beside them.
        assert hint.startswith("In that database run: ")
        assert start(cron.superuser) == names(2)
        before = jobs(cron, "*")
        statements = hint.removeprefix("In that database run: ")
        for _ in range(2):
            # Twice is as good as once.
            cron.execute(statements)
        assert jobs(cron, "*")[: len(before)] == before
        assert sorted(jobs(cron, "jobname, schedule, command, database")[len(before) :]) == sorted(
            (f'{name} in My "App"', schedule, command, 'My "App"')
            for name, schedule, command in app.rows("select name, schedule, command from queen._jobs(2, '* * * * *')")
        )
        assert cron.value("select queen.stop()") == len(before)
        assert len(jobs(cron)) == 4

        # They do their work there.
        app.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
        app.close()
        cron.restart()
        pop = "select payload from queen.pop('q', auto_ack => true)"
        assert wait_for(lambda: app.rows(pop), 30, what="a job fires in the other database") == [(1,)]
        assert app.value("select workers_alive from queen.status()") == 1
    finally:
        app.close()
