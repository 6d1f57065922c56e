"""Limits of a tenant and of a queue: payload bytes, horizon, operations a call, pending timers."""

from __future__ import annotations

import json
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database

A, B = "00000000-0000-0000-0000-0000000000aa", "00000000-0000-0000-0000-0000000000bb"
DEFAULT = "00000000-0000-0000-0000-000000000001"


def limit(db: Database, queue: str | None = None, tenant: str | None = None, **options: Any) -> None:
    """Options of a queue, or of a tenant."""
    if queue is None:
        db.execute("select queen.configure_tenant(%s::uuid, %s)", tenant, Jsonb(options))
    else:
        db.execute("select queen.configure_queue(%s, %s, %s::uuid)", queue, Jsonb(options), tenant)


def over(connection: Connection, statement: str, *values: Any, says: str = "") -> None:
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, values)
    assert caught.value.sqlstate == "QN006", caught.value
    assert says in str(caught.value.diag.message_primary)
    assert "configure_" in str(caught.value.diag.message_hint)


def op(kind: str, key: str, queue: str = "q", **more: Any) -> dict[str, Any]:
    extra: dict[str, Any] = {"delay_ms": 60_000} if kind != "cancel" else {}
    if kind == "schedule":
        extra["payload"] = 1
    return {"op": kind, "queue": queue, "timer_key": key, **extra, **more}


def test_payload_bytes_of_a_queue(db: Database, producer: Connection) -> None:
    limit(db, "q", payload_max_bytes=10)
    fits, long = Jsonb("x" * 8), Jsonb("x" * 9)
    for call in (
        "select queen.schedule('q', 'k', %s, '1 h')",
        "select queen.push('q', %s)",
        "select queen.schedule_many('q', array['k'], array[%s]::jsonb[], array['1 h']::interval[])",
        "select queen.push_many('q', array[%s]::jsonb[])",
    ):
        producer.execute(call, [fits])
        over(producer, call, long, says='queue "q" allows 10')
        producer.execute(call.replace("'q'", "'another'"), [long])
    for call in ("select queen.schedule_bytes('q', 'k', %s, '1 h')", "select queen.push_bytes('q', %s)"):
        producer.execute(call, [b"x" * 10])
        over(producer, call, b"x" * 11)
    for function, kind in (("apply", "schedule"), ("transaction", "schedule"), ("transaction", "push")):
        wanted = op("schedule", "k") if kind == "schedule" else {"op": "push", "queue": "q", "payload": 1}
        producer.execute(f"select queen.{function}(%s)", [Jsonb([{**wanted, "payload": "x" * 8}])])
        over(producer, f"select queen.{function}(%s)", Jsonb([{**wanted, "payload": "x" * 9}]), says="ops[0].payload")


def test_a_queue_may_have_more_than_the_setting(db: Database, producer: Connection) -> None:
    db.execute("select queen.configure('payload_max_bytes', '10')")
    limit(db, "q", payload_max_bytes=100)
    producer.execute("select queen.push('q', %s)", [Jsonb("x" * 90)])
    over(producer, "select queen.push('q', %s)", Jsonb("x" * 99))
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="payload"):
        producer.execute("select queen.push('r', %s)", [Jsonb("x" * 90)])


def test_of_two_limits_the_smaller_counts(db: Database, producer: Connection) -> None:
    for of_queue, of_tenant, whose in ((10, 20, "queue"), (20, 10, "tenant")):
        limit(db, "q", payload_max_bytes=of_queue)
        limit(db, payload_max_bytes=of_tenant)
        producer.execute("select queen.push('q', %s)", [Jsonb("x" * 8)])
        over(producer, "select queen.push('q', %s)", Jsonb("x" * 9), says=f"{whose} ")
    limit(db, payload_max_bytes=None)
    limit(db, "q", payload_max_bytes=None)
    producer.execute("select queen.push('q', %s)", [Jsonb("x" * 9)])


