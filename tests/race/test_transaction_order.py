"""Transactions with opposite inputs beside the sweeper: nobody waits in a circle."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import psycopg
import pytest
from pg_queen import LeaseLost, Queen

from tests.conftest import StartSweeper
from tests.support.database import Database

Op = dict[str, Any]

KEYS = [f"k{number}" for number in range(6)]
PARTITIONS = [f"p{number}" for number in range(5)]
GROUPS = ["g", "h"]


def _deadlocks(db: Database) -> int:
    return int(db.value("select deadlocks from pg_stat_database where datname = current_database()"))


def _timers(number: int) -> list[Op]:
    return [
        {"op": "schedule", "queue": "q", "timer_key": key, "partition": partition, "delay_ms": 0, "payload": number}
        for key, partition in zip(KEYS, [*PARTITIONS, "p0"], strict=True)
    ]


def _pushes(number: int, queue: str) -> list[Op]:
    return [{"op": "push", "queue": queue, "partition": partition, "payload": number} for partition in PARTITIONS]


def _acks(leases: dict[tuple[str, str], UUID | None]) -> list[Op]:
    return [
        {"op": "ack", "queue": "q", "consumer_group": group, "partition": partition, "lease_id": str(lease)}
        for (group, partition), lease in leases.items()
    ]


def _take(queen: Queen) -> dict[tuple[str, str], UUID | None]:
    """What there is for both groups; a popped partition is held by nobody else."""
    leases: dict[tuple[str, str], UUID | None] = {}
    for group in GROUPS:
        for message in queen.pop("q", group, max_messages=200, lease="1 minute"):
            leases[group, message.partition] = message.lease_id
    return leases


def _in_threads(db: Database, rounds: int, work: Any, threads: int = 2) -> Counter[str]:
    """`work(queen, number, session)` in a loop, in sessions of their own that begin together."""
    barrier = threading.Barrier(threads)
    outcomes: Counter[str] = Counter()

    def loop(session: int) -> Counter[str]:
        seen: Counter[str] = Counter()
        with db.connect("ada_admin") as connection:
            queen = Queen(connection)
            barrier.wait(10)
            for number in range(rounds):
                try:
                    work(queen, number, session)
                    seen["done"] += 1
                except LeaseLost:
                    seen["lease lost"] += 1
                except psycopg.Error as error:
                    seen[str(error.sqlstate)] += 1
        return seen

    with ThreadPoolExecutor(threads) as pool:
        for seen in pool.map(loop, range(threads)):
            outcomes += seen
    return outcomes


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_opposite_inputs_beside_the_sweeper(db: Database, sweeper: StartSweeper, mode: str) -> None:
    """Timers, pushes and acks on the same keys and partitions, in orders turned around and shuffled."""
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    queen = Queen(db.superuser)
    for partition in reversed(PARTITIONS):
        queen.push("q", 0, partition=partition)
    workers = [sweeper(number, 2) for number in range(2)]
    rounds = 200

    def work(queen: Queen, number: int, session: int) -> None:
        # The timers alone would already line the sessions up, so only every other round has them.
        ops = _timers(number) * (number % 2) + _pushes(number, "q") + _pushes(number, "answers") + _acks(_take(queen))
        if number % 3 == 2:
            random.Random(number * 2 + session).shuffle(ops)
        elif session:
            ops.reverse()
        results = queen.transaction(ops)
        assert len(results) == len(ops)

    before = time.monotonic()
    outcomes = _in_threads(db, rounds, work)
    assert time.monotonic() - before < 120
    assert outcomes == {"done": 2 * rounds}
    assert _deadlocks(db) == 0
    assert all(worker.alive for worker in workers)
    # Every timer that was scheduled last is delivered or pending; no push was lost.
    sent = db.value(
        "select sum(last_offset) from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
        " where q.name = 'answers'"
    )
    assert sent == 2 * rounds * len(PARTITIONS)


def test_opposite_inputs_beside_all_other_calls(db: Database, sweeper: StartSweeper) -> None:
    """The same beside plain calls that lock what they lock: schedule_many, apply, push_many, nack, seek, maintain."""
    queen = Queen(db.superuser)
    for partition in PARTITIONS:
        queen.push("q", 0, partition=partition)
    queen.configure_queue("q", {"delivery_max_attempts": 3})
    sweeper(0, 1)

    def work(queen: Queen, number: int, session: int) -> None:
        dice = random.Random(number * 7 + session)
        match session:
            case 0 | 1:
                ops = _timers(number) * (number % 2) + _pushes(number, "q") + _acks(_take(queen))
                dice.shuffle(ops)
                queen.transaction(ops)
            case 2:
                keys = dice.sample(KEYS, 4)
                match dice.randrange(9):
                    case 0:
                        queen.schedule_many("q", keys, [number] * 4, delays=[0] * 4, partitions=PARTITIONS[:4])
                    case 1:
                        queen.apply([{"op": "cancel", "queue": "q", "timer_key": key} for key in keys])
                    case 2:
                        queen.push_many("q", [number] * 3, partition=dice.choice(PARTITIONS))
                    case 3:
                        for (group, partition), lease in _take(queen).items():
                            queen.nack("q", group, partition, str(lease), "no")
                    case 4:
                        queen.seek("q", dice.choice(GROUPS), to_offset=dice.randrange(100))
                    case 5:
                        queen.dlq_requeue("q")
                    case 6:
                        queen.drop_group("q", dice.choice(GROUPS))
                    case 7:
                        queen.configure_queue("q", {"delivery_max_attempts": 3})
                    case 8:
                        queen.drop_queue("q")
            case 3:
                queen.connection.execute("call queen.maintain('1 second')")
                time.sleep(0.02)

    outcomes = _in_threads(db, 120, work, threads=4)
    assert set(outcomes) <= {"done", "lease lost"}
    # A seek takes leases away; that is its purpose.
    assert outcomes["lease lost"] < 120
    assert _deadlocks(db) == 0


def test_births_in_opposite_orders(db: Database) -> None:
    """Queues and partitions that are not there yet, made by two transactions at the same time."""

    def work(queen: Queen, number: int, session: int) -> None:
        ops = [op for queue in ("a", "b", "c") for op in _pushes(number, f"{queue}{number}")]
        if session:
            ops.reverse()
        queen.transaction(ops)

    assert _in_threads(db, 100, work) == {"done": 200}
    assert _deadlocks(db) == 0
    assert db.value("select count(*) from queen.log_partitions where last_offset = 2") == 100 * 3 * len(PARTITIONS)
