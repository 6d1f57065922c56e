"""queen.maintain beside users: it waits for nobody, and whoever holds a partition delays that partition only."""

from __future__ import annotations

import time

import psycopg
import pytest

from tests.conftest import StartSession, StartSweeper
from tests.support.database import Connection, Database
from tests.support.waiting import wait_for


def stale(db: Database, partitions: int, segments: int = 3) -> None:
    """Partitions p1, p2, ... of queue q, whose segments were consumed by group g and are due to go, p1 first."""
    db.execute('select queen.configure_queue(\'q\', \'{"retention_consumed": "0 seconds", "txn_window": "1 second"}\')')
    db.execute(
        "select queen.push('q', '1', 'p' || p) from generate_series(1, %s::int) p, generate_series(1, %s::int)",
        *(partitions, segments),
    )
    while db.rows("select queen.pop('q', 'g', 10000, auto_ack => true)"):
        pass
    db.execute("update queen.log_segments set created_at = created_at - interval '1 hour'")
    db.execute("update queen.log_txns set created_at = created_at - interval '1 hour'")
    db.execute(
        "update queen.log_partitions set"
        " due_at = clock_timestamp() - interval '1 minute' * case when name = 'p1' then 2 else 1 end,"
        " last_created_at = last_created_at - interval '1 hour'"
    )


def left(db: Database) -> dict[str, int]:
    """Segments by partition, those without left out."""
    return dict(
        db.rows(
            "select p.name, count(*) from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id"
            " group by 1"
        )
    )


def test_an_open_push_keeps_its_own_partition_only(db: Database, session: StartSession) -> None:
    stale(db, 4)
    user = session("alice_producer", autocommit=False)
    user.run("select queen.push('q', '2', 'p1')")
    maintain = session("ada_admin")
    maintain.run("set lock_timeout = '1 ms'")
    before = time.monotonic()
    maintain.run("call queen.maintain('20 seconds')", timeout=30)
    # Nothing to do but p1's: it is over long before its time.
    assert time.monotonic() - before < 10
    assert left(db) == {"p1": 3}
    user.connection.commit()
    assert left(db) == {"p1": 4}
    # And p1 is seen to by the next run.
    db.execute("call queen.maintain()")
    assert left(db) == {"p1": 1}


def test_an_open_pop_and_ack_keep_nobody(db: Database, session: StartSession) -> None:
    stale(db, 3)
    db.execute("select queen.push('q', '2', 'p2')")
    db.execute("update queen.log_partitions set last_created_at = last_created_at - interval '1 hour'")
    user = session("carl_consumer", autocommit=False)
    assert len(user.run("select * from queen.pop('q', 'g')")) == 1
    maintain = session("ada_admin")
    maintain.run("call queen.maintain('20 seconds')", timeout=15)
    assert left(db) == {"p2": 1}
    # A partition cools only when all of its cursors are free.
    assert db.rows("select name from queen.log_partitions where hot") == [("p2",)]
    user.connection.commit()
    db.execute("call queen.maintain()")
    assert db.rows("select name from queen.log_partitions where hot") == []


def test_one_partition_at_a_time(db: Database, session: StartSession) -> None:
    """A step that is held up in the middle holds one partition; pushes to the others go on, and end with its step."""
    stale(db, 5)
    # No lock holds it up: a step gives up on those.
    db.execute("create table public.closed (yes boolean); insert into public.closed values (true)")
    db.execute(
        "create function public.slow() returns trigger language plpgsql security definer as"
        " $$ begin while exists (select from public.closed) loop perform pg_sleep(0.01); end loop; return null; end $$"
    )
    db.execute("create trigger slow after delete on queen.log_segments execute function public.slow()")
    maintain = session("ada_admin")
    call = maintain.start("call queen.maintain('20 seconds')")
    asleep = "select from pg_stat_activity where pid = %s and wait_event = 'PgSleep'"
    wait_for(lambda: db.rows(asleep, maintain.pid))
    held = []
    for number in range(1, 6):
        user = session("alice_producer")
        user.run("set lock_timeout = '300 ms'")
        try:
            user.run("select queen.push('q', '2', %s)", f"p{number}")
        except psycopg.errors.LockNotAvailable:
            held.append(number)
    assert held == [1]
    db.execute("delete from public.closed")
    call.result(20)
    assert left(db) == {f"p{number}": 1 for number in range(2, 6)}


