"""The clock of pg_queen under a test's control."""

from __future__ import annotations

from datetime import datetime, timedelta

from psycopg import sql

from tests.support.database import Database

__all__ = ["Clock"]


class Clock:
    """Replaces queen._now(), the one source of time, in one database.

    The time is a literal in the function, so every session sees a change from its next statement on, whatever its
    snapshot, and no role needs rights for it.
    """

    def __init__(self, database: Database) -> None:
        self._database = database

    def now(self) -> datetime:
        """What pg_queen takes for the time."""
        now: datetime = self._database.value("select queen._now()")
        return now

    def set(self, at: datetime) -> None:
        """Stand still at `at`, which must have a time zone."""
        if at.tzinfo is None:
            raise ValueError("a time without a zone")
        self._define(sql.SQL("{}::pg_catalog.timestamptz").format(sql.Literal(at.isoformat())))

    def stop(self) -> None:
        """Stand still at the present."""
        self.set(self.now())

    def advance(self, by: timedelta) -> None:
        """Jump ahead, or back, and stand still there."""
        self.set(self.now() + by)

    def run(self) -> None:
        """Run on from where the clock stands."""
        shift = self.now() - self._database.value("select pg_catalog.clock_timestamp()")
        self._define(
            sql.SQL("pg_catalog.clock_timestamp() + {} * interval '1 microsecond'").format(
                sql.Literal(shift // timedelta(microseconds=1))
            )
        )

    def reset(self) -> None:
        """Show the server's time again."""
        self._define(sql.SQL("pg_catalog.clock_timestamp()"))

    def _define(self, body: sql.Composable) -> None:
        self._database.superuser.execute(
            sql.SQL(
                "create or replace function queen._now() returns timestamptz"
                " language sql volatile parallel safe return {}"
            ).format(body)
        )
