"""Sessions beside the test's own: statements that may block, and the sweeper."""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import psycopg
from psycopg import sql

from tests.support.database import Database
from tests.support.waiting import wait_for, wait_until_blocked
from tools.cluster import SUPERUSER

__all__ = ["Session", "Sweeper"]

Rows = list[tuple[Any, ...]]


class Session:
    """A connection whose statements run in a thread of its own, one after the other."""

    def __init__(self, database: Database, user: str = SUPERUSER, **options: Any) -> None:
        self._database = database
        self.connection = database.connect(user, **options)
        self.pid = self.connection.info.backend_pid
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._last: Future[Rows] | None = None

    def start(self, query: str | sql.Composed, *parameters: Any) -> Future[Rows]:
        """Begin a statement; the future gives its rows, or raises its error."""

        def work() -> Rows:
            cursor = self.connection.execute(query, parameters or None)
            return cursor.fetchall() if cursor.description is not None else []

        self._last = self._thread.submit(work)
        return self._last

    def run(self, query: str | sql.Composed, *parameters: Any, timeout: float = 10.0) -> Rows:
        """Run a statement to its end; TimeoutError if it takes longer, and it goes on."""
        try:
            return self.start(query, *parameters).result(timeout)
        except FutureTimeoutError:
            raise TimeoutError(f"not within {timeout} s: {query!r}") from None

    def wait_until_blocked(self, timeout: float = 10.0) -> None:
        """Wait until the statement begun last waits for a lock."""
        wait_until_blocked(self._database, self.pid, timeout)

    def cancel(self) -> None:
        """Cancel the statement begun last; its future raises QueryCanceled."""
        statement = self._last
        assert statement is not None
        # The thread may not have sent it yet, and a session without a statement ignores a cancel.
        wait_for(
            lambda: (
                statement.done()
                or self._database.rows("select from pg_stat_activity where pid = %s and state = 'active'", self.pid)
            ),
            what="the statement runs",
        )
        self._database.execute("select pg_cancel_backend(%s)", self.pid)

    def terminate(self) -> None:
        """End the backend and wait until it is gone; its locks are."""
        self._database.execute("select pg_terminate_backend(%s)", self.pid)
        wait_for(
            lambda: not self._database.rows("select from pg_stat_activity where pid = %s", self.pid),
            what=f"backend {self.pid} is gone",
        )

    def close(self) -> None:
        """End the session, in the middle of a statement if need be."""
        if self._last is not None and not self._last.done():
            # An error here means that the server is down, and the statement ended with it.
            with contextlib.suppress(psycopg.OperationalError):
                self.terminate()
        self._thread.shutdown()
        self.connection.close()


class Sweeper:
    """`CALL queen.sweep(...)` in a session of its own."""

    def __init__(
        self, database: Database, worker: int = 0, workers: int = 1, run_for: str = "1 hour", user: str = SUPERUSER
    ) -> None:
        self.session = Session(database, user)
        self.pid = self.session.pid
        self._call = self.session.start(
            sql.SQL("call queen.sweep(run_for => {}, worker => {}, workers => {})").format(run_for, worker, workers)
        )

    @property
    def alive(self) -> bool:
        """Whether the call still runs."""
        return not self._call.done()

    def wait(self, timeout: float = 10.0) -> None:
        """Wait until the call returns by itself, and raise its error if it had one."""
        self._call.result(timeout)

    def stop(self) -> None:
        """Cancel the call and close the session. Raises the error of a call that had ended with one by itself."""
        try:
            if self.alive:
                self.session.cancel()
                with contextlib.suppress(psycopg.errors.QueryCanceled):
                    self._call.result(10)
            else:
                self._call.result()
        finally:
            self.session.close()

    def kill(self) -> None:
        """Terminate the backend in whatever it does."""
        self.session.terminate()
        with contextlib.suppress(psycopg.OperationalError):
            self._call.result(10)
        self._call = Future()
        self._call.set_result([])
