"""What maintenance takes away, and what it must leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database

LOG = "select base_offset, end_offset from queen.log_segments order by partition_id, end_offset"


def maintain(db: Database) -> None:
    db.execute("call queen.maintain('20 seconds')")


def options(db: Database, **values: str) -> None:
    pairs = ", ".join(f"'{key}', '{value}'" for key, value in values.items())
    db.execute(f"select queen.configure_queue('q', jsonb_build_object({pairs}))")


@pytest.fixture
def hours(db: Database, clock: Clock) -> Clock:
    """Three segments of two messages, one an hour, in partition p of q; now is three hours after the first."""
    clock.stop()
    for _ in range(3):
        db.execute("select queen.push_many('q', array['1', '2']::jsonb[], 'p')")
        clock.advance(timedelta(hours=1))
    return clock


def test_by_age_when_nobody_reads(db: Database, hours: Clock) -> None:
    options(db, retention="90 minutes", retention_consumed="1 second")
    maintain(db)
    assert db.rows(LOG) == [(5, 6)]
    assert db.rows("select log_start, last_offset from queen.log_partitions") == [(5, 6)]
    # A group that comes now begins with what is left.
    assert [o for (o,) in db.rows("select \"offset\" from queen.pop('q', 'late')")] == [5, 6]


def test_by_consumption_whole_segments_below_the_slowest(db: Database, hours: Clock) -> None:
    options(db, retention="1 year", retention_consumed="1 minute")
    for group, to in (("fast", 6), ("slow", 3)):
        rows = db.rows("select \"offset\", lease_id from queen.pop('q', %s)", group)
        db.execute("select queen.ack('q', %s, 'p', %s, %s)", group, rows[0][1], to)
    maintain(db)
    # Offset 3 of the second segment is read by both, offset 4 is not.
    assert db.rows(LOG) == [(3, 4), (5, 6)]
    hours.advance(timedelta(hours=1))
    assert [o for (o,) in db.rows("select \"offset\" from queen.pop('q', 'slow', auto_ack => true)")] == [4, 5, 6]
    hours.advance(timedelta(minutes=10))
    maintain(db)
    assert db.rows(LOG) == []
    # Offsets go on where they were.
    db.execute("select queen.push('q', '3', 'p')")
    assert db.rows("select \"offset\" from queen.pop('q', 'fast')") == [(7,)]


def test_a_group_that_never_acks_keeps_its_messages_unless_forced(
    db: Database, hours: Clock, reader: Connection
) -> None:
    options(db, retention="30 minutes", retention_consumed="1 second")
    db.execute("select queen.pop('q', 'lazy', lease => '1 ms')")
    maintain(db)
    assert len(db.rows(LOG)) == 3
    # A view says so, with the age.
    hours.advance(timedelta(seconds=1))
    lagging = 'select queue, "partition", consumer_group, committed, last_offset, messages, oldest_at from'
    ((*place, oldest),) = reader.execute(f"{lagging} queen.lagging_groups").fetchall()
    assert place == ["q", "p", "lazy", 0, 6, 6]
    assert oldest == db.value("select min(created_at) from queen.log_segments")
    assert reader.execute("select consumer_group, from_offset from queen.expired_leases").fetchall() == [("lazy", 1)]
    options(db, retention_force="true")
    hours.advance(timedelta(minutes=10))
    maintain(db)
    assert db.rows(LOG) == []
    assert db.value("select count(*) from queen.pop('q', 'lazy')") == 0


def test_txns_go_with_their_window(db: Database, clock: Clock) -> None:
    options(db, txn_window="1 hour")
    clock.stop()
    db.execute("select queen.push_many('q', array['1', '2']::jsonb[], 'p', array['a', 'b'])")
    clock.advance(timedelta(minutes=50))
    db.execute("select queen.push('q', '3', 'p', 'c')")
    maintain(db)
    assert db.value("select count(*) from queen.log_txns") == 3
    clock.advance(timedelta(minutes=20))
    maintain(db)
    assert db.rows('select "offset" from queen.log_txns') == [(3,)]
    assert db.value("select txns_start from queen.log_partitions") == 3
    assert db.value("select status from queen.push('q', '4', 'p', 'c')") == "duplicate"
    assert db.value("select status from queen.push('q', '4', 'p', 'a')") == "queued"


def test_idle_partitions_are_removed_and_reborn(db: Database, hours: Clock) -> None:
    options(db, retention="1 hour", txn_window="1 hour", partition_idle="1 day")
    db.execute("select queen.push('q', '1', 'busy')")
    db.execute("select queen.pop('q', 'g', auto_ack => true)")
    hours.advance(timedelta(hours=20))
    maintain(db)
    assert sorted(db.rows("select name from queen.log_partitions")) == [("busy",), ("p",)]
    hours.advance(timedelta(hours=2))
    db.execute("select queen.push('q', '2', 'busy')")
    hours.advance(timedelta(hours=3))
    maintain(db)
    assert db.rows("select name from queen.log_partitions") == [("busy",)]
    assert db.value("select count(*) from queen.log_consumers") == 1
    # A timer for it may wait meanwhile: it names the partition, which is born again at the fire.
    db.execute("select queen.schedule('q', 'k', '3', '0', partition => 'p')")
    assert db.value("select queen.fire_due()") == 1
    rows = db.rows("select \"offset\", payload from queen.pop('q', 'g', partition => 'p')")
    assert rows == [(1, 3)]


def test_dead_letters_have_their_time(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute("select queen.configure('delivery_max_attempts', '1')")
    for queue, keep in (("q", "1 hour"), ("r", "1 day")):
        db.execute(
            "select queen.configure_queue(%s, jsonb_build_object('dead_letter_retention', %s::text))", queue, keep
        )
        db.execute("select queen.push(%s, '1')", queue)
        db.execute("select queen.nack(%s, 'g', 'Default', lease_id, 'no') from queen.pop(%s, 'g')", queue, queue)
    assert db.value("select count(*) from queen.log_dlq") == 2
    clock.advance(timedelta(hours=2))
    maintain(db)
    assert db.rows("select queue from queen.log_dlq") == [("r",)]


def test_it_waits_for_nobody(db: Database, hours: Clock, session: StartSession) -> None:
    options(db, retention="30 minutes")
    db.execute("select queen.push('q', '1', 'other')")
    db.execute("update queen.log_segments set created_at = created_at - interval '1 day'")
    db.execute("update queen.log_partitions set due_at = queen._now()")
    user = session("alice_producer", autocommit=False)
    user.run("select queen.push('q', '3', 'p')")
    db.execute("set statement_timeout = '10 s'")
    maintain(db)
    held = db.value("select id from queen.log_partitions where name = 'p'")
    assert {pid for (pid,) in db.rows("select distinct partition_id from queen.log_segments")} == {held}
    user.connection.commit()
    hours.advance(timedelta(minutes=5))
    db.execute("update queen.log_partitions set due_at = queen._now()")
    maintain(db)
    assert db.rows(LOG) == [(7, 7)]


@pytest.mark.slow
def test_only_our_rows_of_the_run_log(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    db = own_cron_db({})
    commands = [
        "CALL queen.sweep(null, 0, 2)",
        "CALL queen.maintain()",
        "select 1",
        "CALL other.sweep(1)",
        "vacuum",
    ]
    for command in commands:
        for age in ("3 days", "1 minute"):
            db.execute(
                "insert into cron.job_run_details (jobid, runid, database, command, status, start_time, end_time)"
                " values (1, nextval('cron.runid_seq'), current_database(), %s, 'succeeded',"
                " now() - %s::interval, now() - %s::interval)",
                *(command, age, age),
            )
    db.execute(
        "insert into cron.job_run_details (jobid, runid, database, command, status, end_time)"
        " values (1, nextval('cron.runid_seq'), 'another', %s, 'succeeded', now() - interval '3 days')",
        commands[0],
    )
    maintain(db)
    left = db.rows("select command, count(*) from cron.job_run_details where jobid = 1 group by 1 order by 2, 1")
    assert left == [
        ("CALL queen.maintain()", 1),
        ("CALL other.sweep(1)", 2),
        ("CALL queen.sweep(null, 0, 2)", 2),
        ("select 1", 2),
        ("vacuum", 2),
    ]
