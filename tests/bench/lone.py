"""Lateness of single timers on a system that does nothing else, under pg_cron's workers."""

from __future__ import annotations

import random
import time
from typing import Final

from tests.bench.bench import PAYLOAD, Bench
from tests.bench.figures import Cell, Column, Figure, Result, Table, quantiles
from tests.support.database import Database

__all__ = ["run"]

_SCHEDULE: Final = "select message_id, deliver_at from queen.schedule('lone', %s, %s::jsonb, %s::interval)"
_POP: Final = "select message_id, created_at from queen.pop('lone', max_messages => 1, auto_ack => true)"
_RANDOM: Final = random.Random(20261201)


def run(bench: Bench) -> Result:
    """One timer at a time, at random phases of the workers' sleep.

    A consumer asks for it once a millisecond from the due time on.
    """
    database = bench.cron_database()
    samples = bench.pick(500, 15)
    idle = bench.pick(120.0, 0.0)
    bench.say(f"leaving the workers alone for {idle:.0f} s")
    time.sleep(idle)
    rows: list[list[Cell]] = []
    figures = []
    details = {}
    for name, soon, late, target in (
        ("100 to 150 ms ahead", 0.100, 0.150, 20.0),
        ("due at once", 0.0, 0.0, 60.0),
    ):
        bench.say(f"{samples} timers, {name}")
        fired, arrived = _sample(database, samples, soon, late)
        rows.append([name, len(fired), *quantiles(fired), *quantiles(arrived)])
        p50, p99, most = quantiles(fired)
        bench.say(f"{name}: p50 {p50:.1f}, p99 {p99:.1f}, max {most:.1f} ms")
        figures += [
            Figure(f"lone timer {name}, p50", p50, "ms"),
            Figure(f"lone timer {name}, p99", p99, "ms", at_most=target),
            Figure(f"lone timer {name}, max", most, "ms"),
        ]
        details[name] = {"fired": fired, "arrived": arrived}
    return Result(
        Table(
            [
                Column("scheduled"),
                Column("timers", 0),
                Column("in the log: p50 ms", 1),
                Column("p99", 1),
                Column("max", 1),
                Column("at the consumer: p50 ms", 1),
                Column("p99", 1),
                Column("max", 1),
            ],
            rows,
        ),
        figures,
        details,
    )


def _sample(database: Database, samples: int, soon: float, late: float) -> tuple[list[float], list[float]]:
    """Lateness of each timer in milliseconds: created_at in the log, and when the consumer had the message."""
    producer, consumer = database.connect("alice_producer"), database.connect("carl_consumer")
    fired, arrived = [], []
    for number in range(samples + 1):
        time.sleep(_RANDOM.uniform(0.0, 0.06))
        delay = f"{_RANDOM.uniform(soon, late):.6f} seconds"
        scheduled = producer.execute(_SCHEDULE, [f"k{number}", PAYLOAD, delay], prepare=True).fetchone()
        assert scheduled is not None
        due = scheduled[1].timestamp()
        time.sleep(max(due - time.time(), 0))
        while (message := consumer.execute(_POP, prepare=True).fetchone()) is None:
            if time.time() - due > 10:
                raise TimeoutError("a timer is not delivered after 10 s")
            time.sleep(0.001)
        now = time.time()
        assert message[0] == scheduled[0]
        # The first brings the plans of both sessions with it.
        if number > 0:
            fired.append((message[1] - scheduled[1]).total_seconds() * 1000)
            arrived.append((now - due) * 1000)
    assert min(fired) >= 0
    producer.close()
    consumer.close()
    return fired, arrived
