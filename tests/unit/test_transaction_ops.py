"""queen.transaction: acks, pushes and timer operations, all or nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from pg_queen import AckResult, LeaseLost, PushResult, Queen, TimerVerdict
from psycopg.types.json import Jsonb

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

Op = dict[str, Any]


@pytest.fixture
def queen(admin: Connection) -> Queen:
    """queen.transaction takes the rights of a producer and of a consumer."""
    return Queen(admin)


def _push(payload: Any, queue: str = "out", **more: Any) -> Op:
    return {"op": "push", "queue": queue, "payload": payload, **more}


def _ack(lease: UUID | None, partition: str = "Default", queue: str = "in", group: str = "g", **more: Any) -> Op:
    return {
        "op": "ack",
        "queue": queue,
        "consumer_group": group,
        "partition": partition,
        "lease_id": str(lease),
        **more,
    }


def _schedule(key: str, payload: Any = 1, delay_ms: float = 60_000, queue: str = "in", **more: Any) -> Op:
    return {"op": "schedule", "queue": queue, "timer_key": key, "payload": payload, "delay_ms": delay_ms, **more}


STATE = {
    "queues": "select id, name from queen.queues order by id",
    "partitions": "select id, name, last_offset, hot from queen.log_partitions order by id",
    "segments": "select partition_id, base_offset, end_offset, blob from queen.log_segments order by 1, 2",
    "txns": 'select partition_id, "offset", txn_hash from queen.log_txns order by 1, 2',
    "consumers": "select to_jsonb(c) from queen.log_consumers c order by partition_id, consumer_group",
    "timers": "select to_jsonb(t) from queen.log_timers t order by queue, timer_key",
}


def _state(db: Database) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that a transaction could have changed."""
    return {what: db.rows(query) for what, query in STATE.items()}


def test_consume_work_and_answer(db: Database, queen: Queen) -> None:
    queen.push_many("in", [1, 2, 3])
    queen.push("in", 4, partition="p")
    queen.schedule("in", "moved", 1, delay=60, txn="m")
    queen.schedule("in", "cancelled", 1, delay=60)
    messages = queen.pop("in", "g")
    lease = messages[0].lease_id
    ops = [
        _schedule("new", {"a": [1]}, partition="p", txn="n"),
        _push({"answer": 1}, txn="t1"),
        _ack(lease, up_to=2),
        {"op": "cancel", "queue": "in", "timer_key": "cancelled"},
        _push(None, partition="p2"),
        _push("x", txn="t1"),
        {"op": "reschedule", "queue": "in", "timer_key": "moved", "delay_ms": 1.5},
        _ack(lease, "p"),
        {"op": "cancel", "queue": "in", "timer_key": "not there"},
        _push(2),
        _push("back", "in", partition="p"),
    ]
    results = queen.transaction(ops)
    kinds = {"push": PushResult, "ack": AckResult}
    assert [type(r) for r in results] == [kinds.get(op["op"], TimerVerdict) for op in ops]
    assert [r.status for r in results] == [
        "scheduled", "queued", "acked", "cancelled", "queued", "duplicate", "rescheduled", "acked", "absent", "queued",
        "queued",
    ]  # fmt: skip
    acks = [r for r in results if isinstance(r, AckResult)]
    assert acks == [AckResult(True, "acked", 2, 2), AckResult(True, "acked", 1, 1)]
    pushes = [(r.partition, r.offset, r.txn) for r in results if isinstance(r, PushResult)]
    assert [(partition, offset) for partition, offset, _ in pushes] == [
        ("Default", 1), ("p2", 1), ("Default", 1), ("Default", 2), ("p", 2),
    ]  # fmt: skip
    assert [txn for _, _, txn in pushes[:3:2]] == ["t1", "t1"]
    timers = {r.timer_key: r for r in results if isinstance(r, TimerVerdict)}
    assert timers["moved"].txn == "m"
    assert timers["new"].txn == "n"
    peeked = queen.peek("in", "new")
    assert peeked is not None
    assert (peeked.payload, peeked.partition, peeked.message_id) == ({"a": [1]}, "p", timers["new"].message_id)
    assert [m.payload for m in queen.pop("out", "g", partition="Default")] == [{"answer": 1}, 2]
    # The rest of the batch is still held.
    assert queen.ack("in", "g", "Default", str(lease)).acked == 1
    assert [m.payload for m in queen.pop("in", "g")] == ["back"]


