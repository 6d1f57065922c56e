"""Dead letters requeued: where the message says it came from, and once whatever runs beside it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pytest
from pg_queen import Queen
from pg_queen.segment import decode

from tests.conftest import StartSession
from tests.support.database import Connection, Database


@pytest.fixture
def consuming(consumer: Connection) -> Queen:
    return Queen(consumer)


def _letter(
    db: Database,
    payload: bytes = b"1",
    queue: str = "q",
    partition: str = "p",
    group: str = "g",
    offset: int | None = 5,
    txn: str = "t",
    zstd: bool = False,
) -> UUID:
    letter: UUID = db.value(
        'insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, "offset", message_id, txn, payload,'
        " payload_zstd, producer_sub, attempts, failed_at) values ('00000000-0000-0000-0000-000000000001', %s, %s, %s,"
        " %s, gen_random_uuid(), %s, %s, %s, 'somebody', 1, clock_timestamp()) returning id",
        queue,
        partition,
        group,
        offset,
        txn,
        payload,
        zstd,
    )
    return letter


def test_the_message_says_where_it_came_from(db: Database, consuming: Queen, producer: Connection) -> None:
    Queen(db.superuser).configure_queue("q", {"delivery_max_attempts": 1})
    placed = Queen(producer).push_many("q", [1, {"n": 2}], partition="p", txns=[None, "mine"])
    for _ in range(2):
        (message,) = consuming.pop("q", "g", max_messages=1)
        assert message.lease_id is not None
        consuming.nack("q", "g", "p", message.lease_id, "no")
    letters = {d.offset: d for d in consuming.dlq_list("q")}
    assert consuming.dlq_requeue("q") == 2
    assert consuming.dlq_list("q") == []
    # For every group, behind what is there, in the order in which they were given up.
    for group in ("g", "another"):
        again = [m for m in consuming.pop("q", group) if m.offset > 2]
        assert [(m.offset, m.partition, m.payload, m.message_id, m.producer_sub) for m in again] == [
            (3, "p", 1, placed[0].message_id, "alice_producer"),
            (4, "p", {"n": 2}, placed[1].message_id, "alice_producer"),
        ]
        assert [m.txn for m in again] == [
            f"dlq:{letters[1].id}:g:1:{placed[0].message_id}",
            f"dlq:{letters[2].id}:g:2:mine",
        ]
        assert [m.delivery_attempt for m in again] == [1, 1]
    # The log knows it under that name, and the name of the first still means the first.
    (found,) = db.rows('select "partition", "offset", message_id from queen.sent(%s, %s)', "q", again[1].txn)
    assert found == ("p", 4, placed[1].message_id)
    assert Queen(db.superuser).push("q", 0, txn="mine").offset == 2


def test_letters_of_timers_become_messages(db: Database, consuming: Queen) -> None:
    db.execute("select queen.configure('timer_max_attempts', '1')")
    timers = Queen(db.superuser)
    kinds = {"json": {"n": 1}, "bytes": b"\x00x", "large": "long " * 20_000, "null": None}
    due = {}
    for key, payload in kinds.items():
        verdict = timers.schedule("made by the requeue", key, payload, delay=-1, partition=key, txn=f"txn {key}")
        due[key] = (verdict.message_id, verdict.deliver_at)
    db.execute(
        "select queen.log_timers_fail(array_agg(c.tenant_id), array_agg(c.queue), array_agg(c.timer_key),"
        " array_agg(c.claim_token), 'broken') from queen.log_timers_claim() c"
    )
    letters = {d.partition: d for d in consuming.dlq_list("made by the requeue")}
    assert db.rows("select * from queen.queues") == []
    assert consuming.dlq_requeue("made by the requeue") == 4
    messages = {m.partition: m for m in consuming.pop("made by the requeue", "g")}
    for key, payload in kinds.items():
        message = messages[key]
        assert message.txn == f"dlq:{letters[key].id}:__timer__::txn {key}"
        assert (message.message_id, message.offset) == (due[key][0], 1)
        assert (message.payload_bytes if isinstance(payload, bytes) else message.payload) == payload
    # The frame still has the due time.
    assert db.value("select count(*) from queen.log_timers") == 0
    stored = {
        name: next(decode(blob)).deliver_at_us
        for name, blob in db.rows(
            "select p.name, s.blob from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id"
        )
    }
    microseconds = "select extract(epoch from %s - timestamptz '2000-01-01 00:00:00Z') * 1000000"
    assert stored == {key: db.value(microseconds, at) for key, (_, at) in due.items()}


def test_ids_choose(db: Database, consuming: Queen) -> None:
    letters = [_letter(db, str(n).encode(), partition=f"p{n % 2}") for n in range(6)]
    elsewhere = _letter(db, queue="r")
    assert consuming.dlq_requeue("q", []) == 0
    assert consuming.dlq_requeue("q", [elsewhere, uuid4()]) == 0
    assert db.rows("select * from queen.log_segments") == []
    assert db.rows("select * from queen.queues") == []
    assert consuming.dlq_requeue("q", [letters[3], letters[1], letters[3], letters[2], elsewhere]) == 3
    assert sorted((m.partition, m.offset, m.payload) for m in consuming.pop("q")) == [
        ("p0", 1, 2),
        ("p1", 1, 1),
        ("p1", 2, 3),
    ]
    assert consuming.dlq_requeue("q", letters[1:4]) == 0
    assert consuming.dlq_requeue("q") == 3
    assert consuming.dlq_requeue("q") == 0
    assert [d.id for d in consuming.dlq_list("r")] == [elsewhere]


def test_damaged_letters_stay(db: Database, consuming: Queen) -> None:
    stay = {
        _letter(db, b""),
        _letter(db, b"no zstandard", zstd=True),
        _letter(db, b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\xff\x01\x00\x00", zstd=True),
    }
    # A payload that is no JSON is a matter of whoever reads it.
    _letter(db, b"{oops")
    _letter(db, b"7")
    assert consuming.dlq_requeue("q") == 2
    assert {d.id for d in consuming.dlq_list("q")} == stay
    assert [(m.payload, m.payload_bytes) for m in consuming.pop("q")] == [(None, b"{oops"), (7, None)]


def test_locked_letters_are_skipped(db: Database, consuming: Queen, session: StartSession) -> None:
    held, free = _letter(db), _letter(db)
    holder = session(autocommit=False)
    holder.run("select from queen.log_dlq where id = %s for update", held)
    consuming.connection.execute("set lock_timeout = '5s'")
    assert consuming.dlq_requeue("q") == 1
    assert consuming.dlq_requeue("q", [held]) == 0
    assert [d.id for d in consuming.dlq_list("q")] == [held]
    holder.run("rollback")
    assert consuming.dlq_requeue("q", [held, free]) == 1
    assert len(consuming.pop("q")) == 2


def test_a_requeue_that_is_rolled_back_changes_nothing(db: Database) -> None:
    letter = _letter(db)
    connection = db.connect("carl_consumer", autocommit=False)
    queen = Queen(connection)
    assert queen.dlq_requeue("q") == 1
    connection.rollback()
    assert [d.id for d in queen.dlq_list("q")] == [letter]
    assert queen.pop("q") == []
    connection.rollback()
    assert db.rows("select * from queen.log_segments") == []


def test_a_busy_partition_is_waited_for(db: Database, session: StartSession) -> None:
    letter = _letter(db)
    pusher, requeuer, other = session(autocommit=False), session("carl_consumer"), session("carl_consumer")
    pusher.run("select queen.push('q', '1', 'p')")
    waiting = requeuer.start("select queen.dlq_requeue('q')")
    requeuer.wait_until_blocked()
    # A second one waits behind it, and one of them gets the letter.
    second = other.start("select queen.dlq_requeue('q', array[%s])", letter)
    other.wait_until_blocked()
    pusher.run("commit")
    assert waiting.result(10) + second.result(10) in ([(1,), (0,)], [(0,), (1,)])
    assert [m.offset for m in Queen(db.superuser).pop("q")] == [1, 2]


def _race(db: Database, queue: str, ids: list[UUID]) -> dict[str, int]:
    """Two requeues, one without ids, beside a purge of some."""
    barrier = threading.Barrier(3)
    calls: list[tuple[str, Callable[[Queen], int]]] = [
        ("requeued", lambda queen: queen.dlq_requeue(queue)),
        ("requeued", lambda queen: queen.dlq_requeue(queue, ids[::-1])),
        ("purged", lambda queen: queen.dlq_purge(queue, ids[::5])),
    ]

    def work(call: Callable[[Queen], int]) -> int:
        with db.connect("carl_consumer") as connection:
            barrier.wait(10)
            return call(Queen(connection))

    ended: Counter[str] = Counter()
    with ThreadPoolExecutor(3) as threads:
        for (what, _), done in zip(calls, threads.map(work, [call for _, call in calls]), strict=True):
            ended[what] += done
    return ended


def test_two_sessions_requeue_each_letter_once(db: Database) -> None:
    for number in range(15):
        queue = f"q{number}"
        db.execute(
            "insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, message_id, txn, payload,"
            " attempts, failed_at) select '00000000-0000-0000-0000-000000000001', %s, 'p' || n %% 4, 'g',"
            " gen_random_uuid(), 't', '1', 1, now() from generate_series(1, 40) n",
            queue,
        )
        ids = [id_ for (id_,) in db.rows("select id from queen.log_dlq where queue = %s", queue)]
        ended = _race(db, queue, ids)
        messages = Queen(db.superuser).pop(queue, max_messages=1000)
        assert len(messages) == len({m.message_id for m in messages}) == ended["requeued"]
        assert ended["requeued"] + ended["purged"] == 40
        assert Queen(db.superuser).dlq_list(queue) == []


def test_requeue_and_drop_queue_do_not_wait_for_each_other(db: Database, session: StartSession) -> None:
    """Whoever held letters while it waits for a partition would meet one who drops partition and letters."""
    queen = Queen(db.superuser)
    for partition in ("first", "second"):
        queen.push("q", 1, partition=partition)
        _letter(db, partition=partition)
    pusher, dropper, requeuer = session(autocommit=False), session("ada_admin"), session("carl_consumer")
    pusher.run("select queen.push('q', '2', 'second')")
    dropped = dropper.start("select queen.drop_queue('q')")
    dropper.wait_until_blocked()
    requeued = requeuer.start("select queen.dlq_requeue('q')")
    requeuer.wait_until_blocked()
    pusher.run("commit")
    assert dropped.result(10)[0][0]["existed"] is True
    assert requeued.result(10) == [(0,)]
    assert db.rows("select * from queen.log_dlq") == []


def test_many_large_letters_are_requeued(db: Database, consuming: Queen) -> None:
    """More than fits in one segment: a field of the server ends at 1 GiB, and a pop at pop_max_bytes."""
    db.execute("select queen.configure('batch_max_bytes', '100000')")
    db.execute(
        "insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, message_id, txn, payload, attempts,"
        " failed_at) select '00000000-0000-0000-0000-000000000001', 'q', 'p', 'g', gen_random_uuid(), 't',"
        " ('\"' || repeat('x', 20000) || '\"')::bytea, 1, now() from generate_series(1, 20)"
    )
    assert consuming.dlq_requeue("q") == 20
    assert db.value("select max(raw_bytes) < 130000 from queen.log_segments")
    assert len(consuming.pop("q")) == 20


def test_a_message_that_fails_again_and_again_is_requeued_each_time(db: Database, consuming: Queen) -> None:
    """The txn tells where it came from, and must not grow without end: a frame has two bytes for its length."""
    Queen(db.superuser).configure_queue("q", {"delivery_max_attempts": 1})
    Queen(db.superuser).push("q", 1, txn="t" * 255)
    for _ in range(12):
        (message,) = consuming.pop("q", "g" * 255)
        assert message.lease_id is not None
        consuming.nack("q", "g" * 255, "Default", message.lease_id)
        assert consuming.dlq_requeue("q") == 1
    (message,) = consuming.pop("q", "g" * 255)
    assert message.txn.startswith("dlq:")
    assert len(message.txn) < 1000
