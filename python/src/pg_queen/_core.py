"""The calls without the I/O: which SQL functions there are, and how Python arguments become their parameters.

A client, synchronous or not, executes what :func:`prepare` returns and reads rows as :func:`columns` names them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from decimal import Decimal
from functools import cache
from typing import Any
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from . import errors

__all__ = ["FUNCTIONS", "Function", "columns", "prepare", "translated"]


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """An SQL function of the extension: the role that may call it, its arguments with their types, in order."""

    role: str
    arguments: Mapping[str, str]


def _declared(role: str, signatures: Mapping[str, str]) -> Iterator[tuple[str, Function]]:
    for name, signature in signatures.items():
        arguments: dict[str, str] = {}
        for declared in filter(None, signature.split(",")):
            argument, arguments[argument] = declared.split()
        yield name, Function(role, arguments)


_SCHEDULE = "delay interval, deliver_at timestamptz, partition text, txn text, tenant uuid"
_LEASE = "queue text, consumer_group text, partition text, lease_id uuid"

FUNCTIONS: Mapping[str, Function] = dict(
    [
        *_declared(
            "queen_producer",
            {
                "schedule": f"queue text, timer_key text, payload jsonb, {_SCHEDULE}",
                "schedule_bytes": f"queue text, timer_key text, payload bytea, {_SCHEDULE}",
                "schedule_many": "queue text, timer_keys text[], payloads jsonb[], delays interval[],"
                " deliver_ats timestamptz[], partitions text[], txns text[], tenant uuid",
                "reschedule": "queue text, timer_key text, delay interval, deliver_at timestamptz, tenant uuid",
                "cancel": "queue text, timer_key text, tenant uuid",
                "apply": "ops jsonb, tenant uuid",
                "push": "queue text, payload jsonb, partition text, txn text, tenant uuid",
                "push_bytes": "queue text, payload bytea, partition text, txn text, tenant uuid",
                "push_many": "queue text, payloads jsonb[], partition text, txns text[], tenant uuid",
                "sent": "queue text, txn text, tenant uuid",
            },
        ),
        *_declared(
            "queen_consumer",
            {
                "pop": "queue text, consumer_group text, max_messages int, lease interval, partition text,"
                " auto_ack boolean, tenant uuid",
                "ack": f"{_LEASE}, up_to bigint, tenant uuid",
                "nack": f"{_LEASE}, error text, delay interval, tenant uuid",
                "extend": f"{_LEASE}, lease interval, tenant uuid",
                "pop_segments": "queue text, consumer_group text, max_messages int, lease interval, partition text,"
                " auto_ack boolean, tenant uuid",
                "seek": "queue text, consumer_group text, to_offset bigint, to_time timestamptz, partition text,"
                " tenant uuid",
                "dlq_list": "queue text, after uuid, max_rows int, tenant uuid",
                "dlq_requeue": "queue text, ids uuid[], tenant uuid",
                "dlq_purge": "queue text, ids uuid[], tenant uuid",
            },
        ),
        *_declared(
            "queen_reader",
            {
                "peek": "queue text, timer_key text, tenant uuid",
                "list_timers": "queue text, after text, max_rows int, tenant uuid",
                "status": "",
            },
        ),
        *_declared(
            "queen_admin",
            {
                "start": "workers int",
                "stop": "",
                "doctor": "",
                "configure": "key text, value text",
                "configure_queue": "queue text, options jsonb, tenant uuid",
                "pause_queue": "queue text, tenant uuid",
                "resume_queue": "queue text, tenant uuid",
                "drop_queue": "queue text, tenant uuid",
                "drop_group": "queue text, consumer_group text, tenant uuid",
                "create_tenant": "tenant uuid, name text",
                "grant_tenant": "tenant uuid, role_name text",
                "revoke_tenant": "tenant uuid, role_name text",
                "configure_tenant": "tenant uuid, options jsonb",
                "drop_tenant": "tenant uuid",
                "transaction": "ops jsonb, tenant uuid",
            },
        ),
    ]
)

# Functions whose value is JSON, and the rows that the server makes of it: so its parts have their SQL types, whatever
# the connection does with JSON.
_AS_ROWS: Mapping[str, str] = {
    "apply": "pg_catalog.jsonb_populate_recordset(null::queen.timer_verdict, {call})",
    "transaction": "pg_catalog.jsonb_to_recordset({call}) as result (ok boolean, status text, queue text,"
    ' timer_key text, txn text, message_id uuid, deliver_at timestamptz, "partition" text, "offset" bigint,'
    " acked bigint, committed bigint)",
    "configure_queue": "pg_catalog.jsonb_each_text({call})",
    "configure_tenant": "pg_catalog.jsonb_each_text({call})",
    "drop_queue": "pg_catalog.jsonb_to_record({call}) as result (queue text, existed boolean, timers bigint,"
    " partitions bigint, messages bigint, groups bigint, dead_letters bigint)",
}


def prepare(function: str, arguments: Mapping[str, object], result: str) -> tuple[bytes, dict[str, object]]:
    """The statement of a call and its parameters. ``result`` is the select list, or empty for the function's value."""
    parameters: dict[str, object] = {}
    for name, type_ in FUNCTIONS[function].arguments.items():
        value = arguments[name]
        # None is SQL's NULL everywhere but in a JSON payload, where it is JSON's null.
        parameters[name] = None if value is None and type_ != "jsonb" else _CONVERTERS[type_](name, value)
    return _statement(function, result), parameters


