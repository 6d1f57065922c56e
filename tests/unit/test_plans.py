"""What statements read follows what they deliver: not what is pending, stored or idle, and whatever statistics say.

Pages are counted by the backend that reads them, within one transaction, so they are exact and know no busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.support.database import Connection, Database
from tests.support.waiting import wait_for

TIMERS, BY_TIME, BY_KEY = "log_timers", "idx_log_timers_visible", "log_timers_pkey"
BY_TENANT = "idx_log_timers_tenant"
OF_TIMERS = (TIMERS, BY_TIME, BY_KEY)
GROWING = ("log_timers", "log_partitions", "log_segments", "log_txns", "log_consumers", "log_dlq")

# Pages and rows as pg_class has them. A table that empties and refills is met with those of its emptiness: after a
# vacuum that could give the pages back, and after one that could not.
STATISTICS = {"empty": (0, 0), "emptied": (5000, 0), "true": None}


@dataclass
class Touched:
    """What was asked for, by relation; those that were not touched are missing."""

    pages: dict[str, int] = field(default_factory=dict)
    scans: dict[str, int] = field(default_factory=dict)
    tuples: dict[str, int] = field(default_factory=dict)


Counters = dict[str, tuple[int, int, int]]


def counters(connection: Connection) -> Counters:
    """Pages, scans and rows (of a table: sequential ones) that this transaction has asked for so far."""
    rows = connection.execute(
        "select c.relname, pg_stat_get_xact_blocks_fetched(c.oid), pg_stat_get_xact_numscans(c.oid),"
        " pg_stat_get_xact_tuples_returned(c.oid) from pg_class c where c.relkind in ('r', 'i')"
        " and c.relnamespace = 'queen'::regnamespace"
    )
    return {name: (pages, scans, tuples) for name, pages, scans, tuples in rows}


def difference(before: Counters, after: Counters) -> Touched:
    """What lies between two readings."""
    found = Touched()
    for name in after:
        pages, scans, tuples = (new - old for new, old in zip(after[name], before.get(name, (0, 0, 0)), strict=True))
        for kind, value in ((found.pages, pages), (found.scans, scans), (found.tuples, tuples)):
            if value:
                kind[name] = value
    return found


def touched(connection: Connection, *statements: str, keep: bool = True) -> Touched:
    """Run statements in a transaction of their own, rolled back unless they are to be kept, and what they touched."""
    with connection.transaction(force_rollback=not keep):
        before = counters(connection)
        for statement in statements:
            connection.execute(statement)
        return difference(before, counters(connection))


def touched_by_sweep(db: Database, *others: Connection) -> Touched:
    """One pass of the resident sweeper, which commits: a session leaves its counts behind when it has ended."""
    shared = (
        "select c.relname, pg_stat_get_blocks_fetched(c.oid), pg_stat_get_numscans(c.oid),"
        " pg_stat_get_tuples_returned(c.oid) from pg_class c"
        " where c.relkind in ('r', 'i') and c.relnamespace = 'queen'::regnamespace"
    )
    # Sessions that are open keep their counts for a while; they must not come in between.
    for each in (db.superuser, *others):
        each.execute("select pg_stat_force_next_flush()")
    before = {name: (pages, scans, tuples) for name, pages, scans, tuples in db.rows(shared)}
    connection = db.connect("ada_admin")
    pid = connection.info.backend_pid
    connection.execute("call queen.sweep('0')")
    connection.close()
    wait_for(lambda: db.rows("select from pg_stat_activity where pid = %s", pid) == [])
    return difference(before, {name: (pages, scans, tuples) for name, pages, scans, tuples in db.rows(shared)})


def pending(db: Database, count: int, *, first: int = 1, due: bool = False) -> None:
    """Timers with keys from k<first> on, far ahead or each a millisecond more overdue, for destinations that exist."""
    db.execute(
        "insert into queen.log_timers (queue, timer_key, partition, deliver_at, txn, message_id, payload)"
        " select 'q', %s || i, 'p' || i %% 2,"
        "   queen._now() + case when %s then -i else 86400000 + i end * interval '1 ms',"
        " 'k' || i, gen_random_uuid(), '\\x7b7d' from generate_series(%s::int, %s::int) i",
        "d" if due else "k",
        due,
        first,
        first + count - 1,
    )


def set_statistics(db: Database, kind: str) -> None:
    """Clean every table up, and leave the statistics of `kind`."""
    for (table,) in db.rows(
        "select oid::regclass::text from pg_class where relnamespace = 'queen'::regnamespace and relkind = 'r'"
    ):
        db.execute(f"vacuum {table}")
        if STATISTICS[kind] is None:
            db.execute(f"analyze {table}")
    if (given := STATISTICS[kind]) is not None:
        db.execute(
            "delete from pg_statistic where starelid in"
            " (select oid from pg_class where relnamespace = 'queen'::regnamespace)"
        )
        db.execute(
            "update pg_class set relpages = %s, reltuples = %s"
            " where relnamespace = 'queen'::regnamespace and relkind in ('r', 'i')",
            *given,
        )


def levels(db: Database) -> dict[str, int]:
    """How many pages lie above a leaf of each index: what a deeper tree adds to a descent."""
    return dict(
        db.rows(
            "select c.relname, m.level from pg_class c cross join lateral bt_metap(c.oid::regclass::text) m"
            " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'i'"
            " and c.relam = (select oid from pg_am where amname = 'btree')"
        )
    )


def assert_alike(
    small: Touched,
    large: Touched,
    deeper: dict[str, int],
    what: str,
    *,
    inserts: int = 0,
    slack: int = 2,
    only: tuple[str, ...] = (),
) -> None:
    """As many pages within a fifth and the slack, but for descents of trees that are deeper by so much.

    What reads a dozen pages needs a slack of as many; what follows the backlog reads thousands more.
    """
    for name in only or small.pages.keys() | large.pages.keys():
        allowed = small.pages.get(name, 0) * 1.2 + slack + deeper.get(name, 0) * (large.scans.get(name, 0) + inserts)
        assert large.pages.get(name, 0) <= allowed, f"{what}: {name}, {small} against {large}"
    # Never the whole of anything that grows; a table of a few rows may be read so.
    for table in GROWING:
        assert large.tuples.get(table, 0) <= 20, f"{what}: a sequential scan of {table}, {large}"


@pytest.fixture
def admin(db: Database) -> Connection:
    """A session in a database where only the test vacuums and analyzes."""
    db.execute("create extension pageinspect")
    for (table,) in db.rows(
        "select oid::regclass::text from pg_class where relnamespace = 'queen'::regnamespace and relkind = 'r'"
    ):
        db.execute(f"alter table {table} set (autovacuum_enabled = off)")
    db.execute("select queen.push('q', '1', 'p0'), queen.push('q', '1', 'p1')")
    connection = db.connect("ada_admin")
    # A plan that went wrong shows as an error, not as an hour.
    connection.execute("set statement_timeout = '10 s'")
    return connection


FIRE = "select queen.fire_due()"
ON_TIMERS = {
    "schedule": "select queen.schedule('q', 'new', '1', '1 day')",
    "schedule again": "select queen.schedule('q', 'k500', '1', '1 day')",
    "schedule_many": "select queen.schedule_many('q', '{a,b,k501}', array_fill('1'::jsonb, array[3]),"
    " array_fill('1 day'::interval, array[3]))",
    "reschedule": "select queen.reschedule('q', 'k502', '2 days')",
    "cancel": "select queen.cancel('q', 'k503')",
    "cancel of nothing": "select queen.cancel('q', 'k503.')",
    "peek": "select queen.peek('q', 'k504')",
    "apply": 'select queen.apply(\'[{"op": "cancel", "queue": "q", "timer_key": "k505"}]\')',
    "a page of the list": "select queen.list_timers('q', 'k2', 10)",
    "due": "select queen.log_timers_due()",
    "status": "select queen.status()",
}
BY_THE_TIME = ("fire_due", "sweep", "an idle sweep", "due", "status")


@pytest.mark.slow
def test_the_backlog_costs_nothing(db: Database, admin: Connection) -> None:
    """10 due among 1,000 pending timers and among 300,000, plans made before and after, whatever statistics say."""
    found: dict[tuple[str, str, str], list[Touched]] = {}
    depth = []
    for count, first in ((1000, 1), (299_000, 1001)):
        pending(db, count, first=first)
        for kind in STATISTICS:
            sessions = [admin, db.connect("ada_admin")]
            for who, connection in zip(("old session", "new session"), sessions, strict=True):
                connection.execute("set statement_timeout = '10 s'")
                # Plans are made, the generic ones too, under these statistics.
                set_statistics(db, kind)
                for _ in range(6):
                    pending(db, 2, due=True)
                    connection.execute(FIRE)
                    for statement in ON_TIMERS.values():
                        touched(connection, statement, keep=False)
                set_statistics(db, kind)
                pending(db, 10, due=True)
                for name, statement in ON_TIMERS.items():
                    found.setdefault((name, kind, who), []).append(touched(connection, statement, keep=False))
                set_statistics(db, kind)
                found.setdefault(("fire_due", kind, who), []).append(touched(connection, FIRE))
            pending(db, 10, due=True)
            found.setdefault(("sweep", kind, ""), []).append(touched_by_sweep(db, *sessions))
            found.setdefault(("an idle sweep", kind, ""), []).append(touched_by_sweep(db, *sessions))
        depth.append(levels(db))
    deeper = {name: depth[1][name] - depth[0][name] for name in depth[1]}
    assert deeper[BY_TIME] == deeper[BY_KEY] == 1

    for (name, kind, who), (small, large) in found.items():
        what = f"{name}, {kind} statistics, {who}"
        slack = 2 if name in BY_THE_TIME else 16
        assert_alike(small, large, deeper, what, inserts=3, slack=slack, only=OF_TIMERS)
        assert BY_TENANT not in large.scans, f"{what}: {large}"
        # The key's own index for what names a key, the time's for what looks for what is due, and never the other.
        if name in BY_THE_TIME:
            assert BY_KEY not in large.scans, what
            assert large.tuples.get(BY_TIME, 0) <= 10 + 2 * 64, f"{what}: {large}"
        else:
            assert BY_TIME not in large.scans, what
            assert 1 <= large.scans.get(BY_KEY, 0) <= 4, f"{what}: {large}"
            assert large.tuples.get(BY_KEY, 0) <= 12, f"{what}: {large}"


def test_what_is_due_beyond_a_pass_costs_nothing(db: Database, admin: Connection) -> None:
    """A pass of 100 with 1,000 due and with 60,000: no sort of everything due, no more than the window is read."""
    statements = {"fire_due": "select queen.fire_due(100)"}
    statements["claim"] = "select queen.log_timers_claim(max_rows => 100)"
    found: dict[tuple[str, str], list[Touched]] = {}
    depth = []
    for count, first in ((1000, 1), (59_000, 1001)):
        pending(db, count, first=first, due=True)
        for kind in STATISTICS:
            for name, statement in statements.items():
                for _ in range(6):
                    touched(admin, statement, keep=False)
                set_statistics(db, kind)
                found.setdefault((name, kind), []).append(touched(admin, statement, keep=False))
        depth.append(levels(db))
    deeper = {name: depth[1][name] - depth[0][name] for name in depth[1]}
    for (name, kind), (small, large) in found.items():
        # A claim writes each row into the indexes again.
        inserts = 100 if name == "claim" else 0
        assert_alike(small, large, deeper, f"{name}, {kind} statistics", inserts=inserts, only=OF_TIMERS)
        # The window, and the first of each shard to merge them by time.
        assert large.tuples[BY_TIME] <= 101 + 2 * 64, (name, kind, large)


@pytest.mark.slow
def test_pop_and_ack_cost_what_they_deliver(db: Database, admin: Connection) -> None:
    """10 messages at the end of a log of 20 segments and of 20,000, and beside 20,000 partitions that are idle."""
    ((first, second),) = db.rows("select min(id), max(id) from queen.log_partitions")
    pop = "create temp table got on commit drop as select * from queen.pop('q', 'g', 10)"
    named = pop.replace("10)", "10, partition => 'p0')")
    ack = "select queen.ack('q', 'g', partition, lease_id) from (select distinct partition, lease_id from got) g"
    calls = {
        "pop and ack": (pop, ack),
        "pop and ack by name": (named, ack),
        "pop and nack": (pop, ack.replace("ack(", "nack(")),
        "segments": ("select queen.pop_segments('q', 'g', 10)",),
        "push": ("select queen.push('q', '1', 'p0')",),
        "push with a txn": ("select queen.push('q', '1', 'p0', 'mine')",),
        "sent": ("select queen.sent('q', 'mine')",),
    }
    found: dict[tuple[str, str], list[Touched]] = {}
    depth = []

    def measure(segments: int) -> None:
        # One message a segment, as single pushes leave it; their txns too.
        rest = "generate_series((select last_offset + 1 from queen.log_partitions where id = %s), %s::int) i"
        db.execute(
            "insert into queen.log_segments select s.partition_id, i, i, s.created_at, s.raw_bytes, s.blob"
            f" from queen.log_segments s cross join {rest} where s.partition_id = %s and s.end_offset = 1",
            *(first, segments, first),
        )
        db.execute(
            f"insert into queen.log_txns select %s, i, now(), queen._txn_hash('t' || i), null from {rest}",
            *(first, first, segments),
        )
        db.execute("update queen.log_partitions set last_offset = %s where id = %s", segments, first)
        db.execute("select queen.pop('q', 'g', 1, auto_ack => true)")
        db.execute("select queen.pop('q', 'g', 1, partition => 'p1', auto_ack => true)")
        db.execute("select queen.seek('q', 'g', to_offset => %s, partition => 'p0')", segments - 9)
        # What a seek publishes is seen to once.
        db.execute("select queen.nack('q', 'g', partition, lease_id) from queen.pop('q', 'g', 1)")
        for kind in STATISTICS:
            for name, statements in calls.items():
                for _ in range(6):
                    touched(admin, *statements, keep=False)
                set_statistics(db, kind)
                found.setdefault((name, kind), []).append(touched(admin, *statements, keep=False))
        depth.append(levels(db))

    measure(20)
    measure(20_000)
    # Partitions that were read to their end by this group and by another, and cooled since.
    db.execute(
        "with p as (insert into queen.log_partitions (queue_id, name, last_offset)"
        " select p.queue_id, 'idle' || i, 1 from queen.log_partitions p, generate_series(1, 20000) i where p.id = %s"
        " returning id, queue_id)"
        " insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed)"
        " select p.id, p.queue_id, g, 1 from p cross join unnest('{g,h}'::text[]) g",
        second,
    )
    measure(20_020)
    for (name, kind), (small, *large) in found.items():
        for which, one, deep in zip(("long log", "idle partitions"), large, depth[1:], strict=True):
            deeper = {index: deep[index] - depth[0][index] for index in deep}
            assert_alike(small, one, deeper, f"{name}, {which}, {kind} statistics", inserts=1, slack=16)
