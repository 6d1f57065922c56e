"""One database of a test and the ways into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import psycopg

from tools.cluster import SUPERUSER, Cluster

__all__ = ["LOGIN_ROLES", "Connection", "Database"]

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

# Login roles of every test server, each a member of the one role named.
LOGIN_ROLES: Final[Mapping[str, str | None]] = {
    "alice_producer": "queen_producer",
    "carl_consumer": "queen_consumer",
    "rita_reader": "queen_reader",
    "ada_admin": "queen_admin",
    "nobody_role": None,
}


class Database:
    """A database with pg_queen in it. Connections opened here are closed with it."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster = cluster
        self.name = name
        self._connections: list[Connection] = []
        self._superuser: Connection | None = None

    def conninfo(self, user: str = SUPERUSER) -> str:
        """A connection string."""
        return self.cluster.conninfo(self.name, user)

    def connect(self, user: str = SUPERUSER, **options: Any) -> Connection:
        """A new connection as `user`, in autocommit mode unless options say `autocommit=False`."""
        connection = psycopg.connect(self.conninfo(user), **{"autocommit": True, **options})
        self._connections.append(connection)
        return connection

    @property
    def superuser(self) -> Connection:
        """One connection as superuser, for looking and arranging."""
        if self._superuser is None:
            self._superuser = self.connect()
        return self._superuser

    def value(self, query: str, *parameters: Any) -> Any:
        """The first column of the only row of a query, run as superuser."""
        rows = self.rows(query, *parameters)
        assert len(rows) == 1, f"{len(rows)} rows instead of one: {query}"
        return rows[0][0]

    def rows(self, query: str, *parameters: Any) -> list[tuple[Any, ...]]:
        """All rows of a query, run as superuser."""
        return self.superuser.execute(query, parameters or None).fetchall()

    def execute(self, query: str, *parameters: Any) -> None:
        """A statement, run as superuser."""
        self.superuser.execute(query, parameters or None)

    def restart(self, mode: str = "fast") -> None:
        """Restart the server; with mode `immediate` it crashes and recovers. Connections opened before are dead."""
        self._superuser = None
        self.cluster.restart(mode)

    def close(self) -> None:
        """Close every connection that was opened here."""
        for connection in self._connections:
            connection.close()
        self._connections.clear()
        self._superuser = None
