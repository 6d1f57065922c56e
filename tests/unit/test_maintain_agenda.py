"""When maintenance looks at a partition: at births, after options change, and under pg_cron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

from tests.support.clock import Clock
from tests.support.database import Database
from tests.support.waiting import wait_for


def test_a_partition_born_by_duplicates_goes(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute("select queen.push('q', '1', 'a', 't')")
    assert db.value("select status from queen.push('q', '1', 'b', 't')") == "duplicate"
    for _ in range(3):
        clock.advance(timedelta(days=30))
        db.execute("call queen.maintain()")
    assert db.rows("select name from queen.log_partitions") == []


def test_runs_that_a_restart_ended_are_pruned(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    db = own_cron_db({})
    db.execute("select queen.start(1)")
    db.restart()
    wait_for(lambda: db.rows("select from cron.job_run_details where status = 'running'"))
    db.restart("immediate")
    wait_for(lambda: db.rows("select from cron.job_run_details where return_message = 'server restarted'"))
    db.execute("select queen.stop()")
    db.execute("update cron.job_run_details set start_time = start_time - interval '3 days' where status = 'failed'")
    db.execute("call queen.maintain()")
    assert db.rows("select from cron.job_run_details where return_message = 'server restarted'") == []


def test_a_retention_shorter_than_that_of_consumed_messages(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute('select queen.configure_queue(\'q\', \'{"retention": "1 hour", "retention_force": true}\')')
    db.execute("select queen.push('q', '1')")
    db.execute("select queen.pop('q', 'g', lease => '1 ms')")
    clock.advance(timedelta(minutes=10))
    db.execute("call queen.maintain()")
    clock.advance(timedelta(minutes=60))
    db.execute("call queen.maintain()")
    assert db.value("select count(*) from queen.log_segments") == 0


def test_a_shorter_retention_is_in_force_within_the_hour(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute("select queen.push('q', '1')")
    clock.advance(timedelta(hours=2))
    db.execute("call queen.maintain()")
    db.execute("select queen.configure_queue('q', '{\"retention\": \"1 hour\"}')")
    clock.advance(timedelta(minutes=60))
    db.execute("call queen.maintain()")
    assert db.value("select count(*) from queen.log_segments") == 0


def test_the_job_maintains(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    """What queen.start made for maintenance runs by itself, each minute, and removes what is stale."""
    db = own_cron_db({})
    db.execute("select queen.push('q', '1')")
    db.execute("update queen.log_segments set created_at = created_at - interval '30 days'")
    db.execute("update queen.log_partitions set due_at = now()")
    db.execute("select queen.start(1)")
    wait_for(lambda: db.value("select count(*) from queen.log_segments") == 0, 90)
    command = "select status from cron.job_run_details where command like 'CALL queen.maintain(%' limit 1"
    wait_for(lambda: db.rows(command) == [("succeeded",)], 30)
