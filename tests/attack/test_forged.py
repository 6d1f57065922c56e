"""What the server says of a message is not its sender's to say; what is another tenant's is not to be had by its id."""

from __future__ import annotations

import json
from typing import Any, Final
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database
from tests.support.log import FRAMES
from tools.cluster import ROOT

ROLES: Final = ("alice_producer", "carl_consumer")
A, B = UUID(int=0xA), UUID(int=0xB)
SOMEONE: Final = "00000000-0000-0000-0000-00000000beef"
# Columns of timers, messages, letters and cursors that only the server writes, and what somebody might put there.
SERVER_OWNED: Final[dict[str, Any]] = {
    "message_id": SOMEONE,
    "producer_sub": "postgres",
    "created_at": "2000-01-01Z",
    "updated_at": "2000-01-01Z",
    "tenant_id": str(B),
    "tenant": str(B),
    "attempts": -5,
    "delivery_attempt": 0,
    "claimed_until": "2000-01-01Z",
    "claim_token": SOMEONE,
    "encrypted": True,
    "payload_zstd": True,
    "payload_bytes": "AAAA",
    "offset": 1,
    "shard": 63,
    "last_error": "x",
    "committed": 10,
}


@pytest.fixture
def two(db: Database) -> Database:
    """Tenants A, open to the roles, and B, which is not; each with a leased message and two dead letters."""
    for tenant in (A, B):
        db.execute("select queen.create_tenant(%s)", tenant)
        db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}', %s)", tenant)
        db.execute("select queen.push_many('q', array['1', '2', '3']::jsonb[], 'p', tenant => %s)", tenant)
        for _ in range(2):
            db.execute(
                "select queen.nack('q', 'g', 'p', p.lease_id, 'no', tenant => %s)"
                " from queen.pop('q', 'g', 1, tenant => %s) p",
                tenant,
                tenant,
            )
        db.execute("select queen.pop('q', 'g', 1, '1 hour', tenant => %s)", tenant)
    for role in ROLES:
        db.execute("select queen.grant_tenant(%s, %s)", A, role)
    return db


def _of(db: Database, tenant: UUID) -> list[tuple[Any, ...]]:
    """Everything that a theft would change."""
    return [
        *db.rows("select to_jsonb(d) from queen.log_dlq d where tenant_id = %s order by id", tenant),
        *db.rows(
            "select to_jsonb(c) from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id"
            " join queen.queues q on q.id = p.queue_id where q.tenant_id = %s order by 1",
            tenant,
        ),
    ]


def _lease(db: Database, tenant: UUID) -> UUID:
    found = db.value(
        "select c.lease_id from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id"
        " join queen.queues q on q.id = p.queue_id where q.tenant_id = %s",
        tenant,
    )
    assert isinstance(found, UUID)
    return found


@pytest.mark.parametrize("field", SERVER_OWNED)
def test_server_owned_fields_are_refused(db: Database, admin: Connection, field: str) -> None:
    """In each operation of apply and transaction; the good one beside it is not done either."""
    good = {"op": "schedule", "queue": "q", "timer_key": "good", "delay_ms": 5, "payload": 1}
    lease = "00000000-0000-0000-0000-000000000000"
    operations: dict[str, list[dict[str, Any]]] = {
        "apply": [
            {**good, "timer_key": "k"},
            {"op": "reschedule", "queue": "q", "timer_key": "k", "delay_ms": 5},
            {"op": "cancel", "queue": "q", "timer_key": "k"},
        ],
        "transaction": [
            {**good, "timer_key": "k"},
            {"op": "push", "queue": "q", "payload": 1},
            {"op": "ack", "queue": "q", "consumer_group": "g", "partition": "p", "lease_id": lease},
        ],
    }
    for function, ops in operations.items():
        for op in ops:
            with pytest.raises(psycopg.Error) as caught:
                admin.execute(f"select queen.{function}(%s)", [Jsonb([good, {**op, field: SERVER_OWNED[field]}])])
            assert caught.value.sqlstate == "22023", (function, op, field)
            assert field in str(caught.value.diag.message_primary)
    assert db.value("select count(*) from queen.log_timers") == 0
    assert db.value("select count(*) from queen.log_segments") == 0


