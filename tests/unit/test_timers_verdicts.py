"""What schedule, reschedule, cancel and apply answer, and what they leave behind."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import pytest
from psycopg.rows import namedtuple_row
from psycopg.types.json import Jsonb

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

PENDING = (
    "select timer_key, payload, partition, txn, message_id, deliver_at, attempts, last_error from queen.log_timers"
)


def call(connection: Connection, expression: str, *arguments: Any) -> Any:
    """The verdict of one call."""
    with connection.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute(f"select * from queen.{expression}", arguments or None).fetchone()


def claim(admin: Connection, lease: str = "1 minute") -> list[Any]:
    """Lease everything that is due."""
    with admin.cursor(row_factory=namedtuple_row) as cursor:
        return cursor.execute("select * from queen.log_timers_claim(lease => %s::interval)", [lease]).fetchall()


def fail(admin: Connection, row: Any, backoff: str) -> None:
    """Give one back after a failure."""
    arrays = "array[%s::uuid], array[%s], array[%s], array[%s::uuid]"
    arguments = [row.tenant_id, row.queue, row.timer_key, row.claim_token, backoff]
    admin.execute(f"select queen.log_timers_fail({arrays}, 'no luck', %s::interval)", arguments)


def apply(connection: Connection, **op: Any) -> Any:
    """The verdict of one operation by queen.apply."""
    row = connection.execute("select queen.apply(%s)", [Jsonb([op])]).fetchone()
    assert row is not None
    return row[0][0]


def test_the_first_schedule(db: Database, producer: Connection) -> None:
    before = db.value("select clock_timestamp()")
    verdict = call(producer, "schedule('q', 'k', '{\"a\": 1}', delay => '1 hour')")
    assert (verdict.ok, verdict.status, verdict.queue, verdict.timer_key) == (True, "scheduled", "q", "k")
    assert UUID(verdict.txn) == verdict.message_id
    assert timedelta(hours=1) <= verdict.deliver_at - before < timedelta(hours=1, seconds=5)
    (row,) = db.rows(PENDING)
    assert row == ("k", b'{"a": 1}', "Default", verdict.txn, verdict.message_id, verdict.deliver_at, 0, None)


def test_schedule_writes_the_timer_and_nothing_else(db: Database, producer: Connection) -> None:
    call(producer, "schedule('new queue', 'k', '1', '1 hour', \"partition\" => 'new partition')")
    for table in ("queues", "log_partitions", "log_segments", "log_txns", "log_consumers", "log_groups", "log_dlq"):
        assert db.value(f"select count(*) from queen.{table}") == 0, table


def test_the_same_key_again_replaces_everything(db: Database, producer: Connection, admin: Connection) -> None:
    first = call(producer, "schedule('q', 'k', '1', '0', \"partition\" => 'p', txn => 'first')")
    (row,) = claim(admin)
    fail(admin, row, "1 hour")
    assert db.rows("select attempts, last_error from queen.log_timers") == [(1, "no luck")]
    second = call(producer, "schedule_bytes('q', 'k', '\\x00ff', '2 hours', \"partition\" => 'other')")
    assert (second.ok, second.status) == (True, "rescheduled")
    assert second.message_id != first.message_id
    assert second.txn == str(second.message_id)
    (row,) = db.rows(PENDING)
    assert row == ("k", b"\x00\x00\xff", "other", second.txn, second.message_id, second.deliver_at, 0, None)
    assert db.rows("select claimed_until, claim_token from queen.log_timers") == [(None, None)]
    assert db.value("select visible_at = deliver_at from queen.log_timers")


def test_other_keys_and_other_queues_are_other_timers(db: Database, producer: Connection) -> None:
    for queue in ("q", "r"):
        for key in ("k", "K", "k "):
            assert call(producer, "schedule(%s, %s, '1', '1 hour')", queue, key).status == "scheduled"
    assert db.value("select count(*) from queen.log_timers") == 6
    assert call(producer, "cancel('q', 'k')").status == "cancelled"
    assert db.value("select count(*) from queen.log_timers") == 5


def test_reschedule_moves_the_time_and_keeps_the_rest(db: Database, producer: Connection) -> None:
    first = call(producer, "schedule('q', 'k', '{\"a\": 1}', '1 hour', \"partition\" => 'p', txn => 't')")
    at = datetime(2030, 5, 6, tzinfo=timezone.utc)
    moved = call(producer, "reschedule('q', 'k', deliver_at => %s)", at)
    assert moved == (True, "rescheduled", "q", "k", "t", first.message_id, at)
    assert db.rows(PENDING) == [("k", b'{"a": 1}', "p", "t", first.message_id, at, 0, None)]
    sooner = call(producer, "reschedule('q', 'k', delay => '0')")
    assert sooner.status == "rescheduled"
    assert db.value("select queen.fire_due()") == 1
    assert db.value("select message_id from queen.pop('q')") == first.message_id


def test_cancel_and_absent(db: Database, producer: Connection) -> None:
    first = call(producer, "schedule('q', 'k', '1', '1 hour', txn => 't')")
    gone = call(producer, "cancel('q', 'k')")
    assert gone == (True, "cancelled", "q", "k", "t", first.message_id, first.deliver_at)
    assert db.value("select count(*) from queen.log_timers") == 0
    for expression in ("cancel('q', 'k')", "reschedule('q', 'k', '1 hour')", "cancel('no queue', 'k')"):
        verdict = call(producer, expression)
        assert (verdict.ok, verdict.status, verdict.timer_key) == (False, "absent", "k")
        assert (verdict.txn, verdict.message_id, verdict.deliver_at) == (None, None, None)
    # A delivered one is absent, and the log says that it was sent.
    sent = call(producer, "schedule('q', 'k', '1', '0', txn => 'mine')")
    assert db.value("select queen.fire_due()") == 1
    assert call(producer, "cancel('q', 'k')").status == "absent"
    assert producer.execute("select message_id from queen.sent('q', 'mine')").fetchall() == [(sent.message_id,)]


def test_too_late_is_the_answer_under_a_live_lease_only(
    db: Database, producer: Connection, admin: Connection, clock: Clock
) -> None:
    clock.stop()
    first = call(producer, "schedule('q', 'k', '1', '0')")
    ((row),) = claim(admin, "1 minute")
    calls = ("schedule('q', 'k', '2', '1 hour')", "reschedule('q', 'k', '1 hour')", "cancel('q', 'k')")
    for expression in (*calls, "schedule_bytes('q', 'k', '\\x01', '1 hour')"):
        verdict = call(producer, expression)
        assert (verdict.ok, verdict.status) == (False, "too_late"), expression
        assert (verdict.message_id, verdict.deliver_at) == (first.message_id, first.deliver_at)
    many = call(producer, "schedule_many('q', '{k}', array['3'::jsonb], '{1 hour}')")
    assert (many.ok, many.status, many.message_id) == (False, "too_late", first.message_id)
    for op in ({"op": "schedule", "delay_ms": 5, "payload": 1}, {"op": "reschedule", "delay_ms": 5}, {"op": "cancel"}):
        assert apply(producer, queue="q", timer_key="k", **op)["status"] == "too_late"
    assert db.rows("select payload, claim_token from queen.log_timers") == [(b"1", row.claim_token)]
    # The lease is over: the timer is the user's again.
    clock.advance(timedelta(minutes=1))
    assert call(producer, "cancel('q', 'k')").status == "cancelled"


@pytest.mark.parametrize(
    ("expression", "status"),
    [
        ("schedule('q', 'k', '2', '1 hour')", "rescheduled"),
        ("schedule_bytes('q', 'k', '\\x01', '1 hour')", "rescheduled"),
        ("schedule_many('q', '{k}', array['3'::jsonb], '{1 hour}')", "rescheduled"),
        ("reschedule('q', 'k', '1 hour')", "rescheduled"),
        ("cancel('q', 'k')", "cancelled"),
    ],
)
def test_a_backoff_is_nobodys_lease(
    db: Database, producer: Connection, admin: Connection, expression: str, status: str
) -> None:
    call(producer, "schedule('q', 'k', '1', '0')")
    fail(admin, claim(admin)[0], "1 hour")
    assert db.value("select visible_at > now() + interval '50 minutes' from queen.log_timers")
    assert db.value("select claimed from queen.peek('q', 'k')") is False
    verdict = call(producer, expression)
    assert (verdict.ok, verdict.status) == (True, status)


def test_reschedule_ends_a_backoff(db: Database, producer: Connection, admin: Connection) -> None:
    """Whoever moves a timer to now means now."""
    call(producer, "schedule('q', 'k', '1', '0')")
    fail(admin, claim(admin)[0], "1 hour")
    assert call(producer, "reschedule('q', 'k', '0')").status == "rescheduled"
    assert db.value("select queen.fire_due()") == 1


def test_a_past_time_is_due_at_once(db: Database, producer: Connection) -> None:
    call(producer, "schedule('q', 'a', '1', '-1 day')")
    call(producer, "schedule('q', 'b', '1', deliver_at => '2001-02-03Z')")
    call(producer, "schedule('q', 'c', '1', '0')")
    assert db.value("select queen.fire_due()") == 3
    # The frame keeps the time that was asked for, the log the time of the append.
    assert db.value("select min(created_at) > now() - interval '1 minute' from queen.pop('q')")


def test_a_delay_counts_from_the_statement(db: Database, session: StartSession) -> None:
    user = session("alice_producer", autocommit=False)
    user.run("select now()")
    user.run("select pg_sleep(0.3)")
    ((due, begun),) = user.run("select deliver_at, now() from queen.schedule('q', 'k', '1', '10 s')")
    assert due - begun >= timedelta(seconds=10.3)
    ((moved, begun),) = user.run("select deliver_at, now() from queen.reschedule('q', 'k', '20 s')")
    assert moved - begun >= timedelta(seconds=20.3)
    user.connection.rollback()
    assert db.value("select count(*) from queen.log_timers") == 0


def test_the_producer_is_the_session_user(db: Database) -> None:
    connection = db.connect("ada_admin")
    connection.execute("set role queen_producer")
    connection.execute("select queen.schedule('q', 'k', '1', '0'), queen.push('q', '2')")
    assert db.value("select producer_sub from queen.log_timers") == "ada_admin"
    assert db.value("select queen.fire_due()") == 1
    assert db.rows("select distinct producer_sub from queen.pop('q')") == [("ada_admin",)]


def test_schedules_of_different_keys_never_wait(session: StartSession) -> None:
    """Also for a queue that another transaction is giving birth to."""
    first, second = session("alice_producer", autocommit=False), session("alice_producer")
    first.run("select queen.push('q', '1')")
    first.run("select queen.schedule('q', 'a', '1', '0')")
    second.run("set lock_timeout = '500 ms'")
    assert second.run("select status from queen.schedule('q', 'b', '1', '0')") == [("scheduled",)]
    assert second.run("select status from queen.schedule_many('q', '{c,d}', array['1','2']::jsonb[], '{0,0}')") == [
        ("scheduled",),
        ("scheduled",),
    ]
    assert second.run("select status from queen.cancel('q', 'b')") == [("cancelled",)]
    # Of the same key, the second waits for the first and then knows it.
    second.run("set lock_timeout = 0")
    waiting = second.start("select status from queen.schedule('q', 'a', '2', '1 hour')")
    second.wait_until_blocked()
    first.run("commit")
    assert waiting.result(10) == [("rescheduled",)]
