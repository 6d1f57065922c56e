"""Fixtures for the package: clients as the real roles, and the command in this process or as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, TypeAlias

import pytest
from pg_queen import Queen
from pg_queen.cli import app
from typer.testing import CliRunner, Result

from tests.support.database import Connection, Database
from tests.support.servers import Server, install_extension

Cli: TypeAlias = Callable[..., Result]
Command: TypeAlias = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def shared_db(server: Server) -> Iterator[Database]:
    """A database for the tests of a module that leave nothing in it."""
    with server.connect() as connection:
        connection.execute("create database shared")
        database = Database(server.cluster, "shared")
        install_extension(database.superuser)
        yield database
        database.close()
        connection.execute("drop database shared")


@pytest.fixture
def queen(admin: Connection) -> Queen:
    """A client whose role may do everything."""
    return Queen(admin)


@pytest.fixture
def cli(db: Database) -> Cli:
    """Runs ``pg-queen`` in this process on the test's database: cli("push", "q", "1", user="alice_producer")."""

    def run(*arguments: str, user: str = "ada_admin", url: str | None = None, **options: object) -> Result:
        words = 2 if arguments[0] == "dlq" else 1
        named = [*arguments[:words], "--url", url or db.conninfo(user), *arguments[words:]]
        return CliRunner().invoke(app, named, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def command(db: Database) -> Command:
    """Runs the installed script as a process; the database is named by the environment, as for psql."""
    script = Path(sys.executable).parent / "pg-queen"

    def run(
        *arguments: str, user: str = "ada_admin", stdout: int | IO[bytes] = subprocess.PIPE, **environment: str
    ) -> subprocess.CompletedProcess[bytes]:
        named = {
            "PGHOST": db.cluster.host,
            "PGPORT": str(db.cluster.port),
            "PGDATABASE": db.name,
            "PGUSER": user,
        }
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
        return subprocess.run(
            [script, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            check=False,
            timeout=60,
            env={**inherited, **named, **environment},
        )

    return run
