"""A pop of any partition costs by the partitions with work, not by those that exist."""

from __future__ import annotations

import pytest

from tests.support.database import Connection, Database

TABLES = "('log_partitions', 'log_consumers', 'log_segments', 'queues', 'log_groups')"


def pages(connection: Connection, statement: str) -> tuple[int, int]:
    """Pages of the log's tables and their indexes that a statement touches, and its rows; rolled back."""
    indexes = (
        "select i.indexrelid from pg_index i join pg_class t on t.oid = i.indrelid"
        f" where t.relnamespace = 'queen'::regnamespace and t.relname in {TABLES}"
    )
    counted = (
        "select sum(pg_stat_get_xact_blocks_fetched(c.oid)) from pg_class c"
        f" where c.relnamespace = 'queen'::regnamespace and (c.relname in {TABLES} or c.oid in ({indexes}))"
    )
    with connection.transaction(force_rollback=True):
        before = connection.execute(counted).fetchone()
        rows = len(connection.execute(statement).fetchall())
        after = connection.execute(counted).fetchone()
    assert before is not None
    assert after is not None
    return int(after[0] - before[0]), rows


@pytest.mark.slow
def test_ten_of_twenty_thousand(db: Database, admin: Connection) -> None:
    """In the same queue, read to their end by this group, by another, or by nobody; hot and cooled."""
    for i in range(10):
        db.execute("select queen.push('small', '1', %s)", f"p{i}")
    db.execute(
        "insert into queen.queues (name) values ('large');"
        " insert into queen.log_partitions (queue_id, name, last_offset, log_start)"
        " select id, 'p' || i, 1, 2 from queen.queues, generate_series(1, 20000) i where name = 'large';"
        " insert into queen.log_groups (queue_id, consumer_group, created_at)"
        " select id, g, now() from queen.queues, unnest('{g,h}'::text[]) g where name = 'large';"
        " insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed, updated_at)"
        " select p.id, p.queue_id, g, 1, now() from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
        " cross join unnest('{g,h}'::text[]) g where q.name = 'large'"
    )
    for i in range(0, 20000, 2000):
        db.execute("select queen.push('large', '1', %s)", f"p{i + 7}")
    db.execute("select queen.pop('small', 'g', 1, '1 ms'), queen.pop('small', 'h', 1, '1 ms')")
    statement = "select * from queen.pop('{}', '{}', 10)"
    for state in ("hot", "cool"):
        if state == "cool":
            db.execute(
                "update queen.log_partitions set last_created_at = last_created_at - interval '5 seconds' where hot"
            )
            db.execute("call queen.maintain('20 seconds')")
            assert db.value("select count(*) from queen.log_partitions where hot") == 0
        for table in ("log_partitions", "log_consumers"):
            db.execute(f"vacuum analyze queen.{table}")
        for group in ("g", "h"):
            found = {}
            for queue in ("small", "large"):
                # Once for the caches of the session.
                pages(admin, statement.format(queue, group))
                found[queue], rows = pages(admin, statement.format(queue, group))
                assert rows == 10, (state, group, queue)
            assert found["large"] <= 2 * found["small"], (state, group, found)