@cache
def _statement(function: str, result: str) -> bytes:
    arguments = ", ".join(f'"{name}" => %({name})s::{type_}' for name, type_ in FUNCTIONS[function].arguments.items())
    call = f"queen.{function}({arguments})"
    call = _AS_ROWS.get(function, "{call}").replace("{call}", call)
    return (f"select {result} from {call}" if result else f"select {call}").encode()  # noqa: S608


def columns(record: type[Any]) -> str:
    """The select list that fills a dataclass of types.py, in its order."""
    return ", ".join(f'"{field.name}"' for field in dataclasses.fields(record))


@contextmanager
def translated(function: str, connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Turns the psycopg errors that errors.py names into its exceptions."""
    try:
        yield
    except UnicodeEncodeError as error:
        raise errors.InvalidArgument(
            f"text cannot be encoded: {error}", hint="Lone surrogates are no text.", sqlstate="22023"
        ) from error
    except psycopg.Error as error:
        named = errors.translate(error, role=FUNCTIONS[function].role, user=connection.info.user)
        if named is None:
            raise
        raise named from error


def _refused(argument: str, problem: str, hint: str | None = None) -> errors.InvalidArgument:
    return errors.InvalidArgument(f'argument "{argument}": {problem}', hint=hint, sqlstate="22023")


def _instance(accepted: type | tuple[type, ...], what: str) -> Callable[[str, object], object]:
    def convert(argument: str, value: object) -> object:
        # bool is an int for Python, and a number of messages that is True is a mistake.
        if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is int):
            raise _refused(argument, f"a {type(value).__name__} is not accepted", f"Accepted is {what}.")
        return value

    return convert


def _seconds(argument: str, value: int | float | Decimal) -> str:
    if not math.isfinite(value):
        raise _refused(argument, f"{value} is no length of time", "Accepted is a finite number of seconds.")
    return f"{format(Decimal(str(value)), 'f')} seconds"


def _interval(argument: str, value: object) -> str:
    """Text for a cast to interval. Elapsed time is given in seconds, so that no day of 23 hours gets into it."""
    match value:
        case str():
            return value
        case timedelta():
            return f"{value // timedelta(microseconds=1)} microseconds"
        case int() | float() | Decimal() if not isinstance(value, bool):
            return _seconds(argument, value)
    raise _refused(
        argument,
        f"a {type(value).__name__} is not accepted",
        "Accepted is a timedelta, a number of seconds, or an interval such as '24 hours'.",
    )


def _instant(argument: str, value: object) -> datetime:
    if not isinstance(value, datetime):
        raise _refused(argument, f"a {type(value).__name__} is not accepted", "Accepted is an aware datetime.")
    if value.utcoffset() is None:
        raise _refused(
            argument,
            "the datetime is naive, so it names no instant",
            "Give it a time zone, for example datetime.now(timezone.utc) or value.astimezone().",
        )
    return value


def _uuid(argument: str, value: object) -> UUID:
    if isinstance(value, UUID):
        return value
    try:
        if isinstance(value, str):
            return UUID(value)
    except ValueError:
        pass
    raise _refused(argument, f"{value!r} is no uuid", "Accepted is a uuid.UUID or its text.")


def _json(argument: str, value: object) -> Jsonb:
    if isinstance(value, (bytes, bytearray, memoryview)):
        raise _refused(argument, "bytes are no JSON", "schedule_bytes and push_bytes take bytes, one payload a call.")
    return value if isinstance(value, Jsonb) else Jsonb(value)


def _array(convert: Callable[[str, object], object], null: object = None) -> Callable[[str, object], object]:
    def convert_all(argument: str, value: object) -> object:
        if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
            raise _refused(argument, f"a {type(value).__name__} is not accepted", "Accepted is a list.")
        return [null if item is None else convert(argument, item) for item in value]

    return convert_all


_text = _instance(str, "a str")
_whole = _instance(int, "an int")

_CONVERTERS: Mapping[str, Callable[[str, object], object]] = {
    "text": _text,
    "text[]": _array(_text),
    "int": _whole,
    "bigint": _whole,
    "boolean": _instance(bool, "a bool"),
    "bytea": _instance((bytes, bytearray, memoryview), "bytes"),
    "jsonb": _json,
    "jsonb[]": _array(_json, null=Jsonb(None)),
    "interval": _interval,
    "interval[]": _array(_interval),
    "timestamptz": _instant,
    "timestamptz[]": _array(_instant),
    "uuid": _uuid,
    "uuid[]": _array(_uuid),
}
