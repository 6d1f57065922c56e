"""Timers that cannot be fired: backoff, dead letters, and everybody else on time."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger, percentile, report
from tests.support.waiting import wait_for

CLAIMED = """
  with c as (select array_agg(tenant_id) as t, array_agg(queue) as q, array_agg(timer_key) as k,
                    array_agg(claim_token) as c
               from queen.log_timers_claim({claim}))
  select f.timer_key, f.status, f.attempts, f.retry_at - queen._now()
    from c, queen.log_timers_fail(c.t, c.q, c.k, c.c, {rest}) f where c.t is not null
"""


def fail_due(db: Database, rest: str = "'no'", claim: str = "") -> list[tuple[Any, ...]]:
    """Claim what is due and fail it: key, status, attempts, wait."""
    return db.rows(CLAIMED.format(claim=claim, rest=rest))


def raise_for(db: Database, message_id: Any, table: str = "log_txns", errcode: str = "P0001") -> None:
    """From now on the append of one message, which has a txn of its own, raises `errcode`."""
    db.execute(
        "create or replace function public.refuse() returns trigger language plpgsql as"
        f" $$ begin raise exception 'not this one' using errcode = '{errcode}'; end $$"
    )
    db.execute(
        f"create trigger refuse before insert on queen.{table} for each row when (new.message_id = '{message_id}')"
        " execute function public.refuse()"
    )


def raise_always(db: Database, errcode: str) -> None:
    """From now on every append raises `errcode`."""
    db.execute(
        "create or replace function public.refuse() returns trigger language plpgsql as"
        f" $$ begin raise exception 'not now' using errcode = '{errcode}'; end $$"
    )
    db.execute(
        "create or replace trigger refuse before insert on queen.log_segments for each row"
        " execute function public.refuse()"
    )


@pytest.fixture
def quick(db: Database) -> None:
    """Three attempts, 20 ms apart."""
    db.execute(
        "select queen.configure('timer_max_attempts', '3'), queen.configure('timer_backoff_base', '20 ms'),"
        " queen.configure('timer_backoff_cap', '20 ms')"
    )


def test_backoff_doubles_up_to_the_cap(db: Database, clock: Clock, producer: Connection) -> None:
    clock.stop()
    db.execute("select queen.configure('timer_backoff_base', '2 s'), queen.configure('timer_backoff_cap', '1 minute')")
    db.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
    waits = []
    for attempt in range(1, 10):
        ((key, status, attempts, wait),) = fail_due(db, "'why ' || 7")
        assert (key, status, attempts) == ("k", "backoff", attempt)
        waits.append(wait.total_seconds())
        # In nobody's hands, and not due before its time.
        assert db.rows("select claimed, attempts, last_error from queen.peek('q', 'k')") == [(False, attempt, "why 7")]
        clock.advance(wait - timedelta(microseconds=1))
        assert fail_due(db) == []
        assert db.value("select queen.fire_due()") == 0
        clock.advance(timedelta(microseconds=1))
    assert waits == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    assert [row[1:3] for row in fail_due(db, "'the last'")] == [("archived", 10)]
    assert db.value("select count(*) from queen.log_timers") == 0
    assert producer.execute("select status from queen.cancel('q', 'k')").fetchone() == ("absent",)


def test_backoff_does_not_overflow(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute("select queen.configure('timer_max_attempts', '1000000')")
    numbers = [0, 1, 15, 16, 31, 32, 62, 63, 64, 1023, 1024, 100_000, 999_998, 999_999, 2_147_483_646, 2_147_483_647]
    for base, cap in (("1 s", "5 minutes"), ("1 day", "30 days"), ("1 day", "10 ms"), ("10 ms", "10 ms")):
        db.execute(
            "select queen.configure('timer_backoff_base', %s), queen.configure('timer_backoff_cap', %s)", base, cap
        )
        longest, least = db.rows("select %s::interval, least(%s::interval, %s::interval)", cap, base, cap)[0]
        for number in numbers:
            db.execute("select queen.schedule('q', %s, '1', '0'::interval)", f"k{number}")
            db.execute("update queen.log_timers set attempts = %s where timer_key = %s", number, f"k{number}")
        rows = {int(row[0][1:]): row[1:] for row in fail_due(db)}
        assert sorted(rows) == numbers
        for number, (status, attempts, wait) in rows.items():
            if number >= 999_999:
                assert (status, attempts, wait) == ("archived", min(number + 1, 2_147_483_647), None)
            else:
                assert (status, attempts) == ("backoff", number + 1)
                assert least <= wait <= longest, (base, cap, number)
        db.execute("delete from queen.log_timers")
    assert db.rows("select distinct attempts from queen.log_dlq order by 1") == [
        (1_000_000,),
        (2_147_483_647,),
    ]


def test_backoff_of_the_callers_choice(db: Database, clock: Clock) -> None:
    clock.stop()
    for given, seconds in (("0 s", 0), ("1 ms", 0.001), ("1 hour", 3600), ("366 days", 366 * 86400)):
        db.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
        assert [(row[1], row[3].total_seconds()) for row in fail_due(db, f"'no', '{given}'")] == [("backoff", seconds)]
    db.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
    for _ in range(100):
        assert [row[1:3] for row in fail_due(db, "'infrastructure', '0', false")] == [("backoff", 0)]
    # An error text longer than is useful is cut, one that is null keeps the last.
    assert [row[1] for row in fail_due(db, "repeat('é', 100000), '0'")] == ["backoff"]
    text = db.value("select last_error from queen.log_timers")
    assert text == "é" * len(text)
    assert 1000 <= len(text) < 100_000
    fail_due(db, "null, '0'")
    assert db.value("select last_error from queen.log_timers") == text


def test_a_timer_in_backoff_belongs_to_the_user(db: Database, producer: Connection) -> None:
    for i in range(4):
        db.execute("select queen.schedule('q', %s, '1', '0'::interval)", f"k{i}")
    assert [row[1] for row in fail_due(db, "'no', '1 hour'")] == ["backoff"] * 4
    one = "select ok, status from "
    assert producer.execute(one + "queen.cancel('q', 'k0')").fetchone() == (True, "cancelled")
    assert producer.execute(one + "queen.reschedule('q', 'k1', '0'::interval)").fetchone() == (True, "rescheduled")
    assert producer.execute(one + "queen.schedule('q', 'k2', '2', '0'::interval)").fetchone() == (True, "rescheduled")
    assert db.rows("select timer_key, attempts, last_error from queen.list_timers('q')") == [
        ("k1", 0, None),
        ("k2", 0, None),
        ("k3", 1, "no"),
    ]
    assert db.value("select queen.fire_due()") == 2
    assert db.rows("select payload from queen.pop('q')") == [(1,), (2,)]


def test_exhausted_is_a_dead_letter_with_its_payload(db: Database, producer: Connection, consumer: Connection) -> None:
    db.execute("select queen.configure('timer_max_attempts', '1')")
    ids = {}
    for key, call in {
        "json": "schedule('q', 'json', '{\"n\": [1, null]}', '0'::interval, partition => 'p', txn => 'mine')",
        "bytes": "schedule_bytes('q', 'bytes', '\\x00ff'::bytea, '0'::interval)",
        "empty": "schedule_bytes('q', 'empty', '', '0'::interval)",
    }.items():
        ids[key] = producer.execute(f"select message_id from queen.{call}").fetchall()[0][0]
    assert [row[1:3] for row in fail_due(db, "'no such luck'")] == [("archived", 1)] * 3
    letters = consumer.execute(
        'select message_id, "partition", consumer_group, "offset", txn, payload, payload_bytes, error, attempts,'
        " failed_at <= now() from queen.dlq_list('q') order by octet_length(payload_bytes) nulls first"
    ).fetchall()
    group = "__timer__"
    assert letters == [
        (ids["json"], "p", group, None, "mine", {"n": [1, None]}, None, "no such luck", 1, True),
        (ids["empty"], "Default", group, None, str(ids["empty"]), None, b"", "no such luck", 1, True),
        (ids["bytes"], "Default", group, None, str(ids["bytes"]), None, b"\x00\xff", "no such luck", 1, True),
    ]
    assert db.rows("select producer_sub, deliver_at is not null from queen.log_dlq") == [("alice_producer", True)] * 3
    assert db.value("select count(*) from queen.log_timers") == 0
    assert db.value("select dead_letters from queen.status()") == 3


def test_reschedule_between_the_last_failure_and_the_archive(
    db: Database, producer: Connection, session: StartSession
) -> None:
    db.execute("select queen.configure('timer_max_attempts', '3'), queen.configure('timer_backoff_base', '10 ms')")
    db.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
    for attempt in (1, 2):
        wait_for(lambda: db.value("select due from queen.log_timers_due()") == 1)
        assert [row[1:3] for row in fail_due(db, "'no', '10 ms'")] == [("backoff", attempt)]
    # The next one would archive it. The user moves it, and the count begins anew.
    assert producer.execute("select status from queen.reschedule('q', 'k', '0'::interval)").fetchone() == (
        "rescheduled",
    )
    assert [row[1:3] for row in fail_due(db, "'no', '0'")] == [("backoff", 1)]
    assert [row[1:3] for row in fail_due(db, "'no', '0'")] == [("backoff", 2)]

    # Under the lease: too late for the user, until the lease is over; then too late for the holder.
    held = db.rows("select tenant_id, queue, timer_key, claim_token from queen.log_timers_claim(lease => '50 ms')")
    assert producer.execute("select status from queen.reschedule('q', 'k', '0'::interval)").fetchone() == ("too_late",)
    move = "select status from queen.reschedule('q', 'k', '1 hour'::interval)"
    wait_for(lambda: producer.execute(move).fetchone() == ("rescheduled",))
    arrays = [[value] for value in held[0]]
    failed = "select status from queen.log_timers_fail(%s::uuid[], %s::text[], %s::text[], %s::uuid[], 'no')"
    assert db.rows(failed, *arrays) == [("stale",)]

    # While the move is uncommitted, the pass that would archive it passes by.
    db.execute("update queen.log_timers set attempts = 2, payload = '', deliver_at = now() - interval '1 second'")
    user = session("alice_producer", autocommit=False)
    user.run("select queen.schedule('q', 'k', '2', '0'::interval)")
    assert db.value("select queen.fire_due()") == 0
    user.connection.commit()
    assert db.value("select queen.fire_due()") == 1
    assert db.value("select count(*) from queen.log_dlq") == 0


DAMAGES = {
    "garbage": ("payload_zstd = true, payload = '\\xdeadbeef'", "stored payload is damaged"),
    "truncated": (
        # A frame of zstandard, behind the 12 bytes of a segment's header, and its end missing.
        "payload_zstd = true, payload = substr(queen._segment_pack(repeat('abc', 1000)::bytea, 1), 13, 20)",
        "stored payload is damaged",
    ),
    "a lie about its size": (
        # Magic, a descriptor for 8 bytes of content size, 2^62 bytes of it.
        "payload_zstd = true, payload = '\\x28b52ffde00000000000000040010000'",
        "stored payload is damaged",
    ),
    "empty": ("payload = ''", "stored payload is damaged: empty"),
    "empty, said to be compressed": ("payload_zstd = true, payload = ''", "stored payload is damaged"),
    "partition too long": ("\"partition\" = repeat('p', 300)", "partition name"),
    "partition empty": ("\"partition\" = ''", "partition name"),
    "partition with a newline": ("\"partition\" = E'a\\nb'", "partition name"),
    "queue too long": ("queue = repeat('q', 300)", "queue name"),
    "txn too long": ("txn = repeat('t', 70000)", "txn is 70000 bytes long"),
    "txn empty": ("txn = ''", "txn"),
    "no JSON": ("payload = '\\xff'", None),
}


@pytest.mark.parametrize("how", ["fire_due", "lock", "lease"])
def test_damaged_rows_among_a_thousand(
    db: Database, sweeper: StartSweeper, producer: Connection, quick: None, how: str
) -> None:
    """Every kind of damage at once: the rest is delivered now, each of them backs off, and ends as a dead letter."""
    ledger = Ledger(db)
    ledger.schedule("q", 1000)
    for i, (change, _) in enumerate(DAMAGES.values()):
        db.execute(f"update queen.log_timers set {change} where timer_key = 'k{i * 70 + 11:07}'")
    db.execute("select queen.configure('timer_backoff_base', '1 hour'), queen.configure('timer_backoff_cap', '1 hour')")
    bad = [name for name, (_, reason) in DAMAGES.items() if reason is not None]
    if how == "fire_due":
        assert db.value("select queen.fire_due()") == 1000 - len(bad)
        running = None
    else:
        db.execute("select queen.configure('sweep_mode', %s)", how)
        running = sweeper()
        wait_for(lambda: ledger.delivered() == 1000 - len(bad))
        wait_for(lambda: ledger.pending("attempts = 0") == 0)
    waiting = db.rows(
        "select timer_key, attempts, last_error, claim_token, visible_at > now() from queen.log_timers order by 1"
    )
    assert [row[1::2] for row in waiting] == [(1, None)] * len(bad)
    assert all(row[4] for row in waiting)
    keys = {f"k{i * 70 + 11:07}": name for i, name in enumerate(DAMAGES)}
    for key, _, error, _, _ in waiting:
        reason = DAMAGES[keys[key]][1]
        assert reason is not None
        assert error.startswith(reason), (keys[key], error)

    # Cancellable, and none of them holds up what comes later.
    assert producer.execute("select status from queen.cancel('q', %s)", [waiting[0][0]]).fetchone() == ("cancelled",)
    db.execute("select queen.configure('timer_backoff_base', '20 ms'), queen.configure('timer_backoff_cap', '20 ms')")
    db.execute("update queen.log_timers set claimed_until = now()")
    if running is None:
        wait_for(lambda: db.value("select queen.fire_due()") is not None and ledger.pending() == 0)
    else:
        ledger.wait_until_empty()
    letters = db.rows("select distinct consumer_group, attempts, octet_length(error) > 0 from queen.log_dlq")
    assert letters == [("__timer__", 3, True)]
    assert db.value("select count(*) from queen.log_dlq") == len(bad) - 1
    for name, (_, reason) in DAMAGES.items():
        if reason is not None and keys[waiting[0][0]] != name:
            assert db.value("select count(*) > 0 from queen.log_dlq where starts_with(error, %s)", reason), name
    assert ledger.delivered() == 1000 - len(bad)


@pytest.mark.parametrize("how", ["fire_due", "lock", "lease"])
def test_an_error_that_only_one_row_meets(
    db: Database, sweeper: StartSweeper, producer: Connection, quick: None, how: str
) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 999, partition="'p' || i % 3")
    bad = producer.execute(
        "select message_id from queen.schedule('q', 'k0000500b', '1', '-1 minute'::interval, partition => 'p1',"
        " txn => 'bad')"
    ).fetchall()[0][0]
    raise_for(db, bad)
    db.execute("select queen.configure('timer_backoff_base', '1 hour'), queen.configure('timer_backoff_cap', '1 hour')")
    if how == "fire_due":
        total = 0
        for _ in range(40):
            total += db.value("select queen.fire_due()")
            if ledger.pending("attempts = 0") == 0:
                break
        assert total == 999
    else:
        db.execute("select queen.configure('sweep_mode', %s)", how)
        sweeper()
        wait_for(lambda: ledger.delivered() == 999)
        wait_for(lambda: ledger.pending("attempts = 0") == 0)
    assert db.rows("select timer_key, attempts, last_error, claim_token, visible_at > now() from queen.log_timers") == [
        ("k0000500b", 1, "not this one (P0001)", None, True)
    ]
    ledger.check(in_order=False)
    # It is nobody's fault but its own: mended, it fires.
    db.execute("drop trigger refuse on queen.log_txns")
    assert producer.execute("select status from queen.reschedule('q', 'k0000500b', '0'::interval)").fetchone() == (
        "rescheduled",
    )
    if how == "fire_due":
        assert db.value("select queen.fire_due()") == 1
    ledger.wait_until_empty()
    assert db.value("select count(*) from delivered where message_id = %s", bad) == 1


def test_a_producer_of_an_impossible_length(db: Database, quick: None) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 100)
    db.execute("update queen.log_timers set producer_sub = repeat('s', 70000) where timer_key = 'k0000050'")
    wait_for(lambda: db.value("select queen.fire_due()") is not None and ledger.pending() == 0)
    ledger.check(missing=1)
    assert db.rows("select attempts, octet_length(payload) from queen.log_dlq") == [(3, 2)]


def test_a_check_constraint_that_one_row_violates(db: Database, quick: None) -> None:
    """Found by halving, however often; archived at the end, and all others are in the log."""
    ledger = Ledger(db)
    bad = db.value("select message_id from queen.schedule('q', 'bad', '1', '-1 hour'::interval, txn => 'bad')")
    ledger.schedule("q", 1000)
    db.execute(f"alter table queen.log_txns add constraint refused check (message_id is distinct from '{bad}')")
    wait_for(lambda: db.value("select queen.fire_due()") is not None and ledger.pending() == 0)
    ledger.check()
    ((error, attempts),) = db.rows("select error, attempts from queen.log_dlq")
    assert attempts == 3
    assert "refused" in error
    assert "23514" in error


def test_one_bad_row_makes_nothing_late(db: Database, sweeper: StartSweeper) -> None:
    """A steady stream, and in it every 50th row is damaged: the others keep their usual lateness."""
    ledger = Ledger(db)
    sweeper()
    ledger.schedule("a", 300, due="now() + interval '300 ms' + i * interval '5 ms'")
    ledger.wait_until_empty()
    with db.superuser.transaction():
        ledger.schedule("b", 300, due="now() + interval '300 ms' + i * interval '5 ms'")
        db.execute("update queen.log_timers set payload = '' where right(timer_key, 2) in ('00', '50')")
    wait_for(lambda: ledger.delivered() == 594)
    usual, beside = ledger.lateness("queue = 'a'"), ledger.lateness("queue = 'b'")
    print(report("usual", usual), report("beside damaged ones", beside))
    assert percentile(beside, 99) < percentile(usual, 99) + 30


TRANSIENT = ["40001", "40P01", "55P03", "53100", "53200", "57014", "57P01", "58030", "08006"]


@pytest.mark.parametrize("how", ["fire_due", "lock", "lease"])
def test_failures_of_the_moment_spend_no_attempt(db: Database, sweeper: StartSweeper, how: str) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 20, partition="'p' || i % 2")
    running = None
    if how != "fire_due":
        db.execute("select queen.configure('sweep_mode', %s)", how)
    for errcode in TRANSIENT:
        if how != "fire_due" and errcode == "57014":
            continue  # A cancelled sweeper ends: test_fire_operator.py.
        raise_always(db, errcode)
        if how == "fire_due":
            for _ in range(12):
                with pytest.raises(psycopg.Error) as caught:
                    db.execute("select queen.fire_due()")
                assert caught.value.sqlstate == errcode
        elif running is None:
            running = sweeper()
            wait_for(lambda: db.value("select coalesce(sum(errors), 0) from queen.sweep_stats") >= 3)
        else:
            before = db.value("select sum(errors) from queen.sweep_stats")
            wait_for(lambda before=before: db.value("select sum(errors) from queen.sweep_stats") > before + 3)
        assert db.rows("select distinct attempts, last_error from queen.log_timers") == [(0, None)], errcode
    assert ledger.delivered() == 0
    db.execute("drop trigger refuse on queen.log_segments")
    if running is None:
        assert db.value("select queen.fire_due()") == 20
    else:
        ledger.wait_until_empty(2)
        assert running.alive
        assert "not now" in db.value("select last_error from queen.sweep_stats")
    assert db.value("select count(*) from queen.log_dlq") == 0
    ledger.check()


@pytest.mark.parametrize("mode", ["lock", "lease"])
@pytest.mark.parametrize("table", ["log_segments", "log_txns", "log_partitions", "queues", "log_busy"])
def test_lock_timeouts_spend_no_attempt(
    db: Database, sweeper: StartSweeper, session: StartSession, mode: str, table: str
) -> None:
    """An operator's lock on any table the fire needs."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    ledger.schedule("q", 1, key="'first'")
    db.execute("select queen.fire_due()")
    running = sweeper()
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 1)
    operator = session(autocommit=False)
    # Before the lock: a schedule reads the options of its queue, and waits for such an operator as anybody does.
    ledger.schedule("q", 20, due="now() + interval '200 ms'")
    operator.run(f"lock table queen.{table} in access exclusive mode")
    if (mode, table) != ("lease", "log_busy"):
        # The statistics are written once a second, and only when the step that holds them survives.
        wait_for(
            lambda: db.rows("select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'", running.pid), 3
        )
    with contextlib.suppress(psycopg.Error):
        operator.run("select pg_sleep(0.5)")
    assert db.rows("select distinct attempts, last_error from queen.log_timers") in ([(0, None)], [])
    operator.connection.rollback()
    ledger.wait_until_empty(5)
    assert running.alive
    ledger.check()


