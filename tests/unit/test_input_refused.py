"""Bad input is refused at the door: SQLSTATE 22023, the argument's name, a hint, and nothing written."""

from __future__ import annotations

from typing import Any, Final

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.calls import GOOD, expression, literal
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger

NAMES: Final = ("queue", "timer_key", "partition", "txn", "consumer_group", "timer_keys", "partitions", "txns")
# Null means something of its own: any partition, the message id, no arrays.
NULLABLE: Final = {
    *[(name, "txn") for name in ("schedule", "schedule_bytes", "push", "push_bytes")],
    *[(name, "partition") for name in ("pop", "pop_segments", "seek")],
    *[("schedule_many", "partitions"), ("schedule_many", "txns"), ("push_many", "txns")],
}


def refused(connection: Connection, statement: str, argument: str, *parameters: Any) -> psycopg.Error:
    """Run what must be refused, and say how."""
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, parameters or None)
    error = caught.value
    assert error.sqlstate == "22023", (statement, error)
    message = error.diag.message_primary
    assert message is not None
    assert message.startswith(f'argument "{argument}": '), (statement, message)
    assert error.diag.message_hint, statement
    return error


def test_every_function_with_a_name_is_here(db: Database) -> None:
    """A new function, or a new argument that is a name, has to come into the table above."""
    found = db.rows(
        "select p.proname, a.name from pg_proc p cross join unnest(p.proargnames, p.proargmodes) as a (name, mode)"
        " where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^(_|log_)'"
        " and coalesce(a.mode, 'i') = 'i' and a.name = any (%s)",
        list(NAMES),
    )
    listed = {(function, name) for function, arguments in GOOD.items() for name in arguments if name in NAMES}
    assert {(function, name) for function, name in found} == listed


def test_the_good_calls_are_good(db: Database, admin: Connection) -> None:
    for function in GOOD:
        with admin.transaction(force_rollback=True):
            admin.execute(expression(function))


