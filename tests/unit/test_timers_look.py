"""What peek and list_timers show, page by page while rows move; and the order in which batches answer."""

from __future__ import annotations

import random
import threading
from datetime import timedelta
from typing import Any

from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from tests.conftest import StartSweeper
from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.waiting import wait_for


def rows(connection: Connection, query: str, *arguments: Any) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, arguments or None).fetchall()


def test_every_column(db: Database, producer: Connection, admin: Connection, clock: Clock) -> None:
    """All that a row holds, at each stage of its life; the list is the same without the payload."""
    clock.stop()
    scheduled_at = db.value("select queen._now()")
    verdict = rows(
        producer, "select * from queen.schedule('q', 'k', '{\"a\": 1}', '1 minute', partition => 'p', txn => 't')"
    )[0]
    expected: dict[str, Any] = {
        "tenant_id": db.value("select '00000000-0000-0000-0000-000000000001'::uuid"),
        "queue": "q",
        "timer_key": "k",
        "partition": "p",
        "deliver_at": scheduled_at + timedelta(minutes=1),
        "txn": "t",
        "message_id": verdict["message_id"],
        "payload": {"a": 1},
        "payload_bytes": None,
        "encrypted": False,
        "producer_sub": "alice_producer",
        "attempts": 0,
        "last_error": None,
        "claimed": False,
        "created_at": scheduled_at,
        "updated_at": scheduled_at,
    }

    def check() -> None:
        assert rows(admin, "select * from queen.peek('q', 'k')") == [expected]
        assert rows(admin, "select * from queen.list_timers('q')") == [expected | {"payload": None}]

    check()
    clock.advance(timedelta(seconds=10))
    producer.execute("select queen.reschedule('q', 'k', '30 seconds')")
    expected |= {
        "deliver_at": scheduled_at + timedelta(seconds=40),
        "updated_at": scheduled_at + timedelta(seconds=10),
    }
    check()
    clock.advance(timedelta(minutes=1))
    (claim,) = rows(admin, "select * from queen.log_timers_claim(lease => '1 minute')")
    expected |= {"claimed": True}
    check()
    admin.execute(
        "select queen.log_timers_fail(array[%(tenant_id)s::uuid], array['q'], array['k'], array[%(claim_token)s::uuid],"
        " 'no luck')",
        claim,
    )
    expected |= {
        "claimed": False,
        "attempts": 1,
        "last_error": "no luck",
        "updated_at": scheduled_at + timedelta(seconds=70),
    }
    check()


def test_pages_while_rows_come_and_go_and_fire(db: Database, sweeper: StartSweeper) -> None:
    """Every row that stayed is seen once and in order; a second lap finds no other."""
    stay = [f"k{number:05d}" for number in range(0, 3000, 3)]
    go = [f"k{number:05d}" for number in range(1, 3000, 3)]
    fire = [f"k{number:05d}" for number in range(2, 3000, 3)]
    db.execute(
        "select count(*) from queen.schedule_many('q', %s, array_fill('1'::jsonb, array[2000]),"
        " array_fill('1 hour'::interval, array[2000]))",
        stay + go,
    )
    soon = [timedelta(milliseconds=random.Random(7).randrange(1500)) for _ in fire]
    sweeper(0, 1)
    stop = threading.Event()
    moves = 0

    def churn() -> None:
        nonlocal moves
        numbers = random.Random(8)
        with db.connect() as connection:
            connection.execute(
                "select count(*) from queen.schedule_many('q', %s, %s, %s)", [fire, [Jsonb(1)] * 1000, soon]
            )
            while not stop.is_set():
                key = numbers.choice(go)
                connection.execute("select queen.cancel('q', %s)", [key])
                connection.execute("select queen.schedule('q', %s, '1', '1 hour')", [key])
                connection.execute("select queen.reschedule('q', %s, '2 hours')", [numbers.choice(stay)])
                moves += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        laps = 0
        while laps < 3 or not db.value("select coalesce(sum(last_offset), 0) >= 1000 from queen.log_partitions"):
            seen: list[str] = []
            while page := db.rows("select timer_key from queen.list_timers('q', %s, 50)", seen[-1] if seen else None):
                seen += [key for (key,) in page]
            assert seen == sorted(set(seen))
            assert set(stay) <= set(seen) <= {*stay, *go, *fire}
            laps += 1
    finally:
        stop.set()
        thread.join()
    assert moves > 50
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 2000)


def test_batches_answer_in_the_order_of_their_input(db: Database, producer: Connection) -> None:
    """Whatever the order of keys, and of locks: 2,000 at once, scheduled, moved, replaced and cancelled."""
    numbers = random.Random(9)
    keys = [f"key {number}" for number in range(2000)]
    for outcome in ("scheduled", "rescheduled"):
        numbers.shuffle(keys)
        parts = [f"p{numbers.randrange(50)}" for _ in keys]
        answer = rows(
            producer,
            "select timer_key, status, txn from queen.schedule_many('q', %s, %s,"
            " array_fill('1 hour'::interval, array[2000]), partitions => %s, txns => %s)",
            keys,
            [Jsonb(key) for key in keys],
            parts,
            [f"txn of {key}" for key in keys],
        )
        assert [(row["timer_key"], row["status"], row["txn"]) for row in answer] == [
            (key, outcome, f"txn of {key}") for key in keys
        ]
        assert dict(db.rows("select timer_key, partition from queen.log_timers")) == dict(zip(keys, parts, strict=True))
    numbers.shuffle(keys)
    kinds = [numbers.choice(["schedule", "reschedule", "cancel"]) for _ in keys]
    ops = [
        {"op": kind, "queue": "q", "timer_key": key}
        | ({} if kind == "cancel" else {"delay_ms": 1000})
        | ({"payload": key} if kind == "schedule" else {})
        for kind, key in zip(kinds, keys, strict=True)
    ]
    verdicts = producer.execute("select queen.apply(%s)", [Jsonb(ops)]).fetchone()
    assert verdicts is not None
    assert [(verdict["timer_key"], verdict["status"]) for verdict in verdicts[0]] == [
        (key, "cancelled" if kind == "cancel" else "rescheduled") for kind, key in zip(kinds, keys, strict=True)
    ]
