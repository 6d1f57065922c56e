"""Consumers of one group beside one another and beside producers."""

from __future__ import annotations

import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from pg_queen import Queen

from tests.conftest import StartSession
from tests.support.database import Database

PARTITIONS = 20


@pytest.mark.slow
def test_each_message_is_acknowledged_once_and_in_order(db: Database) -> None:
    wanted = 4000

    def produce(number: int) -> None:
        with db.connect("alice_producer") as connection:
            queen = Queen(connection)
            for i in range(wanted // 2 // 20):
                queen.push_many("q", [f"{number} {i} {j}" for j in range(20)], f"p{(i * 7 + number) % PARTITIONS}")

    def consume(number: int) -> list[tuple[str, int]]:
        done: list[tuple[str, int]] = []
        with db.connect("carl_consumer") as connection:
            queen = Queen(connection)
            until = time.monotonic() + 30
            while time.monotonic() < until and db_done() < wanted:
                messages = queen.pop("q", "g", 50, 10)
                if not messages:
                    time.sleep(0.005)
                for part in {message.partition for message in messages}:
                    taken = [m for m in messages if m.partition == part]
                    if (number + len(done)) % 5 == 0:
                        assert taken[0].lease_id is not None
                        queen.nack("q", "g", part, taken[0].lease_id, "later")
                        continue
                    assert taken[0].lease_id is not None
                    answer = queen.ack("q", "g", part, taken[0].lease_id)
                    assert (answer.status, answer.acked) == ("acked", len(taken))
                    done += [(part, message.offset) for message in taken]
                    total[number] = len(done)
        return done

    total: dict[int, int] = {}

    def db_done() -> int:
        return sum(total.values())

    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 100}')")
    with ThreadPoolExecutor(6) as pool:
        producers = [pool.submit(produce, number) for number in range(2)]
        consumers = [pool.submit(consume, number) for number in range(4)]
        for future in producers:
            future.result()
        results = [future.result() for future in consumers]
    acked = [entry for done in results for entry in done]
    assert len(acked) == wanted
    assert len(set(acked)) == wanted
    by_partition: dict[str, list[int]] = defaultdict(list)
    for part, offset in acked:
        by_partition[part].append(offset)
    for part, offsets in by_partition.items():
        last = db.value("select last_offset from queen.log_partitions where name = %s", part)
        assert sorted(offsets) == list(range(1, last + 1)), part
    assert sum(1 for done in results if done) >= 2
    # Each consumer met a partition's messages in order.
    for done in results:
        seen: dict[str, int] = defaultdict(int)
        for part, offset in done:
            assert offset > seen[part]
            seen[part] = offset
    assert db.value("select count(*) from queen.log_dlq") == 0


def test_a_killed_consumer(db: Database, session: StartSession) -> None:
    """A pop that was not committed is none; a batch in the hands of the dead comes back when its lease is over."""
    db.execute("select queen.push_many('q', array['1', '2']::jsonb[])")
    user = session("carl_consumer", autocommit=False)
    assert len(user.run("select * from queen.pop('q', 'g', lease => '1 hour')")) == 2
    user.terminate()
    with pytest.raises(psycopg.OperationalError):
        user.run("select 1")
    rows = db.rows("select \"offset\", delivery_attempt from queen.pop('q', 'g', lease => '300 ms')")
    assert rows == [(1, 1), (2, 1)]
    other = session("carl_consumer")
    assert other.run("select * from queen.pop('q', 'g')") == []
    time.sleep(0.35)
    assert other.run("select \"offset\", delivery_attempt from queen.pop('q', 'g')") == [(1, 2), (2, 2)]
