"""Dropping a queue, or removing a partition, beside sessions that use it: nothing is lost, nothing stays behind."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from pg_queen import LeaseLost, Queen

from tests.conftest import StartSession, StartSweeper
from tests.support.clock import Clock
from tests.support.database import Database
from tests.support.waiting import wait_for

ORPHANS = {
    "log_partitions": "select count(*) from queen.log_partitions where queue_id not in (select id from queen.queues)",
    "log_groups": "select count(*) from queen.log_groups where queue_id not in (select id from queen.queues)",
    **{
        table: f"select count(*) from queen.{table} where partition_id not in (select id from queen.log_partitions)"
        for table in ("log_segments", "log_txns", "log_consumers")
    },
}


def orphans(db: Database) -> dict[str, int]:
    """Rows whose queue or partition is gone."""
    return {name: count for name, query in ORPHANS.items() if (count := db.value(query))}


@pytest.mark.parametrize(
    "birth",
    [
        "select queen.push('q', '\"new\"', 'b')",
        "select queen.push_many('q', array['\"new\"']::jsonb[], 'b')",
        'select queen.transaction(\'[{"op": "push", "queue": "q", "partition": "b", "payload": "new"}]\')',
    ],
)
def test_a_partition_born_beside_the_drop(db: Database, session: StartSession, birth: str) -> None:
    """What was answered with `queued` is dropped with the queue or is in the new one, never nowhere."""
    db.execute("select queen.push('q', '1', 'a')")
    pusher = session("ada_admin", autocommit=False)
    pusher.run(birth)
    dropper = session("ada_admin")
    drop = dropper.start("select queen.drop_queue('q') ->> 'messages'")
    time.sleep(0.2)
    pusher.connection.commit()
    ((dropped,),) = drop.result(10)
    read = db.rows("select payload from queen.pop('q', 'g')")
    assert (dropped, read) in (("2", []), ("1", [("new",)]))
    assert orphans(db) == {}


def test_a_push_that_meets_the_drop(db: Database, session: StartSession) -> None:
    """The other way round: the birth begins while the queue is being dropped."""
    db.execute("select queen.push('q', '1', 'a')")
    dropper = session("ada_admin", autocommit=False)
    dropper.run("select queen.drop_queue('q')")
    pusher = session("alice_producer")
    push = pusher.start("select status, \"offset\" from queen.push('q', '\"new\"', 'b')")
    time.sleep(0.2)
    dropper.connection.commit()
    assert push.result(10) == [("queued", 1)]
    assert db.rows("select payload from queen.pop('q', 'g')") == [("new",)]
    assert orphans(db) == {}


@pytest.mark.parametrize(
    "call", ["pop('q', 'g')", "pop('q', 'new group')", "seek('q', 'g', 0)", "pop_segments('q', 'g')"]
)
def test_a_first_contact_beside_the_drop(db: Database, session: StartSession, call: str) -> None:
    db.execute("select queen.push('q', '1', 'a')")
    db.execute("select queen.pop('q', 'g')")
    db.execute("select queen.push('q', '1', 'b')")
    consumer = session("carl_consumer", autocommit=False)
    consumer.run(f"select queen.{call}")
    dropper = session("ada_admin")
    drop = dropper.start("select queen.drop_queue('q')")
    time.sleep(0.2)
    consumer.connection.commit()
    drop.result(10)
    db.execute("call queen.maintain()")
    assert orphans(db) == {}


def test_a_pop_that_meets_the_drop(db: Database, session: StartSession) -> None:
    db.execute("select queen.push('q', '1', 'a')")
    dropper = session("ada_admin", autocommit=False)
    dropper.run("select queen.drop_queue('q')")
    consumer = session("carl_consumer")
    consumer.run("select * from queen.pop('q', 'g')")
    dropper.connection.commit()
    db.execute("call queen.maintain()")
    assert orphans(db) == {}


def test_a_seek_beside_the_removal_of_a_partition(db: Database, session: StartSession, clock: Clock) -> None:
    clock.stop()
    db.execute("select queen.push('q', '1', 'a')")
    clock.advance(timedelta(days=30))
    user = session("carl_consumer", autocommit=False)
    user.run("select queen.seek('q', 'g', 0)")
    db.execute("call queen.maintain()")
    user.connection.commit()
    clock.advance(timedelta(days=30))
    db.execute("call queen.maintain()")
    assert orphans(db) == {}


def test_beside_everything_at_once(db: Database, sweeper: StartSweeper) -> None:
    """Push, schedule, pop, ack, nack, seek, requeue, configure, drop, maintain: no error, no deadlock, no orphan."""
    workers = [sweeper(number, 2) for number in range(2)]
    stop = threading.Event()

    def pushing(queen: Queen, number: int) -> None:
        queen.push("q", number, partition=f"p{number % 4}", txn=f"t{number % 50}")
        queen.push_many("kept", [number], partition=f"p{number % 4}")

    def scheduling(queen: Queen, number: int) -> None:
        queen.schedule_many("q", [f"k{number % 9}", f"k{number % 7} b"], [1, 2], delays=[0, "10 ms"])
        queen.schedule("kept", f"k{number}", number, delay=0)
        queen.cancel("q", f"k{number % 5}")

    def consuming(queen: Queen, number: int) -> None:
        for message in {m.partition: m for m in queen.pop("q", "g", 20)}.values():
            assert message.lease_id is not None
            if number % 3:
                queen.ack("q", "g", message.partition, message.lease_id)
            else:
                queen.nack("q", "g", message.partition, message.lease_id, "no")
        queen.seek("q", "g", to_offset=0)
        queen.dlq_requeue("q")

    def operating(queen: Queen, number: int) -> None:
        match number % 3:
            case 0:
                queen.configure_queue("q", {"delivery_max_attempts": 2})
            case 1:
                queen.drop_queue("q")
            case 2:
                queen.connection.execute("call queen.maintain('1 second')")
        time.sleep(0.01)

    def loop(work: Any) -> Counter[str]:
        seen: Counter[str] = Counter()
        with db.connect("ada_admin") as connection:
            queen = Queen(connection)
            while not stop.is_set():
                try:
                    work(queen, seen.total())
                    seen["done"] += 1
                except LeaseLost:
                    seen["lease lost"] += 1
                except psycopg.Error as error:
                    seen[f"{work.__name__} {error.sqlstate} {error}"] += 1
        return seen

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(loop, work) for work in (pushing, scheduling, consuming, operating)]
        time.sleep(5)
        stop.set()
        outcomes = [future.result(30) for future in running]
    assert all(set(seen) <= {"done", "lease lost"} for seen in outcomes), outcomes
    assert all(seen["done"] > 20 for seen in outcomes), outcomes
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
    assert all(worker.alive for worker in workers)
    assert db.value("select deadlocks from pg_stat_database where datname = current_database()") == 0
    assert db.value("select coalesce(sum(errors), 0) from queen.sweep_stats") == 0
    # The other queue lost nothing.
    kept = db.value(
        "select sum(last_offset) from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
        " where q.name = 'kept'"
    )
    assert kept == outcomes[0]["done"] + outcomes[1]["done"]
    db.execute("call queen.maintain()")
    assert orphans(db) == {}
