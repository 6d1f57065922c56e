"""queen.transaction refuses a bad operation before it writes anything, and says which and what."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.support.database import Connection, Database

LEASE = str(uuid4())
PUSH: dict[str, Any] = {"op": "push", "queue": "q", "payload": 1}
ACK: dict[str, Any] = {"op": "ack", "queue": "q", "consumer_group": "g", "partition": "p", "lease_id": LEASE}
SCHEDULE: dict[str, Any] = {"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 1, "payload": 1}
RESCHEDULE: dict[str, Any] = {"op": "reschedule", "queue": "q", "timer_key": "l", "delay_ms": 1}
CANCEL: dict[str, Any] = {"op": "cancel", "queue": "q", "timer_key": "m"}
LONG = "x" * 256
MISSING = object()


def _with(op: dict[str, Any], /, **changes: Any) -> dict[str, Any]:
    return {name: value for name, value in {**op, **changes}.items() if value is not MISSING}


BAD: list[tuple[Any, str]] = [
    # No operation at all.
    (None, "ops[2]"),
    (5, "ops[2]"),
    ([PUSH], "ops[2]"),
    ("push", "ops[2]"),
    ({}, "ops[2].op"),
    (_with(PUSH, op=MISSING), "ops[2].op"),
    (_with(PUSH, op=None), "ops[2].op"),
    (_with(PUSH, op="pop"), "ops[2].op"),
    (_with(PUSH, op="PUSH"), "ops[2].op"),
    (_with(PUSH, op=["push"]), "ops[2].op"),
    # Names, of every kind of operation.
    *[
        (_with(op, **{field: value}), f"ops[2].{field}")
        for op, fields in [
            (PUSH, ("queue", "partition", "txn")),
            (ACK, ("queue", "consumer_group", "partition")),
            (SCHEDULE, ("queue", "timer_key", "partition", "txn")),
            (RESCHEDULE, ("queue", "timer_key")),
            (CANCEL, ("queue", "timer_key")),
        ]
        for field in fields
        for value in ("", LONG if field != "timer_key" else LONG * 3, "a\nb", 5, None, ["q"], {"q": 1}, True)
    ],
    *[(_with(op, queue=MISSING), "ops[2].queue") for op in (PUSH, ACK, SCHEDULE, RESCHEDULE, CANCEL)],
    *[(_with(op, timer_key=MISSING), "ops[2].timer_key") for op in (SCHEDULE, RESCHEDULE, CANCEL)],
    (_with(ACK, partition=MISSING), "ops[2].partition"),
    (_with(ACK, consumer_group=MISSING), "ops[2].consumer_group"),
    (_with(ACK, consumer_group="__timer__"), "ops[2].consumer_group"),
    # Leases and offsets.
    *[(_with(ACK, lease_id=value), "ops[2].lease_id") for value in (MISSING, None, "", "x", LEASE + "0", 5, [LEASE])],
    *[
        (_with(ACK, up_to=value), "ops[2].up_to")
        for value in (None, "1", 1.5, -1, 2**63, 1e300, True, [1], {"offset": 1})
    ],
    # Payloads and times.
    (_with(PUSH, payload=MISSING), "ops[2].payload"),
    (_with(PUSH, payload="x" * 1_048_575), "ops[2].payload"),
    (_with(SCHEDULE, payload=MISSING), "ops[2].payload"),
    (_with(SCHEDULE, payload="x" * 1_048_575), "ops[2].payload"),
    *[
        (_with(op, delay_ms=value), "ops[2].delay_ms")
        for op in (SCHEDULE, RESCHEDULE)
        for value in (MISSING, None, "1", True, [1], 1e18, -1e18, 1e300)
    ],
    # A key twice.
    (_with(SCHEDULE, timer_key="twice"), "timer_key is there twice"),
    # Fields that are nobody's, the server's, or another operation's.
    *[
        (_with(op, **{field: "x"}), f"ops[2].{field}")
        for op, fields in [
            (PUSH, ("tenant", "message_id", "producer_sub", "delay_ms", "timer_key", "lease_id", "Payload", "")),
            (ACK, ("tenant", "payload", "txn", "error", "delay")),
            (SCHEDULE, ("tenant", "message_id", "producer_sub", "attempts", "claim_token", "delay", "lease_id")),
            (RESCHEDULE, ("payload", "txn", "partition")),
            (CANCEL, ("payload", "delay_ms")),
        ]
        for field in fields
    ],
]


def test_every_bad_field_is_refused_and_named(db: Database, admin: Connection) -> None:
    # The first would write; nothing of it may be there afterwards. The second has the key that comes twice.
    good = [_with(PUSH, queue="never born"), _with(SCHEDULE, timer_key="twice")]
    wrong: list[str] = []
    for bad, named in BAD:
        try:
            admin.execute("select queen.transaction(%s::jsonb)", [json.dumps([*good, bad])])
        except psycopg.errors.InvalidParameterValue as refusal:
            if named not in str(refusal.diag.message_primary) or not refusal.diag.message_hint:
                wrong.append(f"{str(bad)[:100]}: {refusal.diag.message_primary}")
        except psycopg.Error as error:
            wrong.append(f"{str(bad)[:100]}: {error.sqlstate} {error}")
        else:
            wrong.append(f"{str(bad)[:100]}: accepted")
    assert wrong == []
    for table in ("queues", "log_partitions", "log_segments", "log_timers", "log_consumers"):
        assert db.rows(f"select * from queen.{table}") == [], table


def test_ops_that_are_no_array(admin: Connection) -> None:
    for ops in ["null", "{}", "5", '"x"', '{"op": "push", "queue": "q", "payload": 1}', None]:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match='argument "ops"') as refusal:
            admin.execute("select queen.transaction(%s::jsonb)", [ops])
        assert refusal.value.diag.message_hint


def test_limits_are_those_of_the_calls_alone(db: Database, admin: Connection) -> None:
    def refused(ops: list[dict[str, Any]], named: str) -> None:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=named) as refusal:
            admin.execute("select queen.transaction(%s::jsonb)", [json.dumps(ops)])
        assert refusal.value.diag.message_hint

    def pushes(number: int, payload: str = "x") -> list[dict[str, Any]]:
        return [_with(PUSH, payload=payload)] * number

    def timers(number: int, payload: str = "x") -> list[dict[str, Any]]:
        return [_with(SCHEDULE, timer_key=str(n), payload=payload) for n in range(number)]

    db.execute("select queen.configure('batch_max_ops', '20')")
    refused(pushes(21), "21 items")
    refused(pushes(11) + timers(10), "21 items")
    refused(timers(21), "21 items")
    admin.execute("select queen.transaction(%s::jsonb)", [json.dumps(pushes(10) + timers(10))])

    # push_many refuses these bytes, and so does apply; together they are no other matter.
    db.execute("select queen.configure('batch_max_bytes', '2000')")
    large = "y" * 500
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="bytes"):
        admin.execute("select queen.push_many('q', array_fill(to_jsonb(%s::text), array[5]))", [large])
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="bytes"):
        admin.execute("select queen.apply(%s::jsonb)", [json.dumps(timers(5, large))])
    refused(timers(5, large), "bytes")
    refused(pushes(5, large), "bytes")
    refused([_with(op, partition=f"p{n}") for n, op in enumerate(pushes(5, large))], "bytes")
    admin.execute("select queen.transaction(%s::jsonb)", [json.dumps(pushes(2, large))])


def test_an_offset_outside_the_batch_is_refused_and_nothing_happened(db: Database, admin: Connection) -> None:
    admin.execute("select queen.push_many('q', array[jsonb '1', '2'], 'p')")
    row = admin.execute("select lease_id from queen.pop('q', 'g') limit 1").fetchone()
    assert row is not None
    for up_to in (3, 2**63 - 1):
        ops = [PUSH, SCHEDULE, _with(ACK, lease_id=str(row[0]), up_to=up_to)]
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="up_to") as refusal:
            admin.execute("select queen.transaction(%s::jsonb)", [json.dumps(ops)])
        assert "1 to 2" in str(refusal.value.diag.message_hint)
    assert db.rows("select * from queen.log_timers") == []
    assert db.value("select sum(last_offset) from queen.log_partitions") == 2
    assert db.rows("select committed, leased_to from queen.log_consumers") == [(0, 2)]


def test_extreme_payloads_and_names_go_through(db: Database, admin: Connection) -> None:
    names = ["ä" * 127 + "x", "a b.c\"d'e", "🎉", "שלום", "SELECT", " ", "x" * 255]
    ops = [
        op
        for name in names
        for op in (
            {"op": "push", "queue": name, "partition": name, "txn": name, "payload": {name: [name]}},
            {**SCHEDULE, "queue": name, "timer_key": name, "partition": name, "txn": name},
        )
    ]
    ops += [{**PUSH, "payload": payload} for payload in (None, "", {}, [], 0, False, "z" * 1_048_574)]
    row = admin.execute("select queen.transaction(%s::jsonb)", [json.dumps(ops)]).fetchone()
    assert row is not None
    assert {result["status"] for result in row[0]} == {"queued", "scheduled"}
    for name in names:
        taken = admin.execute("select partition, txn, payload from queen.pop(%s)", [name]).fetchall()
        assert taken == [(name, name, {name: [name]})]
    assert [payload for (payload,) in admin.execute("select payload from queen.pop('q')")] == [
        None, "", {}, [], 0, False, "z" * 1_048_574,
    ]  # fmt: skip
