"""Dead letters: how a message gets there, once, and how it is listed and purged."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from pg_queen import DeadLetter, Queen

from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.sessions import Session


@pytest.fixture
def producing(producer: Connection) -> Queen:
    return Queen(producer)


@pytest.fixture
def consuming(consumer: Connection) -> Queen:
    return Queen(consumer)


def _bury(consuming: Queen, queue: str = "q", group: str = "g", error: str | None = "no") -> None:
    """Refuse everything a group has to read of a queue whose limit is one delivery."""
    while taken := consuming.pop(queue, group, max_messages=1):
        (message,) = taken
        assert message.lease_id is not None
        assert consuming.nack(queue, group, message.partition, message.lease_id, error).status == "nacked"


def _limit(db: Database, deliveries: int, queue: str = "q") -> None:
    db.execute(
        "select queen.configure_queue(%s, jsonb_build_object('delivery_max_attempts', %s::int))", queue, deliveries
    )


def test_a_letter_says_everything_of_its_message(
    db: Database, clock: Clock, producing: Queen, consuming: Queen
) -> None:
    clock.stop()
    _limit(db, 2)
    placed = producing.push("q", {"n": 1}, partition="p", txn="t")
    (first,) = consuming.pop("q", "g")
    assert first.lease_id is not None
    consuming.nack("q", "g", "p", first.lease_id, "once")
    (second,) = consuming.pop("q", "g")
    assert second.lease_id is not None
    given = consuming.nack("q", "g", "p", second.lease_id, "twice")
    assert (given.ok, given.status, given.acked, given.committed) == (True, "nacked", 0, 1)
    (letter,) = consuming.dlq_list("q")
    assert letter == DeadLetter(
        letter.id, "q", "p", "g", 1, placed.message_id, "t", {"n": 1}, None, "twice", 2, clock.now()
    )
    assert db.value("select producer_sub from queen.log_dlq") == "alice_producer"
    # The same message for another group is another matter.
    assert [m.offset for m in consuming.pop("q", "other")] == [1]


def test_the_same_message_nacked_twice_is_one_letter(db: Database, producing: Queen, consuming: Queen) -> None:
    _limit(db, 1)
    producing.push_many("q", [1, 2, 3])
    (message, *_) = consuming.pop("q", "g")
    assert message.lease_id is not None
    assert consuming.nack("q", "g", "Default", message.lease_id, "first").status == "nacked"
    for _ in range(3):
        again = consuming.nack("q", "g", "Default", message.lease_id, "again")
        assert (again.ok, again.status, again.acked, again.committed) == (False, "lease_lost", 0, 1)
    assert [(d.offset, d.error, d.attempts) for d in consuming.dlq_list("q")] == [(1, "first", 1)]
    assert [m.offset for m in consuming.pop("q", "g")] == [2, 3]


def test_a_message_that_is_not_held_cannot_be_refused(db: Database, producing: Queen, consuming: Queen) -> None:
    _limit(db, 1)
    producing.push("q", 1)
    producing.push("q", 2, partition="other")
    assert consuming.nack("q", "g", "Default", uuid4()).status == "absent"
    (held,) = consuming.pop("q", "g", partition="Default")
    assert held.lease_id is not None
    for group, partition, lease, status in [
        ("g", "Default", uuid4(), "lease_lost"),
        ("g", "other", held.lease_id, "absent"),
        ("h", "Default", held.lease_id, "absent"),
        ("g", "no such partition", held.lease_id, "absent"),
    ]:
        answer = consuming.nack("q", group, partition, lease, "not mine")
        assert (answer.ok, answer.status) == (False, status)
    assert consuming.dlq_list("q") == []
    assert consuming.ack("q", "g", "Default", held.lease_id).status == "acked"
    assert consuming.nack("q", "g", "Default", held.lease_id).status == "lease_lost"
    assert consuming.dlq_list("q") == []


def test_an_expired_lease_refuses_nothing(db: Database, clock: Clock, producing: Queen, consuming: Queen) -> None:
    _limit(db, 1)
    producing.push("q", 1)
    clock.stop()
    (message,) = consuming.pop("q", "g", lease="1 second")
    assert message.lease_id is not None
    clock.advance(timedelta(seconds=2))
    assert consuming.nack("q", "g", "Default", message.lease_id, "late").status == "lease_lost"
    assert consuming.dlq_list("q") == []
    # The pop is what finds it exhausted, and it goes with the reason that there is.
    assert consuming.pop("q", "g") == []
    assert [(d.attempts, d.error) for d in consuming.dlq_list("q")] == [(1, "delivered 1 times without an ack")]
    assert consuming.pop("q", "g") == []
    assert len(consuming.dlq_list("q")) == 1


def test_each_group_has_a_letter_of_its_own(db: Database, producing: Queen, consuming: Queen) -> None:
    _limit(db, 1)
    producing.push("q", 1)
    for group in ("g", "h"):
        _bury(consuming, group=group)
    assert sorted(d.consumer_group for d in consuming.dlq_list("q")) == ["g", "h"]


def test_payloads_of_every_kind(db: Database, producing: Queen, consuming: Queen) -> None:
    kinds: list[Any] = [None, {}, [1, "ü", None, {"a": []}], "", 1.5, "x" * 100_000]
    kinds += [b"", b"\x00\xff", b"y" * 1_048_576]
    _limit(db, 1)
    for payload in kinds:
        producing.push("q", payload)
    _bury(consuming)
    expected = [(None, kind) if isinstance(kind, bytes) else (kind, None) for kind in kinds]
    letters = sorted(consuming.dlq_list("q"), key=lambda letter: letter.offset or 0)
    assert [(d.payload, d.payload_bytes) for d in letters] == expected
    assert consuming.dlq_requeue("q") == len(kinds)
    assert [(m.payload, m.payload_bytes) for m in consuming.pop("q", "g")] == expected


def _timer_letter(db: Database, key: str, payload: Any, error: str = "broken") -> None:
    """A timer that used up its attempts, through the leased fire."""
    db.execute("select queen.configure('timer_max_attempts', '1')")
    Queen(db.superuser).schedule("q", key, payload, delay=0, partition=f"p{key}", txn=f"t{key}")
    statuses = db.rows(
        "select f.status from queen.log_timers_claim() c cross join lateral queen.log_timers_fail("
        "array[c.tenant_id], array[c.queue], array[c.timer_key], array[c.claim_token], %s) f",
        error,
    )
    assert statuses == [("archived",)]


def test_letters_of_timers(db: Database, consuming: Queen) -> None:
    for key, payload in [("a", {"n": 1}), ("b", b"\x00\x01"), ("c", "large " * 50_000), ("d", None)]:
        _timer_letter(db, key, payload)
    letters = sorted(consuming.dlq_list("q"), key=lambda letter: letter.txn)
    assert [(d.consumer_group, d.offset, d.partition, d.txn, d.error, d.attempts) for d in letters] == [
        ("__timer__", None, f"p{key}", f"t{key}", "broken", 1) for key in "abcd"
    ]
    assert [(d.payload, d.payload_bytes) for d in letters] == [
        ({"n": 1}, None),
        (None, b"\x00\x01"),
        ("large " * 50_000, None),
        (None, None),
    ]
    assert db.value("select count(*) from queen.log_timers") == 0


DAMAGED = {
    "no JSON": (b"{oops", False, False, b"{oops"),
    "no UTF-8": (b'"\xff"', False, False, b'"\xff"'),
    "empty": (b"", False, False, b""),
    "no zstandard": (b"not compressed", True, False, b"not compressed"),
    "zstandard cut off": (
        b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00",
        True,
        False,
        b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00",
    ),
    "a lying zstandard": (
        b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\xff\x01\x00\x00",
        True,
        False,
        b"\x28\xb5\x2f\xfd\xa0\xff\xff\xff\xff\x01\x00\x00",
    ),
    "encrypted": (b'{"looks": "like JSON"}', False, True, b'{"looks": "like JSON"}'),
    "encrypted and empty": (b"", False, True, b""),
}


def _insert(db: Database, payload: bytes, zstd: bool = False, encrypted: bool = False, queue: str = "q") -> UUID:
    letter: UUID = db.value(
        "insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, message_id, txn, payload,"
        " payload_zstd, encrypted, attempts, failed_at) values ('00000000-0000-0000-0000-000000000001', %s, 'p', 'g',"
        " gen_random_uuid(), 't', %s, %s, %s, 1, now()) returning id",
        queue,
        payload,
        zstd,
        encrypted,
    )
    return letter


def _insert_many(db: Database, letters: int, queues: str) -> None:
    db.execute(
        "insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, message_id, txn, payload, attempts,"
        " failed_at) select '00000000-0000-0000-0000-000000000001', q, 'p', 'g', gen_random_uuid(), 't', '1', 1, now()"
        f" from generate_series(1, {letters}), unnest({queues}) q"
    )


def test_what_cannot_be_read_is_shown_as_stored(db: Database, consuming: Queen) -> None:
    shown = {_insert(db, payload, zstd, encrypted): raw for payload, zstd, encrypted, raw in DAMAGED.values()}
    good = _insert(db, b'{"n": 1}')
    letters = {d.id: d for d in consuming.dlq_list("q")}
    assert {id_: (letters[id_].payload, letters[id_].payload_bytes) for id_ in shown} == {
        id_: (None, raw) for id_, raw in shown.items()
    }
    assert letters[good].payload == {"n": 1}
    assert len(letters) == len(DAMAGED) + 1


def test_the_list_goes_by_pages(db: Database, consuming: Queen, reader: Connection) -> None:
    # By the order of uuids, which is that of their bytes, whatever the collation.
    _insert_many(db, 25, "array['a', 'q', 'r']")
    everything = [d.id for d in consuming.dlq_list("q")]
    assert everything == sorted(everything)
    assert len(everything) == 25
    for page in (1, 3, 25, 26):
        assert [d.id for d in consuming.iter_dlq("q", page_size=page)] == everything
    assert [d.id for d in consuming.dlq_list("q", after=everything[9], max_rows=3)] == everything[10:13]
    assert consuming.dlq_list("q", after=everything[-1]) == []
    assert consuming.dlq_list("q", after="ffffffff-ffff-ffff-ffff-ffffffffffff") == []
    assert consuming.dlq_list("no such queue") == []
    assert [d.id for d in Queen(reader).dlq_list("q")] == everything
    # Letters come and go between the pages: each that stays is seen once.
    seen = []
    for letter in consuming.iter_dlq("q", page_size=4):
        seen.append(letter.id)
        consuming.dlq_purge("q", [letter.id])
        _insert(db, b"1")
    assert set(everything) <= set(seen)
    assert len(seen) == len(set(seen))


def test_the_page_is_read_by_the_key(db: Database) -> None:
    _insert_many(db, 2000, "array['q0', 'q1', 'q2', 'q3', 'q4', 'q5', 'q6', 'q7', 'q8', 'q9']")
    db.execute("vacuum analyze queen.log_dlq")
    middle = db.value("select id from queen.log_dlq where queue = 'q5' order by id offset 1000 limit 1")
    blocks = (
        "select sum(pg_stat_get_xact_blocks_fetched(r)) from unnest(array['queen.log_dlq'::regclass,"
        " 'queen.log_dlq_pkey']) r"
    )
    with db.superuser.transaction():
        before = db.value(blocks)
        assert len(db.rows("select * from queen.dlq_list('q5', %s, 10)", middle)) == 10
        assert db.value(blocks) - before < 40


def test_bad_arguments(db: Database, consumer: Connection) -> None:
    letter = _insert(db, b"1")
    for call, argument in [
        ("dlq_list('')", "queue"),
        ("dlq_list(null)", "queue"),
        ("dlq_list('q', max_rows => 0)", "max_rows"),
        ("dlq_list('q', max_rows => 100001)", "max_rows"),
        ("dlq_list('q', max_rows => null)", "max_rows"),
        ("dlq_requeue('')", "queue"),
        ("dlq_requeue(E'a\\nb')", "queue"),
        ("dlq_requeue('q', array[null]::uuid[])", "ids"),
        (f"dlq_requeue('q', array['{letter}', null]::uuid[])", "ids"),
        ("dlq_purge(null)", "queue"),
        (f"dlq_purge('q', array['{letter}', null]::uuid[])", "ids"),
    ]:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'argument "{argument}"') as refusal:
            consumer.execute(f"select * from queen.{call}")
        assert refusal.value.diag.message_hint, call
    assert db.value("select count(*) from queen.log_dlq") == 1


def test_purge(db: Database, consuming: Queen, session: Any) -> None:
    ids = [_insert(db, b"1") for _ in range(6)]
    elsewhere = _insert(db, b"1", queue="r")
    assert consuming.dlq_purge("q", []) == 0
    assert consuming.dlq_purge("q", [ids[0], ids[0], uuid4(), elsewhere]) == 1
    assert consuming.dlq_purge("q", [ids[0]]) == 0
    holder: Session = session(autocommit=False)
    holder.run("select from queen.log_dlq where id = %s for update", ids[1])
    assert consuming.dlq_purge("q", [ids[1], ids[2]]) == 1
    assert consuming.dlq_purge("q") == 3
    assert [d.id for d in consuming.dlq_list("q")] == [ids[1]]
    holder.run("rollback")
    assert consuming.dlq_purge("q") == 1
    assert [d.id for d in consuming.dlq_list("r")] == [elsewhere]
    assert consuming.dlq_purge("no such queue") == 0


def test_a_purge_that_is_rolled_back_keeps_the_letters(db: Database) -> None:
    letter = _insert(db, b"1")
    connection = db.connect("carl_consumer", autocommit=False)
    assert Queen(connection).dlq_purge("q") == 1
    connection.rollback()
    assert [d.id for d in Queen(connection).dlq_list("q")] == [letter]
