"""Deduplication by txn: exact within the queue's window, in the whole queue; a fire does not look."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest
from pg_queen import Queen

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.waiting import wait_for


@pytest.fixture
def queen(admin: Connection) -> Queen:
    return Queen(admin)


def test_a_duplicate_answers_with_the_place_of_the_first(db: Database, queen: Queen) -> None:
    queen.push("q", 0, partition="a")
    first = queen.push("q", 1, partition="a", txn="t")
    assert (first.status, first.offset) == ("queued", 2)
    for again in (
        queen.push("q", 1, partition="a", txn="t"),
        queen.push("q", 2, partition="b", txn="t"),
        queen.push("q", b"bytes", partition="a", txn="t"),
        queen.push_many("q", [3], partition="c", txns=["t"])[0],
    ):
        assert (again.status, again.partition, again.offset) == ("duplicate", "a", 2)
        assert (again.message_id, again.txn) == (first.message_id, "t")
    (sent,) = queen.sent("q", "t")
    assert (sent.partition, sent.offset, sent.message_id) == ("a", 2, first.message_id)
    assert db.value("select count(*) from queen.log_segments") == 2
    # Nothing was appended, yet the offsets have no gap.
    assert queen.push("q", 4, partition="a").offset == 3
    assert queen.push("another", 1, txn="t").status == "queued"
    assert queen.push("q", 1, txn="t", tenant=uuid4()).status == "queued"


def test_a_batch_knows_its_own_and_the_logs(queen: Queen) -> None:
    first = queen.push("q", 0, partition="other", txn="b")
    results = queen.push_many("q", [1, 2, 3, 4, 5, 6, 7], txns=["a", "b", "a", None, "c", "a", None])
    assert [(r.status, r.partition, r.offset) for r in results] == [
        ("queued", "Default", 1),
        ("duplicate", "other", 1),
        ("duplicate", "Default", 1),
        ("queued", "Default", 2),
        ("queued", "Default", 3),
        ("duplicate", "Default", 1),
        ("queued", "Default", 4),
    ]
    assert results[1].message_id == first.message_id
    assert results[2].message_id == results[5].message_id == results[0].message_id
    assert [m.payload for m in queen.pop("q", partition="Default")] == [1, 4, 5, 7]
    assert {r.status for r in queen.push_many("q", [1, 2], txns=["a", "c"])} == {"duplicate"}
    # The default txn is a message id, and is known like any other.
    assert queen.push("q", 1, txn=str(results[3].message_id)).message_id == results[3].message_id


def test_txns_that_look_alike_are_different(queen: Queen) -> None:
    names = ["t", "T", "t ", "\u00e9", "e\u0301", "ß", "ss", "x" * 255, "x" * 254 + "y", "x" * 63 + "1", "x" * 63 + "2"]
    assert {r.status for r in queen.push_many("q", names, txns=names)} == {"queued"}
    assert {queen.push("q", 0, txn=name).offset for name in names} == set(range(1, len(names) + 1))


def test_the_window_is_exact(db: Database, clock: Clock, queen: Queen) -> None:
    clock.stop()
    queen.configure_queue("q", {"txn_window": "10 minutes"})
    first = queen.push("q", 1, txn="t")
    born = clock.now()
    queen.push("day", 1, txn="t")
    clock.set(born + timedelta(minutes=10))
    assert (queen.push("q", 2, txn="t").status, len(queen.sent("q", "t"))) == ("duplicate", 1)
    clock.set(born + timedelta(minutes=10, microseconds=1))
    assert queen.sent("q", "t") == []
    second = queen.push("q", 3, partition="elsewhere", txn="t")
    assert (second.status, second.partition, second.offset) == ("queued", "elsewhere", 1)
    assert [s.message_id for s in queen.sent("q", "t")] == [second.message_id]
    # The window is the queue's own: another keeps the setting.
    assert queen.push("day", 2, txn="t").status == "duplicate"
    clock.set(born + timedelta(days=1))
    assert queen.push("day", 2, txn="t").status == "duplicate"
    clock.set(born + timedelta(days=1, microseconds=1))
    assert queen.push("day", 2, txn="t").status == "queued"
    # A wider window sees as far back as there are rows: the first is the first again.
    queen.configure_queue("q", {"txn_window": "30 days"})
    assert queen.push("q", 4, txn="t").message_id == first.message_id
    assert [m.payload for m in queen.pop("q")] == [1, 3]


@pytest.mark.parametrize("isolation", ["read committed", "repeatable read"])
def test_the_same_txn_at_the_same_time_in_one_partition(db: Database, session: StartSession, isolation: str) -> None:
    Queen(db.superuser).push("q", 0)
    first, second = session("alice_producer", autocommit=False), session("alice_producer", autocommit=False)
    second.run(f"set transaction isolation level {isolation}")
    second.run("select 1 from pg_catalog.pg_class limit 1")
    first.run("select queen.push('q', '1', txn => 't')")
    waiting = second.start("select (r).status from (select queen.push('q', '2', txn => 't') as r) p")
    second.wait_until_blocked()
    first.run("commit")
    if isolation == "read committed":
        assert waiting.result(10) == [("duplicate",)]
    else:
        with pytest.raises(psycopg.errors.SerializationFailure):
            waiting.result(10)


def test_a_push_that_is_rolled_back_was_not_sent(db: Database, session: StartSession) -> None:
    first, second = session("alice_producer", autocommit=False), session("alice_producer")
    first.run("select queen.push('q', '1', txn => 't')")
    waiting = second.start("select (r).status from (select queen.push('q', '2', txn => 't') as r) p")
    second.wait_until_blocked()
    first.run("rollback")
    assert waiting.result(10) == [("queued",)]
    assert [m.payload for m in Queen(db.superuser).pop("q")] == [2]


def test_the_same_txn_at_the_same_time_in_two_partitions(db: Database, session: StartSession) -> None:
    for partition in ("a", "b"):
        Queen(db.superuser).push("q", 0, partition=partition)
    first, second = session("alice_producer", autocommit=False), session("alice_producer")
    first.run("select queen.push('q', '1', 'a', 't')")
    pending = second.start("select (r).status, (r).partition from (select queen.push('q', '2', 'b', 't') as r) p")
    wait_for(
        lambda: (
            pending.done()
            or db.rows("select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'", second.pid)
        )
    )
    first.run("commit")
    assert pending.result(10) == [("duplicate", "a")]
    assert db.value("select count(*) from queen.log_txns where txn_hash = queen._txn_hash('t')") == 1


def test_many_at_once_and_each_txn_is_there_once(db: Database) -> None:
    """Four sessions push the same 150 names to partitions of their own, in orders of their own."""
    names = [f"t{n}" for n in range(150)]
    start = threading.Barrier(4)

    def work(number: int) -> int:
        with db.connect("alice_producer") as connection:
            queen = Queen(connection)
            start.wait(10)
            mine = names if number % 2 else names[::-1]
            return sum(queen.push("q", n, partition=f"p{number}", txn=n).status == "queued" for n in mine)

    with ThreadPoolExecutor(4) as threads:
        queued = list(threads.map(work, range(4)))
    txns = [m.txn for m in Queen(db.superuser).pop("q", max_messages=10_000)]
    assert len(txns) == sum(queued)
    assert sorted(txns) == sorted(names)


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_a_fire_does_not_look(db: Database, queen: Queen, mode: str) -> None:
    """A timer whose txn is in the log already, unacknowledged, fires all the same."""

    def fire() -> None:
        if mode == "lock":
            assert db.value("select queen.fire_due()") == 1
        else:
            fired = db.rows(
                "select f.status from queen.log_timers_claim() c cross join lateral queen.log_timers_fire("
                "array[c.tenant_id], array[c.queue], array[c.timer_key], array[c.claim_token]) f"
            )
            assert fired == [("fired",)]

    queen.schedule("q", "k", "first", delay=-1, partition="p", txn="t")
    fire()
    first = queen.pop("q", "g")
    assert [(m.offset, m.txn, m.payload) for m in first] == [(1, "t", "first")]
    queen.schedule("q", "k", "second", delay=-1, partition="p", txn="t")
    queen.schedule("q", "other key", "third", delay=3600, partition="elsewhere", txn="t")
    fire()
    assert [(m.offset, m.txn, m.payload) for m in queen.pop("q", "h")] == [(1, "t", "first"), (2, "t", "second")]
    # A push does look, and finds the first.
    again = queen.push("q", "pushed", partition="p", txn="t")
    assert (again.status, again.offset, again.message_id) == ("duplicate", 1, first[0].message_id)
    assert [(s.offset, s.message_id) for s in queen.sent("q", "t")] == [(1, first[0].message_id)]

    queen.push("r", "pushed", txn="u")
    queen.schedule("r", "k", "fired", delay=-1, txn="u")
    fire()
    assert [m.payload for m in queen.pop("r")] == ["pushed", "fired"]


def test_the_txn_of_a_timer_is_known_to_a_later_push(db: Database, queen: Queen) -> None:
    verdict = queen.schedule("q", "k", 1, delay=-1)
    assert verdict.txn == str(verdict.message_id)
    assert queen.sent("q", str(verdict.txn)) == []
    assert db.value("select queen.fire_due()") == 1
    again = queen.push("q", 2, txn=str(verdict.txn))
    assert (again.status, again.offset, again.message_id) == ("duplicate", 1, verdict.message_id)


def test_a_dropped_queue_has_forgotten(queen: Queen) -> None:
    queen.push("q", 1, txn="t")
    queen.drop_queue("q")
    assert queen.sent("q", "t") == []
    assert queen.push("q", 2, txn="t").status == "queued"
