"""How long a timer waits for the sweeper: its sleep, and what may and may not lengthen it.

The bounds. A sleep is at most 50 ms (setting sweep_idle) and a pass of one timer takes a few, so no timer waits longer
than 60 ms on a machine with a core to spare. NOISE is what a loaded machine of a CI service may add to each of them,
by scheduling alone; a wake-up that was missed would add whole sleeps to many, and the percentiles show that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Database
from tests.support.lateness import Ledger, percentile, report
from tests.support.waiting import wait_for

SLEEP = 60.0
NOISE = 190.0

# Schedules timers one by one, each in a transaction of its own, with a pause of random length between them.
DROPS = """
do $$
declare
  v_id uuid;
  v_due timestamptz;
begin
  for i in 1..{count} loop
    select s.message_id, s.deliver_at into v_id, v_due
      from queen.schedule('{queue}', '{queue}' || i, to_jsonb(i), '{delay}'::interval) s;
    insert into public.wanted values ('{queue}', '{queue}' || i, v_id, v_id::text, v_due);
    commit;
    perform pg_sleep(random() * {pause});
  end loop;
end
$$
"""


@contextmanager
def in_background(db: Database, query: str, pause: float) -> Iterator[None]:
    """Run `query` again and again in a session of its own."""
    stop = threading.Event()
    connection = db.connect()

    def work() -> None:
        while not stop.wait(pause):
            connection.execute(query)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.slow
def test_due_now_at_random_phases_of_the_sleep(db: Database, sweeper: StartSweeper) -> None:
    """A thousand, with 0 to 20 ms between them: every phase of a sleep of 50 ms is met."""
    ledger = Ledger(db)
    sweeper()
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 1)
    db.execute(DROPS.format(count=1000, queue="now", delay="0", pause=0.02))
    ledger.wait_until_empty()
    ledger.check()
    late = ledger.lateness()
    figures = report("due now", late)
    # Uniform phases of one sleep: half of them wait less than half of it.
    assert percentile(late, 50) < SLEEP / 2 + 15, figures
    assert percentile(late, 98) < SLEEP + 30, figures
    assert max(late) < SLEEP + NOISE, figures


def test_workers_look_by_turns(db: Database) -> None:
    """Each has its own place in the period, so that somebody looks more often than each of them sleeps."""
    for workers in (1, 2, 3, 7):
        for idle in ("50 ms", "1 ms", "300 ms", "10 s"):
            (looks,) = db.rows(
                "select array_agg(distinct round(mod((extract(epoch from n.at) + l.wait::numeric),"
                "   extract(epoch from i)) / extract(epoch from i) * %s)::int %% %s),"
                " min(l.wait) > 0 and max(l.wait) <= extract(epoch from max(i))"
                " from (select %s::interval as i) p,"
                " lateral (select timestamptz '2026-01-01Z' + random() * interval '1 hour' as at"
                "            from generate_series(1, 50)) n,"
                " generate_series(0, %s - 1) w, lateral (select queen._until_look(n.at, i, w, %s) as wait) l",
                *(workers, workers, idle, workers, workers),
            )
            assert looks == (list(range(workers)), True), (workers, idle)


def test_lone_timers_scheduled_ahead(db: Database, sweeper: StartSweeper) -> None:
    """A timer 100 ms or more ahead is known before the sleep that ends at it begins."""
    ledger = Ledger(db)
    sweeper(0, 2)
    sweeper(1, 2)
    time.sleep(1)
    db.execute(DROPS.format(count=100, queue="ahead", delay="120 ms", pause=0.08))
    ledger.wait_until_empty()
    ledger.check()
    late = ledger.lateness()
    figures = report("100 ms ahead", late)
    assert percentile(late, 50) < 10, figures
    assert percentile(late, 95) < 20 + 30, figures
    assert max(late) < SLEEP + NOISE, figures


def test_far_timers_never_postpone_a_near_one(db: Database, sweeper: StartSweeper) -> None:
    """Neither those that wait, nor those that keep arriving, at every distance."""
    ledger = Ledger(db)
    db.execute(
        "select from generate_series(1, 5000) i,"
        " queen.schedule('far', 'kept' || i, '1', i * interval '1 minute' + interval '1 day')"
    )
    sweeper()
    time.sleep(0.3)
    arrive = (
        "select queen.schedule('far', 'new' || (random() * 500)::int, '1', '1 hour'::interval),"
        " queen.schedule('far', 'soon' || (random() * 500)::int, '1', '30 s'::interval + random() * '30 s'::interval)"
    )
    with in_background(db, arrive, 0.004):
        db.execute(DROPS.format(count=150, queue="near", delay="110 ms", pause=0.02))
        # A near one that arrives while the sweeper has planned to sleep for a farther one.
        db.execute(DROPS.format(count=100, queue="nearer", delay="20 ms", pause=0.04))
        ledger.wait_until_empty(where="queue <> 'far'")
    assert ledger.delivered() == 250
    for queue, usual in (("near", 20.0), ("nearer", SLEEP)):
        late = ledger.lateness(f"queue = '{queue}'")
        figures = report(queue, late)
        assert percentile(late, 90) < usual + 30, figures
        assert max(late) < SLEEP + NOISE, figures


def test_idle_then_delivered_to_a_consumer_that_waits(
    db: Database, sweeper: StartSweeper, session: StartSession
) -> None:
    """Default settings. The wait of the consumer counts too: until the message is in its hands."""
    sweeper(0, 2)
    sweeper(1, 2)
    consumer = session("carl_consumer")
    time.sleep(3)
    waits = []
    for i in range(3):
        (verdict,) = db.rows("select deliver_at from queen.schedule('q', %s, '1', '700 ms'::interval)", f"k{i}")
        while not (got := consumer.run("select clock_timestamp(), created_at from queen.pop('q', auto_ack => true)")):
            time.sleep(0.002)
        ((arrived, created_at),) = got
        assert created_at >= verdict[0]
        waits.append((arrived - verdict[0]).total_seconds() * 1000)
    assert max(waits) < SLEEP + NOISE, report("into the consumer's hands", waits)


def test_a_backlog_does_not_delay_the_wake_up(db: Database, sweeper: StartSweeper) -> None:
    """Timers that come due while 20,000 older ones of other partitions are drained wait no longer than the backlog."""
    ledger = Ledger(db)
    sweeper()
    time.sleep(0.2)
    with db.superuser.transaction():
        ledger.schedule(
            "backlog", 20_000, due="now() - interval '1 hour' + i * interval '1 ms'", partition="'p' || i % 10"
        )
    began = db.value("select clock_timestamp()")
    db.execute(DROPS.format(count=20, queue="fresh", delay="0", pause=0.01))
    ledger.wait_until_empty()
    ledger.check()
    took = db.value(
        "select extract(epoch from max(created_at) - %s) * 1000 from delivered where queue = 'backlog'", began
    )
    late = ledger.lateness("queue = 'fresh'")
    figures = report("beside a backlog", late) + f", backlog {took:.0f} ms"
    assert max(late) < max(float(took), 0) + SLEEP + NOISE, figures


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_an_old_snapshot_elsewhere(db: Database, sweeper: StartSweeper, session: StartSession, mode: str) -> None:
    """It keeps every dead entry at the head of the index. Nothing waits for it; a late commit at most 5 s."""
    ledger = Ledger(db)
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    sweeper()
    keeper = session(autocommit=False)
    keeper.run("set transaction isolation level repeatable read")
    keeper.run("select count(*) from queen.log_timers")
    # Dead entries, and many: what was fired cannot be cleaned up.
    ledger.schedule("dead", 20_000, due="now() - interval '1 hour'", partition="'p' || i % 10")
    ledger.wait_until_empty()
    late_writer = session(autocommit=False)
    late_writer.run("select queen.schedule('late', 'late', '1', '50 ms'::interval)")
    ledger.schedule("steady", 600, due="now() + interval '200 ms' + i * interval '5 ms'", partition="'s' || i % 4")
    time.sleep(0.5)
    late_writer.connection.commit()
    committed = db.value("select clock_timestamp()")
    db.execute("select queen.schedule('past', 'past', '1', deliver_at => now() - interval '1 day')")
    db.execute("select queen.schedule('past', 'now', '1', '0'::interval)")
    ledger.wait_until_empty(20)
    assert keeper.run("select count(*) from queen.log_timers") == [(0,)]
    keeper.connection.rollback()
    steady = ledger.lateness("queue = 'steady'")
    figures = report(f"beside an old snapshot, {mode}", steady)
    assert percentile(steady, 50) < 40, figures
    assert percentile(steady, 98) < SLEEP + NOISE, figures
    waited = db.rows(
        "select queue, extract(epoch from created_at - %s) from delivered where queue in ('late', 'past')", committed
    )
    assert len(waited) == 3
    for queue, seconds in waited:
        assert seconds < 5, (queue, seconds)
    print(f"late commits after {[float(seconds) for _, seconds in waited]} s")
