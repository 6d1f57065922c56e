"""pg_cron taken out of shared_preload_libraries while its settings and tables stay."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import psycopg
import pytest

from tests.support.database import Database


def test_pg_cron_no_longer_loaded(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    db = own_cron_db({})
    db.execute("select queen.start()")
    db.cluster.configure({"shared_preload_libraries": ""})
    db.restart()
    message = "pg_cron is not loaded: shared_preload_libraries does not name it"
    assert db.rows("select pg_cron, jobs from queen.status()") == [(message, 0)]
    with pytest.raises(psycopg.Error, match=message) as caught:
        db.execute("select queen.start()")
    assert caught.value.sqlstate == "QN001"
    assert db.value("select queen.stop()") == 0