def test_nothing_in_a_payload_is_taken_for_more(db: Database, producer: Connection, consumer: Connection) -> None:
    forged = {**SERVER_OWNED, "op": "cancel", "queue": "other", "__proto__": {"encrypted": True}}
    producer.execute("select queen.schedule('q', 'k', %s, '0')", [Jsonb(forged)])
    producer.execute("select queen.push('q', %s)", [Jsonb(forged)])
    assert db.value("select queen.fire_due()") == 1
    rows = consumer.execute("select payload, payload_bytes, producer_sub, txn from queen.pop('q')").fetchall()
    assert [row[:3] for row in rows] == [(forged, None, "alice_producer")] * 2
    assert len({row[3] for row in rows} - {SOMEONE}) == 2


def test_bytes_that_look_like_frames(db: Database, producer: Connection, consumer: Connection) -> None:
    """A payload is opaque: one that is a frame, a segment or an encrypted payload arrives as the bytes it was."""
    frame = bytes(db.value("select queen._frame(%s::uuid, 't', 'postgres', '2000-01-01Z', true, '\\x0001')", SOMEONE))
    segment = bytes(db.value("select queen._segment_pack(%s, 1)", frame))
    sent = [frame, frame * 3, segment, b"QS\x01\x01", b"\x01\x02k1" + bytes(40), b"\x28\xb5\x2f\xfd\x20\x00"]
    for number, payload in enumerate(sent):
        producer.execute("select queen.schedule_bytes('q', %s, %s, '0')", [str(number), payload])
        producer.execute("select queen.push_bytes('q', %s)", [payload])
    assert db.value("select queen.fire_due()") == len(sent)
    rows = consumer.execute("select payload_bytes, producer_sub from queen.pop('q')").fetchall()
    assert [bytes(row[0]) for row in rows] == sent * 2
    assert {row[1] for row in rows} == {"alice_producer"}


def test_leases_of_another_tenant(two: Database, admin: Connection) -> None:
    """By one who may use both, and by one who may use the one: the answer is that of a lease that never was."""
    before, lease = _of(two, B), _lease(two, B)
    carl = two.connect("carl_consumer")
    for connection in (carl, admin):
        for one in (lease, uuid4()):
            for call in ("ack('q', 'g', 'p', %s, tenant => %s)", "nack('q', 'g', 'p', %s, 'x', tenant => %s)"):
                row = connection.execute(f"select status from queen.{call}", [one, A]).fetchone()
                assert row == ("lease_lost",)
            row = connection.execute(
                "select status from queen.extend('q', 'g', 'p', %s, '1 hour', tenant => %s)", [one, A]
            ).fetchone()
            assert row == ("lease_lost",)
    op = {"op": "ack", "queue": "q", "consumer_group": "g", "partition": "p", "lease_id": str(lease)}
    push = {"op": "push", "queue": "q", "payload": 1}
    with pytest.raises(psycopg.Error) as caught:
        admin.execute("select queen.transaction(%s, %s)", [Jsonb([op, push]), A])
    assert caught.value.sqlstate == "QN003"
    # Where the lease is at home, one who was not let in is told what is told of a tenant that does not exist.
    for tenant in (B, uuid4()):
        row = carl.execute("select status from queen.ack('q', 'g', 'p', %s, tenant => %s)", [lease, tenant]).fetchone()
        assert row == ("absent",)
    assert _of(two, B) == before


def test_leases_of_another_queue_group_and_partition(two: Database, admin: Connection) -> None:
    """A lease is for its own place alone, in one's own tenant too."""
    admin.execute("select queen.push('q', '1', 'p2', tenant => %s), queen.push('q2', '1', 'p', tenant => %s)", [A, A])
    lease = _lease(two, A)
    admin.execute("select queen.pop('q2', 'g', tenant => %s), queen.pop('q', 'h', tenant => %s)", [A, A])
    admin.execute("select queen.pop('q', 'g', partition => 'p2', tenant => %s)", [A])
    for queue, group, partition in (("q2", "g", "p"), ("q", "h", "p"), ("q", "g", "p2")):
        status = admin.execute(
            "select status from queen.ack(%s, %s, %s, %s, tenant => %s)", [queue, group, partition, lease, A]
        ).fetchone()
        assert status == ("lease_lost",), (queue, group, partition)
    assert admin.execute(
        "select status from queen.ack('nowhere', 'g', 'p', %s, tenant => %s)", [lease, A]
    ).fetchone() == ("absent",)
    assert admin.execute("select status from queen.ack('q', 'g', 'p', %s, tenant => %s)", [lease, A]).fetchone() == (
        "acked",
    )


