"""A client of a chaos run, a process of its own: calls at random, each written down before and after it.

python -m tests.chaos.client CONNINFO NUMBER SEED FOLDER SECONDS
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TypeAlias

import psycopg
from psycopg.types.json import Jsonb

__all__ = ["GROUPS", "QUEUES", "Recorder", "consume"]

QUEUES: Final = {
    "00000000-0000-0000-0000-000000000001": ["mail", "bills"],
    "00000000-0000-0000-0000-0000000000aa": ["mail"],
    "00000000-0000-0000-0000-0000000000bb": ["mail", "other"],
}
"""Queues by tenant; names alike in two tenants are two queues."""
GROUPS: Final = ("billing", "audit")
_PARTITIONS: Final = ("a", "b", "c", "Default")
_KEYS: Final = 30
_EPOCH_SECONDS: Final = 10

_Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]


class Recorder:
    """Connects again whenever it must, and writes every call to a history."""

    def __init__(self, conninfo: str, number: int, folder: Path) -> None:
        self.number = number
        self._conninfo = conninfo
        # A client that follows a killed one has its number in the name, and another file.
        self._file = (folder / f"{number}.jsonl").open("a", encoding="utf-8", buffering=1)
        self._count = 0
        self._connection: _Connection | None = None

    def mark(self) -> str:
        """The mark of the next call."""
        return f"{self.number}-{self._count}"

    def connection(self) -> _Connection | None:
        """A connection that was usable a moment ago, or None after a short wait."""
        if self._connection is None or self._connection.closed or self._connection.broken:
            try:
                self._connection = psycopg.connect(self._conninfo, autocommit=True, connect_timeout=5)
            except psycopg.Error:
                time.sleep(0.05)
                return None
        return self._connection

    def call(
        self,
        op: str,
        tenant: str,
        queue: str,
        asked: dict[str, Any],
        work: Callable[[_Connection], Any],
    ) -> Any:
        """Make one call and write down what came of it; its answer, or None."""
        connection = self.connection()
        if connection is None:
            return None
        record: dict[str, Any] = {
            "client": self.number,
            "number": self._count,
            "op": op,
            "tenant": tenant,
            "queue": queue,
            "begin": time.time(),
            "asked": asked,
        }
        self._count += 1
        self._write(record)
        try:
            record["answer"] = work(connection)
            record["outcome"] = "ok"
        except _RolledBackError:
            record["outcome"] = "failed"
        except psycopg.Error as error:
            # An error that leaves the session alive has undone its statement. One that ends it may have come after the
            # commit, and so may silence.
            alive = not connection.broken and not connection.closed and error.sqlstate is not None
            record["outcome"] = "failed" if alive else "unknown"
            record["answer"] = {"status": None, "error": f"{error.sqlstate} {error}".splitlines()[0]}
            if not alive:
                connection.close()
        if record["outcome"] != "unknown":
            record["end"] = time.time()
        self._write(record)
        return record["answer"] if record["outcome"] == "ok" else None

    def _write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


class _RolledBackError(Exception):
    """The call was undone on purpose."""


def _verdict(connection: _Connection, statement: str, values: list[Any], rolled_back: bool = False) -> dict[str, Any]:
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        if rolled_back:
            with connection.transaction(force_rollback=True):
                cursor.execute(statement, values)
            raise _RolledBackError
        row = cursor.execute(statement, values).fetchone()
    assert row is not None
    due = row.pop("deliver_at", None)
    return {
        **{name: str(value) if name == "message_id" and value is not None else value for name, value in row.items()},
        "due": due.timestamp() if due is not None else None,
    }


_TIMER: Final = "select status, message_id, deliver_at from queen."


class _Load:
    def __init__(self, recorder: Recorder, seed: int) -> None:
        self.dice = random.Random(seed)
        self.recorder = recorder

    def _key(self) -> str:
        # A key lives for some seconds only: what nobody knows of it for certain stays bounded.
        return f"{int(time.time()) // _EPOCH_SECONDS}-{self.dice.randrange(_KEYS)}"

    def _due(self) -> float:
        # Milliseconds, which a double and a timestamptz both hold.
        ahead = self.dice.choice([-1.0, 0.0, 0.05, 0.2, 1.0, 3.0, 8.0, 15.0]) * self.dice.uniform(0.5, 1.5)
        return round(time.time() + ahead, 3)

    def step(self) -> None:
        tenant = self.dice.choice(list(QUEUES))
        queue = self.dice.choice(QUEUES[tenant])
        kind = self.dice.choices(["schedule", "reschedule", "cancel", "push", "consume"], [45, 12, 12, 11, 20])[0]
        rolled_back = self.dice.random() < 0.03
        if kind == "consume":
            consume(self.recorder, tenant, queue, self.dice.choice(GROUPS), nack=self.dice.random() < 0.05)
        elif kind in ("schedule", "push"):
            self._send(kind, tenant, queue, rolled_back)
        else:
            self._move(kind, tenant, queue, rolled_back)

    def _send(self, kind: str, tenant: str, queue: str, rolled_back: bool) -> None:
        partition = self.dice.choice(_PARTITIONS)
        mark = self.recorder.mark()
        payload = {"v": mark, "pad": "x" * self.dice.choice([0, 10, 300])}
        txn = f"t{mark}" if self.dice.random() < 0.3 else None
        asked: dict[str, Any] = {"partition": partition, "txn": txn, "payload": payload}
        if kind == "push":
            statement = 'select status, message_id, "offset" from queen.push(%s, %s, %s, %s, %s::uuid)'
            values = [queue, Jsonb(payload), partition, txn, tenant]
        else:
            asked |= {"key": self._key(), "due": self._due()}
            statement = (
                _TIMER + "schedule(%s, %s, %s, deliver_at => %s, partition => %s, txn => %s, tenant => %s::uuid)"
            )
            due = datetime.fromtimestamp(asked["due"], UTC)
            values = [queue, asked["key"], Jsonb(payload), due, partition, txn, tenant]
        self.recorder.call(kind, tenant, queue, asked, lambda c: _verdict(c, statement, values, rolled_back))

    def _move(self, kind: str, tenant: str, queue: str, rolled_back: bool) -> None:
        asked: dict[str, Any] = {"key": self._key()}
        if kind == "cancel":
            statement = _TIMER + "cancel(%s, %s, %s::uuid)"
            values = [queue, asked["key"], tenant]
        else:
            asked["due"] = self._due()
            statement = _TIMER + "reschedule(%s, %s, deliver_at => %s, tenant => %s::uuid)"
            values = [queue, asked["key"], datetime.fromtimestamp(asked["due"], UTC), tenant]
        self.recorder.call(kind, tenant, queue, asked, lambda c: _verdict(c, statement, values, rolled_back))


def consume(
    recorder: Recorder, tenant: str, queue: str, group: str, *, nack: bool = False, most: int = 50
) -> int | None:
    """Pop once and acknowledge partition by partition, or refuse; how many messages came, None when it failed."""

    def pop(connection: _Connection) -> list[dict[str, Any]]:
        rows = connection.execute(
            'select "partition", "offset", message_id::text, payload, lease_id::text'
            " from queen.pop(%s, %s, %s, lease => '2 s', tenant => %s::uuid)",
            [queue, group, most, tenant],
        ).fetchall()
        names = ("partition", "offset", "message_id", "payload", "lease")
        return [dict(zip(names, row, strict=True)) for row in rows]

    got = recorder.call("pop", tenant, queue, {"group": group}, pop)
    for partition, lease in dict.fromkeys((m["partition"], m["lease"]) for m in got or []):
        asked = {"group": group, "partition": partition, "lease": lease}
        call = "nack(%s, %s, %s, %s::uuid, 'not now', tenant => %s::uuid)" if nack else (
            "ack(%s, %s, %s, %s::uuid, tenant => %s::uuid)"
        )  # fmt: skip
        statement = f"select status, committed from queen.{call}"
        values = [queue, group, partition, lease, tenant]
        recorder.call(
            "nack" if nack else "ack", tenant, queue, asked, lambda c, s=statement, v=values: _verdict(c, s, v)
        )
    return None if got is None else len(got)


def main() -> None:
    """Call at random until the time is over."""
    conninfo, number, seed, folder, seconds = sys.argv[1:]
    load = _Load(Recorder(conninfo, int(number), Path(folder)), int(seed))
    end = time.monotonic() + float(seconds)
    while time.monotonic() < end:
        load.step()


if __name__ == "__main__":
    main()
