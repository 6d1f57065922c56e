"""Refusals become exceptions by SQLSTATE, with message and hint; everything else stays psycopg's."""

from __future__ import annotations

import contextlib
import math
from datetime import datetime, timezone
from typing import Any

import psycopg
import pytest
from pg_queen import (
    CronUnusable,
    InvalidArgument,
    NotInstalled,
    NotPermitted,
    Queen,
    QueenError,
    TenantDenied,
)
from pg_queen.errors import translate

from tests.support.database import Connection, Database


@pytest.fixture(scope="module")
def shared_queen(shared_db: Database) -> Queen:
    return Queen(shared_db.connect("ada_admin"))


def _schedule(**changes: Any) -> dict[str, Any]:
    return {"queue": "q", "timer_key": "k", "payload": 1, "delay": 60, **changes}


@pytest.mark.parametrize(
    ("arguments", "sqlstate", "named"),
    [
        (_schedule(queue=""), "22023", "queue"),
        (_schedule(queue=None), "22023", "queue"),
        (_schedule(queue=5), "22023", "queue"),
        (_schedule(queue="a\nb"), "22023", "queue"),
        (_schedule(queue="x\x00y"), "22023", "NUL"),
        (_schedule(queue="\ud800"), "22023", "encoded"),
        (_schedule(timer_key="ä" * 257), "22023", "timer_key"),
        (_schedule(partition=None), "22023", "partition"),
        (_schedule(txn=""), "22023", "txn"),
        (_schedule(tenant="no uuid"), "22023", "tenant"),
        (_schedule(payload="x" * 1_048_575), "22023", "payload"),
        (_schedule(payload=b"x" * 1_048_577), "22023", "payload"),
        (_schedule(payload=math.nan), "22P02", "NaN"),
        (_schedule(payload=[math.inf]), "22P02", "Infinity"),
        (_schedule(payload="\x00"), "22P05", "u0000"),
        (_schedule(payload="\ud800"), "22P02", "surrogate"),
        (_schedule(delay=None), "22023", "delay"),
        (_schedule(deliver_at=datetime.now(timezone.utc)), "22023", "deliver_at"),
        (_schedule(delay=None, deliver_at=datetime(2030, 1, 1)), "22023", "naive"),
        (_schedule(delay=None, deliver_at="2030-01-01"), "22023", "deliver_at"),
        (_schedule(delay=None, deliver_at=datetime(9999, 1, 1, tzinfo=timezone.utc)), "22023", "deliver_at"),
        (_schedule(delay=True), "22023", "delay"),
        (_schedule(delay=math.nan), "22023", "delay"),
        (_schedule(delay=-math.inf), "22023", "delay"),
        (_schedule(delay=10**18), "22015", "interval"),
        (_schedule(delay="soon"), "22007", "interval"),
        (_schedule(delay="1e9 years"), None, ""),
    ],
)
def test_bad_arguments_are_refused_with_a_hint(
    shared_queen: Queen, arguments: dict[str, Any], sqlstate: str | None, named: str
) -> None:
    queen = shared_queen
    with pytest.raises(InvalidArgument) as refusal:
        queen.schedule(**arguments)
    assert sqlstate in (None, refusal.value.sqlstate)
    assert named in refusal.value.message
    assert isinstance(refusal.value, (QueenError, ValueError))
    if refusal.value.hint:
        assert str(refusal.value) == f"{refusal.value.message}\nHINT: {refusal.value.hint}"
    assert queen.schedule("q", "k", 1, delay=60).ok


