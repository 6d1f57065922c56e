"""The payload of a command: JSON, text or bytes, from the command line, a file or standard input."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from psycopg.types.json import Jsonb

from ..errors import InvalidArgument

__all__ = ["AsBytes", "AsText", "FromFile", "Payload", "read_payload"]

Payload = Annotated[str | None, typer.Argument(help="The payload as JSON.", show_default=False)]
FromFile = Annotated[
    str | None,
    typer.Option("--file", help="Read the payload from this file, - for standard input.", show_default=False),
]
AsText = Annotated[bool, typer.Option("--text", help="The payload is text and becomes a JSON string.")]
AsBytes = Annotated[bool, typer.Option("--bytes", help="The payload is bytes and stays bytes.")]


def read_payload(argument: str | None, file: str | None, as_text: bool, as_bytes: bool) -> Jsonb | bytes:
    """What to send. JSON goes to the server as it was written, so numbers keep their digits."""
    if (argument is None) == (file is None):
        raise InvalidArgument("give the payload either as an argument or with --file, not both, not neither")
    if as_text and as_bytes:
        raise InvalidArgument("give --text or --bytes, not both")
    data = os.fsencode(argument) if argument is not None else _read(str(file))
    if as_bytes:
        return data
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"the payload is not UTF-8: {error.reason} at byte {error.start}", hint="Send it with --bytes."
        ) from error
    if as_text:
        return Jsonb(text)
    try:
        # Numbers stay text here: they are checked, not converted.
        json.loads(text, parse_int=str, parse_float=str, parse_constant=_no_number)
    except RecursionError:
        pass  # deeper than Python reads; the server decides
    except ValueError as error:
        raise InvalidArgument(
            f"the payload is not JSON: {error}", hint="Quote it for the shell, or send plain text with --text."
        ) from error
    return Jsonb(text, dumps=str)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _read(file: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"cannot read {file}: {error.strerror or error}") from error
