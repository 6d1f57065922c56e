"""Maintenance in bounded steps of a transaction and a partition each; what keeps a partition; what the views say."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database


def maintain(db: Database) -> None:
    db.execute("call queen.maintain('20 seconds')")


def record_deletes(db: Database) -> None:
    """From now on public.deleted holds a row a statement that deletes segments or txns."""
    db.execute("create table public.deleted (xid xid8, what text, partitions bigint[], rows bigint)")
    db.execute(
        "create function public.record() returns trigger language plpgsql security definer as $$ begin"
        " insert into public.deleted select pg_current_xact_id(), tg_table_name,"
        " array_agg(distinct o.partition_id), count(*) from old o having count(*) > 0; return null; end $$"
    )
    for table in ("log_segments", "log_txns"):
        db.execute(
            f"create trigger record after delete on queen.{table} referencing old table as old"
            " for each statement execute function public.record()"
        )


def test_steps_are_bounded_and_hold_one_partition(db: Database) -> None:
    """4 partitions, 1,200 segments of 20 txns each."""
    db.execute('select queen.configure_queue(\'q\', \'{"retention": "1 hour", "txn_window": "1 hour"}\')')
    db.execute("select queen.push('q', '1', 'p' || i) from generate_series(1, 4) i")
    db.execute(
        "insert into queen.log_segments select s.partition_id, i * 20 - 18, i * 20 + 1, s.created_at, s.raw_bytes,"
        " s.blob from queen.log_segments s cross join generate_series(1, 1200) i"
    )
    db.execute(
        "insert into queen.log_txns select t.partition_id, i, t.created_at, queen._txn_hash(i::text), null"
        " from queen.log_txns t cross join generate_series(2, 24001) i"
    )
    db.execute("update queen.log_partitions set last_offset = 24001, due_at = now()")
    for table in ("segments", "txns"):
        db.execute(f"update queen.log_{table} set created_at = created_at - interval '1 day'")
    record_deletes(db)
    maintain(db)
    assert db.value("select count(*) from queen.log_segments") == 0
    assert db.value("select count(*) from queen.log_txns") == 0
    assert db.rows("select distinct log_start, txns_start from queen.log_partitions") == [(24002, 24002)]
    assert db.rows("select what, sum(rows), max(rows) from public.deleted group by 1 order by 1") == [
        ("log_segments", 4804, 500),
        ("log_txns", 96004, 10000),
    ]
    of_a_step = "select array_length(array_agg(distinct p), 1) from public.deleted, unnest(partitions) p group by xid"
    assert set(db.rows(of_a_step)) == {(1,)}
    # Round and round, so that one long backlog does not keep the others waiting.
    order = [
        pid for (pid,) in db.rows("select partitions[1] from public.deleted where what = 'log_segments' order by xid")
    ]
    assert len(set(order[:4])) == 4


def test_a_run_ends_on_time_and_the_next_goes_on(db: Database) -> None:
    db.execute("select queen.configure_queue('q', '{\"retention\": \"1 hour\"}')")
    db.execute("select queen.push('q', '1', 'p' || i) from generate_series(1, 3) i")
    db.execute("update queen.log_segments set created_at = created_at - interval '1 day'")
    db.execute("update queen.log_partitions set due_at = now()")
    for left in (2, 1, 0):
        # One step of each phase at least, or a short time would never do anything.
        db.execute("call queen.maintain('0')")
        assert db.value("select count(*) from queen.log_segments") == left


def test_what_keeps_an_idle_partition(db: Database, clock: Clock) -> None:
    """Segments, remembered txns, a lease that is out; not the cursors, and not the timers that will make it again."""
    clock.stop()
    db.execute(
        'select queen.configure_queue(\'q\', \'{"retention": "1 hour", "retention_consumed": "1 hour",'
        ' "txn_window": "1 hour", "partition_idle": "1 second"}\')'
    )
    for name in ("empty", "segment", "txn", "lease", "timer"):
        db.execute("select queen.push('q', '1', %s)", name)
    db.execute("select queen.pop('q', 'g', auto_ack => true)")
    clock.advance(timedelta(hours=2))
    db.execute("select queen.schedule('q', 'k', '1', '1 hour', partition => 'timer')")
    ids = {name: pid for pid, name in db.rows("select id, name from queen.log_partitions")}
    db.execute("update queen.log_segments set created_at = queen._now() where partition_id = %s", ids["segment"])
    db.execute("update queen.log_txns set created_at = queen._now() where partition_id = %s", ids["txn"])
    db.execute(
        "update queen.log_consumers set lease_expires_at = queen._now() + interval '30 minutes', leased_to = 1,"
        " lease_id = gen_random_uuid() where partition_id = %s",
        ids["lease"],
    )

    def left() -> set[str]:
        return {name for (name,) in db.rows("select name from queen.log_partitions")}

    maintain(db)
    assert left() == {"segment", "txn", "lease"}
    dead = "select name, queen.log_partition_dead(id) from queen.log_partitions"
    assert dict(db.rows(dead)) == {"segment": False, "txn": False, "lease": False}
    # Nothing of a removed one stays.
    for table in ("log_segments", "log_txns", "log_consumers"):
        assert {pid for (pid,) in db.rows(f"select partition_id from queen.{table}")} <= {ids[name] for name in left()}
    clock.advance(timedelta(hours=2))
    db.execute("update queen.log_partitions set due_at = queen._now()")
    maintain(db)
    assert left() == set()
    for table in ("log_segments", "log_txns", "log_consumers"):
        assert db.value(f"select count(*) from queen.{table}") == 0
    # The queue, its options and its groups live on.
    assert db.value("select options ->> 'retention' from queen.queues") == "1 hour"
    db.execute("select queen.fire_due()")
    assert db.rows("select \"partition\", \"offset\" from queen.pop('q', 'g')") == [("timer", 1)]


def test_a_partition_that_is_appended_to_is_not_idle(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute(
        'select queen.configure_queue(\'q\', \'{"retention": "1 minute", "txn_window": "1 minute",'
        ' "partition_idle": "1 hour"}\')'
    )
    db.execute("select queen.push('q', '1', 'p')")
    for _ in range(4):
        clock.advance(timedelta(minutes=50))
        maintain(db)
        db.execute("select queen.push('q', '1', 'p')")
    # Had it been removed in between, offsets would have begun again.
    assert db.rows("select name, last_offset from queen.log_partitions") == [("p", 5)]


def test_many_dead_letters_some_in_hands(db: Database, session: StartSession) -> None:
    """Thousands of them, of messages and timers, of queues that are and are not; one that somebody holds waits."""
    db.execute("select queen.configure_queue('q', '{\"dead_letter_retention\": \"1 hour\"}')")
    db.execute(
        "insert into queen.log_dlq (tenant_id, queue, partition, consumer_group, message_id, txn, payload, attempts,"
        " failed_at)"
        " select '00000000-0000-0000-0000-000000000001', (array['q', 'gone'])[1 + i % 2], 'p',"
        " (array['g', '__timer__'])[1 + i % 3 / 2], gen_random_uuid(), i::text, '1', 1,"
        " now() - (array['2 hours', '40 days'])[1 + i % 5 / 4]::interval from generate_series(1, 6000) i"
    )
    db.execute(
        "insert into queen.log_dlq select (jsonb_populate_record(d, jsonb_build_object('id', gen_random_uuid(),"
        " 'failed_at', now(), 'txn', 'young'))).* from queen.log_dlq d where queue = 'q' limit 1"
    )
    holder = session("postgres", autocommit=False)
    holder.run("select from queen.log_dlq where queue = 'q' and txn = '2' for update")
    maintain_ = session("ada_admin")
    maintain_.run("call queen.maintain('20 seconds')", timeout=30)
    # Of 'gone' only what is past the setting, 30 days.
    assert db.rows(
        "select queue, count(*), bool_and(failed_at > now() - interval '30 days') from queen.log_dlq"
        " group by 1 order by 1"
    ) == [("gone", 2400, True), ("q", 2, True)]
    assert {txn for (txn,) in db.rows("select txn from queen.log_dlq where queue = 'q'")} == {"2", "young"}
    holder.connection.rollback()
    maintain(db)
    assert db.rows("select txn from queen.log_dlq where queue = 'q'") == [("young",)]


def test_the_views_tell_ages(db: Database, clock: Clock, reader: Connection) -> None:
    clock.stop()
    db.execute("select queen.push('q', '1', 'a')")
    clock.advance(timedelta(hours=1))
    db.execute("select queen.push('q', '2', 'a'), queen.push('q', '1', 'b')")
    lagging = 'select "partition", consumer_group, messages, age, last_error from queen.lagging_groups order by 1, 2'
    # Nobody was here yet, so nobody lags.
    assert reader.execute(lagging).fetchall() == []
    db.execute("select queen.pop('q', 'g', lease => '10 minutes', partition => 'a')")
    clock.advance(timedelta(minutes=30))
    hour, half = timedelta(hours=1), timedelta(minutes=30)
    # Also where a group has no cursor yet.
    assert reader.execute(lagging).fetchall() == [("a", "g", 2, hour + half, None), ("b", "g", 1, half, None)]
    expired = (
        'select queue, "partition", consumer_group, from_offset, to_offset, attempts, expired_for'
        " from queen.expired_leases"
    )
    assert reader.execute(expired).fetchall() == [("q", "a", "g", 1, 2, 1, timedelta(minutes=20))]
    db.execute(
        "select queen.nack('q', 'g', 'a', lease_id, 'broken') from queen.pop('q', 'g', partition => 'a') limit 1"
    )
    assert reader.execute(expired).fetchall() == []
    assert reader.execute(lagging).fetchall()[0] == ("a", "g", 2, hour + half, "broken")
    while db.rows("select queen.pop('q', 'g', auto_ack => true)"):
        pass
    assert reader.execute(lagging).fetchall() == []
    # A lease in force is no expired one.
    db.execute("select queen.push('q', '3', 'a')")
    db.execute("select queen.pop('q', 'g')")
    assert reader.execute(expired).fetchall() == []


@pytest.mark.parametrize("forced", [False, True])
def test_the_slowest_of_three_groups_keeps_whole_segments(db: Database, clock: Clock, forced: bool) -> None:
    """In two partitions, one of which a group never saw; unless the queue says so."""
    clock.stop()
    for part in ("a", "b"):
        for _ in range(4):
            db.execute("select queen.push_many('q', array['1', '2', '3']::jsonb[], %s)", part)
    for group, upto in (("fast", 12), ("slow", 7)):
        for part in ("a", "b") if group == "fast" else ("a",):
            db.execute(
                "select queen.ack('q', %s, %s, lease_id, %s::bigint) from queen.pop('q', %s, partition => %s) limit 1",
                *(group, part, upto, group, part),
            )
    clock.advance(timedelta(days=2))
    db.execute(
        "select queen.configure_queue('q', jsonb_build_object('retention', '1 day', 'retention_consumed', '1 minute',"
        " 'retention_force', %s::boolean))",
        forced,
    )
    maintain(db)
    left = db.rows(
        "select p.name, s.base_offset, s.end_offset from queen.log_segments s"
        " join queen.log_partitions p on p.id = s.partition_id order by 1, 2"
    )
    whole = [("b", 1, 3), ("b", 4, 6), ("b", 7, 9), ("b", 10, 12)]
    assert left == ([] if forced else [("a", 7, 9), ("a", 10, 12), *whole])
    rows = db.rows("select \"partition\", \"offset\" from queen.pop('q', 'slow', 100) order by 1, 2")
    assert rows == ([] if forced else [*(("a", o) for o in range(8, 13)), *(("b", o) for o in range(1, 13))])
