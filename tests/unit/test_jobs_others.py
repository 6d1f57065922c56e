"""Jobs of other people whose names begin like those of queen.start."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.support.database import Database


def test_jobs_with_names_like_ours(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    db = own_cron_db({})
    db.execute("create role bob login; grant usage on schema cron to bob")
    db.execute("select cron.schedule('pg_queen report', '0 3 * * *', 'select 1')")
    bob = db.connect("bob")
    for name in ("pg_queen worker 0", "pg_queen worker 9", "pg_queen worker 99999999999", "pg_queen worker 3b"):
        bob.execute("select cron.schedule(%s, '0 4 * * *', 'select 1')", [name])
    others = db.rows("select * from cron.job order by jobid")
    for workers in (3, 1):
        db.execute(f"select queen.start({workers})")
        assert db.rows("select * from cron.job where jobid <= %s order by jobid", others[-1][0]) == others
    assert db.value("select queen.stop()") == 3
    assert db.rows("select * from cron.job order by jobid") == others
