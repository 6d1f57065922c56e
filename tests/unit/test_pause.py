"""pause_queue and resume_queue: the fire into one queue stops, costs nothing meanwhile, and goes on in order."""

from __future__ import annotations

import time

import psycopg
import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.waiting import wait_for

TENANT = "00000000-0000-0000-0000-0000000000aa"


def pending(db: Database, queue: str) -> int:
    return int(db.value("select count(*) from queen.log_timers where queue = %s", queue))


def fired_in_order(db: Database, queue: str) -> bool:
    """Whether each partition holds its messages by number, which is their txn."""
    popped = db.rows("""select m."partition", m.txn::int from queen.pop(%s, 'check', 10000) m""", queue)
    by_partition: dict[str, list[int]] = {}
    for partition, number in popped:
        by_partition.setdefault(partition, []).append(number)
    return all(numbers == sorted(numbers) for numbers in by_partition.values())


def schedule(db: Database, queue: str, first: int, last: int, partitions: int = 3) -> None:
    db.execute(
        """select count(*) from queen.schedule_many(%s,
             array(select 'k' || i from generate_series(%s::int, %s::int) i),
             array(select to_jsonb(i) from generate_series(%s::int, %s::int) i),
             deliver_ats => array(
                 select now() - interval '1 h' + i * interval '1 ms' from generate_series(%s::int, %s::int) i),
             partitions => array(select 'p' || i %% %s from generate_series(%s::int, %s::int) i),
             txns => array(select i::text from generate_series(%s::int, %s::int) i))""",
        queue, first, last, first, last, first, last, partitions, first, last, first, last,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["lock", "lease"])
def test_a_paused_queue_waits_and_the_others_go_on(db: Database, sweeper: StartSweeper, mode: str) -> None:
    db.execute("select queen.configure('sweep_mode', %s)", mode)
    assert db.value("select queen.pause_queue('p')") is True
    assert db.value("select queen.pause_queue('p')") is False
    assert db.rows("select queue, paused_by from queen.paused_queues") == [("p", "postgres")]
    assert db.value("select paused_queues from queen.status()") == 1
    for worker in range(2):
        sweeper(worker, 2)
    schedule(db, "p", 1, 600)
    schedule(db, "q", 1, 600)
    wait_for(lambda: pending(db, "q") == 0)
    # Out of the way of the passes, and not counted as late.
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    assert pending(db, "p") == 600
    assert db.rows("select due, oldest_lateness <= interval '1 s', busy_partitions from queen.status()") == [
        (0, True, 0)
    ]
    assert db.value("select next_due_at from queen.log_timers_due()") is None
    schedule(db, "p", 601, 900)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    # Cancel, move and replace work; what is moved into the future is in nobody's line.
    assert db.value("select (queen.cancel('p', 'k3')).status") == "cancelled"
    assert db.value("select (queen.reschedule('p', 'k4', '1 hour'::interval)).status") == "rescheduled"
    assert (
        db.value("select (queen.schedule('p', 'k900', '0', '0', \"partition\" => 'p0', txn => '9000')).status")
        == "rescheduled"
    )
    assert db.value("select queen.resume_queue('p')") is True
    assert db.value("select queen.resume_queue('p')") is False
    wait_for(lambda: pending(db, "p") == 1, 2)
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 0, 2)
    assert db.value("select count(*) from queen.queue_pauses") == 0
    assert fired_in_order(db, "p")
    assert db.value("select sum(last_offset - log_start + 1) from queen.log_partitions") == 898 + 600


def test_resumed_while_much_waits_keeps_order(db: Database, sweeper: StartSweeper) -> None:
    """More than a step fires, and new ones come due while the line drains: nobody overtakes."""
    db.execute("select queen.pause_queue('p')")
    for worker in range(2):
        sweeper(worker, 2)
    schedule(db, "p", 1, 9000)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    db.execute("select queen.resume_queue('p')")
    for first in range(9001, 9801, 100):
        schedule(db, "p", first, first + 99)
    wait_for(lambda: pending(db, "p") == 0)
    assert fired_in_order(db, "p")
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 0, 2)


def test_resume_takes_effect_within_a_second(db: Database, sweeper: StartSweeper) -> None:
    sweeper(0, 2)
    sweeper(1, 2)
    db.execute("select queen.pause_queue('p')")
    schedule(db, "p", 1, 20)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    time.sleep(0.7)
    db.execute("select queen.resume_queue('p')")
    began = time.monotonic()
    wait_for(lambda: pending(db, "p") == 0, 5)
    assert time.monotonic() - began < 1