def test_two_at_once(db: Database, session: StartSession) -> None:
    stale(db, 300)
    calls = []
    for _ in range(3):
        maintain = session("ada_admin")
        calls.append(maintain.start("call queen.maintain('20 seconds')"))
    for call in calls:
        call.result(30)
    assert left(db) == {}
    assert db.value("select deadlocks from pg_stat_database where datname = current_database()") == 0


def test_pushes_go_on_beside_it(db: Database, session: StartSession, sweeper: StartSweeper) -> None:
    """Timers and pushes to partitions that empty all the time and are removed: nothing lost, offsets without a gap."""
    db.execute(
        'select queen.configure_queue(\'q\', \'{"retention_consumed": "0 seconds", "txn_window": "1 second",'
        ' "partition_idle": "1 second"}\')'
    )
    sweeper()
    maintain = session("ada_admin")
    pusher = session("alice_producer")
    consumer = session("carl_consumer")
    got: list[int] = []
    sent = 0
    deadline = time.monotonic() + 4
    while time.monotonic() < deadline:
        # What is stored ages by an hour, and goes at the next step.
        with db.superuser.transaction():
            db.execute("lock table queen.log_partitions in exclusive mode")
            for table in ("segments", "txns"):
                db.execute(f"update queen.log_{table} set created_at = created_at - interval '1 hour'")
            db.execute(
                "update queen.log_partitions set last_created_at = last_created_at - interval '1 hour',"
                " created_at = created_at - interval '1 hour', due_at = clock_timestamp()"
            )
        call = maintain.start("call queen.maintain('1 second')")
        push = pusher.start(
            "select queen.push('q', to_jsonb(i), 'p' || i %% 4) from generate_series(%s::int, %s::int) i",
            sent,
            sent + 9,
        )
        taken = consumer.start("select payload from queen.pop('q', 'g', 100, auto_ack => true)")
        pusher_result = push.result(10)
        assert len(pusher_result) == 10
        pusher.run("select queen.schedule('q', %s, to_jsonb(%s::int), '0', partition => 'p0')", f"k{sent}", sent + 10)
        sent += 11
        got += [payload for (payload,) in taken.result(10)]
        call.result(10)
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
    while rows := db.rows("select payload from queen.pop('q', 'g', 10000, auto_ack => true)"):
        got += [payload for (payload,) in rows]
    assert sorted(got) == list(range(sent))
    # Otherwise no partition was ever removed and born again.
    assert db.value("select max(id) from queen.log_partitions") > 8


def test_a_push_that_waits_for_a_removal_finds_a_new_partition(db: Database, session: StartSession) -> None:
    stale(db, 1)
    db.execute("select queen.configure_queue('q', '{\"partition_idle\": \"1 second\"}')")
    db.execute("update queen.log_partitions set created_at = created_at - interval '1 hour'")
    remover = session("postgres", autocommit=False)
    remover.run("select queen._retain(id, 500, queen._now()) from queen.log_partitions")
    user = session("alice_producer")
    push = user.start("select status, \"partition\", \"offset\" from queen.push('q', '\"new\"', 'p1')")
    user.wait_until_blocked()
    remover.connection.commit()
    assert push.result(10) == [("queued", "p1", 1)]
    assert db.rows("select payload from queen.pop('q', 'g')") == [("new",)]


def test_it_is_a_procedure_of_many_transactions(db: Database, admin: Connection) -> None:
    with pytest.raises(psycopg.errors.InvalidTransactionTermination), admin.transaction():
        admin.execute("call queen.maintain()")
    for user in ("alice_producer", "carl_consumer", "rita_reader", "nobody_role"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            db.connect(user).execute("call queen.maintain()")
