"""What commands print: JSON lines for programs, tables and sentences for people, times in the local zone."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["RawJson", "instant", "print_json", "print_table", "printable"]

# Control characters (a payload or a recorded error may hold terminal sequences) and lone surrogates.
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


class RawJson(str):
    """JSON text as the server sent it: parsing and printing it again would cost numbers their digits."""

    @classmethod
    def of(cls, data: str | bytes) -> RawJson:
        """For psycopg's ``set_json_loads``."""
        return cls(data if isinstance(data, str) else bytes(data).decode())


def printable(text: str) -> str:
    """Text that cannot move the cursor or change colours."""
    return _UNPRINTABLE.sub(lambda found: ascii(found.group())[1:-1], text)


def instant(value: datetime) -> str:
    """A time for people: local zone with its offset, to the millisecond."""
    return value.astimezone().isoformat(sep=" ", timespec="milliseconds")


def print_json(record: Any) -> None:
    """A dataclass or mapping as one line of JSON. Bytes are in hex as psql shows them, lengths of time in seconds."""
    print("{" + ", ".join(f"{json.dumps(name)}: {_json(value)}" for name, value in _items(record)) + "}")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A table as wide as its content; only a terminal makes it narrower."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    width = None if sys.stdout.isatty() else 1_000_000
    console = Console(file=sys.stdout, width=width, highlight=False)
    # Rich would end the program by itself when the reader of a pipe is gone.
    with console.capture() as rendered:
        console.print(table)
    print("\n".join(line.rstrip() for line in rendered.get().splitlines()))


def _items(record: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(record, Mapping):
        return record.items()
    return ((field.name, getattr(record, field.name)) for field in dataclasses.fields(record))


def _json(value: Any) -> str:
    match value:
        case RawJson():
            return str(value)
        case datetime():
            return json.dumps(value.astimezone().isoformat())
        case timedelta():
            return json.dumps(value.total_seconds())
        case bytes():
            return json.dumps(f"\\x{value.hex()}")
        case UUID():
            return json.dumps(str(value))
    return json.dumps(value)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case datetime():
            return instant(value)
        case timedelta():
            return f"{value.total_seconds():.3f} s"
        case bytes():
            return f"\\x{value.hex()}"
    return printable(str(value))
