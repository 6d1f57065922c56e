"""The fire from outside: claim, fire, fail, and the tokens that make a late holder harmless."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tests.support.lateness import Ledger


class Claim(NamedTuple):
    """A row of log_timers_claim."""

    tenant_id: UUID
    queue: str
    timer_key: str
    partition: str
    txn: str
    message_id: UUID
    payload: bytes
    attempts: int
    deliver_at: Any
    claim_token: UUID


def claim(firer: Connection, arguments: str = "") -> list[Claim]:
    """Claim due timers."""
    return [Claim(*row) for row in firer.execute(f"select * from queen.log_timers_claim({arguments})").fetchall()]


def arrays(claims: list[Claim]) -> list[list[Any]]:
    """The four arrays of log_timers_fire and log_timers_fail."""
    return [
        [c.tenant_id for c in claims],
        [c.queue for c in claims],
        [c.timer_key for c in claims],
        [c.claim_token for c in claims],
    ]


def fire(firer: Connection, claims: list[Claim]) -> list[tuple[Any, ...]]:
    """Key, status, partition and offset of each."""
    return firer.execute(
        'select timer_key, status, "partition", "offset" from'
        " queen.log_timers_fire(%s::uuid[], %s::text[], %s::text[], %s::uuid[])",
        arrays(claims),
    ).fetchall()


def fail(firer: Connection, claims: list[Claim], rest: str = "'no'") -> list[tuple[Any, ...]]:
    """Key, status, attempts and retry_at of each; `rest` are the further arguments as SQL."""
    return firer.execute(
        "select timer_key, status, attempts, retry_at from"
        f" queen.log_timers_fail(%s::uuid[], %s::text[], %s::text[], %s::uuid[], {rest})",
        arrays(claims),
    ).fetchall()


def statuses(rows: list[tuple[Any, ...]]) -> list[str]:
    """The second column."""
    return [row[1] for row in rows]


def test_claim_and_fire(db: Database, admin: Connection, producer: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 50, due="now() - i * interval '1 s'", partition="'p' || i % 2")
    ledger.schedule("q", 1, key="'future'", due="now() + interval '1 hour'", partition="'p0'")
    claims = claim(admin, "max_rows => 20, lease => '1 minute'")
    # In expiry order, each with a token of its own.
    assert [c.timer_key for c in claims] == [f"k{i:07}" for i in range(50, 30, -1)]
    assert len({c.claim_token for c in claims}) == 20
    assert {c.attempts for c in claims} == {0}
    assert claims[0].payload == b"50"
    assert claims[0].deliver_at < claims[-1].deliver_at
    assert (ledger.pending(), ledger.delivered()) == (51, 0)

    fired = fire(admin, claims)
    assert statuses(fired) == ["fired"] * 20
    assert [(row[0], row[2], row[3]) for row in fired] == [
        (c.timer_key, c.partition, i // 2 + 1) for i, c in enumerate(claims)
    ]
    assert (ledger.pending(), ledger.delivered()) == (31, 20)
    for c in claims[:3]:
        assert producer.execute("select message_id from queen.sent('q', %s)", [c.txn]).fetchall() == [(c.message_id,)]
    assert statuses(fire(admin, claim(admin))) == ["fired"] * 30
    assert claim(admin) == []
    ledger.check(missing=1)


def test_a_leased_timer_is_in_somebodys_hands(db: Database, admin: Connection, producer: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 3)
    claims = claim(admin)
    assert len(claims) == 3
    # Nobody else's: neither a second claim, nor a pass, nor the user.
    assert claim(admin) == []
    assert admin.execute("select queen.fire_due()").fetchone() == (0,)
    key = claims[0].timer_key
    for call in (
        "queen.cancel('q', %s)",
        "queen.reschedule('q', %s, '1 hour'::interval)",
        "queen.schedule('q', %s, '\"new\"', '0'::interval)",
    ):
        answer = producer.execute(f"select ok, status, message_id from {call}", [key]).fetchone()
        assert answer == (False, "too_late", claims[0].message_id)
    assert db.value("select claimed from queen.peek('q', %s)", key) is True
    assert statuses(fire(admin, claims)) == ["fired"] * 3
    ledger.check()
    assert db.value("select payload from queen.pop('q') where message_id = %s", claims[0].message_id) == 1


def test_a_stale_token_fires_nothing_and_its_companions_go_back_at_once(
    db: Database, admin: Connection, producer: Connection
) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 10)
    claims = claim(admin, "lease => '1 hour'")
    spoiled = [c._replace(claim_token=uuid4()) if i == 4 else c for i, c in enumerate(claims)]
    assert statuses(fire(admin, spoiled)) == ["stale"] * 10
    assert (ledger.pending(), ledger.delivered()) == (10, 0)
    assert db.value("select count(*) from queen.queues") == 0
    # The nine are free: for the user, a claim, a pass. The one with another token stays with its holder.
    assert producer.execute("select status from queen.cancel('q', %s)", [claims[4].timer_key]).fetchone() == (
        "too_late",
    )
    again = claim(admin, "max_rows => 4")
    assert [c.timer_key for c in again] == [c.timer_key for c in claims[:4]]
    assert {c.attempts for c in again} == {0}
    assert statuses(fire(admin, again)) == ["fired"] * 4
    assert admin.execute("select queen.fire_due()").fetchone() == (5,)
    assert statuses(fire(admin, claims)) == ["stale"] * 10
    # That gave the one back, too, because the call held it.
    assert admin.execute("select queen.fire_due()").fetchone() == (1,)
    assert ledger.pending() == 0
    ledger.check(in_order=False)


def test_what_does_not_exist_is_stale(db: Database, admin: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 2)
    wrong: list[dict[str, Any]] = [
        {"timer_key": "no"},
        {"queue": "no"},
        {"tenant_id": uuid4()},
        {"claim_token": None},
        {"timer_key": None},
    ]
    for change in wrong:
        claims = claim(admin)
        assert statuses(fire(admin, [claims[0], claims[1]._replace(**change)])) == ["stale", "stale"], change
        assert ledger.delivered() == 0
        # The second is still leased, under the token that was not shown.
        assert statuses(fail(admin, claims[1:], "null, '0'::interval, false")) == ["backoff"]
    assert fire(admin, []) == []


def test_an_expired_lease_is_taken_by_the_next_claim(db: Database, admin: Connection, clock: Clock) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 5)
    clock.stop()
    old = claim(admin, "lease => '10 seconds'")
    clock.advance(timedelta(seconds=9.9))
    assert claim(admin) == []
    clock.advance(timedelta(seconds=0.2))
    # Over, though nobody took them yet: the holder may not write.
    assert statuses(fire(admin, old[:1])) == ["stale"]
    new = claim(admin)
    assert [c.timer_key for c in new] == [c.timer_key for c in old]
    assert {c.claim_token for c in new}.isdisjoint(c.claim_token for c in old)
    # The old holder after the new claim: nothing is written, not even the destination, and the new lease stays.
    assert statuses(fire(admin, old)) == ["stale"] * 5
    assert statuses(fail(admin, old)) == ["stale"] * 5
    assert db.rows("select (select count(*) from queen.queues), (select count(*) from queen.log_partitions)") == [
        (0, 0)
    ]
    assert (ledger.pending(), ledger.delivered()) == (5, 0)
    assert db.rows("select distinct attempts, last_error from queen.log_timers") == [(0, None)]
    assert statuses(fire(admin, new)) == ["fired"] * 5
    ledger.check()


def test_an_expired_lease_is_taken_by_a_pass(db: Database, admin: Connection, clock: Clock) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 5)
    clock.stop()
    old = claim(admin, "lease => '10 seconds'")
    clock.advance(timedelta(seconds=11))
    assert admin.execute("select queen.fire_due()").fetchone() == (5,)
    assert statuses(fire(admin, old)) == ["stale"] * 5
    ledger.check()


def test_a_lease_taken_late_in_a_transaction_lasts_its_full_length(db: Database, admin: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 1)
    with admin.transaction():
        admin.execute("select pg_sleep(0.3)")
        claims = claim(admin, "lease => '300 milliseconds'")
        # Nobody else sees it yet.
        assert db.value("select count(*) from queen.log_timers where claim_token is not null") == 0
    assert statuses(fire(admin, claims)) == ["fired"]


def test_lost_answer(db: Database, admin: Connection) -> None:
    """The fire committed, its answer did not arrive, the client asks again with the same tokens."""
    ledger = Ledger(db)
    ledger.schedule("q", 5)
    claims = claim(admin)
    assert statuses(fire(admin, claims)) == ["fired"] * 5
    assert statuses(fire(admin, claims)) == ["stale"] * 5
    assert statuses(fail(admin, claims)) == ["stale"] * 5
    # The key scheduled again is another timer.
    db.execute("select queen.schedule('q', %s, '1', '0'::interval)", claims[0].timer_key)
    assert statuses(fire(admin, claims)) == ["stale"] * 5
    assert (ledger.pending(), ledger.delivered()) == (1, 5)


def test_the_same_timer_twice_in_a_call(db: Database, admin: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 3)
    a, b, c = claim(admin)
    rows = fire(admin, [a, b, a, c, b, b])
    assert statuses(rows) == ["fired", "fired", "duplicate", "fired", "duplicate", "duplicate"]
    assert [row[3] for row in rows] == [1, 2, None, 3, None, None]
    ledger.check()


def test_the_same_timer_twice_in_a_failure(db: Database, admin: Connection) -> None:
    Ledger(db).schedule("q", 2)
    a, b = claim(admin)
    rows = fail(admin, [a, b, a])
    assert [(row[0], row[1]) for row in rows[:2]] == [(a.timer_key, "backoff"), (b.timer_key, "backoff")]
    assert db.rows("select attempts from queen.log_timers") == [(1,), (1,)]


def test_destinations_are_born_and_locked_by_the_fire(db: Database, admin: Connection) -> None:
    ledger = Ledger(db)
    for queue in ("b", "a", "c"):
        ledger.schedule(queue, 30, partition="'p' || i % 4")
    claims = claim(admin)
    assert statuses(fire(admin, claims)) == ["fired"] * 90
    assert db.value("select count(*) from queen.queues") == 3
    ledger.check()


def test_a_row_that_somebody_holds(db: Database, admin: Connection, session: StartSession) -> None:
    """Neither claim, nor fire, nor fail waits for it."""
    ledger = Ledger(db)
    ledger.schedule("q", 4)
    holder = session(autocommit=False)
    holder.run("select from queen.log_timers where timer_key = 'k0000002' for update")
    admin.execute("set statement_timeout = '5s'")
    claims = claim(admin, "lease => '1 hour'")
    assert [c.timer_key for c in claims] == ["k0000001", "k0000003", "k0000004"]
    holder.run("select from queen.log_timers where timer_key = 'k0000003' for update")
    assert statuses(fire(admin, claims)) == ["stale"] * 3
    assert ledger.delivered() == 0
    assert statuses(fail(admin, claims[1:2])) == ["stale"]
    holder.connection.rollback()
    # 1 and 4 went back; 3 was out of reach, so its lease stands, and with it the token.
    assert [c.timer_key for c in claim(admin)] == ["k0000001", "k0000002", "k0000004"]
    assert statuses(fire(admin, claims[1:2])) == ["fired"]


def test_the_fire_may_wait_for_a_partition(db: Database, admin: Connection, session: StartSession) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 1, key="'first'")
    db.execute("select queen.fire_due()")
    ledger.schedule("q", 10)
    claims = claim(admin, "lease => '1 hour'")
    pusher, firer = session("alice_producer", autocommit=False), session("ada_admin")
    pusher.run("select queen.push('q', '\"pushed\"')")
    call = firer.start(
        "select status from queen.log_timers_fire(%s::uuid[], %s::text[], %s::text[], %s::uuid[])", *arrays(claims)
    )
    firer.wait_until_blocked()
    # Its timers are locked meanwhile, and a user who waits for one gets the true answer.
    user = session("alice_producer")
    cancel = user.start("select status from queen.cancel('q', 'k0000001')")
    pusher.connection.commit()
    assert [status for (status,) in call.result(10)] == ["fired"] * 10
    assert cancel.result(10)[0][0] in ("absent", "too_late")
    offsets = db.rows("select payload, \"offset\" from queen.pop('q') where payload = '\"pushed\"'")
    assert offsets == [("pushed", 2)]


def test_two_firers_claim_different_rows(db: Database, session: StartSession) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 100, partition="'p' || i % 3")
    first, second = session("ada_admin", autocommit=False), session("ada_admin", autocommit=False)
    keys_1 = first.run("select timer_key from queen.log_timers_claim(max_rows => 30)")
    keys_2 = second.run("select timer_key from queen.log_timers_claim(max_rows => 100)")
    assert (len(keys_1), len(keys_2)) == (30, 70)
    assert set(keys_1).isdisjoint(keys_2)
    first.connection.rollback()
    second.connection.commit()
    # A claim that was rolled back leased nothing.
    assert db.value("select count(*) from queen.log_timers_claim()") == 30


def test_claim_of_some_shards_and_some_of_each_tenant(db: Database, admin: Connection) -> None:
    ledger = Ledger(db)
    ledger.schedule("q", 200)
    other = "00000000-0000-0000-0000-0000000000aa"
    for i in range(3):
        db.execute("select queen.schedule('q', %s, '1', '0'::interval, tenant => %s)", f"o{i}", other)
    shard, of_it = db.rows("select shard, count(*) from queen.log_timers group by 1 order by 2 desc limit 1")[0]
    assert [due for (due,) in db.rows("select due from queen.log_timers_due(array[%s]::smallint[])", shard)] == [of_it]
    assert len(claim(admin, f"shards => array[{shard}]::smallint[]")) == of_it
    claims = claim(admin, "per_tenant => 2")
    assert sorted(c.tenant_id.int for c in claims) == sorted([1, 1, UUID(other).int, UUID(other).int])
    assert statuses(fire(admin, claims)) == ["fired"] * 4
    assert db.value("select count(*) from queen.queues") == 2


def test_log_timers_due(db: Database, admin: Connection, clock: Clock) -> None:
    clock.stop()
    due = "select next_due_at - queen._now(), due, lateness from queen.log_timers_due()"
    assert admin.execute("select * from queen.log_timers_due()").fetchall() == [(None, 0, timedelta(0))]
    db.execute("select queen.schedule('q', 'far', '1', '1 hour'::interval)")
    assert db.rows(due) == [(timedelta(hours=1), 0, timedelta(0))]
    db.execute("select queen.schedule('q', 'past', '1', '-1 minute'::interval)")
    assert db.rows(due) == [(timedelta(minutes=-1), 1, timedelta(minutes=1))]
    clock.advance(timedelta(hours=2))
    assert db.rows("select due, lateness from queen.log_timers_due()") == [(2, timedelta(hours=2, minutes=1))]
    Ledger(db).schedule("q", 12_000)
    assert db.rows("select due from queen.log_timers_due()") == [(10_000,)]


def test_bad_arguments(admin: Connection) -> None:
    for call, argument in (
        ("log_timers_claim(lease => null)", "lease"),
        ("log_timers_claim(lease => '0')", "lease"),
        ("log_timers_claim(lease => '-1 s')", "lease"),
        ("log_timers_claim(lease => '2 days')", "lease"),
        ("log_timers_claim(max_rows => 0)", "max_rows"),
        ("log_timers_claim(max_rows => null)", "max_rows"),
        ("log_timers_claim(per_tenant => 0)", "per_tenant"),
        ("log_timers_claim(shards => '{64}')", "shards"),
        ("log_timers_claim(shards => '{-1}')", "shards"),
        ("log_timers_claim(shards => '{null}')", "shards"),
        ("log_timers_due('{64}')", "shards"),
        ("log_timers_fire('{}', '{q}', '{}', '{}')", "queues"),
        ("log_timers_fire(null, '{}', '{}', '{}')", "tenants"),
        ("log_timers_fire('{}', '{}', '{}', null)", "tokens"),
        ("log_timers_fail('{}', '{}', '{k}', '{}', 'e')", "timer_keys"),
        ("log_timers_fail('{}', '{}', '{}', '{}', 'e', '-1 s')", "backoff"),
        ("log_timers_fail('{}', '{}', '{}', '{}', 'e', '1 s', null)", "count_attempt"),
    ):
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'argument "{argument}"') as caught:
            admin.execute(f"select * from queen.{call}")
        assert caught.value.diag.message_hint, call


def test_isolation_levels(db: Database, session: StartSession) -> None:
    """READ COMMITTED and higher: the same verdicts; a row that changed since the snapshot is a 40001 or left alone."""
    ledger = Ledger(db)
    for level in ("read committed", "repeatable read", "serializable"):
        ledger.schedule("q", 10, key=f"'{level}' || i")
        firer = session("ada_admin", autocommit=False)
        firer.run(f"set transaction isolation level {level}")
        claims = [Claim(*row) for row in firer.run("select * from queen.log_timers_claim(max_rows => 10)")]
        assert len(claims) == 10
        firer.connection.commit()
        firer.run(f"set transaction isolation level {level}")
        rows = firer.run(
            "select status from queen.log_timers_fire(%s::uuid[], %s::text[], %s::text[], %s::uuid[])", *arrays(claims)
        )
        assert [status for (status,) in rows] == ["fired"] * 10
        firer.connection.commit()
        ledger.schedule("q", 10, key=f"'{level} due' || i")
        firer.run(f"set transaction isolation level {level}")
        assert firer.run("select queen.fire_due()") == [(10,)]
        firer.connection.commit()
    ledger.check(in_order=False)
