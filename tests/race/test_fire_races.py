"""Two workers, and users who cancel, move and replace timers in the moment they fire."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.conftest import StartSweeper
from tests.support.database import Database
from tests.support.lateness import Ledger
from tests.support.waiting import wait_for


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_two_workers_share_ten_thousand(db: Database, sweeper: StartSweeper, mode: str) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s), queen.configure('sweep_max_rows', '250')", mode)
    ledger.schedule("q", 16, key="'first' || i", due="'2020-01-01Z'", partition="'p' || i % 16")
    db.execute("select queen.fire_due()")
    workers = [sweeper(0, 2), sweeper(1, 2)]
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 2)
    # Whoever looks first holds its partitions for a pass, so it takes more than one backlog until both had a share.
    shares: dict[int, int] = {}
    for rounds in range(1, 6):
        ledger.schedule(
            "q",
            10_000,
            key=f"'k{rounds} ' || i",
            due=f"now() - interval '1 hour' + ({rounds}0000 + i) * interval '1 ms'",
            partition="'p' || i % 16",
        )
        ledger.wait_until_empty()
        wait_for(lambda rounds=rounds: db.value("select sum(fired) from queen.sweep_stats") == 10_000 * rounds)
        shares = dict(db.rows("select worker, fired from queen.sweep_stats"))
        if min(shares.values()) > 500:
            break
    ledger.check(in_order=mode == "lock")
    took = db.value(
        "select extract(epoch from max(created_at) - min(created_at)) from entries where deliver_at > '2021-01-01'"
    )
    print(f"mode {mode}: shares {shares}, {float(took):.2f} s")
    # 250 rows a pass: some 40 passes of a few ms. A hundred times as long would be workers that hinder one another.
    assert took < 5 * rounds
    assert min(shares.values()) > 500, shares
    assert all(worker.alive for worker in workers)


def race(db: Database, count: int, call: str, threads: int = 4) -> list[tuple[str, Any]]:
    """Call `call` for timers k1 to kN around the moment each is due; its status and time of each."""
    dues = {key: due.timestamp() for key, due in db.rows("select timer_key, deliver_at from wanted")}
    offset = time.time() - db.value("select extract(epoch from clock_timestamp())::float")
    assert abs(offset) < 0.05
    keys = sorted(dues, key=dues.__getitem__)
    assert len(keys) == count
    answers: list[tuple[str, Any]] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        connection = db.connect("alice_producer")
        chooser = random.Random(number)
        for key in keys[number::threads]:
            # In time for most, too late for some: a pass begins a few ms after the due time.
            wait = dues[key] + chooser.uniform(-0.004, 0.008) - time.time()
            if wait > 0:
                time.sleep(wait)
            row = connection.execute(call, [key]).fetchone()
            assert row is not None
            with lock:
                answers.append((key, row))

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, number) for number in range(threads)]:
            future.result()
    return answers


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_cancel_racing_the_fire(db: Database, sweeper: StartSweeper, mode: str) -> None:
    """Two thousand times: never cancelled and delivered, never neither."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    sweeper(0, 2)
    sweeper(1, 2)
    ledger.schedule("q", 2000, due="now() + interval '1 s' + i * interval '2 ms'", partition="'p' || i % 4")
    answers = race(db, 2000, "select status from queen.cancel('q', %s)")
    ledger.wait_until_empty()
    outcome = Counter(row[0] for _, row in answers)
    print(f"mode {mode}: {dict(outcome)}")
    assert set(outcome) <= {"cancelled", "absent", "too_late"}
    # Otherwise it was no race.
    assert outcome["cancelled"] > 100
    assert outcome["absent"] + outcome["too_late"] > 100
    cancelled = [key for key, row in answers if row[0] == "cancelled"]
    assert (
        db.value(
            "select count(*) from delivered d join wanted w using (message_id) where w.timer_key = any (%s)", cancelled
        )
        == 0
    )
    db.execute("delete from wanted where timer_key = any (%s)", cancelled)
    ledger.check(in_order=mode == "lock")
    assert ledger.delivered() == 2000 - len(cancelled)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_reschedule_racing_the_fire(db: Database, sweeper: StartSweeper, mode: str) -> None:
    """Two thousand times: delivered once, by the last time that was confirmed, and not before it."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    sweeper(0, 2)
    sweeper(1, 2)
    ledger.schedule("q", 2000, due="now() + interval '1 s' + i * interval '2 ms'", partition="'p' || i % 4")
    answers = race(db, 2000, "select status, deliver_at from queen.reschedule('q', %s, '300 ms'::interval)")
    ledger.wait_until_empty()
    outcome = Counter(row[0] for _, row in answers)
    print(f"mode {mode}: {dict(outcome)}")
    assert set(outcome) <= {"rescheduled", "absent", "too_late"}
    assert outcome["rescheduled"] > 100
    assert outcome["absent"] + outcome["too_late"] > 100
    with db.superuser.cursor() as cursor:
        cursor.executemany(
            "update wanted set deliver_at = %s where timer_key = %s",
            [(row[1], key) for key, row in answers if row[0] == "rescheduled"],
        )
    ledger.check(in_order=False)
    wrong = "select w.timer_key from wanted w join entries d using (message_id) where w.deliver_at <> d.deliver_at"
    assert db.rows(wrong) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_sessions_replacing_one_key_while_it_fires(db: Database, sweeper: StartSweeper, mode: str) -> None:
    """Every call gets a verdict; each life that began is one delivery, and the last write is the last message."""
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    ledger = Ledger(db)
    sweeper(0, 2)
    sweeper(1, 2)
    stop = time.monotonic() + 2.5
    answers: list[tuple[str, Any]] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        connection = db.connect("alice_producer")
        chooser = random.Random(number)
        while time.monotonic() < stop:
            delay = chooser.choice(["0", "1 ms", "5 ms", "20 ms"])
            row = connection.execute(
                "select status, message_id from queen.schedule('q', 'k', %s, %s::interval)", [str(number), delay]
            ).fetchone()
            assert row is not None
            with lock:
                answers.append((row[0], row[1]))
            time.sleep(chooser.uniform(0, 0.1))

    with ThreadPoolExecutor(32) as pool:
        for future in [pool.submit(work, number) for number in range(32)]:
            future.result()
    last = db.value("select message_id from queen.schedule('q', 'other', '1', '0'::interval)")
    ledger.wait_until_empty()
    outcome = Counter(status for status, _ in answers)
    print(f"mode {mode}: {dict(outcome)}")
    assert set(outcome) <= {"scheduled", "rescheduled", "too_late"}
    assert min(outcome["scheduled"], outcome["rescheduled"]) > 10
    # A life begins with `scheduled` and ends in the log; nothing is there that no call was told of.
    delivered = [message_id for (message_id,) in db.rows("select message_id from delivered")]
    assert len(delivered) == outcome["scheduled"] + 1
    assert len(set(delivered)) == len(delivered)
    told = {message_id for status, message_id in answers if status != "too_late"} | {last}
    assert set(delivered) <= told
    assert {message_id for status, message_id in answers if status == "too_late"} <= set(delivered)


def test_batches_in_both_orders_beside_the_sweeper(db: Database, sweeper: StartSweeper) -> None:
    """Batches {A, B} and {B, A} in four sessions, the sweeper running: no deadlock."""
    sweeper()
    stop = time.monotonic() + 2

    def work(number: int) -> None:
        connection = db.connect("alice_producer")
        keys = ["a", "b", "c"] if number % 2 else ["c", "b", "a"]
        ops = ", ".join(
            f'{{"op": "{"cancel" if number == 3 and key == "b" else "schedule"}", "queue": "q", "timer_key": "{key}"'
            + ("}" if number == 3 and key == "b" else ', "delay_ms": 3, "payload": 1}')
            for key in keys
        )
        while time.monotonic() < stop:
            connection.execute(
                "select from queen.schedule_many('q', %s, array_fill('1'::jsonb, array[3]),"
                " delays => array_fill('2 ms'::interval, array[3]))",
                [keys],
            )
            connection.execute("select queen.apply(%s::jsonb)", [f"[{ops}]"])

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, number) for number in range(4)]:
            future.result()
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
    assert db.value("select count(*) = count(distinct message_id) from queen.pop('q', max_messages => 100000)") is True


def test_firers_of_every_kind_at_once(db: Database, sweeper: StartSweeper) -> None:
    """Row locks, leases, fire_due and claims from outside, on the same timers."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_max_rows', '100')")
    ledger.schedule("q", 6000, due="now() + (i % 100) * interval '10 ms'", partition="'p' || i % 5")
    sweeper(0, 3)
    db.execute("select queen.configure('sweep_mode', 'lease')")
    sweeper(1, 3)

    def by_claim(number: int) -> None:
        connection = db.connect("ada_admin")
        while ledger_pending(connection):
            if random.random() < 0.1:
                # A claim that comes to nothing.
                connection.execute("select from queen.log_timers_claim(lease => '200 ms', max_rows => 20)")
            connection.execute(
                "do $$ declare t uuid[]; q text[]; k text[]; c uuid[]; begin"
                " select array_agg(x.tenant_id), array_agg(x.queue), array_agg(x.timer_key), array_agg(x.claim_token)"
                " into t, q, k, c from queen.log_timers_claim(lease => '2 seconds', max_rows => 37) x; commit;"
                " if t is not null then perform queen.log_timers_fire(t, q, k, c); end if; end $$"
            )

    def by_pass(number: int) -> None:
        connection = db.connect("ada_admin")
        while ledger_pending(connection):
            connection.execute("select queen.fire_due(50)")

    def ledger_pending(connection: Any) -> bool:
        return bool(connection.execute("select exists (select from queen.log_timers)").fetchone()[0])

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(by_claim, 0), pool.submit(by_claim, 1), pool.submit(by_pass, 2)]:
            future.result()
    ledger.check(in_order=False)
