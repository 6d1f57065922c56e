"""The log: pushes in batches, and what consumers take and acknowledge, by rows and by segments."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from typing import Any, Final

import psycopg
from pg_queen import Queen

from tests.bench.bench import PAYLOAD, Bench
from tests.bench.figures import Cell, Column, Figure, Result, Table
from tests.support.database import Database

__all__ = ["run"]

_BATCH: Final = 1000
_ACK: Final = "select ok from queen.ack('log', %s, 'Default', %s)"

Connection = psycopg.Connection[tuple[Any, ...]]
Take = Callable[[Connection, str], int]


def _rows(connection: Connection, group: str) -> int:
    """Every column of every message, JSON parsed, through psycopg."""
    messages = connection.execute(
        "select * from queen.pop('log', %s, max_messages => %s)", [group, _BATCH], prepare=True
    ).fetchall()
    return _ack(connection, group, messages[0][-1], len(messages)) if messages else 0


def _counted(connection: Connection, group: str) -> int:
    """The rows stay in the server: what pop and ack cost without transfer and parsing."""
    row = connection.execute(
        "select count(*), min(lease_id::text) from queen.pop('log', %s, max_messages => %s)",
        [group, _BATCH],
        prepare=True,
    ).fetchone()
    assert row is not None
    return _ack(connection, group, row[1], row[0]) if row[0] else 0


def _package(connection: Connection, group: str) -> int:
    """queen.pop through the Python package, a dataclass a message."""
    messages = Queen(connection).pop("log", group, max_messages=_BATCH)
    return _ack(connection, group, messages[0].lease_id, len(messages)) if messages else 0


def _segments(connection: Connection, group: str) -> int:
    """queen.pop_segments through the Python package, which decodes."""
    messages = list(Queen(connection).pop_segments("log", group, max_messages=_BATCH))
    return _ack(connection, group, messages[0].lease_id, len(messages)) if messages else 0


def _ack(connection: Connection, group: str, lease: object, count: int) -> int:
    row = connection.execute(_ACK, [group, lease], prepare=True).fetchone()
    assert row is not None
    assert row[0]
    return count


_FORMS: Final[dict[str, tuple[str, Take]]] = {
    "rows": ("pop(1000) and ack, rows to psycopg", _rows),
    "counted": ("pop(1000) and ack, rows counted in the server", _counted),
    "package": ("pop(1000) and ack, Queen.pop", _package),
    "segments": ("pop_segments(1000) and ack, decoded by the package", _segments),
}


def run(bench: Bench) -> Result:
    """Push into one partition, then let consumers of groups that are new to it read everything."""
    count = bench.pick(200_000, 5_000)
    rows: list[list[Cell]] = []
    figures = []

    def add(name: str, consumers: int, messages: int, seconds: float) -> None:
        rows.append([name, consumers, messages / seconds, 1000 * seconds * _BATCH * consumers / messages])
        figures.append(
            Figure(name + (f", {consumers} groups" if consumers > 1 else ""), messages / seconds, "messages/s")
        )
        bench.say(
            f"{name}, {consumers} consumers: {messages / seconds:,.0f} messages/s".replace("1 consumers", "1 consumer")
        )

    with bench.database() as database:
        bench.checkpoint()
        add("push_many of 1,000", 1, count, _push(database, count))
        add(_FORMS["rows"][0], 1, count, _consume(database, ["one"], "rows", count))
        add(_FORMS["rows"][0], 3, 3 * count, _consume(database, ["a", "b", "c"], "rows", count))
        for form in ("package", "segments", "counted"):
            add(_FORMS[form][0], 1, count, _consume(database, [form], form, count))
        stored = database.value("select sum(end_offset - base_offset + 1) from queen.log_segments")
        assert stored == count, "each message is stored once, whatever the number of groups"
        bytes_stored = database.value("select sum(length(blob)) from queen.log_segments")
    return Result(
        Table(
            [Column("call"), Column("clients", 0), Column("messages/s", 0), Column("ms a call of 1,000", 1)],
            rows,
        ),
        figures,
        {"messages": count, "stored bytes a message": float(bytes_stored) / count},
    )


def _push(database: Database, count: int) -> float:
    connection = database.connect("alice_producer")
    statement = "select count(*) from queen.push_many('log', %s::jsonb[])"
    payloads = [PAYLOAD] * _BATCH
    begin = time.perf_counter()
    for _ in range(count // _BATCH):
        connection.execute(statement, [payloads], prepare=True)
    return time.perf_counter() - begin


def _consume(database: Database, groups: list[str], form: str, count: int) -> float:
    """Seconds until each group, a process of its own, has acknowledged everything."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(groups) + 1)
    processes = [
        context.Process(target=_consumer, args=(database.conninfo("carl_consumer"), group, form, count, barrier))
        for group in groups
    ]
    for process in processes:
        process.start()
    barrier.wait(60)
    begin = time.perf_counter()
    for process in processes:
        process.join()
    seconds = time.perf_counter() - begin
    assert [process.exitcode for process in processes] == [0] * len(groups)
    committed = database.rows(
        "select distinct committed from queen.log_consumers where consumer_group = any (%s)", groups
    )
    assert committed == [(count,)]
    return seconds


def _consumer(conninfo: str, group: str, form: str, count: int, barrier: Barrier) -> None:
    take = _FORMS[form][1]
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("select from queen.pop('no such queue')")
        barrier.wait(60)
        done = 0
        while done < count:
            taken = take(connection, group)
            assert taken > 0, f"{done} of {count} messages"
            done += taken
