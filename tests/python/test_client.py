"""Queen on a real server."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from decimal import Decimal
from functools import partial
from json import loads
from typing import Any
from uuid import UUID, uuid4

import hypothesis
import psycopg
import pytest
from hypothesis import strategies as st
from pg_queen import Queen
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb, set_json_loads

from tests.support.clock import Clock
from tests.support.database import Connection, Database


def test_a_timer_is_scheduled_seen_moved_and_cancelled(queen: Queen) -> None:
    before = datetime.now(timezone.utc)
    scheduled = queen.schedule("mail", "k", {"n": 1}, delay=timedelta(hours=1), partition="p", txn="t")
    assert (scheduled.ok, scheduled.status, scheduled.queue, scheduled.timer_key) == (True, "scheduled", "mail", "k")
    assert scheduled.txn == "t"
    assert isinstance(scheduled.message_id, UUID)
    assert scheduled.deliver_at is not None
    assert timedelta(minutes=59) < scheduled.deliver_at - before < timedelta(minutes=61)

    timer = queen.peek("mail", "k")
    assert timer is not None
    assert (timer.payload, timer.payload_bytes, timer.partition, timer.txn) == ({"n": 1}, None, "p", "t")
    assert (timer.message_id, timer.attempts, timer.claimed) == (scheduled.message_id, 0, False)

    at = datetime(2026, 12, 24, 18, 0, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    at = at.replace(year=datetime.now(timezone.utc).year + 1)
    moved = queen.reschedule("mail", "k", deliver_at=at)
    assert (moved.status, moved.deliver_at, moved.message_id) == ("rescheduled", at, scheduled.message_id)

    replaced = queen.schedule("mail", "k", {"n": 2}, delay=5)
    assert (replaced.status, replaced.ok) == ("rescheduled", True)
    assert queen.cancel("mail", "k").status == "cancelled"
    late = queen.cancel("mail", "k")
    assert (late.ok, late.status, late.message_id, late.deliver_at) == (False, "absent", None, None)
    assert queen.reschedule("mail", "k", delay=1).status == "absent"
    assert queen.peek("mail", "k") is None


def test_a_fired_timer_is_popped_and_acknowledged(db: Database, queen: Queen) -> None:
    verdict = queen.schedule("mail", "k", ["due"], delay=0)
    assert db.value("select queen.fire_due()") == 1
    (message,) = queen.pop("mail", "workers", lease=timedelta(minutes=1))
    assert (message.message_id, message.payload, message.payload_bytes) == (verdict.message_id, ["due"], None)
    assert (message.queue, message.partition, message.offset, message.delivery_attempt) == ("mail", "Default", 1, 1)
    assert message.lease_id is not None
    (sent,) = queen.sent("mail", str(verdict.txn))
    assert (sent.partition, sent.offset, sent.message_id) == ("Default", 1, verdict.message_id)
    assert queen.sent("mail", "no such txn") == []

    longer = queen.extend("mail", "workers", "Default", message.lease_id, 120)
    assert (longer.ok, longer.status) == (True, "extended")
    assert queen.ack("mail", "workers", "Default", uuid4()).status == "lease_lost"
    done = queen.ack("mail", "workers", "Default", message.lease_id)
    assert (done.ok, done.status, done.acked, done.committed) == (True, "acked", 1, 1)
    assert queen.pop("mail", "workers") == []
    assert queen.ack("mail", "nobody", "Default", message.lease_id).status == "absent"


def test_a_nacked_message_comes_again(queen: Queen) -> None:
    queen.push("q", 1)
    (first,) = queen.pop("q")
    assert first.lease_id is not None
    given_back = queen.nack("q", "default", "Default", first.lease_id, error="not now")
    assert (given_back.ok, given_back.status) == (True, "nacked")
    (second,) = queen.pop("q")
    assert (second.offset, second.delivery_attempt) == (1, 2)


def test_push_answers_with_the_place_and_knows_a_duplicate(queen: Queen) -> None:
    first = queen.push("q", {"a": 1}, partition="p", txn="t")
    assert (first.status, first.partition, first.offset, first.txn) == ("queued", "p", 1, "t")
    again = queen.push("q", {"a": 2}, partition="p", txn="t")
    assert (again.status, again.offset, again.message_id) == ("duplicate", 1, first.message_id)
    many = queen.push_many("q", [1, None, "x"], partition="p", txns=["t", "u", None])
    assert [(r.status, r.offset) for r in many] == [("duplicate", 1), ("queued", 2), ("queued", 3)]
    assert queen.push_many("q", []) == []
    assert [m.payload for m in queen.pop("q", auto_ack=True)] == [{"a": 1}, None, "x"]


def test_schedule_many_takes_aligned_lists(queen: Queen) -> None:
    verdicts = queen.schedule_many(
        "q",
        ["c", "a", "b", "d", "e"],
        [None, {"x": [1]}, "text", 2.5, True],
        delays=[timedelta(days=1), 60, 0.5, "2 hours", Decimal(3)],
        partitions=["p1", "p2", "p3", "p4", "p5"],
        txns=["t", None, None, None, None],
    )
    assert [v.timer_key for v in verdicts] == ["c", "a", "b", "d", "e"]
    assert {v.status for v in verdicts} == {"scheduled"}
    assert [(t.timer_key, t.partition) for t in queen.list_timers("q")] == [
        ("a", "p2"),
        ("b", "p3"),
        ("c", "p1"),
        ("d", "p4"),
        ("e", "p5"),
    ]
    timer = queen.peek("q", "c")
    assert timer is not None
    assert (timer.payload, timer.payload_bytes, timer.txn) == (None, None, "t")

    ats = [datetime.now(timezone(timedelta(hours=hours))) + timedelta(days=3) for hours in (0, 9, -3)]
    moved = queen.schedule_many("q", ["a", "b", "f"], [1, 2, 3], deliver_ats=ats)
    assert [(v.status, v.deliver_at) for v in moved] == [
        ("rescheduled", ats[0]),
        ("rescheduled", ats[1]),
        ("scheduled", ats[2]),
    ]
    assert queen.schedule_many("q", [], [], delays=[]) == []


def test_apply_answers_typed_verdicts_in_the_order_of_the_operations(queen: Queen) -> None:
    verdicts = queen.apply(
        [
            {"op": "schedule", "queue": "q", "timer_key": "z", "delay_ms": 60_000, "payload": None},
            {"op": "cancel", "queue": "q", "timer_key": "a"},
            {"op": "schedule", "queue": "q", "timer_key": "b", "delay_ms": 1.5, "payload": {"x": 1}, "txn": "t"},
        ]
    )
    assert [(v.timer_key, v.status) for v in verdicts] == [("z", "scheduled"), ("a", "absent"), ("b", "scheduled")]
    assert isinstance(verdicts[0].message_id, UUID)
    assert isinstance(verdicts[0].deliver_at, datetime)
    assert queen.apply([]) == []


def test_iter_timers_goes_through_all_pages(queen: Queen) -> None:
    keys = [f"k{number:03}" for number in range(25)]
    queen.schedule_many("q", keys, [1] * 25, delays=["1 hour"] * 25)
    assert [t.timer_key for t in queen.list_timers("q", after="k009", max_rows=3)] == ["k010", "k011", "k012"]
    for page_size in (1, 5, 7, 25, 26):
        assert [t.timer_key for t in queen.iter_timers("q", page_size=page_size)] == keys
    assert [t.timer_key for t in queen.iter_timers("q", after="k022")] == keys[23:]
    assert list(queen.iter_timers("nothing here")) == []


def test_iter_timers_sees_each_timer_that_stays_once(queen: Queen) -> None:
    keys = [f"k{number:03}" for number in range(20)]
    queen.schedule_many("q", keys, [1] * 20, delays=["1 hour"] * 20)
    seen = []
    for timer in queen.iter_timers("q", page_size=4):
        seen.append(timer.timer_key)
        queen.cancel("q", timer.timer_key)
        queen.schedule("q", f"a{len(seen)}", 1, delay=3600)
    assert seen == keys


@pytest.mark.parametrize("payload", [b"", b"\x00\xff", bytes(range(256)), bytearray(b"x"), memoryview(b"yz")])
def test_bytes_stay_bytes(db: Database, queen: Queen, payload: bytes) -> None:
    queen.schedule("q", "k", payload, delay=0)
    queen.schedule_bytes("q", "l", payload, delay=0)
    timer = queen.peek("q", "k")
    assert timer is not None
    assert (timer.payload, timer.payload_bytes) == (None, bytes(payload))
    queen.push("r", payload)
    queen.push_bytes("r", payload)
    assert db.value("select queen.fire_due()") == 2
    for queue in ("q", "r"):
        assert [(m.payload, m.payload_bytes) for m in queen.pop(queue)] == [(None, bytes(payload))] * 2


_texts = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\x00"))
_json = st.recursive(
    # Within the range in which a Python float and PostgreSQL's numeric print the same.
    st.none() | st.booleans() | st.integers() | st.floats(-1e15, 1e15) | _texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_texts, inner, max_size=4),
    max_leaves=12,
)


@hypothesis.given(payloads=st.lists(_json, min_size=1, max_size=20))
@hypothesis.settings(max_examples=40, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_json_round_trips(queen: Queen, payloads: list[Any]) -> None:
    queen.push_many("round trip", payloads)
    assert [m.payload for m in queen.pop("round trip", auto_ack=True)] == payloads
    queen.schedule("round trip", "k", payloads[0], delay=3600)
    timer = queen.peek("round trip", "k")
    assert timer is not None
    assert timer.payload == payloads[0]


def test_numbers_keep_their_digits_when_the_connection_is_set_up_so(db: Database) -> None:
    with db.connect("ada_admin") as connection:
        set_json_loads(partial(loads, parse_float=Decimal), connection)
        queen = Queen(connection)
        queen.push("q", Jsonb("1.00000000000000000001", dumps=str))
        assert queen.pop("q")[0].payload == Decimal("1.00000000000000000001")


@pytest.mark.parametrize(
    ("delay", "microseconds"),
    [
        (timedelta(days=1, microseconds=1), 86_400_000_001),
        (timedelta(microseconds=-3), -3),
        (1, 1_000_000),
        (0.25, 250_000),
        (1e-6, 1),
        (Decimal("1.5"), 1_500_000),
        (-2, -2_000_000),
        ("90 seconds", 90_000_000),
        ("PT1H", 3_600_000_000),
    ],
)
def test_delays_are_elapsed_time(clock: Clock, queen: Queen, delay: Any, microseconds: int) -> None:
    start = datetime(2030, 1, 1, tzinfo=timezone.utc)
    clock.set(start)
    clock.stop()
    verdict = queen.schedule("q", "k", 1, delay=delay)
    assert verdict.deliver_at == start + timedelta(microseconds=microseconds)


def test_a_timedelta_of_a_day_is_24_hours_when_clocks_change(db: Database, clock: Clock) -> None:
    clock.set(datetime(2030, 3, 30, 12, tzinfo=timezone.utc))
    clock.stop()
    with db.connect("alice_producer", options="-c timezone=Europe/Berlin") as connection:
        verdict = Queen(connection).schedule("q", "k", 1, delay=timedelta(days=1))
    assert verdict.deliver_at == datetime(2030, 3, 31, 12, tzinfo=timezone.utc)


def test_results_do_not_depend_on_the_session(db: Database) -> None:
    with db.connect(
        "ada_admin",
        options="-c intervalstyle=iso_8601 -c datestyle=sql,dmy -c bytea_output=escape -c search_path=",
        row_factory=dict_row,
        cursor_factory=psycopg.ClientCursor,
        autocommit=False,
    ) as connection:
        queen = Queen(connection)
        verdict = queen.schedule("q", "k", b"\x00'\\", delay=-5)
        timer = queen.peek("q", "k")
        assert timer is not None
        assert (timer.payload_bytes, timer.deliver_at) == (b"\x00'\\", verdict.deliver_at)
        assert timedelta(seconds=4) < queen.status().oldest_lateness < timedelta(minutes=1)


def test_nothing_commits_behind_the_caller(db: Database) -> None:
    connection = db.connect("ada_admin", autocommit=False)
    queen = Queen(connection)
    queen.schedule("q", "k", 1, delay=0)
    queen.schedule_many("q", ["l"], [1], delays=[0])
    queen.apply([{"op": "schedule", "queue": "q", "timer_key": "m", "delay_ms": 0, "payload": 1}])
    queen.push("r", 1)
    queen.push_many("r", [2])
    messages = queen.pop("r")
    queen.ack("r", "default", "Default", str(messages[0].lease_id))
    list(queen.iter_timers("q", page_size=1))
    queen.configure("horizon", "1 year")
    assert connection.info.transaction_status == psycopg.pq.TransactionStatus.INTRANS
    assert db.value("select count(*) from queen.log_timers") == 0
    connection.rollback()
    assert db.rows("select * from queen.log_timers") == []
    assert db.rows("select * from queen.log_segments") == []
    assert db.rows("select * from queen.config") == []

    queen.schedule("q", "k", 1, delay=0)
    connection.commit()
    assert db.value("select count(*) from queen.log_timers") == 1


def test_a_timer_shares_the_fate_of_the_callers_block(db: Database, producer: Connection) -> None:
    queen = Queen(producer)
    with producer.transaction(force_rollback=True):
        queen.schedule("q", "k", 1, delay=0)
    assert queen.cancel("q", "k").status == "absent"
    with producer.transaction():
        queen.schedule("q", "k", 1, delay=0)
    assert queen.cancel("q", "k").status == "cancelled"


def test_calls_work_in_a_pipeline(producer: Connection) -> None:
    queen = Queen(producer)
    with producer.pipeline():
        assert queen.schedule("q", "k", 1, delay=60).status == "scheduled"
        assert queen.schedule("q", "k", 1, delay=60).status == "rescheduled"


def test_status_and_configure(db: Database, queen: Queen) -> None:
    state = queen.status()
    assert state.version == db.value("select extversion from pg_extension where extname = 'pg_queen'")
    assert (state.due, state.next_due_at, state.jobs, state.dead_letters) == (0, None, 0, 0)
    assert state.oldest_lateness == timedelta(0)
    assert "postgres" in state.pg_cron
    queen.schedule("q", "k", 1, delay=-1)
    assert queen.status().due == 1
    assert queen.configure("payload_max_bytes", "100") == "100"
    assert queen.configure("payload_max_bytes", None) == "1048576"


def test_start_and_stop_make_and_remove_the_jobs(cron_db: Database) -> None:
    queen = Queen(cron_db.connect("ada_admin"))
    assert queen.start(workers=3)[:3] == [f"pg_queen worker {number}" for number in range(3)]
    assert cron_db.value("select count(*) from cron.job where jobname ~ '^pg_queen worker'") == 3
    assert queen.status().jobs == 3
    assert queen.status().pg_cron == cron_db.value("select extversion from pg_extension where extname = 'pg_cron'")
    queen.start()
    assert cron_db.value("select count(*) from cron.job where jobname ~ '^pg_queen worker'") == 2
    assert queen.stop() >= 2
    assert queen.stop() == 0
    assert cron_db.rows("select jobname from cron.job where jobname ~ '^pg_queen'") == []
