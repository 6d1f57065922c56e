"""queen.configure and queen.settings: what is refused, where the bounds are, and that a value is in force."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from tests.conftest import StartSweeper
from tests.support.database import Connection, Database
from tests.support.keys import KeyFile
from tests.support.keys import key as key_line
from tests.support.waiting import wait_for

# Kind, default, least and greatest (of a choice, its two values), whether a queue and a tenant may have their own.
SETTINGS = {
    "payload_max_bytes": ("integer", "1048576", "1", "67108864", True, True),
    "horizon": ("interval", "10 years", "1 second", "1000 years", True, True),
    "batch_max_ops": ("integer", "10000", "1", "1000000", True, True),
    "batch_max_bytes": ("integer", "67108864", "1024", "268435456", False, False),
    "pending_max": ("limit", "none", "0", "1000000000000", True, True),
    "encrypt": ("choice", "false", "false", "true", True, False),
    "key_file": ("path", "none", "none", "an absolute path", False, False),
    "timer_zstd_bytes": ("integer", "8192", "256", "67108864", False, False),
    "txn_window": ("interval", "1 day", "1 second", "3650 days", True, False),
    "start_at": ("choice", "beginning", "beginning", "new", True, False),
    "delivery_max_attempts": ("integer", "5", "1", "1000000", True, False),
    "pop_max_bytes": ("integer", "33554432", "1024", "268435456", False, False),
    "retention": ("interval", "7 days", "1 second", "36500 days", True, False),
    "retention_consumed": ("interval", "1 day", "0 seconds", "36500 days", True, False),
    "retention_force": ("choice", "false", "false", "true", True, False),
    "partition_idle": ("interval", "7 days", "1 second", "36500 days", True, False),
    "dead_letter_retention": ("interval", "30 days", "1 second", "36500 days", True, False),
    "timer_max_attempts": ("integer", "10", "1", "1000000", False, False),
    "timer_backoff_base": ("interval", "1 second", "10 milliseconds", "1 day", False, False),
    "timer_backoff_cap": ("interval", "5 minutes", "10 milliseconds", "30 days", False, False),
    "sweep_mode": ("choice", "lock", "lock", "lease", False, False),
    "sweep_max_rows": ("integer", "10000", "1", "100000", False, False),
    "sweep_max_bytes": ("integer", "16777216", "1024", "268435456", False, False),
    "sweep_idle": ("interval", "50 milliseconds", "1 millisecond", "10 seconds", False, False),
    "schedule_enabled": ("choice", "true", "false", "true", False, False),
    "fire_enabled": ("choice", "true", "false", "true", False, False),
    "run_log_retention": ("interval", "1 day", "1 minute", "3650 days", False, False),
}
# The SQL type of a kind, and the smallest step in it.
STEP = {"integer": ("bigint", "1"), "limit": ("bigint", "1"), "interval": ("interval", "1 microsecond")}


def refusal(connection: Connection, key: str | None, value: str | None) -> psycopg.Diagnostic:
    """What queen.configure says to a bad call."""
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        connection.execute("select queen.configure(%s, %s)", [key, value])
    return caught.value.diag


def configure(connection: Connection, key: str, value: str | None) -> str:
    """The answer of queen.configure."""
    row = connection.execute("select queen.configure(%s, %s)", [key, value]).fetchone()
    assert row is not None
    return str(row[0])


def test_the_settings_are_these(reader: Connection) -> None:
    rows = reader.execute(
        "select key, kind, default_value, min_value, max_value, per_queue, per_tenant, value, updated_at,"
        " updated_by, description from queen.settings"
    ).fetchall()
    assert {row[0]: row[1:7] for row in rows} == SETTINGS
    assert len(rows) == len(SETTINGS)
    for row in rows:
        # Nothing was changed, and each says what it is.
        assert row[7:10] == (row[2], None, None)
        assert len(row[10]) > 20


def test_defaults_lie_within_their_bounds(db: Database, admin: Connection) -> None:
    for key, (kind, default, *_rest) in SETTINGS.items():
        if kind != "path":
            assert configure(admin, key, default) == default


def check_bounds(db: Database, admin: Connection, key: str, kind: str, default: str, least: str, greatest: str) -> None:
    """A setting takes both its bounds and refuses what lies beyond, or is no value at all."""
    for good in (least, greatest):
        assert configure(admin, key, good) == good
        assert db.value("select value from queen.settings where key = %s", key) == good
    bad = [
        "",
        " ",
        "x",
        "-1",
        "null",
        "NaN",
        "infinity",
        "1e9 years",
        "9999999999999999999",
        "1; drop table queen.config",
    ]
    if kind in STEP:
        sql_type, step = STEP[kind]
        bad.append(db.value(f"select ((%s)::{sql_type} - '{step}')::text", least))
        bad.append(db.value(f"select ((%s)::{sql_type} + '{step}')::text", greatest))
    else:
        bad += [least.upper(), greatest + " ", "1"]
    if kind in ("integer", "limit"):
        bad += ["1.5", "1e3", "0x10", "1_000"]
    for value in bad:
        said = refusal(admin, key, value)
        assert said.message_primary is not None
        assert said.message_primary.startswith('argument "value":'), value
        assert key in said.message_primary
        assert said.message_hint is not None
        for word in (least, greatest, default):
            assert word in said.message_hint
        # Nothing is clamped, nothing changed.
        assert db.value("select value from queen.settings where key = %s", key) == greatest


def test_bounds(db: Database, admin: Connection) -> None:
    # `encrypt` is taken where there are keys; tests/unit/test_encryption_keys.py has the path to them.
    KeyFile(db).use(key_line("k1"))
    for key, (kind, default, least, greatest, *_) in SETTINGS.items():
        if kind != "path":
            check_bounds(db, admin, key, kind, default, least, greatest)


def test_unknown_keys(admin: Connection) -> None:
    for key in (None, "", "HORIZON", "horizon ", "retention.q", "work_mem"):
        said = refusal(admin, key, "1")
        assert said.message_primary is not None
        assert said.message_primary.startswith('argument "key":')
        assert said.message_hint is not None
        assert "queen.settings" in said.message_hint
        # Null restores a default; of nothing there is none.
        refusal(admin, key, None)


def test_null_restores_the_default_and_the_view_says_who_changed_what(db: Database, admin: Connection) -> None:
    assert configure(admin, "horizon", "1 year") == "1 year"
    assert configure(admin, "horizon", "2 years") == "2 years"
    changed = db.rows(
        "select key, value, default_value, updated_by, updated_at <= now() from queen.settings"
        " where updated_at is not null"
    )
    assert changed == [("horizon", "2 years", "10 years", "ada_admin", True)]
    assert configure(admin, "horizon", None) == "10 years"
    assert configure(admin, "horizon", None) == "10 years"
    assert db.rows("select from queen.settings where updated_at is not null") == []
    assert db.rows("select from queen.config") == []


def test_who_may(
    db: Database, producer: Connection, consumer: Connection, reader: Connection, nobody: Connection
) -> None:
    for connection in (producer, consumer, reader, nobody):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select queen.configure('horizon', '1 day')")
    for connection in (producer, consumer, nobody):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            connection.execute("select * from queen.settings")
    assert db.rows("select from queen.config") == []


def test_limits_are_in_force_at_the_next_statement(admin: Connection, producer: Connection) -> None:
    schedule = "select (queen.schedule('q', %s, to_jsonb(%s::text), %s::interval)).status"
    calls = {
        # The setting, a value, what just fits it, what does not, and the argument that is named.
        "payload_max_bytes": ("10", ("a", "x" * 8, "1 h"), ("b", "x" * 9, "1 h"), "payload"),
        "horizon": ("1 day", ("c", "x", "1 day"), ("d", "x", "1 day 1 second"), "delay"),
    }
    for key, (value, fits, beyond, argument) in calls.items():
        # Prepared and planned in this session before the change.
        for n in range(7):
            producer.execute(schedule, [f"{key}{n}", *beyond[1:]])
        configure(admin, key, value)
        assert producer.execute(schedule, fits).fetchone() == ("scheduled",)
        with pytest.raises(psycopg.errors.InvalidParameterValue, match=f'argument "{argument}"') as caught:
            producer.execute(schedule, beyond)
        # The hint names the way out.
        assert caught.value.diag.message_hint is not None
        assert key in caught.value.diag.message_hint
        configure(admin, key, None)
        assert producer.execute(schedule, beyond).fetchone() == ("scheduled",)


def test_batches(admin: Connection, producer: Connection) -> None:
    many = "select count(*) from queen.push_many('q', array_fill(to_jsonb(repeat('x', %s)), array[%s]))"
    configure(admin, "batch_max_ops", "3")
    assert producer.execute(many, [1, 3]).fetchone() == (3,)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="payloads"):
        producer.execute(many, [1, 4])
    configure(admin, "batch_max_bytes", "1024")
    assert producer.execute(many, [510, 2]).fetchone() == (2,)
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="payloads"):
        producer.execute(many, [511, 2])


def test_attempts_and_backoff(db: Database, admin: Connection) -> None:
    for key, value in {"timer_max_attempts": "4", "timer_backoff_base": "2 s", "timer_backoff_cap": "5 s"}.items():
        configure(admin, key, value)
    db.execute("select queen.schedule('q', 'k', '1', '0'::interval)")
    waits = []
    for attempts in range(4):
        # As if its backoff were over.
        db.execute("update queen.log_timers set claimed_until = null")
        ((status, wait),) = db.rows(
            "select f.status, f.retry_at - queen._now() from queen.log_timers_claim() c"
            " cross join lateral queen.log_timers_fail(array[c.tenant_id], array[c.queue], array[c.timer_key],"
            "   array[c.claim_token], 'no') f"
        )
        waits.append(wait)
        assert status == ("backoff" if attempts < 3 else "archived")
    for wait, seconds in zip(waits[:3], (2, 4, 5), strict=True):
        # Spread by some share, so that many do not come back at once; never beyond it, and soon enough.
        assert timedelta(seconds=seconds * 0.5) <= wait <= timedelta(seconds=seconds * 1.5)
    assert db.value("select count(*) from queen.dlq_list('q')") == 1


def test_deliveries_of_a_queue_and_of_all(db: Database, admin: Connection) -> None:
    configure(admin, "delivery_max_attempts", "2")
    db.execute("select queen.configure_queue('own', '{\"delivery_max_attempts\": 1}')")
    for queue in ("own", "other"):
        db.execute("select queen.push(%s, '1')", queue)
        for _ in range(2):
            db.execute("select queen.nack(queue, 'default', partition, lease_id) from queen.pop(%s)", queue)
    assert db.rows("select queue, attempts from queen.log_dlq order by queue") == [("other", 2), ("own", 1)]


def test_a_running_sweeper_takes_it_up(db: Database, admin: Connection, sweeper: StartSweeper) -> None:
    sweeper()
    wait_for(lambda: db.value("select count(*) from queen.sweep_stats") == 1)
    configure(admin, "sweep_max_rows", "7")

    def segments() -> list[int]:
        db.execute(
            "select queen.schedule_many('q', (select array_agg('k' || i) from generate_series(1, 70) i),"
            " array_fill('1'::jsonb, array[70]), array_fill('-1 s'::interval, array[70]))"
        )
        wait_for(lambda: db.value("select count(*) from queen.log_timers") == 0)
        counts = [n for (n,) in db.rows("select end_offset - base_offset + 1 from queen.log_segments")]
        db.execute("delete from queen.log_segments")
        return counts

    # Within a second or so; a batch goes at once, so several are tried.
    wait_for(lambda: segments() == [7] * 10, 20)