@pytest.mark.parametrize(
    ("method", "arguments", "named"),
    [
        ("schedule_many", {"queue": "q", "timer_keys": ["a", "a"], "payloads": [1, 2], "delays": [1, 1]}, "timer_keys"),
        ("schedule_many", {"queue": "q", "timer_keys": "ab", "payloads": [1, 2], "delays": [1, 1]}, "timer_keys"),
        ("schedule_many", {"queue": "q", "timer_keys": ["a"], "payloads": [b"x"], "delays": [1]}, "payloads"),
        ("schedule_many", {"queue": "q", "timer_keys": ["a"], "payloads": [1, 2], "delays": [1]}, "payloads"),
        ("schedule_bytes", {"queue": "q", "timer_key": "a", "payload": "text", "delay": 1}, "payload"),
        ("schedule_bytes", {"queue": "q", "timer_key": "a", "payload": None, "delay": 1}, "payload"),
        ("push_many", {"queue": "q", "payloads": {"a": 1}}, "payloads"),
        ("apply", {"ops": {}}, "ops"),
        ("apply", {"ops": [{"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 1}]}, "payload"),
        ("pop", {"queue": "q", "max_messages": 0}, "max_messages"),
        ("pop", {"queue": "q", "max_messages": True}, "max_messages"),
        ("pop", {"queue": "q", "max_messages": 1.5}, "max_messages"),
        ("pop", {"queue": "q", "lease": 0}, "lease"),
        ("pop", {"queue": "q", "auto_ack": 1}, "auto_ack"),
        ("pop", {"queue": "q", "consumer_group": "__timer__"}, "consumer_group"),
        ("ack", {"queue": "q", "consumer_group": "g", "partition": "p", "lease_id": 5}, "lease_id"),
        ("list_timers", {"queue": "q", "max_rows": 0}, "max_rows"),
        ("list_timers", {"queue": "q", "max_rows": 2**40}, "integer out of range"),
        ("configure", {"key": "no such key", "value": "1"}, "key"),
        ("configure", {"key": "horizon", "value": "soon"}, "value"),
    ],
)
def test_bad_arguments_of_other_calls(shared_queen: Queen, method: str, arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named) as refusal:
        getattr(shared_queen, method)(**arguments)
    assert refusal.value.hint


def test_a_payload_that_json_cannot_hold_is_pythons_own_error(queen: Queen) -> None:
    with pytest.raises(TypeError, match="JSON serializable"):
        queen.push("q", {"at": datetime.now(timezone.utc)})


@pytest.mark.parametrize(
    ("call", "role"),
    [
        (lambda queen: queen.schedule("q", "k", 1, delay=1), "queen_producer"),
        (lambda queen: queen.push("q", 1), "queen_producer"),
        (lambda queen: queen.pop("q"), "queen_consumer"),
        (lambda queen: queen.peek("q", "k"), "queen_reader"),
        (lambda queen: queen.status(), "queen_reader"),
        (lambda queen: queen.start(), "queen_admin"),
        (lambda queen: queen.configure("horizon", "1 day"), "queen_admin"),
    ],
)
def test_a_missing_permission_names_the_role_to_grant(nobody: Connection, db: Database, call: Any, role: str) -> None:
    with pytest.raises(NotPermitted) as refusal:
        call(Queen(nobody))
    assert refusal.value.sqlstate == "42501"
    assert refusal.value.hint == f"Ask an administrator to run: grant {role} to nobody_role;"
    db.execute(f"grant {role} to nobody_role")
    try:
        # start() is permitted now, and finds no pg_cron here.
        with contextlib.suppress(CronUnusable):
            call(Queen(nobody))
    finally:
        db.execute(f"revoke {role} from nobody_role")


def test_a_role_name_that_needs_quotes_is_quoted(db: Database) -> None:
    db.execute('create role "Odd ""Role" login')
    try:
        with db.connect('Odd "Role') as connection, pytest.raises(NotPermitted) as refusal:
            Queen(connection).status()
        assert refusal.value.hint == 'Ask an administrator to run: grant queen_reader to "Odd ""Role";'
    finally:
        db.execute('drop role "Odd ""Role"')


def test_another_tenant_is_denied(producer: Connection) -> None:
    with pytest.raises(TenantDenied) as refusal:
        Queen(producer).schedule("q", "k", 1, "1 hour", tenant="10000000-0000-0000-0000-000000000000")
    assert refusal.value.sqlstate == "QN002"


def test_a_database_without_the_extension(db: Database) -> None:
    db.execute("drop extension pg_queen")
    with pytest.raises(NotInstalled) as refusal:
        Queen(db.superuser).status()
    assert (refusal.value.sqlstate, "pg-queen install" in str(refusal.value.hint)) == ("3F000", True)


def test_an_extension_without_the_function(db: Database) -> None:
    db.execute("create schema other")
    db.execute("alter function queen.sent(text, text, uuid) set schema other")
    with pytest.raises(NotInstalled) as refusal:
        Queen(db.superuser).sent("q", "t")
    assert (refusal.value.sqlstate, "UPDATE" in str(refusal.value.hint)) == ("42883", True)


def test_other_errors_stay_those_of_psycopg(db: Database, producer: Connection) -> None:
    db.superuser.execute("set lock_timeout = 0")
    with db.superuser.transaction():
        db.execute("lock table queen.log_timers")
        producer.execute("set lock_timeout = '10 ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            Queen(producer).schedule("q", "k", 1, delay=1)
    producer.close()
    with pytest.raises(psycopg.OperationalError):
        Queen(producer).schedule("q", "k", 1, delay=1)


def test_errors_are_told_apart_by_sqlstate_and_never_by_text() -> None:
    class Invented(psycopg.Error):
        sqlstate = "QN999"

    assert translate(Invented('schema "queen" does not exist')) is None
    Invented.sqlstate = "3F000"
    assert isinstance(translate(Invented("das Schema gibt es nicht")), NotInstalled)
    assert translate(psycopg.OperationalError("the connection is closed")) is None
