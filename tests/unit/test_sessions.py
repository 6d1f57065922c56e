"""Whatever a session has set, calls mean the same."""

from __future__ import annotations

from typing import Final

import psycopg
import pytest

from tests.support.database import Connection, Database
from tests.support.whole_way import whole_way

SETTINGS: Final = {
    "empty search path": ["set search_path = ''"],
    "replica": ["set session_replication_role = replica"],
    "bytea_output": ["set bytea_output = escape"],
    "dates": ["set datestyle = 'SQL, DMY'", "set intervalstyle = sql_standard", "set timezone = 'Pacific/Chatham'"],
    "strings": [
        "set standard_conforming_strings = off",
        "set backslash_quote = off",
        "set escape_string_warning = off",
    ],
    "floats": ["set extra_float_digits = -15"],
    "xml and null": ["set transform_null_equals = on", "set array_nulls = off", "set quote_all_identifiers = on"],
    "plans": [
        "set enable_indexscan = off",
        "set enable_nestloop = off",
        "set enable_tidscan = off",
        "set jit_above_cost = 0",
        "set plan_cache_mode = force_custom_plan",
    ],
    "check bodies": ["set check_function_bodies = off", "set default_transaction_isolation = 'repeatable read'"],
    "serializable": ["set default_transaction_isolation = serializable"],
    "read only default": ["set default_transaction_read_only = off", "set row_security = off"],
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_the_session(db: Database, what: str) -> None:
    connection = db.connect("postgres")
    for setting in SETTINGS[what]:
        connection.execute(setting)
    whole_way(connection)


def test_another_client_encoding(db: Database, producer: Connection) -> None:
    """What is stored is UTF-8 whatever the client speaks."""
    producer.execute("set client_encoding = latin1")
    producer.execute("select queen.schedule('q', chr(233), to_jsonb(chr(233)), '0', txn => chr(252))")
    producer.execute("select queen.push('q', to_jsonb(chr(233)), chr(228))")
    assert bytes(db.value("select payload from queen.log_timers")) == '"\u00e9"'.encode()
    assert producer.execute("select status from queen.reschedule('q', chr(233), '0')").fetchone() == ("rescheduled",)
    assert db.value("select queen.fire_due()") == 1
    rows = db.rows('select "partition", payload, txn from queen.pop(\'q\') order by "partition" collate "C"')
    assert [row[:2] for row in rows] == [("Default", "\u00e9"), ("\u00e4", "\u00e9")]
    assert rows[0][2] == "\u00fc"


def test_names_alike_in_their_first_63_bytes(db: Database, producer: Connection) -> None:
    long = "n" * 63
    for name in (long, long + "1", long + "2"):
        assert producer.execute("select status from queen.schedule(%s, %s, '1', '0')", [name, name]).fetchone() == (
            "scheduled",
        )
        producer.execute("select queen.push(%s, '1', %s, %s)", [name, name, name])
    assert db.value("select queen.fire_due()") == 3
    assert db.value("select count(*) from queen.queues") == 3
    assert db.value("select count(*) from queen.log_partitions") == 6


def test_verdicts_in_every_isolation(db: Database) -> None:
    for level in ("read committed", "repeatable read", "serializable"):
        connection = db.connect("alice_producer", autocommit=False)
        connection.execute(f"set transaction isolation level {level}")

        def status(expression: str, connection: Connection = connection) -> object:
            row = connection.execute(f"select status from queen.{expression}").fetchone()
            assert row is not None
            return row[0]

        assert status("schedule('q', 'k', '1', '1 h')") == "scheduled"
        assert status("schedule('q', 'k', '2', '1 h')") == "rescheduled"
        assert status("reschedule('q', 'k', '2 h')") == "rescheduled"
        assert status("cancel('q', 'k')") == "cancelled"
        assert status("cancel('q', 'k')") == "absent"
        assert status("push('q', '1', txn => 't')") in ("queued", "duplicate")
        connection.commit()
        # Somebody else changes the row after the snapshot: an error that asks to try again, and no wrong answer.
        db.execute("select queen.schedule('q', 'k', '1', '1 h')")
        connection.execute(f"set transaction isolation level {level}")
        connection.execute("select 1")
        db.execute("select queen.reschedule('q', 'k', '3 h')")
        if level == "read committed":
            assert status("cancel('q', 'k')") == "cancelled"
            connection.commit()
        else:
            with pytest.raises(psycopg.errors.SerializationFailure):
                status("cancel('q', 'k')")
            connection.rollback()
            assert status("cancel('q', 'k')") == "cancelled"
            connection.commit()
