"""A backlog of one tenant and the timers of others; and the order of its keys."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.conftest import StartSweeper
from tests.support.database import Connection, Database
from tests.support.log import FRAMES
from tests.support.waiting import wait_for

BIG, SMALL = UUID(int=0xA << 120), UUID(int=0xB << 120)


def backlog(db: Database, count: int, tenant: UUID | None = BIG, due: str = "'2020-01-01Z'", queues: int = 10) -> None:
    """`count` timers of one tenant, their keys in no order; `due` is SQL over i."""
    db.execute("select queen.configure('batch_max_ops', '1000000')")
    db.execute(
        "select count(*) from generate_series(1, %s) q,"
        " lateral (select array_agg(md5(q || '.' || i) order by i) as keys,"
        f" array_agg(({due})::timestamptz order by i) as dues from generate_series(1, %s) i) a,"
        " lateral queen.schedule_many('q' || q, a.keys, array_fill('1'::jsonb, array[%s]), deliver_ats => a.dues,"
        " tenant => %s)",
        *(queues, count // queues, count // queues, tenant),
    )


def delivered(db: Database, tenant: UUID | None) -> int:
    return int(
        db.value(
            "select coalesce(sum(p.last_offset), 0)::bigint from queen.log_partitions p"
            " join queen.queues q on q.id = p.queue_id"
            " where q.tenant_id = coalesce(%s, '00000000-0000-0000-0000-000000000001'::uuid)",
            tenant,
        )
    )


@pytest.mark.parametrize("mode", ["lock", "lease"])
@pytest.mark.parametrize("small", [SMALL, None], ids=["another tenant", "the default tenant"])
def test_a_backlog_does_not_delay_another_tenant(
    db: Database, sweeper: StartSweeper, mode: str, small: UUID | None
) -> None:
    """One that comes due amid it, and one that is hidden in it: due at the same instant."""
    db.execute("select queen.configure('sweep_mode', %s), queen.configure('sweep_max_rows', '1000')", mode)
    backlog(db, 60_000 if mode == "lock" else 20_000)
    db.execute("select queen.schedule('q1', 'hidden', '1', deliver_at => '2020-01-01Z', tenant => %s)", small)
    worker = sweeper(0, 1)
    wait_for(lambda: delivered(db, BIG) > 0)
    wait_for(lambda: delivered(db, small) == 1, 1)
    db.execute("select queen.schedule('q1', 'fresh', '1', '50 ms', tenant => %s)", small)
    wait_for(lambda: delivered(db, small) == 2, 1)
    left = db.value("select count(*) from queen.log_timers")
    assert left > 1000, "the backlog was over too soon to show anything"
    assert worker.alive
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 60)
    assert db.value("select coalesce(sum(errors), 0) from queen.sweep_stats") == 0


def test_many_tenants_due_at_once(db: Database, sweeper: StartSweeper) -> None:
    """Each of 300 has its first before any has a hundred times as many, with passes of a thousand."""
    db.execute("select queen.configure('sweep_max_rows', '1000')")
    tenants = [UUID(int=number << 64 | 1) for number in range(1, 301)]
    for tenant in tenants:
        db.execute(
            "select count(*) from queen.schedule_many('q', (select array_agg('k' || i) from generate_series(1, 40) i),"
            " array_fill('1'::jsonb, array[40]), array_fill('0'::interval, array[40]), tenant => %s)",
            tenant,
        )
    workers = [sweeper(number, 2) for number in range(2)]
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 60)
    firsts, lasts = db.rows(
        "select max(f.first), max(f.last) from (select min(s.created_at) as first, max(s.created_at) as last"
        " from queen.log_segments s group by s.partition_id) f"
    )[0]
    begin = db.value("select min(created_at) from queen.log_segments")
    # The backlog takes twelve passes at least; the last first delivery belongs to the first few.
    assert firsts - begin < (lasts - begin) / 2, (firsts - begin, lasts - begin)
    assert all(worker.alive for worker in workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_equal_times_come_in_the_order_of_their_keys(db: Database, sweeper: StartSweeper, workers: int) -> None:
    """Across all passes of a backlog that is due at one instant, of three tenants."""
    tenants = (BIG, SMALL, None)
    for tenant in tenants:
        backlog(db, 6000, tenant, queues=2)
    # A key is in no frame; the message id stands for it.
    expected = {
        (tenant, queue): db.rows(
            "select message_id from queen.log_timers where queue = %s"
            " and tenant_id = coalesce(%s, '00000000-0000-0000-0000-000000000001'::uuid) order by timer_key",
            *(queue, tenant),
        )
        for tenant in tenants
        for queue in ("q1", "q2")
    }
    db.execute("select queen.configure('sweep_max_rows', '300')")
    for number in range(workers):
        sweeper(number, workers)
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 60)
    for (tenant, queue), ids in expected.items():
        assert db.rows("select message_id from queen.pop(%s, 'g', 100000, tenant => %s)", queue, tenant) == ids


def test_a_claim_takes_of_every_tenant(db: Database, admin: Connection) -> None:
    """200 at a time from a backlog of one tenant, with a few of two others; with per_tenant too."""
    backlog(db, 20_000)
    backlog(db, 20, SMALL)
    backlog(db, 20, None)
    query = "select tenant_id, count(*)::int from queen.log_timers_claim(max_rows => 200, per_tenant => %s) group by 1"
    default = UUID("00000000-0000-0000-0000-000000000001")
    assert dict(admin.execute(query, [None]).fetchall()) == {BIG: 160, SMALL: 20, default: 20}
    backlog(db, 20, SMALL)
    assert dict(admin.execute(query, [5]).fetchall()) == {BIG: 5}


def test_what_was_committed_late_comes_in_a_backlog_too(db: Database, sweeper: StartSweeper) -> None:
    """A timer that becomes visible behind the position of its tenant is found while the backlog lasts."""
    db.execute("select queen.configure('sweep_max_rows', '300')")
    late = db.connect("alice_producer", autocommit=False)
    db.execute("select queen.create_tenant(%s), queen.grant_tenant(%s, 'alice_producer')", BIG, BIG)
    late.execute("select queen.schedule('late', '0', '1', deliver_at => '2019-01-01Z', tenant => %s)", [BIG])
    backlog(db, 100_000)
    sweeper(0, 1)
    wait_for(lambda: delivered(db, BIG) > 1000)
    late.commit()
    wait_for(lambda: db.rows("select from queen.queues where name = 'late'"), 4)
    assert db.value("select count(*) from queen.log_timers") > 1000


def test_a_held_partition_in_a_backlog(db: Database, sweeper: StartSweeper) -> None:
    """Its tenant's other partitions go on, and its own rows come in order when it is free."""
    db.execute("select queen.configure('sweep_max_rows', '500')")
    db.execute("select queen.push('q1', '0', tenant => %s)", BIG)
    holder = db.connect("ada_admin", autocommit=False)
    holder.execute("select queen.push('q1', '0', tenant => %s)", [BIG])
    backlog(db, 20_000, due="'2020-01-01Z'::timestamptz + i * interval '1 ms'", queues=4)
    sweeper(0, 1)
    wait_for(lambda: delivered(db, BIG) >= 15_000, 30)
    holder.commit()
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 30)
    assert db.value("select count(*) from queen.log_busy") == 0
    dues = db.rows(
        "select u.deliver_at_us from queen.log_segments s"
        " join queen.log_partitions p on p.id = s.partition_id join queen.queues q on q.id = p.queue_id"
        f" cross join lateral {FRAMES}"
        " where q.name = 'q1' and u.deliver_at_us is not null order by u.\"offset\""
    )
    assert len(dues) == 5000
    assert dues == sorted(dues)