def test_horizon(db: Database, producer: Connection) -> None:
    limit(db, "q", horizon="1 hour")
    producer.execute("select queen.schedule('q', 'k', '1', '59 min')")
    far = 'queue "q" allows 1 hour'
    over(producer, "select queen.schedule('q', 'k', '1', '61 min')", says=far)
    over(producer, "select queen.schedule('q', 'k', '1', deliver_at => now() + interval '2 h')", says=far)
    over(producer, "select queen.reschedule('q', 'k', '61 min')", says=far)
    over(producer, "select queen.schedule_many('q', array['k'], array['1']::jsonb[], array['61 min']::interval[])")
    over(
        producer,
        "select queen.schedule_many('q', array['k'], array['1']::jsonb[],"
        " deliver_ats => array[now() + interval '2 h'])",
    )
    over(producer, "select queen.apply(%s)", Jsonb([op("reschedule", "k", delay_ms=4_000_000)]), says="ops[0]")
    # The past is due at once, however near the horizon; no time at all is a bad argument, limit or not.
    producer.execute("select queen.schedule('q', 'past', '1', '-3 h')")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="deliver_at"):
        producer.execute("select queen.schedule('q', 'k', '1', deliver_at => 'infinity')")
    assert db.value("select deliver_at < now() + interval '1 h' from queen.log_timers where timer_key = 'k'") is True


def test_operations_a_call(db: Database, producer: Connection) -> None:
    limit(db, "q", batch_max_ops=2)
    ones = "array_fill('1'::jsonb, array[%s])"
    producer.execute(f"select count(*) from queen.push_many('q', {ones})", [2])
    over(producer, f"select count(*) from queen.push_many('q', {ones})", 3, says="3 items")
    for function in ("apply", "transaction"):
        call = f"select queen.{function}(%s)"
        producer.execute(call, [Jsonb([op("schedule", "a"), op("schedule", "b"), op("schedule", "c", "r")])])
        over(producer, call, Jsonb([op("schedule", key) for key in "abc"]), says='queue "q" allows 2')
        # Never a cancel.
        producer.execute(call, [Jsonb([op("cancel", str(n)) for n in range(50)])])
    limit(db, batch_max_ops=4)
    many = [op("schedule", str(n), queue) for n in range(2) for queue in ("q", "r", "s")]
    over(producer, "select queen.apply(%s)", Jsonb(many), says="tenant ")
    producer.execute("select queen.apply(%s)", [Jsonb([*many[:4], *(op("cancel", f"c{n}", "s") for n in range(9))])])


def test_pending_of_a_queue(db: Database, producer: Connection) -> None:
    limit(db, "q", pending_max=3)
    schedule = "select (queen.schedule('q', %s, '1', '1 h')).status"
    for key in "abc":
        producer.execute(schedule, [key])
    over(producer, schedule, "d", says='queue "q" allows 3')
    many = (
        "select count(*) from queen.schedule_many('q', %s, array['1', '2']::jsonb[], array['1 h', '1 h']::interval[])"
    )
    over(producer, many, ["c", "d"], says="1 more")
    # What is pending takes no new place, other queues have their own, and cancel makes room within a batch too.
    assert producer.execute(schedule, ["a"]).fetchone() == ("rescheduled",)
    assert producer.execute(many, [["b", "c"]]).fetchone() == (2,)
    producer.execute("select queen.schedule('r', 'd', '1', '1 h')")
    producer.execute("select queen.apply(%s)", [Jsonb([op("cancel", "a"), op("schedule", "d")])])
    over(producer, "select queen.apply(%s)", Jsonb([op("cancel", "gone"), op("schedule", "e")]), says="1 more")
    over(producer, "select queen.transaction(%s)", Jsonb([op("schedule", "e")]))
    assert producer.execute("select (queen.cancel('q', 'b')).status").fetchone() == ("cancelled",)
    producer.execute("select queen.reschedule('q', 'c', '0')")
    producer.execute(schedule, ["e"])
    over(producer, schedule, "f")
    # The fire makes room.
    db.execute("select queen.fire_due()")
    producer.execute(schedule, ["f"])
    assert db.value("select count(*) from queen.log_timers where queue = 'q'") == 3
    limit(db, "q", pending_max=0)
    over(producer, schedule, "g")
    limit(db, "q", pending_max="none")
    producer.execute(schedule, ["g"])


