"""Tenants: closed to roles that were not granted them, independent of one another, and removed whole."""

from __future__ import annotations

from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.database import Connection, Database

A, B = UUID(int=0xA), UUID(int=0xB)
ROLES = ("alice_producer", "carl_consumer", "rita_reader")
EVERYTHING = (
    "log_timers where tenant_id = %(t)s",
    "log_dlq where tenant_id = %(t)s",
    "hotlist_repairs where tenant_id = %(t)s",
    "log_busy where tenant_id = %(t)s",
    "tenants where id = %(t)s",
    "tenant_grants where tenant_id = %(t)s",
    "queues where tenant_id = %(t)s",
    "log_groups where queue_id not in (select id from queen.queues)",
    "log_partitions where queue_id not in (select id from queen.queues)",
    *(
        f"{table} where partition_id not in (select id from queen.log_partitions)"
        for table in ("log_segments", "log_txns", "log_consumers")
    ),
)


@pytest.fixture
def tenants(db: Database) -> Database:
    """Two tenants; A is open to the three roles and has one of everything."""
    for tenant in (A, B):
        db.execute("select queen.create_tenant(%s, 'a name')", tenant)
    for role in ROLES:
        db.execute("select queen.grant_tenant(%s, %s)", A, role)
    furnish(db, A)
    return db


def furnish(db: Database, tenant: UUID) -> None:
    """A timer, messages, a lease, a dead letter of a message and one of a timer."""
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}', %s)", tenant)
    db.execute("select queen.schedule('q', 'k', '\"secret\"', '1 hour', tenant => %s)", tenant)
    db.execute("select queen.push_many('q', array['1', '2', '3']::jsonb[], 'p', array['a', 'b', 'c'], %s)", tenant)
    db.execute("select queen.pop('q', 'g', 1, tenant => %s)", tenant)
    db.execute(
        "select queen.nack('q', 'g', 'p', lease_id, 'no', tenant => %s) from queen.log_consumers"
        " where lease_id is not null",
        tenant,
    )
    db.execute("select queen.pop('q', 'g', 1, tenant => %s)", tenant)


def answers(connection: Connection, call: str, tenant: UUID) -> tuple[str | None, list[Any]]:
    """SQLSTATE and rows of a call."""
    try:
        return None, connection.execute(f"select * from queen.{call}", {"t": tenant}).fetchall()
    except psycopg.Error as error:
        return error.sqlstate, [str(error.diag.message_primary).replace(str(tenant), "TENANT")]


def calls(db: Database) -> dict[str, tuple[str, str]]:
    """Every public function with a tenant: a call that works where it is open, and a role that may make it."""
    lease = db.value("select lease_id from queen.log_consumers where lease_id is not null")
    letter = db.value("select id from queen.log_dlq limit 1")
    ack = f"('q', 'g', 'p', '{lease}'"
    op = '[{{"op": "{}", "queue": "q", "timer_key": "k", "delay_ms": 5, "payload": 1}}]'
    acking = f'[{{"op": "ack", "queue": "q", "consumer_group": "g", "partition": "p", "lease_id": "{lease}"}}]'
    return {
        "peek": ("peek('q', 'k', %(t)s)", "alice_producer"),
        "list_timers": ("list_timers('q', tenant => %(t)s)", "rita_reader"),
        "sent": ("sent('q', 'a', %(t)s)", "alice_producer"),
        "dlq_list": ("dlq_list('q', tenant => %(t)s)", "rita_reader"),
        "extend": (f"extend{ack}, '1 minute', tenant => %(t)s)", "carl_consumer"),
        "ack": (f"ack{ack}, tenant => %(t)s)", "carl_consumer"),
        "nack": (f"nack{ack}, tenant => %(t)s)", "carl_consumer"),
        "pop": ("pop('q', 'g', tenant => %(t)s)", "carl_consumer"),
        "pop_segments": ("pop_segments('q', 'h', tenant => %(t)s)", "carl_consumer"),
        "seek": ("seek('q', 'g', 1, tenant => %(t)s)", "carl_consumer"),
        "dlq_requeue": (f"dlq_requeue('q', array['{letter}']::uuid[], %(t)s)", "carl_consumer"),
        "dlq_purge": ("dlq_purge('q', tenant => %(t)s)", "carl_consumer"),
        "reschedule": ("reschedule('q', 'k', '2 hours', tenant => %(t)s)", "alice_producer"),
        "transaction": (f"transaction('{acking}', %(t)s)", "carl_consumer"),
        "apply": (f"apply('{op.format('schedule')}', %(t)s)", "alice_producer"),
        "schedule": ("schedule('q', 'k', '1', '1 hour', tenant => %(t)s)", "alice_producer"),
        "schedule_bytes": ("schedule_bytes('q', 'k', '1', '1 hour', tenant => %(t)s)", "alice_producer"),
        "schedule_many": (
            "schedule_many('q', array['k'], array['1']::jsonb[], array['1 hour']::interval[], tenant => %(t)s)",
            "alice_producer",
        ),
        "push": ("push('q', '1', tenant => %(t)s)", "alice_producer"),
        "push_bytes": ("push_bytes('q', '1', tenant => %(t)s)", "alice_producer"),
        "push_many": ("push_many('q', array['1']::jsonb[], tenant => %(t)s)", "alice_producer"),
        "cancel": ("cancel('q', 'k', %(t)s)", "alice_producer"),
    }


