"""Giving messages back: acknowledged, refused, kept longer, or not at all."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from tests.support.clock import Clock
from tests.support.database import Connection, Database

CURSOR = "select committed, leased_to, attempts, last_error from queen.log_consumers where consumer_group = 'g'"


def fill(db: Database, messages: int) -> None:
    db.execute("select queen.push_many('q', array(select to_jsonb(i) from generate_series(1, %s) i))", messages)


def pop(connection: Connection, messages: int = 100, lease: str = "10 s") -> tuple[list[int], Any]:
    """The offsets and the lease."""
    rows = connection.execute(
        "select \"offset\", lease_id from queen.pop('q', 'g', %s, %s)", [messages, lease]
    ).fetchall()
    return [offset for offset, _ in rows], rows[0][1] if rows else None


def answer(connection: Connection, function: str, lease: Any, *more: Any) -> tuple[Any, ...]:
    """What ack, nack or extend answers."""
    marks = ", %s" * len(more)
    row = connection.execute(
        f"select * from queen.{function}('q', 'g', 'Default', %s{marks})", [lease, *more]
    ).fetchone()
    assert row is not None
    return row


def test_the_whole_batch_and_a_part_of_it(db: Database, consumer: Connection) -> None:
    fill(db, 10)
    offsets, lease = pop(consumer, 6)
    assert offsets == [1, 2, 3, 4, 5, 6]
    assert answer(consumer, "ack", lease, 2) == (True, "acked", 2, 2)
    assert answer(consumer, "ack", lease, 2) == (True, "acked", 0, 2)
    # The rest is still held.
    assert pop(consumer) == ([], None)
    assert answer(consumer, "ack", lease) == (True, "acked", 4, 6)
    assert answer(consumer, "ack", lease) == (False, "lease_lost", 0, 6)
    assert pop(consumer)[0] == [7, 8, 9, 10]


def test_offsets_outside_the_batch_are_refused(db: Database, consumer: Connection) -> None:
    fill(db, 10)
    _, lease = pop(consumer, 5)
    answer(consumer, "ack", lease, 3)
    for bad in (2, 6, -1):
        with pytest.raises(psycopg.Error) as caught:
            answer(consumer, "ack", lease, bad)
        assert caught.value.sqlstate == "22023"
        assert 'argument "up_to"' in str(caught.value.diag.message_primary)
        assert "offsets 4 to 5" in str(caught.value.diag.message_hint)
    assert db.rows(CURSOR)[0][:2] == (3, 5)


def test_an_old_token_changes_nothing(db: Database, consumer: Connection, clock: Clock) -> None:
    fill(db, 3)
    clock.stop()
    _, old = pop(consumer)
    clock.advance(timedelta(seconds=10))
    # Over, though nobody has taken the messages yet.
    before = db.rows(CURSOR)
    for function, more in (("ack", ()), ("ack", (2,)), ("nack", ("error",)), ("extend", ("1 min",))):
        assert answer(consumer, function, old, *more)[:3] == (False, "lease_lost", 0)
    assert db.rows(CURSOR) == before
    offsets, new = pop(consumer)
    assert offsets == [1, 2, 3]
    before = db.rows(CURSOR)
    for function, more in (("ack", ()), ("nack", ("error",)), ("extend", ("1 min",))):
        assert answer(consumer, function, old, *more)[:3] == (False, "lease_lost", 0)
    assert db.rows(CURSOR) == before
    assert answer(consumer, "ack", new) == (True, "acked", 3, 3)


def test_absent_where_the_group_never_was(db: Database, consumer: Connection) -> None:
    fill(db, 1)
    for function, more in (("ack", ()), ("nack", ("error",)), ("extend", ("1 min",))):
        assert answer(consumer, function, uuid4(), *more)[:3] == (False, "absent", 0)
        row = consumer.execute(
            f"select status from queen.{function}('no queue', 'g', 'p', %s{', %s' * len(more)})", [uuid4(), *more]
        ).fetchone()
        assert row == ("absent",)
    assert db.value("select count(*) from queen.log_consumers") == 0


def test_an_extended_lease_is_kept(db: Database, consumer: Connection, clock: Clock) -> None:
    fill(db, 2)
    clock.stop()
    _, lease = pop(consumer, lease="10 s")
    clock.advance(timedelta(seconds=9))
    assert answer(consumer, "extend", lease, "30 s") == (True, "extended", 0, 0)
    clock.advance(timedelta(seconds=29))
    assert pop(consumer) == ([], None)
    # It counts from the call, so it can be made shorter as well.
    assert answer(consumer, "extend", lease, "1 s")[1] == "extended"
    clock.advance(timedelta(seconds=1))
    assert pop(consumer)[0] == [1, 2]


def test_a_nack_with_a_delay_comes_back_by_itself(db: Database, consumer: Connection, clock: Clock) -> None:
    fill(db, 3)
    clock.stop()
    _, lease = pop(consumer)
    answer(consumer, "ack", lease, 1)
    assert answer(consumer, "nack", lease, "not now", "1 min") == (True, "nacked", 0, 1)
    assert db.rows("select last_error from queen.log_consumers") == [("not now",)]
    clock.advance(timedelta(seconds=59))
    assert pop(consumer) == ([], None)
    clock.advance(timedelta(seconds=1))
    row = consumer.execute("select \"offset\", delivery_attempt from queen.pop('q', 'g')").fetchall()
    assert row == [(2, 2), (3, 2)]


def test_the_poison_goes_and_the_rest_flows(db: Database, consumer: Connection) -> None:
    db.execute("select queen.configure('delivery_max_attempts', '3')")
    fill(db, 5)
    sizes = []
    for attempt in range(3):
        offsets, lease = pop(consumer)
        sizes.append(len(offsets))
        answer(consumer, "nack", lease, f"failure {attempt}")
    # The last delivery that is allowed carries the head alone: its neighbours are not buried for its sake.
    assert sizes == [5, 5, 1]
    assert db.rows(
        'select queue, "partition", consumer_group, "offset", payload, error, attempts from queen.dlq_list(\'q\')'
    ) == [("q", "Default", "g", 1, 1, "failure 2", 3)]
    rows = consumer.execute("select \"offset\", delivery_attempt from queen.pop('q', 'g')").fetchall()
    assert rows == [(2, 1), (3, 1), (4, 1), (5, 1)] or rows == [(2, 3), (3, 3), (4, 3), (5, 3)]
    # Another group has lost nothing.
    assert db.value("select count(*) from queen.pop('q', 'other')") == 5


def test_a_consumer_that_dies_each_time(db: Database, consumer: Connection, clock: Clock) -> None:
    """Deliveries that end without ack or nack count."""
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 2}')")
    fill(db, 3)
    clock.stop()
    seen = []
    while (taken := pop(consumer))[0] or db.value("select committed < 3 from queen.log_consumers"):
        seen.append(taken[0])
        clock.advance(timedelta(seconds=11))
        assert len(seen) < 20
    letters = db.rows('select "offset", payload, attempts from queen.log_dlq order by "offset"')
    assert [(offset, bytes(payload), attempts) for offset, payload, attempts in letters] == [
        (1, b"1", 2),
        (2, b"2", 2),
        (3, b"3", 2),
    ]
    assert "without an ack" in db.value("select min(error) from queen.log_dlq")


def test_the_limit_of_a_queue_is_its_own(db: Database, consumer: Connection) -> None:
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}')")
    fill(db, 2)
    # The first delivery is the last: each message by itself.
    for offset in (1, 2):
        offsets, lease = pop(consumer)
        assert offsets == [offset] or offsets == [1, 2]
        answer(consumer, "nack", lease, "no")
    assert db.value("select count(*) from queen.log_dlq") >= 1