def test_bad_names(admin: Connection) -> None:
    for function, name in ((f, n) for f, arguments in GOOD.items() for n in arguments if n in NAMES):
        good = GOOD[function][name]
        most = 512 if name.startswith("timer_key") else 255
        # Two bytes a letter: what counts is bytes.
        long = "ä" * (most // 2) + "x" * (most % 2)
        array = good.startswith("array")
        bad = ["", "a\nb", "\t", "\x7f", "a\u0085", "\x01", long + "x", "x" * 100_000]
        for value in bad:
            given = f"array['ok', {literal(value)}]" if array else literal(value)
            refused(admin, expression(function, **{name: given}), name)
        with admin.transaction(force_rollback=True):
            admin.execute(expression(function, **{name: f"array['ok', {literal(long)}]" if array else literal(long)}))
        if (function, name) not in NULLABLE:
            refused(admin, expression(function, **{name: "null"}), name)
        if name in ("timer_keys", "partitions"):
            refused(admin, expression(function, **{name: "array['ok', null]"}), name)


BAD_TIMES: Final[list[tuple[dict[str, str], str]]] = [
    ({"delay": "null"}, "delay"),
    ({"deliver_at": "now()"}, "deliver_at"),
    ({"delay": "null", "deliver_at": "'infinity'"}, "deliver_at"),
    ({"delay": "null", "deliver_at": "'-infinity'"}, "deliver_at"),
    ({"delay": "null", "deliver_at": "'294276-12-31 23:59:59Z'"}, "deliver_at"),
    ({"delay": "null", "deliver_at": "now() + interval '10 years 2 days'"}, "deliver_at"),
    ({"delay": "'100000000 years'"}, "delay"),
    ({"delay": "make_interval(years => 178000000)"}, "delay"),
    ({"delay": "'-100000000 years'"}, "delay"),
    ({"delay": "'3660 days'"}, "delay"),
]


def test_bad_times(db: Database, producer: Connection) -> None:
    for function in ("schedule", "schedule_bytes", "reschedule"):
        for times, argument in BAD_TIMES:
            refused(producer, expression(function, **times), argument)
    assert db.value("select count(*) from queen.log_timers") == 0


def test_an_interval_of_a_billion_years_is_no_interval(producer: Connection) -> None:
    """PostgreSQL itself refuses the literal, with a code of its own."""
    with pytest.raises(psycopg.DataError):
        producer.execute(expression("schedule", delay="interval '1e9 years'"))


BAD_BATCHES: Final[list[tuple[dict[str, str], str]]] = [
    ({"delays": "null"}, "delays"),
    ({"deliver_ats": "array[now(), now()]"}, "deliver_ats"),
    ({"delays": "array['1 h']::interval[]"}, "delays"),
    ({"delays": "array['1 h', null]::interval[]"}, "delays"),
    ({"delays": "array['1 h', '11 years']::interval[]"}, "delays"),
    ({"delays": "null", "deliver_ats": "array[now(), 'infinity']"}, "deliver_ats"),
    ({"delays": "null", "deliver_ats": "array[now(), null]"}, "deliver_ats"),
    ({"payloads": "array['1']::jsonb[]"}, "payloads"),
    ({"payloads": "array['1', null]::jsonb[]"}, "payloads"),
    ({"payloads": "null"}, "payloads"),
    ({"timer_keys": "array['a', 'a']"}, "timer_keys"),
    ({"timer_keys": "null"}, "timer_keys"),
    ({"partitions": "array['a']"}, "partitions"),
    ({"txns": "array['a', 'b', 'c']"}, "txns"),
]


def test_bad_batches(db: Database, producer: Connection) -> None:
    """All or nothing: the good one of two is not there either."""
    for changes, argument in BAD_BATCHES:
        refused(producer, expression("schedule_many", **changes), argument)
    assert db.value("select count(*) from queen.log_timers") == 0


def test_payloads(db: Database, admin: Connection, producer: Connection) -> None:
    for function in ("schedule", "schedule_bytes", "push", "push_bytes"):
        refused(producer, expression(function, payload="null"), "payload")
    # 1 MiB as it is stored: the text of the JSON, two quotes included, or the bytes.
    fits, over = "x" * (1_048_576 - 2), "x" * (1_048_576 - 1)
    for function in ("schedule", "push"):
        admin.execute(expression(function, payload="%s"), [Jsonb(fits)])
        assert "payload_max_bytes" in str(
            refused(producer, expression(function, payload="%s"), "payload", Jsonb(over)).diag.message_hint
        )
    for function in ("schedule_bytes", "push_bytes"):
        admin.execute(expression(function, payload="%s", queue="'bytes'"), [b"x" * 1_048_576])
        refused(producer, expression(function, payload="%s"), "payload", b"x" * 1_048_577)
    refused(producer, expression("schedule_many", payloads="array['1', %s]::jsonb[]"), "payloads", Jsonb(over))
    refused(producer, expression("push_many", payloads="array['1', %s]::jsonb[]"), "payloads", Jsonb(over))
    admin.execute("select queen.configure('payload_max_bytes', '1024')")
    refused(producer, expression("push", payload="%s"), "payload", Jsonb("x" * 1023))
    producer.execute(expression("push", payload="%s", txn="'small'"), [Jsonb("x" * 1022)])
    op = {"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 1, "payload": "x" * 1023}
    refused(producer, "select queen.apply(%s)", "ops[0].payload", Jsonb([op]))


def test_batches_have_bounds(admin: Connection, producer: Connection) -> None:
    keys = "array(select 'k' || i from generate_series(1, 10001) i)"
    ones = "array_fill('1'::jsonb, array[10001])"
    hours = "array_fill('1 hour'::interval, array[10001])"
    statement = f"select count(*) from queen.schedule_many('q', {keys}, {ones}, {hours})"
    assert "10001" in str(refused(producer, statement, "timer_keys").diag.message_primary)
    refused(producer, f"select count(*) from queen.push_many('q', {ones})", "payloads")
    op = {"op": "reschedule", "queue": "q", "delay_ms": 1}
    refused(producer, "select queen.apply(%s)", "ops", Jsonb([{**op, "timer_key": f"k{i}"} for i in range(10_001)]))
    admin.execute("select queen.configure('batch_max_bytes', '2000')")
    large = "array_fill(to_jsonb(repeat('x', 500)), array[5])"
    refused(producer, f"select count(*) from queen.push_many('q', {large})", "payloads")


BOUNDS: Final[list[tuple[str, str]]] = [
    (expression("pop", max_messages="0"), "max_messages"),
    (expression("pop", max_messages="100001"), "max_messages"),
    (expression("pop", max_messages="null"), "max_messages"),
    (expression("pop", lease="'0'"), "lease"),
    (expression("pop", lease="'-1 s'"), "lease"),
    (expression("pop", lease="'25 hours'"), "lease"),
    (expression("pop", lease="null"), "lease"),
    (expression("pop", auto_ack="null"), "auto_ack"),
    (expression("pop", consumer_group="'__timer__'"), "consumer_group"),
    (expression("pop_segments", max_messages="-1"), "max_messages"),
    (expression("extend", lease="'2 days'"), "lease"),
    (expression("extend", lease="null"), "lease"),
    (expression("ack", lease_id="null"), "lease_id"),
    (expression("nack", lease_id="null"), "lease_id"),
    (expression("nack", delay="'-1 s'"), "delay"),
    (expression("nack", delay="'400 days'"), "delay"),
    (expression("list_timers", max_rows="0"), "max_rows"),
    (expression("list_timers", max_rows="null"), "max_rows"),
    (expression("dlq_list", max_rows="0"), "max_rows"),
    (expression("dlq_requeue", ids="array[null]::uuid[]"), "ids"),
    (expression("seek", to_offset="null"), "to_offset"),
    (expression("seek", to_offset="-1"), "to_offset"),
    (expression("configure_queue", options="'[]'"), "options"),
    (expression("configure_queue", options="'{\"nothing\": 1}'"), "options"),
    ("select queen.fire_due(0)", "max_rows"),
    ("select queen.fire_due(null)", "max_rows"),
    ("select * from queen.log_timers_claim(max_rows => 0)", "max_rows"),
    ("select * from queen.log_timers_claim(lease => '2 days')", "lease"),
    ("select * from queen.log_timers_claim(per_tenant => 0)", "per_tenant"),
    ("select * from queen.log_timers_claim(shards => '{64}')", "shards"),
    ("select * from queen.log_timers_due('{-1}')", "shards"),
    ("select * from queen.log_timers_fire('{}', '{a}', '{}', '{}')", "queues"),
    ("select * from queen.log_timers_fail('{}', '{}', '{}', '{}', 'e', '-1 s')", "backoff"),
    ("select queen.start(0)", "workers"),
    ("select queen.start(17)", "workers"),
    ("call queen.sweep('-1 s')", "run_for"),
    ("call queen.sweep('0', 2, 2)", "worker"),
    ("call queen.sweep('0', 0, 65)", "workers"),
]


def test_bounds(admin: Connection) -> None:
    for statement, argument in BOUNDS:
        refused(admin, statement, argument)


GOOD_OP: Final = {"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 1000, "payload": 1}


BAD_OPS: Final[list[tuple[Any, str]]] = [
    ("null", "is no array"),
    ("{}", "is no array"),
    ("[1]", "ops[0] is no object"),
    ([{**GOOD_OP, "op": "delete"}], "ops[0].op"),
    ([{**GOOD_OP, "op": None}], "ops[0].op"),
    ([{k: v for k, v in GOOD_OP.items() if k != "op"}], "ops[0].op"),
    ([{k: v for k, v in GOOD_OP.items() if k != "queue"}], "ops[0].queue"),
    ([{k: v for k, v in GOOD_OP.items() if k != "timer_key"}], "ops[0].timer_key"),
    ([{k: v for k, v in GOOD_OP.items() if k != "payload"}], "ops[0].payload"),
    ([{k: v for k, v in GOOD_OP.items() if k != "delay_ms"}], "ops[0].delay_ms"),
    ([GOOD_OP, {**GOOD_OP, "timer_key": "l", "queue": 5}], "ops[1].queue"),
    ([{**GOOD_OP, "timer_key": ""}], "ops[0].timer_key"),
    ([{**GOOD_OP, "partition": "a\nb"}], "ops[0].partition"),
    ([{**GOOD_OP, "txn": None}], "ops[0].txn"),
    ([{**GOOD_OP, "delay_ms": "NaN"}], "ops[0].delay_ms"),
    ([{**GOOD_OP, "delay_ms": "Infinity"}], "ops[0].delay_ms"),
    ([{**GOOD_OP, "delay_ms": True}], "ops[0].delay_ms"),
    ([{**GOOD_OP, "delay_ms": None}], "ops[0].delay_ms"),
    ('[{"op":"schedule","queue":"q","timer_key":"k","delay_ms":1e400,"payload":1}]', "ops[0].delay_ms"),
    ('[{"op":"schedule","queue":"q","timer_key":"k","delay_ms":-1e400,"payload":1}]', "ops[0].delay_ms"),
    ([{**GOOD_OP, "delay_ms": 400 * 86_400_000 * 10}], "ops[0].delay_ms"),
    ([{**GOOD_OP, "producer_sub": "me"}], "ops[0].producer_sub"),
    ([{**GOOD_OP, "message_id": "x"}], "ops[0].message_id"),
    ([{**GOOD_OP, "tenant": "x"}], "ops[0].tenant"),
    ([{**GOOD_OP, "tenant_id": "x"}], "ops[0].tenant_id"),
    ([{**GOOD_OP, "attempts": 0}], "ops[0].attempts"),
    ([{**GOOD_OP, "claim_token": "x"}], "ops[0].claim_token"),
    ([{**GOOD_OP, "deliver_at": "2030-01-01"}], "ops[0].deliver_at"),
    ([{**GOOD_OP, "colour": "red"}], "ops[0].colour"),
    ([{"op": "cancel", "queue": "q", "timer_key": "k", "payload": 1}], "ops[0].payload"),
    ([{"op": "reschedule", "queue": "q", "timer_key": "k", "delay_ms": 1, "txn": "t"}], "ops[0].txn"),
    ([GOOD_OP, {"op": "cancel", "queue": "q", "timer_key": "k"}], "ops[1].timer_key"),
]


def test_apply_refuses_all_for_one(db: Database, producer: Connection) -> None:
    for ops, named in BAD_OPS:
        given = ops if isinstance(ops, str) else Jsonb(ops)
        with pytest.raises(psycopg.Error) as caught:
            producer.execute("select queen.apply(%s::jsonb)", [given])
        assert caught.value.sqlstate == "22023", (ops, caught.value)
        assert named in str(caught.value.diag.message_primary), (ops, caught.value)
        assert caught.value.diag.message_hint
    assert db.value("select count(*) from queen.log_timers") == 0


def test_good_timers_beside_bad_input_fire(db: Database, producer: Connection, admin: Connection) -> None:
    """Each refusal in the middle of a hundred good ones, in a transaction of its own, costs them nothing."""
    ledger = Ledger(db)
    bad = [
        expression("schedule", queue="''"),
        expression("schedule", timer_key="null"),
        expression("schedule", timer_key="repeat('x', 513)"),
        expression("schedule", queue="E'a\\x01'"),
        expression("schedule", payload="null"),
        expression("schedule", deliver_at="now()"),
        expression("schedule", delay="null"),
        expression("schedule", delay="null", deliver_at="'infinity'"),
        expression("schedule", delay="null", deliver_at="'294276-01-01Z'"),
        expression("schedule", payload="to_jsonb(repeat('x', 1048577))"),
        expression("schedule_many", timer_keys="array['a', 'a']"),
        'select queen.apply(\'[{"op":"schedule","queue":"q","timer_key":"k","delay_ms":1e999,"payload":1}]\')',
        'select queen.apply(\'[{"op":"cancel","queue":"q","timer_key":"k","attempts":1}]\')',
        # What jsonb cannot hold is refused where it is read.
        expression("schedule", payload="'\"\\u0000\"'"),
        expression("schedule", payload="'NaN'"),
        expression("schedule", payload="'{'"),
    ]
    for number, statement in enumerate(bad):
        ledger.schedule(f"good {number}", 100, due="now() - i * interval '1 ms'", partition="'p' || i % 3")
        with pytest.raises(psycopg.Error) as caught:
            producer.execute(statement)
        assert caught.value.sqlstate in ("22023", "22P05", "22P02"), caught.value
        assert admin.execute("select queen.fire_due()").fetchone() == (100,)
        assert db.value("select count(*) from queen.log_timers") == 0
    ledger.check()
