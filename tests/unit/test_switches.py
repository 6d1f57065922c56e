"""schedule_enabled and fire_enabled: apart, in force within a second, seen in status."""

from __future__ import annotations

import time

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import StartSweeper
from tests.support.database import Connection, Database
from tests.support.waiting import wait_for

SCHEDULES = {
    "schedule": "select queen.schedule('q', 'new', '1', '1 hour')",
    "schedule_bytes": "select queen.schedule_bytes('q', 'new', '1', '1 hour')",
    "schedule_many": "select queen.schedule_many('q', '{new}', array['1']::jsonb[], array['1 hour']::interval[])",
    "apply": "select queen.apply(jsonb_build_array(jsonb_build_object("
    "'op', 'schedule', 'queue', 'q', 'timer_key', 'new', 'delay_ms', 1, 'payload', 1)))",
}


def switches(db: Database) -> tuple[bool, bool]:
    ((schedule, fire),) = db.rows("select schedule_enabled, fire_enabled from queen.status()")
    return schedule, fire


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_new_timers_while_scheduling_is_off(db: Database, producer: Connection, name: str) -> None:
    producer.execute("select queen.schedule('q', 'old', '1', '1 hour'), queen.schedule('q', 'gone', '1', '1 hour')")
    db.execute("select queen.configure('schedule_enabled', 'false')")
    assert switches(db) == (False, True)
    with pytest.raises(psycopg.Error) as caught:
        producer.execute(SCHEDULES[name])
    assert caught.value.sqlstate == "QN005"
    assert "schedule_enabled" in str(caught.value.diag.message_hint)
    # What was promised can be moved and taken back, and is kept.
    ops = [
        {"op": "cancel", "queue": "q", "timer_key": "gone"},
        {"op": "reschedule", "queue": "q", "timer_key": "old", "delay_ms": 0},
    ]
    assert [v["status"] for v in producer.execute("select queen.apply(%s)", [Jsonb(ops)]).fetchall()[0][0]] == [
        "cancelled",
        "rescheduled",
    ]
    assert db.value("select queen.fire_due()") == 1
    db.execute("select queen.configure('schedule_enabled', 'true')")
    producer.execute(SCHEDULES[name])


def test_nothing_is_fired_while_the_fire_is_off(db: Database, producer: Connection, sweeper: StartSweeper) -> None:
    workers = [sweeper(0, 2), sweeper(1, 2)]
    producer.execute("select queen.schedule('q', 'first', '1', '0')")
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
    db.execute("select queen.configure('fire_enabled', 'false')")
    time.sleep(1)
    assert switches(db) == (True, False)
    producer.execute("select queen.schedule('q', 'k', '1', '0'), queen.schedule('q', 'l', '1', '0')")
    assert db.value("select queen.fire_due()") == 0
    assert db.rows("select * from queen.log_timers_claim()") == []
    time.sleep(0.3)
    assert producer.execute("select (queen.cancel('q', 'l')).status").fetchone() == ("cancelled",)
    assert db.value("select due from queen.status()") == 1
    # The workers are there and say so.
    assert all(worker.alive for worker in workers)
    wait_for(lambda: db.value("select min(last_seen_at) > now() - interval '6 s' from queen.sweep_stats"))
    db.execute("select queen.configure('fire_enabled', 'true')")
    wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0, 1)
