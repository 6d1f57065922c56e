"""EXPLAIN BUFFERS of the statements inside a pop of any partition: they cost by the partitions with work."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.database import Database

IDLE = 20_000
WITH_WORK = 10


def fill(db: Database, queue: str, idle: int) -> None:
    """10 partitions with a message each, in the midst of `idle` others whose message g and h have read."""
    append = (
        "select cardinality(queen._append(array_agg(row(id, 1,"
        " queen._frame(gen_random_uuid(), null, 'me', null, false, '1'), '{{}}', '{{}}', null)::queen._segment"
        " order by id), queen._now())) from queen.log_partitions p where {0}"
    )
    db.execute("select queen.configure_queue(%s, '{}')", queue)
    db.execute(
        "insert into queen.log_partitions (queue_id, name)"
        " select id, case when i %% greatest(%s / 10, 1) = 0 then 'busy' else 'idle' end || i"
        " from queen.queues, generate_series(1, %s) i where name = %s",
        *(idle, idle or WITH_WORK, queue),
    )
    ours = f"p.queue_id = (select id from queen.queues where name = '{queue}')"
    if idle:
        db.execute(append.format(ours))
        for group in ("g", "h"):
            db.execute("select queen.pop(%s, %s, auto_ack => true)", queue, group)
        # A pop makes a few hundred cursors at a time; here they are made all at once.
        db.execute(
            "insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed)"
            " select p.id, p.queue_id, g, 1 from queen.log_partitions p cross join unnest('{g,h}'::text[]) g"
            f" where {ours} on conflict do nothing"
        )
        assert db.rows("select queen.pop(%s, 'g'), queen.pop(%s, 'h')", queue, queue) == []
        db.execute("update queen.log_partitions set last_created_at = now() - interval '1 minute'")
        db.execute("call queen.maintain('20 seconds')")
    db.execute(append.format(f"{ours} and p.name like 'busy%'"))


class Explained:
    """What auto_explain says of every statement of a session, those inside functions included."""

    def __init__(self, db: Database) -> None:
        self.connection = db.connect()
        self._plans: list[dict[str, Any]] = []
        self.connection.add_notice_handler(self._note)
        self.connection.execute("set client_min_messages = log")
        self.connection.execute("load 'auto_explain'")
        for setting in ("min_duration = 0", "nested_statements = on", "analyze = on", "buffers = on", "format = json"):
            self.connection.execute(f"set auto_explain.log_{setting}")

    def _note(self, diagnostic: psycopg.errors.Diagnostic) -> None:
        message = diagnostic.message_primary or ""
        if " plan:\n" in message:
            self._plans.append(json.loads(message.split(" plan:\n", 1)[1]))

    def pages(self, statement: str) -> tuple[int, Counter[str], int]:
        """All pages, pages by the statement inside, and rows; rolled back."""
        self._plans.clear()
        with self.connection.transaction(force_rollback=True):
            rows = len(self.connection.execute(statement).fetchall())
        # The outermost ends last, and holds what was touched inside.
        *inner, whole = self._plans
        found: Counter[str] = Counter()
        for plan in inner:
            found[" ".join(plan["Query Text"].split())] += self._touched(plan)
        return self._touched(whole), found, rows

    def _touched(self, plan: dict[str, Any]) -> int:
        node = plan["Plan"]
        return int(node["Shared Hit Blocks"]) + int(node["Shared Read Blocks"])


@pytest.mark.slow
def test_twenty_thousand_partitions(db: Database) -> None:
    fill(db, "small", 0)
    fill(db, "large", IDLE)
    db.execute("select queen.pop('small', 'g', 1, '1 ms'), queen.pop('small', 'h', 1, '1 ms')")
    db.execute("select queen.pop('large', 'g', 1, '1 ms'), queen.pop('large', 'h', 1, '1 ms')")
    for state in ("hot", "cool"):
        if state == "cool":
            db.execute("update queen.log_partitions set last_created_at = now() - interval '1 minute' where hot")
            db.execute("call queen.maintain('20 seconds')")
            assert db.value("select count(*) from queen.log_partitions where hot") == 0
        for table in ("log_partitions", "log_consumers", "log_segments"):
            db.execute(f"vacuum analyze queen.{table}")
        explained = Explained(db)
        for call, group in itertools.product(("pop", "pop_segments"), ("g", "h")):
            results = {}
            for queue in ("small", "large"):
                statement = f"select * from queen.{call}('{queue}', '{group}', 100)"
                # Once for the caches of the session, and the generic plans.
                for _ in range(6):
                    explained.pages(statement)
                results[queue] = explained.pages(statement)
            (small, inside_small, rows_small), (large, inside_large, rows_large) = results["small"], results["large"]
            assert rows_small == rows_large == WITH_WORK
            # The statements inside are seen, not the call alone.
            assert any("log_partitions_hot_idx" in text or "p.hot" in text for text in inside_large)
            assert large <= 2 * small, (state, call, group, small, large)
            for text, pages in inside_large.items():
                assert pages <= 2 * inside_small[text] + 4, (state, call, group, text, inside_small[text], pages)


def test_consumers_of_a_group_get_disjoint_partitions(db: Database, session: StartSession) -> None:
    """Ten consumers at once, none of whose pops is committed; the eleventh gets nothing. Nobody waits."""
    fill(db, "q", 1000)
    taken: list[str] = []
    for form in ("pop", "pop_segments"):
        for _ in range(5):
            user = session("carl_consumer", autocommit=False)
            user.run("set lock_timeout = '2 s'")
            # Each has something, however many of those it looked at first are in other hands.
            ((part,),) = user.run(f"select \"partition\" from queen.{form}('q', 'g', 1)")
            taken.append(part)
    assert len(set(taken)) == WITH_WORK
    for form in ("pop", "pop_segments"):
        late = session("carl_consumer")
        late.run("set lock_timeout = '2 s'")
        assert late.run(f"select * from queen.{form}('q', 'g', 100)") == []
        # Another group has nothing to do with it.
        assert len(late.run(f"select * from queen.{form}('q', 'h {form}', 2000)")) >= WITH_WORK


def test_a_first_contact_waits_for_nobody(db: Database, session: StartSession) -> None:
    """New partitions, a new group, other consumers' first contacts and a producer not committed."""
    db.execute("select queen.push('q', '1', 'p' || i) from generate_series(1, 6) i")
    pusher = session("alice_producer", autocommit=False)
    pusher.run("select queen.push('q', '2', 'p1')")
    pusher.run("select queen.push('q', '1', 'uncommitted')")
    first = session("carl_consumer", autocommit=False)
    assert len(first.run("select * from queen.pop('q', 'g', 3)")) == 3
    second = session("carl_consumer", autocommit=False)
    rows = second.run("select \"partition\", \"offset\" from queen.pop('q', 'g', 100)", timeout=5)
    assert len(rows) == 3
    assert {offset for _, offset in rows} == {1}
    first.connection.rollback()
    third = session("carl_consumer")
    assert len(third.run("select * from queen.pop('q', 'g', 100)", timeout=5)) == 3
    pusher.connection.commit()
    second.connection.commit()
    assert third.run("select \"partition\", \"offset\" from queen.pop('q', 'g', 100)") == [("uncommitted", 1)]