# For queen_admin, to whom every tenant is open.
ADMIN_ONLY = {
    *("configure_queue", "pause_queue", "resume_queue", "drop_queue", "drop_group"),
    *("create_tenant", "grant_tenant", "revoke_tenant", "configure_tenant", "drop_tenant"),
}


def test_the_table_of_calls_is_whole(tenants: Database) -> None:
    functions = tenants.rows(
        "select distinct proname from pg_proc where pronamespace = 'queen'::regnamespace"
        " and 'tenant' = any (proargnames) and proname not like '\\_%%'"
    )
    assert {name for (name,) in functions} == {*calls(tenants), *ADMIN_ONLY}


def test_a_tenant_that_is_not_open_reads_like_one_that_is_not_there(tenants: Database) -> None:
    """The same answer, word for word, for somebody else's tenant and for none; and nothing happens."""
    tenants.execute("select queen.revoke_tenant(%s, role) from unnest(%s::text[]) role", A, list(ROLES))
    before = contents(tenants, A)
    for name, (call, role) in calls(tenants).items():
        connection = tenants.connect(role)
        closed = answers(connection, call, A)
        assert closed == answers(connection, call, uuid4()), name
        # What sends is refused; what looks, moves or removes finds nothing.
        sends = name.startswith(("schedule", "push")) or name == "apply"
        assert closed[0] == ("QN002" if sends else "QN003" if name == "transaction" else None), (name, closed)
        assert "secret" not in str(closed)
    assert contents(tenants, A) == before
    for view in ("lagging_groups", "expired_leases", "paused_queues"):
        assert tenants.connect("rita_reader").execute(f"select * from queen.{view}").fetchall() == []
    assert tenants.connect("rita_reader").execute("select dead_letters from queen.status()").fetchone() == (0,)


def contents(db: Database, tenant: UUID) -> list[Any]:
    """All rows of a tenant."""
    return [
        db.rows("select * from queen.log_timers where tenant_id = %s", tenant),
        db.rows("select * from queen.log_dlq where tenant_id = %s", tenant),
        *(
            db.rows(f"select * from queen.{table} order by 1, 2")
            for table in ("log_segments", "log_consumers", "queues")
        ),
    ]


def test_a_tenant_that_was_granted_is_open(tenants: Database) -> None:
    for name, (call, role) in calls(tenants).items():
        state, rows = answers(tenants.connect(role), call, A)
        # The leases of the table are gone after the first ack.
        assert state in ((None, "QN003") if name == "transaction" else (None,)), (name, rows)
        assert rows, name
        assert "absent" not in str(rows), (name, rows)
    reader = tenants.connect("rita_reader")
    assert reader.execute("select tenant_id from queen.lagging_groups").fetchall() != []
    # A member of the role that was granted is meant too.
    tenants.execute("select queen.revoke_tenant(%s, 'alice_producer'), queen.grant_tenant(%s, 'queen_producer')", A, A)
    alice = tenants.connect("alice_producer")
    assert answers(alice, "schedule('q', 'again', '1', '1 hour', tenant => %(t)s)", A)[0] is None
    # SET ROLE and definer functions don't change who is asked.
    tenants.execute("select queen.revoke_tenant(%s, 'queen_producer')", A)
    alice.execute("set role queen_producer")
    assert answers(alice, "peek('q', 'again', %(t)s)", A) == (None, [])


def test_the_same_names_in_two_tenants(db: Database) -> None:
    """Keys, queues, txns, groups and offsets know nothing of one another, the fire's grouping included."""
    for number, tenant in enumerate((A, B, None)):
        db.execute("select queen.schedule('q', 'k', %s, '0', tenant => %s, txn => 't')", str(number), tenant)
        db.execute("select queen.push('other', %s, 'Default', 't', %s)", str(number), tenant)
    assert db.value("select (queen.cancel('q', 'k', %s)).status", B) == "cancelled"
    assert db.value("select queen.fire_due()") == 2
    for number, tenant in enumerate((A, B, None)):
        expected = [] if tenant == B else [(number, 1)]
        rows = db.rows("select payload, \"offset\" from queen.pop('q', 'g', tenant => %s)", tenant)
        assert rows == expected
        assert db.rows("select payload, \"offset\" from queen.pop('other', 'g', tenant => %s)", tenant) == [(number, 1)]
        assert db.value("select count(*) from queen.sent('q', 't', %s)", tenant) == len(expected)
        assert db.value("select (queen.push('other', '9', 'Default', 't', %s)).status", tenant) == "duplicate"
    lease = db.value(
        "select lease_id from queen.log_consumers c join queen.queues q on q.id = c.queue_id"
        " where tenant_id = %s and name = 'q'",
        A,
    )
    assert db.value("select (queen.ack('q', 'g', 'Default', %s)).status", lease) == "lease_lost"
    assert db.value("select (queen.ack('q', 'g', 'Default', %s, tenant => %s)).status", lease, B) == "absent"
    assert db.value("select (queen.ack('q', 'g', 'Default', %s, tenant => %s)).status", lease, A) == "acked"


