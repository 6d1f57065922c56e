"""Fixtures of the suite.

A session has one real server (pg_cron preloaded, run as `postgres` when root); every test gets a database of its own,
cloned from a template with the extension in it.

Databases and connections
    db          the test's Database: db.connect(user), db.superuser, db.value(sql, *args), db.rows(...), db.execute(...)
    producer, consumer, reader, admin, nobody, superuser
                a connection to it (autocommit) as alice_producer, carl_consumer, rita_reader, ada_admin, nobody_role
                (member of nothing), postgres;  producer.execute("select * from queen.schedule(...)").fetchone()

Time, other sessions, the sweeper
    clock       clock.set(datetime), .stop(), .advance(timedelta), .run(), .reset(), .now(): moves queen._now() in `db`
    session     session("alice_producer", autocommit=False) -> Session, whose statements run in a thread of their own:
                s.run(sql, *args); f = s.start(sql, *args); s.wait_until_blocked(); f.result(timeout); s.pid;
                s.cancel(); s.terminate()
    sweeper     sweeper(worker=0, workers=1, run_for="1 hour") -> Sweeper, running CALL queen.sweep(...) until the test
                ends: .pid, .alive, .stop(), .kill(), .wait(timeout). An error of its own fails the test.

Servers of one's own (about a second each)
    cron_db     a Database on a fresh server where pg_cron and pg_queen are both created; the test runs twice, with jobs
                over libpq and with background workers.  cron_db.restart() runs pg_cron's @reboot jobs at once
    own_cron_db own_cron_db({"cron.use_background_workers": "on", ...}) -> the same, with settings of the test's choice
    own_server  own_server({...}) -> Server without our extension: .connect(dbname, user), .cluster; see
                tests.support.servers.install_extension
    server      the session's server; never stop or crash this one
    A crash and its recovery: cron_db.restart("immediate"); connections opened before are dead, db.superuser opens anew.

Functions: tests.support.waiting: wait_for(callable, timeout), wait_until_blocked(db, pid).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import hypothesis
import psycopg
import pytest
from pytest_postgresql import factories

from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.servers import Server, build_extension, install_extension, pg_cron_database, running_server
from tests.support.sessions import Session, Sweeper

# A server's answer takes as long as the machine is busy; and a run of CI tries the same examples each time.
hypothesis.settings.register_profile("pg_queen", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("pg_queen")


@pytest.fixture(scope="session")
def extension() -> None:
    """The extension's script, built."""
    build_extension()


@pytest.fixture(scope="session")
def server(extension: None) -> Iterator[Server]:
    """The session's server."""
    with running_server() as running:
        yield running


def _load(*, host: str, port: int, user: str, dbname: str, password: str | None, **_: Any) -> None:
    with psycopg.connect(host=host, port=port, user=user, dbname=dbname, password=password) as connection:
        install_extension(connection)
        # Ids that fit neither an int4 nor a double: what takes them for less fails everywhere.
        connection.execute("alter table queen.queues alter id restart with 2147483640")
        connection.execute("alter table queen.log_partitions alter id restart with 9007199254740985")
    connection.close()


queen_template = factories.postgresql_noproc(dbname="queen", depends_on="server", load=[_load])
queen_clone = factories.postgresql("queen_template")


@pytest.fixture
def db(server: Server, queen_clone: Connection) -> Iterator[Database]:
    """The test's own database."""
    database = Database(server.cluster, queen_clone.info.dbname)
    yield database
    database.close()


@pytest.fixture
def superuser(db: Database) -> Connection:
    """A connection as superuser, the one that db.value and its like use."""
    return db.superuser


@pytest.fixture
def producer(db: Database) -> Connection:
    """A connection as a member of queen_producer."""
    return db.connect("alice_producer")


@pytest.fixture
def consumer(db: Database) -> Connection:
    """A connection as a member of queen_consumer."""
    return db.connect("carl_consumer")


@pytest.fixture
def reader(db: Database) -> Connection:
    """A connection as a member of queen_reader."""
    return db.connect("rita_reader")


@pytest.fixture
def admin(db: Database) -> Connection:
    """A connection as a member of queen_admin."""
    return db.connect("ada_admin")


@pytest.fixture
def nobody(db: Database) -> Connection:
    """A connection as a role that was granted nothing."""
    return db.connect("nobody_role")


@pytest.fixture
def clock(db: Database) -> Clock:
    """The clock of pg_queen in the test's database."""
    return Clock(db)


class StartSession(Protocol):
    """What the fixture `session` is."""

    def __call__(self, user: str = "postgres", **options: Any) -> Session:
        """Open a session as `user`; options go to psycopg.connect."""


class StartSweeper(Protocol):
    """What the fixture `sweeper` is."""

    def __call__(self, worker: int = 0, workers: int = 1, run_for: str = "1 hour", user: str = "postgres") -> Sweeper:
        """Start a sweeper."""


@pytest.fixture
def session(db: Database) -> Iterator[StartSession]:
    """Sessions whose statements may block; closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(user: str = "postgres", **options: Any) -> Session:
            return stack.enter_context(contextlib.closing(Session(db, user, **options)))

        yield start


@pytest.fixture
def sweeper(db: Database) -> Iterator[StartSweeper]:
    """Sweepers in sessions of their own; stopped at the end."""
    with contextlib.ExitStack() as stack:

        def start(worker: int = 0, workers: int = 1, run_for: str = "1 hour", user: str = "postgres") -> Sweeper:
            started = Sweeper(db, worker, workers, run_for, user)
            stack.callback(started.stop)
            return started

        yield start


@pytest.fixture(params=["libpq", "background workers"])
def cron_db(extension: None, request: pytest.FixtureRequest) -> Iterator[Database]:
    """A database with pg_cron and pg_queen on a server of its own, once for each way in which pg_cron runs jobs."""
    with pg_cron_database({"cron.use_background_workers": "off" if request.param == "libpq" else "on"}) as database:
        yield database


@pytest.fixture
def own_cron_db(extension: None) -> Iterator[Callable[[Mapping[str, str]], Database]]:
    """Databases like cron_db, with settings of the test's choice."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(pg_cron_database(settings))


@pytest.fixture
def own_server(extension: None) -> Iterator[Callable[[Mapping[str, str]], Server]]:
    """Servers of the test's own."""
    with contextlib.ExitStack() as stack:
        yield lambda settings: stack.enter_context(running_server(settings))
