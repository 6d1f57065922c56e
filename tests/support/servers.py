"""Real servers for tests and benchmarks, each with its own folder, gone when the test or its process ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import psycopg

from tests.support.database import LOGIN_ROLES, Connection, Database
from tools.cluster import ROOT, SUPERUSER, Cluster, give, state_directory

__all__ = ["SETTINGS", "Server", "build_extension", "install_extension", "pg_cron_database", "running_server"]

# What a test needs to be quick and to see more; nothing here changes what a statement answers. Without fsync a server
# that is killed keeps its data all the same, only a machine that loses power would not.
SETTINGS: Final[Mapping[str, str]] = {
    "shared_preload_libraries": "pg_cron",
    "cron.database_name": "postgres",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "100",
    "max_worker_processes": "20",
    "log_lock_waits": "on",
    "log_line_prefix": "%m [%p] %q%u@%d %a ",
}


class Server:
    """A running server; `cluster` starts, stops and crashes it.

    The attributes in lower case beside it are those that pytest-postgresql expects of a server it did not start.
    """

    user: Final = SUPERUSER
    password: Final = None
    options: Final = ""
    maintenance_dbname: Final = "postgres"
    template_dbname: Final = "template1"

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    @property
    def host(self) -> str:
        """The folder of the socket."""
        return self.cluster.host

    @property
    def port(self) -> int:
        """The port."""
        return self.cluster.port

    def connect(self, dbname: str = "postgres", user: str = SUPERUSER, **options: Any) -> Connection:
        """A connection in autocommit mode, which the caller closes."""
        return psycopg.connect(self.cluster.conninfo(dbname, user), **{"autocommit": True, **options})


def build_extension() -> None:
    """Bring the extension's script up to date, through the one rule that makes it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    subprocess.run(["make", "-s", "build"], cwd=ROOT, env=environment, check=True)


@contextlib.contextmanager
def running_server(
    settings: Mapping[str, str] | None = None, *, collation: str | None = "en-US", files: list[Path] | None = None
) -> Iterator[Server]:
    """A fresh server that knows this checkout's extension (or the one in `files`), for the length of the block.

    Its default collation is a natural language's, so that an order or a comparison that forgot `collate "C"` shows.
    `collation=None` takes C.UTF-8, as the benchmarks do.
    """
    path = Path(tempfile.mkdtemp(prefix="test-", dir=state_directory()))
    give(path)
    cluster = Cluster(path)
    cluster.tie_to_this_process()
    try:
        cluster.programs.install(files)
        icu = collation is not None and cluster.programs.major >= 15
        initdb = ["--locale-provider=icu", f"--icu-locale={collation}"] if icu else []
        cluster.create({**SETTINGS, **(settings or {})}, initdb=initdb)
        cluster.start()
        yield Server(cluster)
    finally:
        cluster.remove()


def install_extension(connection: Connection) -> None:
    """Create the extension in a database, and the login roles, which are the server's, where they are missing."""
    connection.execute("create extension pg_queen cascade")
    for login, group in LOGIN_ROLES.items():
        if connection.execute("select from pg_roles where rolname = %s", [login]).fetchone() is None:
            connection.execute(f"create role {login} login")
            if group is not None:
                connection.execute(f"grant {group} to {login}")


@contextlib.contextmanager
def pg_cron_database(settings: Mapping[str, str] | None = None) -> Iterator[Database]:
    """A server of its own with pg_cron and pg_queen in one database named `cron`, for the length of the block.

    pg_cron can be created in one database of a server, so a test that needs it needs a server.
    """
    with running_server({"cron.database_name": "cron", **(settings or {})}) as server:
        with server.connect() as connection:
            connection.execute("create database cron")
        database = Database(server.cluster, "cron")
        try:
            with server.connect("cron") as connection:
                connection.execute("create extension pg_cron")
                install_extension(connection)
            yield database
        finally:
            database.close()
