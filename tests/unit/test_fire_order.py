"""Within a partition messages come by due time, then key: across passes, and with several workers under a backlog."""

from __future__ import annotations

import random
from datetime import timedelta

import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger
from tests.support.waiting import wait_for


def drain(db: Database, max_rows: int) -> list[int]:
    """What each pass of fire_due fired, until one fires nothing."""
    passes = []
    while fired := db.value("select queen.fire_due(%s)", max_rows):
        assert fired <= max_rows
        passes.append(fired)
    return passes


@pytest.mark.parametrize("max_rows", [1, 7, 64, 1000])
def test_scheduled_in_reverse(db: Database, max_rows: int) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 300, due="now() - i * interval '1 second'", partition="'p' || i % 2")
    assert sum(drain(db, max_rows)) == 300
    ledger.check()


def test_equal_times_come_by_key_in_bytes(db: Database, producer: Connection, admin: Connection) -> None:
    keys = ["ä", "a", "B", "Z", "_", "10", "9", "aa", "a b", "é", "😀", "a\u00a0b", "A"]
    for key in keys:
        producer.execute("select queen.schedule('q', %s, to_jsonb(%s::text), deliver_at => '2020-01-01Z')", [key, key])
    while admin.execute("select queen.fire_due(4)").fetchone() != (0,):
        pass
    seen = [payload for (payload,) in db.rows("select payload from queen.pop('q')")]
    assert seen == sorted(keys, key=str.encode)


@pytest.mark.parametrize("parts", [1, 3])
def test_five_thousand_at_one_instant(db: Database, parts: int) -> None:
    ledger = Ledger(db)
    # Keys that a hash does not happen to hand out in order, and neighbours in time on both sides.
    key = "md5(i::text)"
    ledger.schedule(
        "q",
        200,
        key="'before' || i",
        due="'2020-01-01 00:00Z'::timestamptz - i * interval '1 ms'",
        partition=f"'p' || i % {parts}",
    )
    ledger.schedule("q", 5000, key=key, due="'2020-01-01 00:00Z'", partition=f"'p' || i % {parts}")
    ledger.schedule(
        "q",
        200,
        key="'after' || i",
        due="'2020-01-01 00:00Z'::timestamptz + i * interval '1 ms'",
        partition=f"'p' || i % {parts}",
    )
    passes = drain(db, 100)
    assert sum(passes) == 5400
    # Bounded, and not more passes than it takes: a window that ends in the instant still fires what it may.
    assert len(passes) <= 60
    ledger.check()


def test_due_in_turns(db: Database) -> None:
    """What comes due later, though scheduled with earlier keys, comes later."""
    ledger = Ledger(db)
    for turn in range(5):
        ledger.schedule(
            "q", 50, key=f"'{9 - turn}-' || i", due=f"timestamptz '2020-01-01Z' + {turn} * interval '1 hour'"
        )
        assert db.value("select queen.fire_due(30)") == 30
    drain(db, 30)
    ledger.check()


@pytest.mark.parametrize(
    "due",
    ["now() - (i * 7919 % 20000) * interval '1 ms'", "now() - (i % 40) * interval '1 s'"],
    ids=["distinct", "equal"],
)
def test_two_workers_under_a_backlog(db: Database, sweeper: StartSweeper, due: str) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_max_rows', '400')")
    sweeper(0, 2)
    sweeper(1, 2)
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 2)
    ledger.schedule("q", 20_000, due=due, partition="'p' || i % 7")
    ledger.wait_until_empty(60)
    ledger.check()
    wait_for(lambda: db.value("select sum(fired) from queen.sweep_stats") == 20_000)
    shares = db.rows("select fired from queen.sweep_stats")
    assert min(share for (share,) in shares) > 1000, shares


def test_workers_and_fire_due_side_by_side(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """And timers that come due meanwhile."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_max_rows', '150')")
    for worker in range(3):
        sweeper(worker, 3)
    with db.superuser.transaction():
        ledger.schedule("q", 4000, key="'a' || i", due="now() + (i % 100) * interval '20 ms'", partition="'p' || i % 5")
        ledger.schedule("q", 4000, key="'b' || i", due="now() - (i % 997) * interval '1 ms'", partition="'p' || i % 5")
    firer = session("ada_admin")
    while ledger.pending():
        firer.run("select queen.fire_due(%s)", random.randint(1, 300))
    ledger.check()


def test_one_worker_by_lease(db: Database, sweeper: StartSweeper) -> None:
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', 'lease'), queen.configure('sweep_max_rows', '300')")
    ledger.schedule("q", 5000, due="now() - (i * 7919 % 5000 / 4) * interval '1 ms'", partition="'p' || i % 3")
    sweeper()
    ledger.wait_until_empty()
    ledger.check()


def test_rolled_back_pass_keeps_the_order(db: Database, session: StartSession) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 300, due="now() - i * interval '1 s'")
    firer = session("ada_admin", autocommit=False)
    for i in range(12):
        firer.run("select queen.fire_due(50)")
        if i % 2:
            firer.connection.commit()
        else:
            firer.connection.rollback()
    assert ledger.pending() == 0
    ledger.check()


def test_a_partition_is_not_overtaken_while_a_pass_is_open(db: Database, session: StartSession) -> None:
    """A second firer leaves the partitions that the first has taken, though rows of them are free."""
    ledger = Ledger(db)
    ledger.schedule("q", 100, due="now() - (100 - i) * interval '1 s'", partition="'p' || i % 2")
    first, second = session("ada_admin", autocommit=False), session("ada_admin")
    assert first.run("select queen.fire_due(20)") == [(20,)]
    assert second.run("select queen.fire_due(20)") == [(0,)]
    first.connection.commit()
    assert second.run("select queen.fire_due(100)") == [(80,)]
    ledger.check()


def test_lateness_counts_from_the_due_time(db: Database, admin: Connection) -> None:
    """Not from the end of a backoff."""
    db.execute("select queen.schedule('q', 'k', '1', deliver_at => now() - interval '1 hour')")
    assert admin.execute("select lateness from queen.log_timers_due()").fetchall()[0][0] >= timedelta(hours=1)
    claims = "array_agg(tenant_id), array_agg(queue), array_agg(timer_key), array_agg(claim_token)"
    admin.execute(
        f"with c as (select {claims} from queen.log_timers_claim()), a (t, q, k, c) as (select * from c)"
        " select f.* from a, queen.log_timers_fail(a.t, a.q, a.k, a.c, 'no', interval '1 ms') f"
    )
    wait_for(lambda: admin.execute("select due from queen.log_timers_due()").fetchone() == (1,))
    assert admin.execute("select lateness from queen.log_timers_due()").fetchall()[0][0] >= timedelta(hours=1)


def test_one_transaction_that_takes_its_time(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """A business transaction schedules its messages as it goes: they come in that order, however long it took."""
    ledger = Ledger(db)
    sweeper()
    ledger.schedule("q", 1, key="'first'")
    ledger.wait_until_empty()
    for turn in range(5):
        with db.superuser.transaction():
            for step in range(4):
                ledger.schedule("q", 1, key=f"'{turn}-{9 - step}'", due="clock_timestamp()")
                db.execute("select pg_sleep(0.06)")
        ledger.wait_until_empty()
    ledger.check()
