"""A dump holds all that users put in, and its restore fires each timer once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.database import Database
from tests.support.servers import Server
from tools.cluster import pg_config, run


def test_every_table_and_sequence_is_marked(db: Database) -> None:
    marked = db.rows(
        "select c.oid::regclass::text, coalesce(k.condition, 'not marked') from pg_class c"
        " left join (select unnest(extconfig) as oid, unnest(extcondition) as condition"
        "              from pg_extension where extname = 'pg_queen') k on k.oid = c.oid"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'p', 'S', 'm') order by 1"
    )
    assert len(marked) >= 14
    # No condition either: all of it is the user's.
    assert [each for each in marked if each[1] != ""] == []


def fill(db: Database) -> None:
    """Something of everything, in every state that lasts."""
    db.execute("select queen.configure('timer_max_attempts', '1')")
    db.execute("select queen.configure('payload_max_bytes', '2000000')")
    db.execute("select queen.configure_queue('o''clock', '{\"delivery_max_attempts\": 1, \"retention\": \"9 days\"}')")
    db.execute(
        "select queen.create_tenant('a0000000-0000-0000-0000-000000000001', 'shop'),"
        " queen.grant_tenant('a0000000-0000-0000-0000-000000000001', 'alice_producer'),"
        " queen.configure_tenant('a0000000-0000-0000-0000-000000000001', '{\"pending_max\": 1000000}')"
    )
    # The log: read in part, leased in part, given back, moved back, dead.
    db.execute(
        "select queen.push_many('log', (select array_agg(to_jsonb(i)) from generate_series(1, 50) i), partition => 'p'"
        " || p) from generate_series(1, 3) p"
    )
    db.execute("select queen.push_bytes('log', '\\x0001ff', 'p1', txn => 'mine')")
    db.execute(
        "with m as materialized (select distinct partition, lease_id from queen.pop('log', 'half', 1000)),"
        " a as materialized (select m.*, queen.ack('log', 'half', m.partition, m.lease_id, 20) from m)"
        " select queen.nack('log', 'half', a.partition, a.lease_id, 'later') from a"
    )
    db.execute("select queen.pop('log', 'leased', 5, lease => '1 hour', partition => 'p1')")
    db.execute("select queen.pop('log', 'done', 1000, auto_ack => true)")
    db.execute("select queen.seek('log', 'done', to_offset => 41)")
    db.execute("select queen.push('o''clock', '\"dead\"')")
    db.execute("select queen.nack('o''clock', 'g', m.partition, m.lease_id, 'no') from queen.pop('o''clock', 'g') m")
    # Timers: pending, due, fired, leased, backed off, archived, with each kind of payload.
    db.execute("select queen.schedule('fired', 'gone', '0', '0'::interval)")
    db.execute("select queen.schedule('bad', 'archived', '1', '0'::interval)")
    db.execute(
        "update queen.log_timers set payload = '\\x28b52ffd00', payload_zstd = true where timer_key = 'archived'"
    )
    db.execute("call queen.sweep('0')")
    db.execute("call queen.sweep('0')")
    db.execute("select queen.schedule('leased', 'held', '2', '0'::interval)")
    db.execute("select queen.log_timers_claim(lease => '1 hour')")
    db.execute("select queen.schedule('failed', 'backing off', '3', '0'::interval)")
    db.execute(
        "select queen.log_timers_fail(array[c.tenant_id], array[c.queue], array[c.timer_key], array[c.claim_token],"
        " 'later', '1 hour', false) from queen.log_timers_claim() c"
    )
    db.execute(
        "select queen.schedule_many('due', (select array_agg('k' || i) from generate_series(1, 500) i),"
        " (select array_agg(jsonb_build_object('i', i)) from generate_series(1, 500) i),"
        " array_fill('-1 s'::interval, array[500]),"
        " partitions => (select array_agg('p' || i % 4) from generate_series(1, 500) i))"
    )
    db.execute("select queen.schedule_bytes('new \"queue\"', 'é', '\\x00', '0'::interval, partition => ' ')")
    db.execute("select queen.schedule('due', 'far', '{}', '300 days'::interval, txn => 'the far one')")
    db.execute("select queen.pause_queue('paused')")
    # What a worker notes, and the mark of a partition that is held.
    db.execute(
        "insert into queen.log_busy"
        " values ('00000000-0000-0000-0000-000000000001', 'due', 'p1', now(), now(), now(), now())"
    )


def contents(db: Database) -> dict[str, Any]:
    """Every row of every table, and where each sequence stands."""
    found: dict[str, Any] = {}
    for name, kind in db.rows(
        "select c.oid::regclass::text, c.relkind::text from pg_class c"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'S')"
    ):
        row = "row(t.last_value, t.is_called)" if kind == "S" else "t"
        found[name] = sorted(text for (text,) in db.rows(f"select {row}::text from {name} t"))
    return found


@pytest.fixture(params=["custom", "plain"])
def restored(server: Server, db: Database, request: pytest.FixtureRequest) -> Iterator[Database]:
    """The test's database, filled, dumped and restored into a fresh one."""
    fill(db)
    bindir, file, name = pg_config("--bindir"), server.cluster.path / f"{db.name}.dump", f"{db.name}_restored"
    run([bindir / "pg_dump", "--format", request.param, "--file", file, db.conninfo()])
    with server.connect() as connection:
        connection.execute(f'create database "{name}" template template0')
    database = Database(server.cluster, name)
    try:
        if request.param == "custom":
            run([bindir / "pg_restore", "--exit-on-error", "--dbname", database.conninfo(), file])
        else:
            run([bindir / "psql", "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", database.conninfo(), "-f", file])
        yield database
    finally:
        database.close()
        file.unlink(missing_ok=True)
        with server.connect() as connection:
            connection.execute(f'drop database if exists "{name}" with (force)')