def test_a_deadlock_spends_no_attempt(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """A superuser's trigger that waits for what the pass holds: a real 40P01 or a lock timeout, never an attempt."""
    ledger = Ledger(db)
    ledger.schedule("q", 1, key="'first'")
    db.execute("select queen.fire_due()")
    db.execute("create table public.side (a int primary key); insert into public.side values (1)")
    db.execute(
        "create function public.meet() returns trigger language plpgsql as"
        " $$ begin perform from public.side for update; return new; end $$"
    )
    db.execute("create trigger meet before insert on queen.log_segments for each row execute function public.meet()")
    db.execute("set deadlock_timeout = '10s'")
    ledger.schedule("q", 10)
    user = session("postgres", autocommit=False)
    user.run("update public.side set a = 1")
    firer = session("postgres", autocommit=False)
    firer.run("set local deadlock_timeout = '20ms'")
    call = firer.start("select queen.fire_due()")
    firer.wait_until_blocked()
    # The pass has the partition, this wants it: a cycle, and the firer looks for it first.
    push = user.start("select queen.push('q', '1')")
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        push.result(10)
        user.connection.rollback()
    with contextlib.suppress(psycopg.errors.DeadlockDetected):
        call.result(10)
    firer.connection.rollback()
    user.connection.rollback()
    assert db.rows("select distinct attempts, last_error from queen.log_timers") == [(0, None)]
    db.execute("drop trigger meet on queen.log_segments")
    assert db.value("select queen.fire_due()") == 10
    ledger.check()