def test_a_row_that_somebody_holds_is_not_left_in_the_line(
    db: Database, sweeper: StartSweeper, session: StartSession
) -> None:
    db.execute("select queen.pause_queue('p')")
    sweeper(0, 1)
    schedule(db, "p", 1, 30, partitions=1)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    holder = session()
    holder.run("begin")
    holder.run("select 1 from queen.log_timers where timer_key = 'k1' for update")
    db.execute("select queen.resume_queue('p')")
    wait_for(lambda: pending(db, "p") == 1)
    holder.run("rollback")
    wait_for(lambda: pending(db, "p") == 0, 2)
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 0, 2)


def test_without_workers_fire_due_does_what_they_do(db: Database) -> None:
    schedule(db, "p", 1, 30)
    schedule(db, "q", 1, 30)
    db.execute("select queen.pause_queue('p')")
    assert db.value("select queen.fire_due()") == 30
    assert {row[0] for row in db.rows("select queue from queen.log_timers_claim()")} == set()
    db.execute("call queen.sweep('300 ms')")
    assert db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0
    db.execute("select queen.resume_queue('p')")
    db.execute("delete from queen.sweep_stats")
    first = db.value("select queen.fire_due(7)")
    assert 0 < first <= 7
    assert db.value("select queen.fire_due()") == 30 - first
    assert fired_in_order(db, "p")


def test_a_bad_row_in_a_line_stops_nobody(db: Database, sweeper: StartSweeper) -> None:
    db.execute("select queen.pause_queue('p')")
    sweeper(0, 1)
    schedule(db, "p", 1, 50, partitions=1)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    db.execute("update queen.log_timers set payload = 'damaged', payload_zstd = true where timer_key = 'k7'")
    db.execute("select queen.resume_queue('p')")
    wait_for(lambda: pending(db, "p") == 1, 3)
    assert "damaged" in db.value("select last_error from queen.log_timers")
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 0, 2)


def test_a_claim_passes_over_paused_queues(db: Database) -> None:
    schedule(db, "p", 1, 300)
    schedule(db, "q", 1, 10)
    db.execute("select queen.pause_queue('p')")
    assert {row[0] for row in db.rows("select queue from queen.log_timers_claim(max_rows => 50)")} == {"q"}
    db.execute("select queen.resume_queue('p')")
    db.execute("select queen._end_pauses(now())")
    assert {row[0] for row in db.rows("select queue from queen.log_timers_claim(max_rows => 50)")} == {"p"}


def test_tenants_are_apart(db: Database, reader: Connection, sweeper: StartSweeper) -> None:
    db.execute("select queen.create_tenant(%s)", TENANT)
    db.execute("select queen.pause_queue('p', %s)", TENANT)
    sweeper(0, 1)
    db.execute("select queen.schedule('p', 'a', '1', '0'), queen.schedule('p', 'a', '1', '0', tenant => %s)", TENANT)
    wait_for(lambda: pending(db, "p") == 1)
    time.sleep(0.2)
    assert db.rows("select tenant_id::text from queen.log_timers") == [(TENANT,)]
    # A reader sees the pauses of its tenants only.
    assert reader.execute("select count(*) from queen.paused_queues").fetchone() == (0,)
    assert db.value("select count(*) from queen.paused_queues") == 1


def test_drop_queue_ends_the_pause(db: Database, sweeper: StartSweeper) -> None:
    sweeper(0, 1)
    db.execute("select queen.pause_queue('p')")
    schedule(db, "p", 1, 10)
    wait_for(lambda: db.value("select count(*) from queen.log_timers where visible_at <= now()") == 0)
    db.execute("select queen.drop_queue('p')")
    assert db.value("select count(*) from queen.paused_queues") == 0
    wait_for(lambda: db.value("select count(*) from queen.log_busy") == 0, 3)
    schedule(db, "p", 1, 10)
    wait_for(lambda: pending(db, "p") == 0, 2)


def test_only_the_operator_pauses(db: Database, producer: Connection) -> None:
    for call in ("select queen.pause_queue('p')", "select queen.resume_queue('p')"):
        with pytest.raises(psycopg.Error) as caught:
            producer.execute(call)
        assert caught.value.sqlstate == "42501"