def test_drop_tenant_removes_everything_of_it(tenants: Database, session: StartSession) -> None:
    furnish(tenants, B)
    for batch in ("k", "l", "m"):
        tenants.execute(
            "select queen.schedule_many('q', array_agg(%s || i), array_agg('1'::jsonb), array_agg('1 hour'::interval),"
            " tenant => %s) from generate_series(1, 10000) i",
            batch,
            A,
        )
    other = contents(tenants, B)[:2]
    # Somebody is in the midst of sending there.
    producer = session("alice_producer", autocommit=False)
    producer.run("select queen.push('late', '1', tenant => %s)", A)
    assert tenants.value("select queen.drop_tenant(%s) ->> 'done'", A) == "false"
    assert tenants.value("select count(*) from queen.log_timers where tenant_id = %s", A) == 10_001
    state, _ = answers(tenants.connect("alice_producer"), "push('q', '1', tenant => %(t)s)", A)
    assert state == "QN002"
    state, rows = answers(tenants.connect("ada_admin"), "push('q', '1', tenant => %(t)s)", A)
    assert state == "QN002"
    assert "being dropped" in rows[0]
    tenants.execute("call queen.maintain()")
    producer.connection.commit()
    tenants.execute("call queen.maintain()")
    for what in EVERYTHING:
        assert tenants.superuser.execute(f"select * from queen.{what}", {"t": A}).fetchall() == [], what
    assert contents(tenants, B)[:2] == other
    # The name is free again, and open to nobody.
    tenants.execute("select queen.create_tenant(%s)", A)
    assert answers(tenants.connect("alice_producer"), "push('q', '1', tenant => %(t)s)", A)[0] == "QN002"
    assert tenants.rows("select * from queen.pop('q', 'g', tenant => %s)", A) == []


@pytest.mark.parametrize(
    ("call", "state", "named"),
    [
        ("create_tenant(null)", "22023", "tenant"),
        ("create_tenant('00000000-0000-0000-0000-000000000001')", "22023", "tenant"),
        ("create_tenant(gen_random_uuid(), '')", "22023", "name"),
        ("grant_tenant(null, 'alice_producer')", "22023", "tenant"),
        ("grant_tenant('00000000-0000-0000-0000-00000000000a', null)", "22023", "role_name"),
        ("grant_tenant('00000000-0000-0000-0000-00000000000a', 'no such role')", "22023", "role_name"),
        ("grant_tenant(gen_random_uuid(), 'alice_producer')", "QN004", "does not exist"),
        ("revoke_tenant('00000000-0000-0000-0000-00000000000a', null)", "22023", "role_name"),
        ("configure_tenant(gen_random_uuid(), '{}')", "QN004", "does not exist"),
        ("configure_tenant(null, null)", "22023", "options"),
        ("configure_tenant(null, '[]')", "22023", "options"),
        ('configure_tenant(null, \'{"retention": "1 day"}\')', "22023", "retention"),
        ("configure_tenant(null, '{\"pending_max\": -1}')", "22023", "pending_max"),
        ("drop_tenant(null)", "22023", "tenant"),
        ("drop_tenant(gen_random_uuid())", "QN004", "does not exist"),
    ],
)
def test_refusals(tenants: Database, call: str, state: str, named: str) -> None:
    with pytest.raises(psycopg.Error) as caught:
        tenants.connect("ada_admin").execute(f"select queen.{call}")
    assert caught.value.sqlstate == state
    assert named in str(caught.value)
    assert caught.value.diag.message_hint


def test_granting_is_said_once(tenants: Database) -> None:
    admin = tenants.connect("ada_admin")
    assert admin.execute("select queen.grant_tenant(%s, 'nobody_role')", [A]).fetchone() == (True,)
    assert admin.execute("select queen.grant_tenant(%s, 'nobody_role')", [A]).fetchone() == (False,)
    assert admin.execute("select queen.revoke_tenant(%s, 'nobody_role')", [A]).fetchone() == (True,)
    assert admin.execute("select queen.revoke_tenant(%s, 'nobody_role')", [A]).fetchone() == (False,)
    assert admin.execute("select queen.create_tenant(%s, 'another')", [A]).fetchone() == (A,)
    assert tenants.value("select name from queen.tenants where id = %s", A) == "another"