def test_dead_letters_of_another_tenant(two: Database, admin: Connection) -> None:
    before = _of(two, B)
    ids = [row[0] for row in two.rows("select id from queen.log_dlq where tenant_id = %s", B)]
    assert len(ids) == 2
    for connection in (two.connect("carl_consumer"), admin):
        for function in ("dlq_requeue", "dlq_purge"):
            row = connection.execute(f"select queen.{function}('q', %s, %s)", [ids, A]).fetchone()
            assert row == (0,), function
        # A place in the list that is another's is a place like any other, and shows only what is one's own.
        for after in (*ids, uuid4()):
            rows = connection.execute("select id from queen.dlq_list('q', %s, tenant => %s)", [after, A]).fetchall()
            assert not {row[0] for row in rows} & set(ids)
    assert _of(two, B) == before
    assert len(two.rows("select from queen.log_dlq where tenant_id = %s", A)) == 2


def test_dead_letters_of_another_queue(two: Database, admin: Connection) -> None:
    ids = [row[0] for row in two.rows("select id from queen.log_dlq where tenant_id = %s", A)]
    for function in ("dlq_requeue", "dlq_purge"):
        assert admin.execute(f"select queen.{function}('q2', %s, %s)", [ids, A]).fetchone() == (0,)
    assert admin.execute("select queen.dlq_purge('q', %s, %s)", [ids, A]).fetchone() == (2,)


def test_claim_tokens_of_somebody_else(db: Database, admin: Connection) -> None:
    """A firer with a token that is not the row's moves nothing."""
    admin.execute("select queen.schedule('q', 'a', '1', '0'), queen.schedule('q', 'b', '1', '0')")
    claimed = dict(db.rows("select timer_key, claim_token from queen.log_timers_claim(max_rows => 10)"))
    assert set(claimed) == {"a", "b"}
    tenant = db.value("select tenant_id from queen.log_timers limit 1")
    fire = "select status from queen.log_timers_fire(array[%s, %s]::uuid[], '{q,q}', '{a,b}', array[%s, %s]::uuid[])"
    crossed = admin.execute(fire, [tenant, tenant, claimed["b"], claimed["a"]]).fetchall()
    assert crossed == [("stale",), ("stale",)]
    assert db.value("select count(*) from queen.log_timers") == 2
    right = admin.execute(fire, [tenant, tenant, claimed["a"], claimed["b"]]).fetchall()
    assert right == [("fired",), ("fired",)]


