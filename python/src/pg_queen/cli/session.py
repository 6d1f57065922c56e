"""The connection of a command, and how errors leave it: a sentence and a hint on stderr, an exit code, no traceback."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Annotated, Any, NoReturn, ParamSpec, TypeVar

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict
from psycopg.types.json import set_json_loads

from ..client import Queen
from ..errors import InstallError, InvalidArgument, NotInstalled, NotPermitted, QueenError
from .output import RawJson, printable

__all__ = [
    "AsJson",
    "CannotConnect",
    "Url",
    "connect",
    "fail",
    "guarded",
    "session",
]

REFUSED, BAD_ARGUMENT, DATABASE_ERROR, CANNOT_CONNECT, NOT_INSTALLED, NOT_PERMITTED = range(1, 7)
OUTPUT_LOST = 74  # EX_IOERR of sysexits.h
BROKEN_PIPE = 141  # as a shell reports a program that SIGPIPE ended

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        help="Connection string or URL of the database; without it the PG* variables and PGSERVICE count.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class CannotConnect(QueenError):
    """There is no connection to work on."""


def connect(url: str | None) -> psycopg.Connection[Any]:
    """A connection in autocommit, on which JSON is kept as the text that the server sent."""
    try:
        parameters: dict[str, Any] = conninfo_to_dict(url or "")
    except psycopg.ProgrammingError as error:
        raise InvalidArgument(
            f"--url is no connection string: {_one_line(error)}",
            hint="Write postgresql://USER@HOST:PORT/DATABASE, or for example 'host=/run/postgresql dbname=app'.",
        ) from error
    if "PGCONNECT_TIMEOUT" not in os.environ:
        parameters.setdefault("connect_timeout", 10)
    parameters.setdefault("fallback_application_name", "pg-queen")
    # Text is what Python's str can hold, whatever the encoding of the database.
    parameters.setdefault("client_encoding", "UTF8")
    try:
        connection = psycopg.connect(autocommit=True, **parameters)
    except psycopg.Error as error:
        raise CannotConnect(
            f"cannot connect: {_one_line(error)}",
            hint="Name the database with --url, the PG* variables or a service, as for psql.",
        ) from error
    set_json_loads(RawJson.of, connection)
    return connection


@contextmanager
def session(url: str | None) -> Iterator[Queen]:
    """A client for one command."""
    with connect(url) as connection:
        yield Queen(connection)


def guarded(command: Callable[_P, _T]) -> Callable[_P, _T]:
    """The command, with every expected error turned into a sentence and an exit code."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except QueenError as error:
            fail(_exit_code(error), error.message, error.hint)
        except psycopg.Error as error:
            detail = error.diag.message_detail
            message = error.diag.message_primary or _one_line(error)
            fail(DATABASE_ERROR, f"{message}: {detail}" if detail else message, error.diag.message_hint)
        except BrokenPipeError as error:
            _drop_output()
            raise typer.Exit(BROKEN_PIPE) from error
        except OSError as error:
            _drop_output()
            fail(OUTPUT_LOST, f"cannot write the output: {error.strerror or error}")

    return run


def fail(code: int, message: str, hint: str | None = None) -> NoReturn:
    """Say what is wrong on stderr and end with this exit code."""
    print(f"pg-queen: {_sentence(message)}", file=sys.stderr)
    if hint:
        print(f"hint: {_sentence(hint)}", file=sys.stderr)
    raise typer.Exit(code)


def _drop_output() -> None:
    """What is still buffered goes nowhere; Python would try to write it once more when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _exit_code(error: QueenError) -> int:
    match error:
        case InvalidArgument():
            return BAD_ARGUMENT
        case CannotConnect():
            return CANNOT_CONNECT
        case NotInstalled() | InstallError():
            return NOT_INSTALLED
        case NotPermitted():
            return NOT_PERMITTED
    return DATABASE_ERROR


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def _sentence(text: str) -> str:
    text = printable(text.strip())
    return text if text.endswith((".", "!", "?", ";")) else f"{text}."