def test_dump_and_restore(db: Database, restored: Database) -> None:
    before = contents(db)
    empty = [name for name, rows in before.items() if not rows]
    # A table that this test puts nothing into proves nothing.
    assert empty == []
    assert contents(restored) == before

    # Nothing fires because it was restored; then what is due does, once, with the ids it had.
    due = dict(
        db.rows(
            "select timer_key, message_id from queen.log_timers"
            " where queue in ('due', 'new \"queue\"') and deliver_at < now()"
        )
    )
    assert len(due) == 501
    last = dict(db.rows("select name, max(last_offset) from queen.log_partitions group by 1"))
    restored.execute("delete from queen.log_busy")
    for _ in range(2):
        restored.execute("call queen.sweep('0')")
    messages = restored.rows(
        "select payload ->> 'i', message_id, payload_bytes from queen.pop('due', max_messages => 1000)"
    )
    messages += restored.rows("select null, message_id, payload_bytes from queen.pop('new \"queue\"')")
    assert len(messages) == 501
    assert {f"k{i}" if i else "é": message_id for i, message_id, _ in messages} == due
    assert [payload for i, _, payload in messages if i is None] == [b"\0"]
    assert restored.rows("select payload from queen.pop('fired')") == [(0,)]
    assert (
        restored.value(
            "select last_offset from queen.log_partitions where name = 'p1' and queue_id ="
            " (select id from queen.queues where name = 'log')"
        )
        == last["p1"]
        == 51
    )
    # The held and the backed off stay so, and the far one keeps its time.
    assert restored.rows('select queue, timer_key from queen.log_timers order by queue collate "C"') == [
        ("due", "far"),
        ("failed", "backing off"),
        ("leased", "held"),
    ]
    assert restored.value("select (queen.cancel('leased', 'held')).status") == "too_late"
    assert restored.value("select (queen.cancel('failed', 'backing off')).status") == "cancelled"
    assert restored.value("select (queen.schedule('due', 'far', '1', '1 s'::interval)).status") == "rescheduled"

    # Cursors.
    assert restored.value("select count(*) from queen.pop('log', 'half', 1000)") == 91
    assert restored.value("select min(\"offset\") from queen.pop('log', 'done', 1000)") == 41
    assert restored.value("select count(*) from queen.pop('log', 'leased', 1000)") == 100
    # Deduplication, options and settings.
    assert restored.rows("select status, \"offset\" from queen.push('log', '1', 'p2', txn => 'mine')") == [
        ("duplicate", 51)
    ]
    assert restored.value("select queen.configure_queue('o''clock', '{}') ->> 'retention'") == "9 days"
    assert restored.value("select value from queen.settings where key = 'payload_max_bytes'") == "2000000"
    # Dead letters, of a group and of a timer.
    assert restored.rows("select consumer_group, payload, error from queen.dlq_list('o''clock')") == [
        ("g", "dead", "no")
    ]
    assert restored.rows("select consumer_group, attempts from queen.dlq_list('bad')") == [("__timer__", 1)]
    assert restored.value("select queen.dlq_requeue('o''clock')") == 1
    # Sequences: what is born now meets nobody's id.
    assert restored.rows("select status, \"offset\" from queen.push('born later', '1')") == [("queued", 1)]
    assert restored.rows("select status, \"offset\" from queen.push('log', '1', 'born later')") == [("queued", 1)]