def test_pending_of_a_tenant_and_by_the_setting(db: Database, producer: Connection) -> None:
    db.execute("select queen.create_tenant(%s)", A)
    db.execute("select queen.grant_tenant(%s, 'queen_producer')", A)
    limit(db, tenant=A, pending_max=2)
    schedule = "select queen.schedule(%s, %s, '1', '1 h', tenant => %s)"
    producer.execute(schedule, ["q", "a", A])
    producer.execute(schedule, ["r", "a", A])
    over(producer, schedule, "s", "a", A, says=f'tenant "{A}" allows 2')
    over(producer, "select queen.apply(%s, %s)", Jsonb([op("schedule", "a", "s")]), A)
    for n in range(3):
        producer.execute(schedule, ["q", str(n), None])
    # The setting is the limit of each queue that has none.
    db.execute("select queen.configure('pending_max', '4')")
    producer.execute(schedule, ["q", "3", None])
    over(producer, schedule, "q", "4", None)
    limit(db, "q", pending_max=5)
    producer.execute(schedule, ["q", "4", None])


def test_a_large_limit_is_of_the_last_count(db: Database, producer: Connection, admin: Connection) -> None:
    keys = "array(select 'k' || i from generate_series(%s::int, %s::int) i)"
    many = (
        f"select count(*) from queen.schedule_many('q', {keys}, array_fill('1'::jsonb, array[%s]),"
        " array_fill('1 day'::interval, array[%s]))"
    )
    limit(db, "q", pending_max=10_001)
    producer.execute(many, [1, 10_000, 10_000, 10_000])
    producer.execute("select queen.schedule('q', 'uncounted', '1', '1 h')")
    # A count is made at most twice a minute.
    admin.execute("call queen.maintain()")
    assert db.value("select pending from queen.pending_counts where queue = 'q'") == 0
    db.execute("update queen.pending_counts set counted_at = counted_at - interval '31 s'")
    admin.execute("call queen.maintain()")
    assert db.value("select pending from queen.pending_counts where queue = 'q'") == 10_001
    over(producer, "select queen.schedule('q', 'more', '1', '1 h')")
    producer.execute("select queen.schedule('q', 'k1', '1', '1 h')")
    # Setting the limit counts at once; one that is none is counted no more.
    db.execute("delete from queen.log_timers where timer_key > 'k5'")
    limit(db, "q", pending_max=10_002)
    producer.execute("select queen.schedule('q', 'more', '1', '1 h')")
    limit(db, "q", pending_max=None)
    assert db.rows("select * from queen.pending_counts") == []


def test_the_count_reads_what_the_limit_says(db: Database) -> None:
    """And not what is pending beyond it, or in other queues."""
    db.execute(
        "insert into queen.log_timers (queue, timer_key, deliver_at, txn, message_id, payload)"
        " select q, 'k' || i, now() + interval '1 day', i::text, gen_random_uuid(), '1'"
        " from generate_series(1, 20000) i cross join unnest(array['a', 'b']) q"
    )
    db.execute("vacuum analyze queen.log_timers")
    explained = "explain (analyze, buffers, format json) select queen._pending(%s, 'b', 101)"
    db.execute(explained, DEFAULT)
    (plan,) = db.value(explained, DEFAULT)
    assert plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"] < 60, json.dumps(plan)


def test_bad_options_of_a_tenant(db: Database, admin: Connection, producer: Connection) -> None:
    db.execute("select queen.create_tenant(%s)", A)
    for options, named in (
        ({"retention": "1 day"}, "retention"),
        ({"pending_max": -1}, "pending_max"),
        ({"pending_max": "many"}, "pending_max"),
        ({"pending_max": 1.5}, "pending_max"),
        ({"horizon": "2000 years"}, "horizon"),
        ({"batch_max_ops": [1]}, "batch_max_ops"),
        ([], "object"),
        (None, "null"),
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=named):
            admin.execute("select queen.configure_tenant(%s, %s)", [A, None if options is None else Jsonb(options)])
    assert db.value("select options from queen.tenants where id = %s", A) == {}
    with pytest.raises(psycopg.Error) as caught:
        admin.execute("select queen.configure_tenant(%s, '{}')", [B])
    assert caught.value.sqlstate == "QN004"
    told = admin.execute('select queen.configure_tenant(%s, \'{"horizon": "1 day"}\')', [A]).fetchone()
    assert told == (
        {"horizon": "1 day", "pending_max": "none", "batch_max_ops": "10000", "payload_max_bytes": "1048576"},
    )
    # A role to which the tenant is closed learns nothing of its limits.
    limit(db, tenant=A, payload_max_bytes=1)
    with pytest.raises(psycopg.Error) as caught:
        producer.execute("select queen.push('q', '\"long\"', tenant => %s)", [A])
    assert caught.value.sqlstate == "QN002"
