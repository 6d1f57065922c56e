"""The sweeper never waits on a lock that a user can hold: an open transaction delays its own partition only."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger, percentile, report
from tests.support.sessions import Session, Sweeper
from tests.support.waiting import wait_for

# What the session does and leaves uncommitted, and the timers behind it: queue and partition.
HOLDS = {
    "push": ("select from queen.push('held', '0', 'P')", "held", "P"),
    "birth": ("select from queen.push('unborn', '0', 'Q')", "unborn", "Q"),
    "birth of a partition": ("select from queen.push('held', '0', 'new')", "held", "new"),
    "cancel": ("select from queen.cancel('steady', 'T')", "steady", "p0"),
    "reschedule": ("select from queen.reschedule('steady', 'T', '0'::interval)", "steady", "p0"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hold", "end", "mode"),
    [
        ("push", "commit", "lock"),
        ("push", "rollback", "lock"),
        ("push", "commit", "lease"),
        ("birth", "commit", "lock"),
        ("birth", "rollback", "lock"),
        ("birth", "commit", "lease"),
        ("birth of a partition", "rollback", "lease"),
        ("cancel", "commit", "lock"),
        ("cancel", "rollback", "lock"),
        ("cancel", "commit", "lease"),
        ("reschedule", "commit", "lock"),
    ],
)
def test_an_open_transaction_delays_its_own_only(
    db: Database, sweeper: StartSweeper, session: StartSession, hold: str, end: str, mode: str
) -> None:
    ledger = Ledger(db)
    statement, queue, part = HOLDS[hold]
    own = "timer_key = 'T'" if queue == "steady" else f"queue = '{queue}'"
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    ledger.schedule("held", 1, key="'first'", partition="'P'")
    ledger.schedule("steady", 8, key="'first' || i", partition="'p' || i % 8")
    db.execute("select queen.fire_due()")
    sweeper(0, 2)
    sweeper(1, 2)
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 2)
    # 200 a second, for 3.6 s; the held ones come due while the session is at it.
    with db.superuser.transaction():
        ledger.schedule("steady", 680, due="now() + interval '400 ms' + i * interval '5 ms'", partition="'p' || i % 8")
        due = "now() + interval '2 s' + i * interval '20 ms'"
        if queue == "steady":
            ledger.schedule(queue, 1, key="'T'", due=due, partition=f"'{part}'")
        else:
            ledger.schedule(queue, 30, due=due, partition=f"'{part}'")
    timer = db.rows("select message_id from wanted where timer_key = 'T'")
    begun, begun_at = time.monotonic(), db.value("select clock_timestamp()")
    holder = session("alice_producer", autocommit=False)
    time.sleep(1.8)
    holder.run(statement)
    (held,) = holder.run("select clock_timestamp()")[0]
    wait_for(lambda: time.monotonic() > begun + 3.6)
    # Meanwhile: nothing of its own, everything else.
    assert ledger.pending(own) == (1 if queue == "steady" else 30)
    assert ledger.pending(f"not ({own}) and deliver_at < now() - interval '500 ms'") == 0
    released = db.value("select clock_timestamp()")
    getattr(holder.connection, end)()
    ledger.wait_until_empty()

    never = hold == "cancel" and end == "commit"
    if never:
        db.execute("delete from wanted where timer_key = 'T'")
    # A push that was committed is in the log too.
    pushed = db.value("select count(*) from delivered where deliver_at is null")
    assert pushed == (1 if end == "commit" and queue != "steady" else 0)
    db.execute(
        "insert into wanted select queue, '', message_id, txn, deliver_at from delivered where deliver_at is null"
    )
    # A row that somebody held may come later; and leases of two workers do not wait for one another.
    ledger.check(in_order=queue != "steady" and mode == "lock")
    behind = f"queue = '{queue}' and part = '{part}' and deliver_at > now() - interval '30 s'"
    if queue == "steady":
        behind = f"message_id = '{timer[0][0]}'"
    assert db.value(f"select count(*) from delivered where {behind}") == (0 if never else 1 if timer else 30)
    if not never:
        longest = db.value(f"select extract(epoch from max(created_at) - %s) from delivered where {behind}", released)
        assert db.value(f"select min(created_at) >= %s from delivered where {behind}", held)
        print(f"{hold}, {end}: the last of its own {float(longest) * 1000:.0f} ms after the end")
        assert longest < 1
    usual = ledger.lateness(f"queue = 'steady' and deliver_at between '{begun_at}' and '{held}' and not ({behind})")
    beside = ledger.lateness(f"queue = 'steady' and deliver_at between '{held}' and '{released}' and not ({behind})")
    figures = report("usual", usual) + "; " + report("beside", beside)
    assert len(usual) > 200, figures
    assert len(beside) > 200, figures
    assert percentile(beside, 99) < percentile(usual, 99) + 40, figures
    assert max(beside) < 500, figures


def test_what_holds_nothing_up(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """Open transactions that do not write to the partition do not even delay that partition."""
    ledger = Ledger(db)
    sweeper()
    ledger.schedule("q", 50)
    ledger.wait_until_empty()
    ledger.schedule("q", 1, key="'other'", due="now() + interval '1 hour'")
    calls = {
        "ada_admin": [
            "select from queen.configure_queue('q', '{\"delivery_max_attempts\": 7}')",
            "select from queen.configure('timer_max_attempts', '8')",
            "select from queen.log_timers_claim()",
            "select count(*) from queen.log_timers",
        ],
        "alice_producer": [
            "select from queen.schedule('q', 'k1', '1', '1 hour'::interval)",
            "select from queen.schedule('q', 'soon', '1', '0'::interval)",
            "select from queen.peek('q', 'other')",
            "select from queen.reschedule('q', 'other', '2 hours'::interval)",
        ],
        "carl_consumer": [
            "select from queen.pop('q', 'g1', max_messages => 3)",
            "select from queen.pop('q', 'g2', \"partition\" => 'Default', auto_ack => true)",
        ],
    }
    for user, statements in calls.items():
        open_session = session(user, autocommit=False)
        for statement in statements:
            open_session.run(statement)
    released = ledger.delivered()
    ledger.schedule("q", 100, key="'n' || i", due="now() + interval '100 ms' + i * interval '5 ms'")
    wait_for(lambda: ledger.delivered() == released + 100)
    late = ledger.lateness('"offset" > 50')
    figures = report("beside idle transactions", late)
    assert percentile(late, 90) < 60, figures


@pytest.fixture
def stepped_out(db: Database, sweeper: StartSweeper, session: StartSession) -> tuple[Ledger, Session, list[Sweeper]]:
    """5,000 due timers behind a partition that somebody holds, out of the way; that session, and the sweepers."""
    ledger = Ledger(db)
    db.execute("alter table queen.log_timers set (autovacuum_enabled = false)")
    ledger.schedule("held", 1, key="'first'", partition="'P'")
    db.execute("select queen.fire_due()")
    holder = session("alice_producer", autocommit=False)
    holder.run("select queen.push('held', '\"pushed\"', 'P')")
    sweepers = [sweeper(0, 2), sweeper(1, 2)]
    ledger.schedule("held", 5000, key="'h' || i", due="now() - (i * 7919 % 5000) * interval '1 ms'", partition="'P'")
    wait_for(lambda: ledger.pending("visible_at <= now()") == 0, what="all have stepped out")
    return ledger, holder, sweepers


def sweep_for(db: Database, run_for: str) -> int:
    """Sweep for so long; how many pages of the timers that touched.

    A backend reports its counts when it goes idle or ends, not at the commits inside a call.
    """
    db.execute("select pg_stat_force_next_flush()")
    pages = (
        "select heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit"
        " from pg_statio_user_tables where relname = 'log_timers'"
    )
    before = db.value(pages)
    connection = db.connect()
    connection.execute(f"call queen.sweep('{run_for}')")
    pid = connection.info.backend_pid
    connection.close()
    wait_for(lambda: not db.rows("select from pg_stat_activity where pid = %s", pid))
    touched: int = db.value(pages) - before
    return touched


@pytest.mark.slow
def test_passes_do_not_read_what_stepped_out(db: Database, session: StartSession) -> None:
    ledger = Ledger(db)
    db.execute("alter table queen.log_timers set (autovacuum_enabled = false)")
    db.execute("select queen.push('held', '1', 'P')")
    steady = "now() + interval '200 ms' + i * interval '5 ms'"
    ledger.schedule("usual", 300, due=steady, partition="'p' || i % 4")
    usual = sweep_for(db, "2 s")
    assert ledger.pending() == 0
    holder = session("alice_producer", autocommit=False)
    holder.run("select queen.push('held', '\"pushed\"', 'P')")
    ledger.schedule("held", 5000, key="'h' || i", due="now() - (i * 7919 % 5000) * interval '1 ms'", partition="'P'")
    moving = sweep_for(db, "1 s")
    assert ledger.pending("visible_at <= now()") == 0
    versions = "select timer_key, ctid from queen.log_timers where queue = 'held' order by 1"
    before = db.rows(versions)
    assert len(before) == 5000
    ledger.schedule("beside", 300, due=steady, partition="'p' || i % 4")
    beside = sweep_for(db, "2 s")
    figures = f"pages of the timers: usual {usual}, while 5,000 step out {moving}, beside them {beside}"
    print(figures)
    assert ledger.pending() == 5000
    # Some 300 passes. A scan from the start, twice a second, meets the entries that the open transaction keeps alive.
    assert beside < usual + 10 * 5000, figures
    # Nor were they written again.
    assert db.rows(versions) == before
    late = [ledger.lateness(f"queue = '{queue}'") for queue in ("usual", "beside")]
    figures = report("usual", late[0]) + "; " + report("beside 5,000 that stepped out", late[1])
    assert percentile(late[1], 95) < percentile(late[0], 95) + 40, figures


@pytest.mark.slow
def test_what_stepped_out_belongs_to_the_user(
    db: Database, stepped_out: tuple[Ledger, Session, list[Sweeper]], producer: Connection, admin: Connection
) -> None:
    ledger, holder, _ = stepped_out
    assert db.rows('select queue, "partition" from queen.log_busy') == [("held", "P")]
    assert db.value("select busy_partitions from queen.status()") == 1
    # In backoff without an attempt: nobody's, and still late.
    assert db.rows("select distinct attempts, claim_token, last_error from queen.log_timers") == [(0, None, None)]
    assert db.value("select claimed from queen.peek('held', 'h1')") is False
    one = "select status from "
    assert producer.execute(one + "queen.cancel('held', 'h7')").fetchone() == ("cancelled",)
    assert producer.execute(one + "queen.reschedule('held', 'h8', '1 hour'::interval)").fetchone() == ("rescheduled",)
    assert producer.execute(one + "queen.reschedule('held', 'h9', '0'::interval)").fetchone() == ("rescheduled",)
    fresh = "select message_id from queen.schedule('held', 'h10', '\"new\"', '0'::interval, partition => 'P')"
    new_id = producer.execute(fresh).fetchall()[0][0]
    assert producer.execute("select payload from queen.peek('held', 'h11')").fetchone() == (11,)
    assert len(producer.execute("select from queen.list_timers('held', max_rows => 10000)").fetchall()) == 4999
    # To another partition, which is free.
    producer.execute("select queen.schedule('held', 'h12', '\"elsewhere\"', '0'::interval, partition => 'free')")
    wait_for(lambda: db.value("select count(*) from delivered where part = 'free'") == 1, 2)
    assert ledger.pending() == 4998

    released = db.value("select clock_timestamp()")
    holder.connection.commit()
    wait_for(lambda: ledger.pending() == 1, what="all but the one in an hour")
    took = db.value("select extract(epoch from max(created_at) - %s) from delivered", released)
    print(f"5,000 followed within {float(took):.2f} s")
    assert took < 2
    assert db.value("select count(*) from queen.log_busy") == 0
    assert db.value("select count(*) from delivered where message_id = %s", new_id) == 1
    # Cancelled, moved and replaced ones aside, all are there, once, and in order.
    db.execute("delete from wanted where timer_key = any (%s)", ["h7", "h8", "h9", "h10", "h12"])
    db.execute(
        "insert into wanted select d.queue, '', d.message_id, d.txn, d.deliver_at from delivered d"
        " where d.message_id not in (select message_id from wanted)"
    )
    ledger.check(in_order=False)
    backwards = (
        "select from (select d.deliver_at, w.timer_key, lag(d.deliver_at) over o as due_before,"
        " lag(w.timer_key) over o as key_before"
        " from delivered d join wanted w on w.message_id = d.message_id where d.part = 'P' and w.timer_key <> ''"
        ' window o as (order by d."offset")) x where (deliver_at, timer_key) < (due_before, key_before)'
    )
    assert db.rows(backwards) == []


@pytest.mark.slow
def test_what_comes_due_meanwhile_joins_the_end(
    db: Database, stepped_out: tuple[Ledger, Session, list[Sweeper]]
) -> None:
    ledger, holder, _ = stepped_out
    for turn in range(3):
        ledger.schedule("held", 100, key=f"'m{turn}-' || i", due="now() + i * interval '1 ms'", partition="'P'")
        wait_for(lambda: ledger.pending("visible_at <= now() + interval '500 ms'") == 0)
    assert ledger.pending() == 5300
    holder.connection.rollback()
    ledger.wait_until_empty(10)
    assert db.value("select count(*) from queen.log_busy") == 0
    ledger.check()


@pytest.mark.slow
def test_what_stepped_out_survives_its_sweepers(
    db: Database, stepped_out: tuple[Ledger, Session, list[Sweeper]], session: StartSession
) -> None:
    """All sweepers die, the partition is freed, another comes: at the latest the timers are due by themselves."""
    ledger, holder, sweepers = stepped_out
    for sweeper in sweepers:
        sweeper.kill()
    holder.connection.rollback()
    assert ledger.pending() == 5000
    fresh = session("ada_admin")
    fresh.start("call queen.sweep('20 s')")
    ledger.wait_until_empty(15)
    ledger.check()


@pytest.mark.slow
def test_many_held_partitions(db: Database, sweeper: StartSweeper, session: StartSession) -> None:
    """Forty partitions held at once do not starve the free ones, and each follows."""
    ledger = Ledger(db)
    ledger.schedule("q", 50, key="'first' || i", partition="'p' || i")
    db.execute("select queen.fire_due()")
    sweeper(0, 2)
    sweeper(1, 2)
    holders = [session("alice_producer", autocommit=False) for _ in range(4)]
    for number in range(1, 41):
        holders[number % 4].run("select queen.push('q', '0', %s)", f"p{number}")
    ledger.schedule("q", 4000, due="now() - interval '1 s' + i * interval '1 ms'", partition="'p' || 1 + i % 50")
    wait_for(
        lambda: db.value("select count(*) from queen.log_timers where \"partition\" in ('p41', 'p45', 'p50')") == 0
    )
    ledger.schedule("steady", 300, due="now() + interval '100 ms' + i * interval '5 ms'", partition="'s' || i % 4")
    wait_for(lambda: ledger.pending("queue = 'steady'") == 0)
    late = ledger.lateness("queue = 'steady'")
    figures = report("beside forty held partitions", late)
    assert percentile(late, 95) < 150, figures
    for holder in holders:
        holder.connection.rollback()
    ledger.wait_until_empty(10)
    ledger.check()


def test_a_stream_of_short_pushes_does_not_starve_the_timers(db: Database, sweeper: StartSweeper) -> None:
    """Four sessions push to one partition without a pause; its timers come through."""
    ledger = Ledger(db)
    sweeper()
    pushes = (
        "do $$ begin for i in 1..150 loop"
        " perform queen.push('q', to_jsonb(i), 'P'); commit; perform pg_sleep(0.005);"
        " end loop; end $$"
    )
    sessions = [db.connect() for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(each.execute, pushes) for each in sessions]
        ledger.schedule("q", 100, due="now() + i * interval '5 ms'", partition="'P'")
        ledger.wait_until_empty(5)
        for future in running:
            future.result()
    late = ledger.lateness("deliver_at is not null")
    figures = report("beside a stream of pushes", late)
    assert len(late) == 100
    assert max(late) < 1500, figures