def test_the_pushes_of_a_partition_are_one_segment(db: Database, queen: Queen) -> None:
    results = queen.transaction([_push(n, partition=f"p{n % 3}") for n in range(30)])
    assert db.value("select count(*) from queen.log_segments") == 3
    assert [r.offset for r in results if isinstance(r, PushResult)] == [1 + n // 3 for n in range(30)]
    for number in range(3):
        assert [m.payload for m in queen.pop("out", partition=f"p{number}")] == list(range(number, 30, 3))


def test_results_of_sql_are_aligned_json(db: Database, admin: Connection) -> None:
    row = admin.execute(
        """select queen.transaction('[{"op": "push", "queue": "b", "payload": 1, "txn": "t"},
                                      {"op": "cancel", "queue": "a", "timer_key": "k"},
                                      {"op": "push", "queue": "a", "payload": 1, "partition": "p"}]')"""
    ).fetchone()
    assert row is not None
    first, second, third = row[0]
    assert set(first) == {"status", "partition", "offset", "message_id", "txn"}
    assert (first["status"], first["partition"], first["offset"], first["txn"]) == ("queued", "Default", 1, "t")
    assert (second["ok"], second["status"], second["timer_key"]) == (False, "absent", "k")
    assert (third["partition"], third["offset"]) == ("p", 1)
    assert admin.execute("select queen.transaction('[]')").fetchone() == ([],)


def test_a_lost_lease_and_nothing_happened(db: Database, clock: Clock, queen: Queen) -> None:
    clock.stop()
    queen.push_many("in", [1, 2])
    queen.push("in", 3, partition="p")
    queen.schedule("in", "pending", 1, delay=60)
    lease = queen.pop("in", "g", partition="Default")[0].lease_id
    expired = queen.pop("in", "late", lease="1 second", partition="p")[0].lease_id
    clock.advance(timedelta(seconds=5))
    good: list[Op] = [
        _schedule("born"),
        _schedule("pending", 2),
        _push(1, "a queue that is not there", partition="born"),
        _push(2, "in", partition="born"),
        _push(3, "in"),
        _ack(lease),
    ]
    before = _state(db)
    for what, bad in {
        "a token of nobody": _ack(uuid4()),
        "a lease that ran out": _ack(expired, "p", group="late"),
        "another group's": _ack(lease, group="late", partition="p"),
        "a group that was never there": _ack(lease, group="nobody"),
        "a partition that is not there": _ack(lease, "no such partition"),
        "a queue that is not there": _ack(lease, queue="no such queue"),
        "the same once more": _ack(lease),
    }.items():
        for ops in ([*good, bad], [bad, *good]):
            with pytest.raises(LeaseLost) as lost:
                queen.transaction(ops)
            assert lost.value.sqlstate == "QN003", what
            assert lost.value.hint
            position = ops.index(bad) if what != "the same once more" else len(ops) - 1 if ops[-1] is bad else None
            if position is not None:
                assert f"ops[{position}]" in lost.value.message, what
            assert _state(db) == before, what
    assert [r.status for r in queen.transaction(good)] == [
        "scheduled", "rescheduled", "queued", "queued", "queued", "acked",
    ]  # fmt: skip


def test_a_leased_timer_is_a_verdict_and_no_error(db: Database, queen: Queen) -> None:
    queen.schedule("in", "held", 1, delay=-1)
    assert len(db.rows("select * from queen.log_timers_claim()")) == 1
    results = queen.transaction([_schedule("held", 2), _push(1)])
    assert [r.status for r in results] == ["too_late", "queued"]


def test_what_the_callers_transaction_rolls_back_did_not_happen(db: Database) -> None:
    connection = db.connect("ada_admin", autocommit=False)
    queen = Queen(connection)
    queen.push("in", 1)
    lease = queen.pop("in", "g")[0].lease_id
    connection.commit()
    before = _state(db)
    queen.transaction([_ack(lease), _push(1), _schedule("k")])
    connection.rollback()
    assert _state(db) == before
    queen.transaction([_ack(lease), _push(1), _schedule("k")])
    connection.commit()
    assert [m.payload for m in queen.pop("out")] == [1]


def test_a_txn_counts_within_the_call_and_across_partitions(queen: Queen) -> None:
    first = queen.push("out", 0, partition="z", txn="seen")
    results = queen.transaction(
        [
            _push(1, partition="b", txn="t"),
            _push(2, partition="a", txn="t"),
            _push(3, partition="b", txn="t"),
            _push(4, partition="a", txn="seen"),
            _push(5, "other", txn="t"),
        ]
    )
    pushes = [r for r in results if isinstance(r, PushResult)]
    assert [r.status for r in pushes].count("queued") == 2
    assert {(r.partition, r.offset, r.message_id) for r in pushes[:3]} == {
        (pushes[0].partition, 1, pushes[0].message_id)
    }
    assert (pushes[3].status, pushes[3].message_id) == ("duplicate", first.message_id)
    assert pushes[4].status == "queued"
    assert len(queen.pop("out", partition="a") + queen.pop("out", partition="b")) == 1


def test_the_first_operation_of_a_txn_stands(queen: Queen) -> None:
    """And not the one whose partition is the first to be locked."""
    for partition in ("a", "b"):
        queen.push("out", 0, partition=partition)
    results = queen.transaction([_push(1, partition=partition, txn="t") for partition in ("b", "a")])
    assert [r.status for r in results] == ["queued", "duplicate"]


def test_messages_that_are_acknowledged_in_parts(queen: Queen) -> None:
    queen.push_many("in", [1, 2, 3, 4])
    lease = queen.pop("in", "g")[0].lease_id
    results = queen.transaction([_ack(lease, up_to=1), _push("one"), _ack(lease, up_to=3)])
    assert results[0] == AckResult(True, "acked", 1, 1)
    assert results[2] == AckResult(True, "acked", 2, 3)
    assert queen.transaction([_ack(lease)]) == [AckResult(True, "acked", 1, 4)]


def test_two_groups_and_many_partitions_at_once(queen: Queen) -> None:
    leases: dict[tuple[str, str], UUID | None] = {}
    for number in range(10):
        queen.push("in", number, partition=f"p{number}")
    for group in ("g", "h"):
        for message in queen.pop("in", group):
            leases[group, message.partition] = message.lease_id
    assert len(leases) == 20
    results = queen.transaction([_ack(lease, partition, group=group) for (group, partition), lease in leases.items()])
    assert results == [AckResult(True, "acked", 1, 1)] * 20


def test_only_who_may_push_and_acknowledge(db: Database, producer: Connection, consumer: Connection) -> None:
    Queen(producer).push("mine", 1)
    message = Queen(consumer).pop("mine")[0]
    lease = str(message.lease_id)
    ack = {"op": "ack", "queue": "mine", "consumer_group": "default", "partition": "Default", "lease_id": lease}
    for connection, ops, role in (
        (producer, [_push(2), ack], "queen_consumer"),
        (producer, [ack], "queen_consumer"),
        (consumer, [ack, _push(2)], "queen_producer"),
        (consumer, [_schedule("k")], "queen_producer"),
    ):
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match=role):
            connection.execute("select queen.transaction(%s)", [Jsonb(ops)])
    assert db.value("select count(*) from queen.log_timers") == 0
    assert [r.status for r in Queen(producer).transaction([_push(3), _schedule("k")])] == ["queued", "scheduled"]
    assert [r.status for r in Queen(consumer).transaction([ack])] == ["acked"]
    Queen(producer).push("mine", 4)
    db.execute("grant queen_producer to carl_consumer")
    try:
        lease = str(Queen(consumer).pop("mine")[0].lease_id)
        ack["lease_id"] = lease
        assert [r.status for r in Queen(consumer).transaction([ack, _push(5)])] == ["acked", "queued"]
    finally:
        db.execute("revoke queen_producer from carl_consumer")
    db.execute("select queen.drop_queue('mine'), queen.drop_queue('out'), queen.drop_queue('in')")
    tenant = uuid4()
    results = Queen(db.connect("ada_admin")).transaction([_push(1), _schedule("k")], tenant=tenant)
    assert [r.status for r in results] == ["queued", "scheduled"]
    assert db.rows("select distinct tenant_id from queen.queues") == [(tenant,)]
    assert db.rows("select distinct tenant_id, producer_sub from queen.log_timers") == [(tenant, "ada_admin")]


def test_a_key_in_an_open_transaction_is_waited_for(session: StartSession) -> None:
    holder, waiter = session("ada_admin", autocommit=False), session("ada_admin")
    op = '[{"op": "schedule", "queue": "q", "timer_key": "%s", "delay_ms": 60000, "payload": 1}]'
    holder.run(f"select queen.transaction('{op % 'k'}')")
    assert waiter.run(f"select queen.transaction('{op % 'l'}') -> 0 ->> 'status'") == [("scheduled",)]
    waiter.run("set lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        waiter.run(f"select queen.transaction('{op % 'k'}')")
    waiter.run("set lock_timeout = 0")
    waiting = waiter.start(f"select queen.transaction('{op % 'k'}') -> 0 ->> 'status'")
    waiter.wait_until_blocked()
    holder.run("commit")
    assert waiting.result(10) == [("rescheduled",)]