def test_the_producer_is_who_logged_in(db: Database, admin: Connection) -> None:
    """Through SET ROLE and through a definer function; in the timer, the frame, the message and the dead letter."""
    db.execute(
        "create function public.send(key text) returns text language sql security definer set search_path = '' as"
        " $$ select status from queen.schedule('q', key, '1'::jsonb, delay => '0'::interval, \"partition\" => 'p') $$"
    )
    db.execute("grant queen_producer to nobody_role")
    try:
        session = db.connect("nobody_role")
        session.execute("set role queen_producer")
        session.execute("select queen.schedule('q', 'role', '1', '0', partition => 'p')")
        session.execute("select queen.push('q', '1', 'p')")
        session.execute(
            "select queen.transaction(%s)",
            [json.dumps([{"op": "push", "queue": "q", "partition": "p", "payload": 1}])],
        )
        session.execute("reset role")
        session.execute("select public.send('definer')")
        # A superuser may become another altogether, with what that one can do; then it is that one.
        became = db.connect("postgres")
        became.execute("set session authorization alice_producer")
        became.execute("select queen.schedule('q', 'authorization', '1', '0', partition => 'p')")
    finally:
        db.execute("revoke queen_producer from nobody_role")
    found = dict(db.rows("select timer_key, producer_sub from queen.log_timers"))
    assert found == {"role": "nobody_role", "definer": "nobody_role", "authorization": "alice_producer"}
    assert db.value("select queen.fire_due()") == 3
    expected = ["nobody_role"] * 4 + ["alice_producer"]
    frames = db.rows(f"select u.producer_sub from queen.log_segments s cross join {FRAMES}")
    assert sorted(row[0] for row in frames) == sorted(expected)
    db.execute("select queen.configure_queue('q', '{\"delivery_max_attempts\": 1}')")
    seen = []
    for _ in expected:
        row = admin.execute("select producer_sub, lease_id from queen.pop('q', 'g', 1)").fetchone()
        assert row is not None
        seen.append(row[0])
        admin.execute("select queen.nack('q', 'g', 'p', %s, 'no')", [row[1]])
    assert sorted(seen) == sorted(expected)
    letters = [row[0] for row in db.rows("select producer_sub from queen.log_dlq")]
    assert sorted(letters) == sorted(expected)
    # Sent again by somebody else, a message is still of the one who made it.
    assert admin.execute("select queen.dlq_requeue('q')").fetchone() == (5,)
    again = [row[0] for row in admin.execute("select producer_sub from queen.pop('q', 'h2')").fetchall()]
    assert sorted(again) == sorted(expected * 2)


def test_a_claim_of_another_name_in_the_session(db: Database, producer: Connection) -> None:
    """Settings that a client may make say nothing of who it is."""
    for setting in ("application_name", "queen.producer_sub", "session.user", "request.jwt.claim.sub"):
        producer.execute(f"select set_config('{setting}', 'postgres', false)")
    producer.execute("select queen.schedule('q', 'k', '1', '1 h')")
    assert db.value("select producer_sub from queen.log_timers") == "alice_producer"


def test_advisory_locks_of_a_stranger(db: Database, producer: Connection) -> None:
    """Taken by one who was granted nothing, they make a push with a txn wait; as the docs say, they can be closed."""
    stranger = db.connect("nobody_role")
    with producer.transaction():
        producer.execute("select queen.push('q', '1', txn => 't')")
        bucket = db.value("select objid::bigint from pg_locks where locktype = 'advisory' and objsubid = 2")
    take = f"select pg_advisory_lock(hashtext('pg_queen txn'), ({bucket}::bigint::bit(32))::int)"
    stranger.execute(take)
    producer.execute("set lock_timeout = '100 ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        producer.execute("select queen.push('q', '1', txn => 't')")
    # Nobody else waits, and the fire least of all.
    producer.execute("select queen.push('q', '1'), queen.schedule('q', 'k', '1', '0', txn => 't')")
    assert db.value("select queen.fire_due()") == 1
    stranger.execute("select pg_advisory_unlock_all()")
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    db.execute(page.split("\n## A database shared with strangers\n")[1].split("```sql\n")[1].split("```")[0])
    for function in ("pg_advisory_lock", "pg_advisory_xact_lock", "pg_try_advisory_lock", "pg_advisory_lock_shared"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            stranger.execute(take.replace("pg_advisory_lock", function))
    assert producer.execute("select status from queen.push('q', '1', txn => 't')").fetchone() == ("duplicate",)
    assert len(db.connect("carl_consumer").execute("select from queen.pop('q')").fetchall()) == 3


def test_tables_are_closed(db: Database) -> None:
    """No table can be written, and none with messages read, by the roles themselves."""
    tables = [
        row[0]
        for row in db.rows("select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind = 'r'")
    ]
    assert "log_timers" in tables
    for user in (*ROLES, "rita_reader", "ada_admin", "nobody_role"):
        connection = db.connect(user)
        for table in tables:
            for statement in (
                f"insert into queen.{table} default values",
                f"delete from queen.{table}",
                f"truncate queen.{table}",
                f"lock table queen.{table} in access exclusive mode",
                f"alter table queen.{table} add x int",
            ):
                with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                    connection.execute(statement)
