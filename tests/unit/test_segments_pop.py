"""pop_segments hands over what pop hands over: the same messages, leases, acks, attempts and refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from datetime import timedelta
from decimal import Decimal
from functools import partial
from json import loads
from typing import Any

import psycopg
import pytest
from pg_queen import KeyUnusable, Message, Queen, segment
from psycopg.types.json import set_json_loads

from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.keys import KeyFile, key


@pytest.fixture
def producing(producer: Connection) -> Queen:
    return Queen(producer)


@pytest.fixture
def consuming(consumer: Connection) -> Queen:
    return Queen(consumer)


def _comparable(messages: Iterable[Message]) -> list[tuple[Any, ...]]:
    """Messages by place, without their lease."""
    rows = [dataclasses.astuple(dataclasses.replace(message, lease_id=None)) for message in messages]
    return sorted(rows, key=lambda row: row[1:3])


def test_the_messages_are_those_of_pop(db: Database, producing: Queen, consuming: Queen) -> None:
    kinds: list[Any] = [None, 0, 1e30, "", 'ü \U0001f389 \\ " \n', {}, [], {"a": [None, {"b": 1.25}]}, "x" * 300_000]
    producing.push_many("q", kinds, partition="p", txns=["t\u00e9", *[None] * (len(kinds) - 1)])
    for payload in (b"", b"\x00\xff", b"y" * 100_000, "alone"):
        producing.push("q", payload, partition="p")
    producing.push_many("q", list(range(2000)), partition="many")
    for number in range(20):
        producing.push("q", number, partition=f"n{number}")
        producing.schedule(
            "q", f"k{number}", {"timer": number}, delay=-number, partition=f"n{number}", txn=f"t{number}"
        )
    producing.schedule("q", "long", "long " * 50_000, delay=-1, partition="p")
    # By hand: what no producer can send.
    db.execute("select queen.schedule('q', 'broken', '1', '-1 second', partition => 'p')")
    db.execute("update queen.log_timers set payload = '{oops' where timer_key = 'broken'")
    assert db.value("select queen.fire_due()") == 22
    everything = consuming.pop("q", "a", max_messages=10_000)
    assert len(everything) == len(kinds) + 4 + 2000 + 20 + 20 + 2
    assert {type(m.payload_bytes) for m in everything} == {bytes, type(None)}
    assert _comparable(consuming.pop_segments("q", "b", max_messages=10_000)) == _comparable(everything)

    # A slice of a segment, and across segments.
    seen: list[Message] = []
    for size in (1, 3, 7, 100):
        for name in ("p", "many"):
            taken = list(consuming.pop_segments("q", "c", size, partition=name))
            assert [m.offset for m in taken] == [m.offset for m in consuming.pop("q", "d", size, partition=name)]
            assert len({m.lease_id for m in taken}) == 1
            seen += taken
            for group in ("c", "d"):
                lease = db.value(
                    "select lease_id from queen.log_consumers c join queen.log_partitions p"
                    " on p.id = c.partition_id where p.name = %s and consumer_group = %s",
                    name,
                    group,
                )
                assert consuming.ack("q", group, name, lease).status == "acked"
    places = {(m.partition, m.offset) for m in seen}
    assert len(places) == len(seen)
    assert _comparable(seen) == [row for row in _comparable(everything) if (row[1], row[2]) in places]


def test_encrypted_messages_are_for_pop(db: Database, producing: Queen, consuming: Queen) -> None:
    KeyFile(db).use(key("k"))
    producing.push("q", "open")
    db.execute("select queen.configure_queue('q', '{\"encrypt\": true}')")
    secret = producing.push("q", "secret")
    messages = consuming.pop_segments("q", "a")
    assert next(messages).payload == "open"
    with pytest.raises(KeyUnusable, match=f"message {secret.message_id} is encrypted") as caught:
        next(messages)
    assert (caught.value.sqlstate, caught.value.hint) == ("QN011", "Use pop, which decrypts in the server.")
    assert [m.payload for m in consuming.pop("q", "b")] == ["open", "secret"]


def test_the_slice_is_what_was_asked_for(db: Database, producing: Queen, consumer: Connection) -> None:
    producing.push_many("q", list(range(10)))
    producing.push_many("q", list(range(10, 15)))
    rows = consumer.execute(
        "select from_offset, to_offset, base_offset, segment, delivery_attempt, attempted_to"
        " from queen.pop_segments('q', 'g', 12, auto_ack => true)"
    ).fetchall()
    assert [(row[0], row[1], row[2]) for row in rows] == [(1, 10, 1), (11, 12, 11)]
    assert [f.offset for f in segment.decode(rows[1][3], 11)] == [11, 12, 13, 14, 15]
    assert [(row[4], row[5]) for row in rows] == [(1, 0), (1, 0)]
    rows = consumer.execute("select from_offset, to_offset, base_offset from queen.pop_segments('q', 'g')").fetchall()
    assert rows == [(13, 15, 11)]
    assert consumer.execute("select * from queen.pop_segments('q', 'g')").fetchall() == []
    assert consumer.execute("select * from queen.pop_segments('no such queue')").fetchall() == []


def test_leases_and_acks_are_the_same(clock: Clock, producing: Queen, consuming: Queen) -> None:
    clock.stop()
    producing.push_many("q", list(range(6)))
    first, *rest = consuming.pop_segments("q", "g", 3, lease="10 seconds")
    assert first.lease_id is not None
    assert {m.lease_id for m in rest} == {first.lease_id}
    # Held against both forms.
    assert list(consuming.pop_segments("q", "g")) == []
    assert consuming.pop("q", "g") == []
    assert consuming.ack("q", "g", "Default", first.lease_id, up_to=1).committed == 1
    assert consuming.extend("q", "g", "Default", first.lease_id, 60).status == "extended"
    clock.advance(timedelta(seconds=30))
    assert list(consuming.pop_segments("q", "g")) == []
    assert consuming.nack("q", "g", "Default", first.lease_id, "no", delay=5).status == "nacked"
    assert list(consuming.pop_segments("q", "g")) == []
    clock.advance(timedelta(seconds=5))
    again = list(consuming.pop_segments("q", "g", 4, lease="10 seconds"))
    # What came along the last time is delivered again, what follows is new.
    assert [(m.offset, m.delivery_attempt) for m in again] == [(2, 2), (3, 2), (4, 1), (5, 1)]
    assert consuming.ack("q", "g", "Default", first.lease_id).status == "lease_lost"
    clock.advance(timedelta(seconds=11))
    assert consuming.ack("q", "g", "Default", str(again[0].lease_id)).status == "lease_lost"
    assert [(m.offset, m.delivery_attempt) for m in consuming.pop("q", "g")] == [(2, 3), (3, 3), (4, 3), (5, 3), (6, 1)]


def test_a_consumer_that_dies_each_time_reaches_the_dead_letters(
    db: Database, clock: Clock, producing: Queen, consuming: Queen
) -> None:
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 3}')")
    clock.stop()
    producing.push_many("q", ["poison", "good", "better"])
    seen = []
    for _ in range(4):
        seen.append([(m.offset, m.delivery_attempt) for m in consuming.pop_segments("q", "g", lease=1)])
        clock.advance(timedelta(seconds=2))
    # The last delivery carries the head alone; then the rest flows on.
    assert seen[:3] == [[(1, 1), (2, 1), (3, 1)], [(1, 2), (2, 2), (3, 2)], [(1, 3)]]
    assert [offset for offset, _ in seen[3]] == [2, 3]
    assert [d.payload for d in consuming.dlq_list("q")] == ["poison"]


def test_auto_ack_and_arguments(producing: Queen, consuming: Queen, consumer: Connection) -> None:
    producing.push_many("q", [1, 2])
    producing.push("q", 3, partition="p")
    taken = list(consuming.pop_segments("q", auto_ack=True, partition="Default"))
    assert [(m.payload, m.lease_id) for m in taken] == [(1, None), (2, None)]
    assert [m.payload for m in consuming.pop_segments("q", auto_ack=True)] == [3]
    assert consuming.pop("q") == []
    for call, argument in [
        ("''", "queue"),
        ("'q', '__timer__'", "consumer_group"),
        ("'q', 'g', 0", "max_messages"),
        ("'q', 'g', 100001", "max_messages"),
        ("'q', 'g', null", "max_messages"),
        ("'q', 'g', 1, '0 seconds'", "lease"),
        ("'q', 'g', 1, '2 days'", "lease"),
        ("'q', 'g', 1, '1 second', ''", "partition"),
        ("'q', 'g', 1, '1 second', 'p', null", "auto_ack"),
    ]:
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'argument "{argument}"'):
            consumer.execute(f"select * from queen.pop_segments({call})")


def test_two_consumers_of_a_group_take_different_partitions(db: Database, producing: Queen) -> None:
    for number in range(6):
        producing.push_many("q", [number] * 3, partition=f"p{number}")
    one, two = (Queen(db.connect("carl_consumer", autocommit=False)) for _ in range(2))
    two.connection.execute("set lock_timeout = '1s'")
    first = list(one.pop_segments("q", "g", 9))
    # The other has not committed; nobody waits.
    second = list(two.pop_segments("q", "g", 100))
    assert (len(first), len(second)) == (9, 9)
    assert {m.partition for m in first}.isdisjoint(m.partition for m in second)
    one.connection.rollback()
    two.connection.rollback()
    assert len(list(one.pop_segments("q", "g", 100))) == 18


def test_json_is_read_as_the_connection_reads_it(db: Database, producing: Queen) -> None:
    producing.push("q", {"n": 1.5, "m": [0.1]})
    for configure in (
        lambda connection: set_json_loads(partial(loads, parse_float=Decimal), connection),
        lambda connection: None,
        lambda connection: set_json_loads(lambda data: f"<{bytes(data).decode()}>", connection),
    ):
        _same_json(db, configure)


def _same_json(db: Database, configure: Callable[[Connection], None]) -> None:
    with db.connect("carl_consumer") as connection:
        configure(connection)
        queen = Queen(connection)
        queen.seek("q", "g", to_offset=0)
        (whole,) = queen.pop("q", "g", auto_ack=True)
        queen.seek("q", "g", to_offset=0)
        (decoded,) = queen.pop_segments("q", "g", auto_ack=True)
        assert repr(decoded.payload) == repr(whole.payload)
