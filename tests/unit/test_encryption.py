"""Payloads that are encrypted when they are scheduled or pushed."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.keys import KeyFile, key
from tests.support.log import FRAMES

SECRET = "attack at dawn, attack at dawn, attack at dawn"
A = "00000000-0000-0000-0000-0000000000aa"

WAYS = {
    "schedule": "select queen.schedule('q', 'k', %s, '0', \"partition\" => 'p')",
    "schedule_bytes": "select queen.schedule_bytes('q', 'k', %s, '0', \"partition\" => 'p')",
    "schedule_many": "select queen.schedule_many('q', array['k'], array[%s]::jsonb[], array['0']::interval[],"
    " partitions => array['p'])",
    "apply": "select queen.apply(%s)",
    "transaction, a timer": "select queen.transaction(%s)",
    "transaction, a push": "select queen.transaction(%s)",
    "push": "select queen.push('q', %s, 'p')",
    "push_bytes": "select queen.push_bytes('q', %s, 'p')",
    "push_many": "select queen.push_many('q', array[%s]::jsonb[], 'p')",
}


def argument(way: str) -> Any:
    if way.endswith("bytes"):
        return SECRET.encode()
    if way in ("apply", "transaction, a timer"):
        op = {"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 0}
        return Jsonb([{**op, "partition": "p", "payload": SECRET}])
    if way == "transaction, a push":
        return Jsonb([{"op": "push", "queue": "q", "partition": "p", "payload": SECRET}])
    return Jsonb(SECRET)


@pytest.fixture
def keys(db: Database) -> KeyFile:
    """A key file with one key, k1, and the queue q encrypted with it."""
    file = KeyFile(db).use(key("k1"))
    db.execute("select queen.configure_queue('q', '{\"encrypt\": true}')")
    return file


def push(connection: Connection, payload: object, part: str = "p", queue: str = "q") -> None:
    connection.execute("select queen.push(%s, %s, %s)", [queue, Jsonb(payload), part])


def pop(connection: Connection, part: str | None = None, group: str = "g", queue: str = "q") -> list[Any]:
    """Payloads of a pop, in order."""
    statement = "select payload from queen.pop(%s, %s, \"partition\" => %s, lease => '1 s')"
    return [payload for (payload,) in connection.execute(statement, [queue, group, part]).fetchall()]


def refused(connection: Connection, statement: str, *values: Any, says: str) -> None:
    """QN011 with a message that says so, a hint, and no word of what is secret."""
    with pytest.raises(psycopg.Error) as caught:
        connection.execute(statement, values)
    assert caught.value.sqlstate == "QN011", caught.value
    assert says in str(caught.value.diag.message_primary)
    assert not str(caught.value.diag.message_primary).startswith("plpy")
    assert caught.value.diag.message_hint
    for secret in ("attack", key("k1").split()[1]):
        assert secret not in str(caught.value)


POP_P = "select queen.pop('q', 'g', \"partition\" => 'p')"


@pytest.mark.parametrize("way", WAYS)
def test_there_and_back(db: Database, producer: Connection, consumer: Connection, keys: KeyFile, way: str) -> None:
    producer.execute(WAYS[way], [argument(way)])
    peeked = producer.execute("select encrypted, payload, payload_bytes from queen.peek('q', 'k')").fetchall()
    assert peeked == ([(True, None, None)] if "push" not in way else [])
    for table in ("log_timers", "log_segments"):
        assert b"attack" not in b"".join(
            bytes.fromhex(row.removeprefix("\\x")) if row.startswith("\\x") else row.encode()
            for (row,) in db.rows(
                "select coalesce(j.value, '') from queen." + table + " t, jsonb_each_text(to_jsonb(t)) j"
            )
        )
    db.value("select queen.fire_due()")
    frames = db.rows(f"select u.encrypted, u.payload from queen.log_segments s, {FRAMES}")
    assert [encrypted for encrypted, _ in frames] == [True]
    assert b"attack" not in frames[0][1]
    assert frames[0][1][:4] == b"\x01\x02k1"
    got = consumer.execute("select payload, payload_bytes from queen.pop('q', 'g')").fetchall()
    assert got == [(None, SECRET.encode()) if way.endswith("bytes") else (SECRET, None)]


def test_another_queue_stays_as_it_is(db: Database, producer: Connection, consumer: Connection, keys: KeyFile) -> None:
    push(producer, SECRET, queue="clear")
    unpacked = db.rows(f"select u.encrypted, u.payload from queen.log_segments s, {FRAMES}")
    assert unpacked == [(False, f'"{SECRET}"'.encode())]
    # Of the whole database at once, and a queue taken out of it.
    db.execute("select queen.configure('encrypt', 'true')")
    db.execute("select queen.configure_queue('q', '{\"encrypt\": false}')")
    for queue in ("clear", "q"):
        push(producer, SECRET, "now", queue)
    rows = db.rows(
        "select p.name, u.encrypted from queen.log_partitions p join queen.log_segments s on s.partition_id = p.id"
        f" cross join {FRAMES} where p.name = 'now' order by p.id"
    )
    assert rows == [("now", True), ("now", False)]
    assert pop(consumer, queue="clear") == [SECRET, SECRET]


def test_no_two_messages_look_alike(db: Database, producer: Connection, keys: KeyFile) -> None:
    for _ in range(2):
        producer.execute("select queen.push_many('q', array_fill(%s::jsonb, array[50]))", [Jsonb(SECRET)])
        producer.execute(
            "select queen.schedule_many('q', array(select gen_random_uuid()::text from generate_series(1, 50)),"
            " array_fill(%s::jsonb, array[50]), array_fill(interval '0', array[50]))",
            [Jsonb(SECRET)],
        )
    assert db.value("select queen.fire_due()") == 100
    statement = f"from queen.log_segments s, {FRAMES}"
    assert db.rows(f"select count(distinct u.payload), count(distinct substr(u.payload, 5, 12)) {statement}") == [
        (200, 200)
    ]


def test_a_new_key_is_appended(db: Database, producer: Connection, consumer: Connection, keys: KeyFile) -> None:
    push(producer, 1)
    keys.write("# since 2026", key("k1"), "", key("k-2.b_3"))
    push(producer, 2)
    names = db.rows(
        "select encode(substr(u.payload, 3, get_byte(u.payload, 1)), 'escape')"
        f" from queen.log_segments s, {FRAMES} order by s.base_offset"
    )
    assert names == [("k1",), ("k-2.b_3",)]
    assert pop(consumer) == [1, 2]
    # Nothing is encrypted with the old one any more, and what was is gone or unread: it can go.
    keys.write(key("k-2.b_3"))
    assert consumer.execute("select queen.seek('q', 'g', 2, \"partition\" => 'p')").fetchone() == (1,)
    assert pop(consumer, "p") == [2]
    refused(consumer, POP_P.replace("'g'", "'h'"), says='"k1"')


@pytest.mark.parametrize("loss", ["removed", "another file", "another key", "another key by that name", "unset"])
def test_without_the_key_the_message_stays(
    db: Database, producer: Connection, consumer: Connection, keys: KeyFile, clock: Clock, loss: str
) -> None:
    clock.stop()
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 2}')")
    push(producer, SECRET)
    db.execute("select queen.configure_queue('q', '{\"encrypt\": false}')")
    push(producer, "clear", "other")
    push(producer, "another queue", queue="r")
    match loss:
        case "removed":
            keys.remove()
        case "another file":
            KeyFile(db).use(key("k2"))
        case "another key":
            keys.write(key("k2"))
        case "another key by that name":
            keys.write(key("k1", "another"))
        case "unset":
            db.execute("select queen.configure('key_file', null)")
    for _ in range(3):
        refused(consumer, POP_P, says="key")
    assert db.value("select count(*) from queen.log_consumers where attempts > 0 or lease_id is not null") == 0
    notices: list[tuple[str | None, str | None]] = []
    consumer.add_notice_handler(lambda notice: notices.append((notice.sqlstate, notice.message_primary)))
    assert pop(consumer) == ["clear"]
    ((state, message),) = notices
    assert state == "QN011"
    assert message
    assert not message.startswith("plpy")
    assert "key" in db.value("select last_error from queen.log_consumers where last_error is not null")
    assert pop(consumer, queue="r") == ["another queue"]
    # In a minute it is tried again, and never counted.
    for _ in range(3):
        clock.advance(timedelta(seconds=61))
        assert SECRET not in pop(consumer)
    keys.use(key("k1"))
    clock.advance(timedelta(seconds=61))
    assert SECRET in pop(consumer)
    assert db.value("select count(*) from queen.log_dlq where partition = 'p'") == 0


def test_without_a_key_nothing_is_promised(
    db: Database, producer: Connection, consumer: Connection, keys: KeyFile
) -> None:
    producer.execute("select queen.schedule('q', 'k', %s, '0')", [Jsonb(SECRET)])
    keys.remove()
    for way, statement in WAYS.items():
        refused(producer, statement, argument(way), says="key file cannot be read: No such file")
    for statement in (
        "select queen.schedule('r', 'k', '1', '0')",
        "select queen.push('r', '2')",
        "select queen.cancel('q', 'another')",
        "select queen.reschedule('q', 'k', '0')",
    ):
        producer.execute(statement)
    # The fire carries what is encrypted as it is, and needs no key for it.
    assert db.value("select queen.fire_due()") == 2
    assert pop(consumer, queue="r") == [2, 1]
    keys.write(key("k1"))
    assert pop(consumer) == [SECRET]


CHANGES = {
    "the payload": "overlay(u.payload placing '\\x00' from octet_length(u.payload) - 20)",
    "the nonce": "overlay(u.payload placing '\\x000000' from 6)",
    "the length": "substr(u.payload, 1, 20)",
    "the version": "overlay(u.payload placing '\\x02' from 1)",
    "nothing left": "''::bytea",
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_is_refused(db: Database, producer: Connection, keys: KeyFile, change: str) -> None:
    push(producer, SECRET)
    db.execute(
        "update queen.log_segments s set (blob, raw_bytes) ="
        " (select queen._segment_pack(f.raw, 1), octet_length(f.raw) from"
        f" (select queen._frame(u.message_id, u.txn, u.producer_sub, null, true, {CHANGES[change]}) as raw"
        f" from {FRAMES}) f)"
    )
    refused(db.superuser, POP_P, says="message ")


MOVES = {
    "nothing": "",
    "message id": "update queen.log_timers set message_id = gen_random_uuid()",
    "partition": "update queen.log_timers set partition = 'other'",
    "queue": "update queen.log_timers set queue = 'other'",
    "tenant": f"update queen.log_timers set tenant_id = '{A}'",
}


@pytest.mark.parametrize("move", MOVES)
def test_what_was_moved_by_hand_is_refused(db: Database, producer: Connection, keys: KeyFile, move: str) -> None:
    """A payload says who it is for: put into another row, it is not decrypted for those who read that."""
    db.execute("select queen.create_tenant(%s::uuid, 'a')", A)
    producer.execute("select queen.schedule('q', 'k', %s, '0', \"partition\" => 'p')", [Jsonb(SECRET)])
    if MOVES[move]:
        db.execute(MOVES[move])
    assert db.value("select queen.fire_due()") == 1
    statement = "select payload from queen.pop(%s, 'g', \"partition\" => %s, tenant => %s)"
    values = (
        "other" if move == "queue" else "q",
        "other" if move == "partition" else "p",
        A if move == "tenant" else None,
    )
    if move == "nothing":
        assert db.rows(statement, *values) == [(SECRET,)]
    else:
        refused(db.superuser, statement, *values, says="cannot be decrypted")


def test_encrypted_afterwards_it_delivers_in_clear(
    db: Database, producer: Connection, consumer: Connection, keys: KeyFile
) -> None:
    producer.execute("select queen.schedule('r', 'before', %s, '0')", [Jsonb(SECRET)])
    db.execute("select queen.configure_queue('r', '{\"encrypt\": true}')")
    look = "select encrypted, payload from queen.peek('r', 'before')"
    assert producer.execute(look).fetchall() == [(False, SECRET)]
    # A new date is no new payload; a new payload is encrypted, and one from before is replaced.
    producer.execute("select queen.reschedule('r', 'before', '0')")
    assert producer.execute(look).fetchall() == [(False, SECRET)]
    producer.execute("select queen.schedule('r', 'before', %s, '0')", [Jsonb(SECRET)])
    assert producer.execute(look).fetchall() == [(True, None)]
    db.execute("select queen.configure_queue('r', '{\"encrypt\": false}')")
    producer.execute("select queen.schedule('r', 'after', '2', '0')")
    assert db.value("select queen.fire_due()") == 2
    assert sorted(map(str, pop(consumer, queue="r"))) == ["2", SECRET]


def test_large_and_empty_payloads(db: Database, producer: Connection, consumer: Connection, keys: KeyFile) -> None:
    for size in (0, 1, 300_000):
        producer.execute("select queen.push_bytes('q', %s)", [bytes(size)])
        producer.execute("select queen.schedule_bytes('q', %s, %s, '0')", [f"k{size}", bytes(size)])
    assert db.value("select bool_or(payload_zstd) from queen.log_timers") is False
    assert db.value("select queen.fire_due()") == 3
    rows = consumer.execute("select payload_bytes from queen.pop('q', 'g')").fetchall()
    assert sorted(len(row[0]) for row in rows) == [0, 0, 1, 1, 300_000, 300_000]


def test_dead_letters(db: Database, consumer: Connection, producer: Connection, reader: Connection) -> None:
    keys = KeyFile(db).use(key("k1"))
    db.execute("select queen.configure_queue('q', '{\"encrypt\": true, \"delivery_max_attempts\": 1}')")
    push(producer, SECRET)
    (lease,) = consumer.execute("select lease_id from queen.pop('q', 'g')").fetchone() or (None,)
    consumer.execute("select queen.nack('q', 'g', 'p', %s, 'no')", [lease])
    look = "select payload, payload_bytes from queen.dlq_list('q')"
    assert consumer.execute(look).fetchall() == [(SECRET, None)]
    # Who may look but not consume sees what is stored.
    ((payload, stored),) = reader.execute(look).fetchall()
    assert payload is None
    assert stored[:4] == b"\x01\x02k1"
    keys.remove()
    ((payload, stored),) = consumer.execute(look).fetchall()
    assert payload is None
    assert stored[:4] == b"\x01\x02k1"
    # Sent again, it is the same message in the same place, and is read where the key is.
    assert consumer.execute("select queen.dlq_requeue('q')").fetchone() == (1,)
    keys.write(key("k1"))
    assert pop(consumer) == [SECRET]


def test_segments_are_handed_over_as_they_are(db: Database, producer: Connection, keys: KeyFile) -> None:
    push(producer, SECRET)
    keys.remove()
    blob = db.value("select segment from queen.pop_segments('q', 'g')")
    unpacked = "queen._segment_unpack(%s, s.raw_bytes, 1, 1, 1, 1, 'x')"
    assert db.rows(f"select encrypted from queen.log_segments s, {unpacked}", blob) == [(True,)]
