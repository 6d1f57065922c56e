"""Large payloads of timers wait compressed; nobody notices but the disk."""

from __future__ import annotations

import random

import pytest
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database

WAITING = "select payload_zstd, octet_length(payload) from queen.log_timers where timer_key = %s"
LARGE = {"text": "the same again and again " * 4000}


def schedule(producer: Connection, how: str, key: str, payload: object) -> None:
    """Schedule a JSON payload, in one of the ways there are."""
    ops = Jsonb([{"op": "schedule", "queue": "q", "timer_key": key, "delay_ms": 0, "payload": payload}])
    match how:
        case "schedule":
            producer.execute("select queen.schedule('q', %s, %s, '0')", [key, Jsonb(payload)])
        case "schedule_many":
            producer.execute(
                "select queen.schedule_many('q', array[%s], array[%s::jsonb], array['0']::interval[])",
                [key, Jsonb(payload)],
            )
        case "apply":
            producer.execute("select queen.apply(%s)", [ops])
        case "transaction":
            producer.execute("select queen.transaction(%s)", [ops])


@pytest.mark.parametrize("how", ["schedule", "schedule_many", "apply", "transaction"])
def test_a_large_payload_waits_compressed(db: Database, producer: Connection, how: str) -> None:
    noise = random.Random(1).randbytes(20_000).hex()
    for key, payload in {"small": [1], "large": LARGE, "noise": noise}.items():
        schedule(producer, how, key, payload)
    zstd, size = db.rows(WAITING, "large")[0]
    assert zstd
    assert size < 200
    assert db.rows(WAITING, "small") == [(False, 3)]
    # Replaced by a small one, and by a large one again.
    schedule(producer, how, "large", 1)
    assert db.rows(WAITING, "large") == [(False, 1)]
    schedule(producer, how, "large", LARGE)
    assert producer.execute("select payload from queen.peek('q', 'large')").fetchone() == (LARGE,)
    assert db.value("select queen.fire_due()") == 3
    delivered = {str(payload)[:10] for (payload,) in db.rows("select payload from queen.pop('q', 'g')")}
    assert delivered == {str(payload)[:10] for payload in ([1], LARGE, noise)}


def test_bytes_that_do_not_shrink_wait_as_they_are(db: Database, producer: Connection) -> None:
    noise, zeros = random.Random(2).randbytes(50_000), bytes(500_000)
    for key, payload in {"noise": noise, "zeros": zeros}.items():
        producer.execute("select queen.schedule_bytes('q', %s, %s, '0')", [key, payload])
    assert db.rows(WAITING, "noise") == [(False, 50_001)]
    zstd, size = db.rows(WAITING, "zeros")[0]
    assert zstd
    assert size < 100
    assert db.value("select queen.fire_due()") == 2
    assert {payload for (payload,) in db.rows("select payload_bytes from queen.pop('q', 'g')")} == {noise, zeros}


@pytest.mark.parametrize("size", [256, 257, 511, 512, 65_791, 65_792, 70_000, 300_000, 1_048_576])
def test_the_size_that_a_frame_states(db: Database, size: int) -> None:
    """Every form of the size field, and the bytes a pass counts."""
    db.execute("select queen.configure('timer_zstd_bytes', '256')")
    db.execute("select queen.schedule_bytes('q', 'k', %s, '0')", bytes(size - 1))
    assert db.rows("select payload_zstd, queen._payload_size(payload, payload_zstd) from queen.log_timers") == [
        (True, size)
    ]


def test_a_pass_is_bounded_by_what_it_unpacks(db: Database) -> None:
    """A megabyte of zeros waits in some fifty bytes, and counts as a megabyte."""
    for number in range(40):
        db.execute("select queen.schedule_bytes('q', %s, %s, '0')", f"k{number}", bytes(1_000_000))
    db.execute("select queen.configure('sweep_max_bytes', '5000000')")
    assert db.value("select sum(octet_length(payload)) from queen.log_timers") < 4000
    assert db.value("select queen.fire_due(40)") == 4
    db.execute("call queen.sweep('3 seconds', 0, 1)")
    assert db.value("select max(raw_bytes) from queen.log_segments") < 5_100_000
    assert db.value("select last_offset from queen.log_partitions") == 40


def test_a_limit_lowered_afterwards_keeps_what_was_promised(db: Database, producer: Connection) -> None:
    schedule(producer, "schedule", "large", LARGE)
    producer.execute("select queen.schedule_bytes('q', 'noise', %s, '0')", [random.Random(3).randbytes(50_000)])
    db.execute("select queen.configure('payload_max_bytes', '100')")
    assert producer.execute("select payload from queen.peek('q', 'large')").fetchone() == (LARGE,)
    assert db.value("select queen.fire_due()") == 2
    assert db.value("select count(*) from queen.log_dlq") == 0


def test_a_dead_letter_keeps_it_compressed(db: Database, producer: Connection) -> None:
    schedule(producer, "schedule", "large", LARGE)
    db.execute("select queen.configure('timer_max_attempts', '1')")
    db.execute(
        "select queen.log_timers_fail(array[c.tenant_id], array[c.queue], array[c.timer_key], array[c.claim_token],"
        " 'no') from queen.log_timers_claim() c"
    )
    assert db.rows("select payload_zstd from queen.log_dlq") == [(True,)]
    assert db.value("select payload from queen.dlq_list('q')") == LARGE
    assert db.value("select queen.dlq_requeue('q')") == 1
    assert db.value("select payload from queen.pop('q', 'g')") == LARGE
