"""Whatever a session has set, calls mean the same."""

from __future__ import annotations

from typing import Final

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database

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


def whole_way(connection: Connection) -> None:
    """Schedule, look, move, fire, pop, refuse, take again, acknowledge."""

    def one(statement: str, *arguments: object) -> tuple[object, ...]:
        row = connection.execute(statement, arguments or None).fetchone()
        assert row is not None, statement
        return row

    assert one(
        "select status from queen.schedule('q', 'k', %s, delay => '1 hour', txn => 't')", Jsonb({"x": [1.5, "\u00e9"]})
    ) == ("scheduled",)
    assert one("select status from queen.schedule_bytes('q', 'b', %s, '0')", b"\x00\\\xff") == ("scheduled",)
    assert one("select count(*) from queen.schedule_many('q', '{m,n}', array['1', '2']::jsonb[], '{0,0}')") == (2,)
    assert one("select payload from queen.peek('q', 'k')") == ({"x": [1.5, "\u00e9"]},)
    assert one("select status from queen.reschedule('q', 'k', '-1 day')") == ("rescheduled",)
    assert one("select status from queen.push('q', '\"pushed\"', txn => 'u')") == ("queued",)
    assert one("select status from queen.push('q', '\"pushed\"', txn => 'u')") == ("duplicate",)
    assert one("select queen.fire_due()") == (4,)
    messages = connection.execute(
        "select \"offset\", payload, payload_bytes, lease_id from queen.pop('q', 'g')"
    ).fetchall()
    assert [m[:3] for m in messages] == [
        (1, "pushed", None),
        (2, {"x": [1.5, "\u00e9"]}, None),
        (3, None, b"\x00\\\xff"),
        (4, 1, None),
        (5, 2, None),
    ]
    lease = messages[0][3]
    assert one("select status from queen.nack('q', 'g', 'Default', %s, 'no')", lease) == ("nacked",)
    assert one("select status from queen.nack('q', 'g', 'Default', %s, 'no')", lease) == ("lease_lost",)
    (lease,) = one("select distinct lease_id from queen.pop('q', 'g')")
    assert one("select status, acked from queen.ack('q', 'g', 'Default', %s)", lease) == ("acked", 5)
    assert one("select \"offset\" from queen.sent('q', 't')") == (2,)
    assert one("select queen.drop_queue('q') ->> 'messages'") == ("5",)


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


def test_a_schema_of_decoys_in_front(db: Database) -> None:
    """Functions, operators, tables and types of the same names, in a schema of one's own and in pg_temp."""
    connection = db.connect("ada_admin")
    db.execute("create schema decoy authorization ada_admin")
    connection.execute("set search_path = decoy, public, pg_catalog")
    spoil = "language plpgsql as $$ begin raise exception 'a decoy was called'; end $$"
    for signature, result in (
        ("octet_length(text)", "int"),
        ("octet_length(bytea)", "int"),
        ("now()", "timestamptz"),
        ("clock_timestamp()", "timestamptz"),
        ("convert_to(text, name)", "bytea"),
        ("gen_random_uuid()", "uuid"),
        ("format(text, text)", "text"),
        ("jsonb_typeof(jsonb)", "text"),
        ("hashtext(text)", "int"),
    ):
        connection.execute(f"create function decoy.{signature} returns {result} {spoil}")
    connection.execute(f"create function decoy.eq(text, text) returns boolean {spoil}")
    connection.execute("create operator decoy.= (leftarg = text, rightarg = text, function = decoy.eq)")
    for table in ("log_timers", "queues", "log_partitions", "log_segments", "config", "log_consumers", "pg_class"):
        connection.execute(f"create temporary table {table} (id int, name int, queue int)")
        connection.execute(f"create table decoy.{table} (id int, name int, queue int)")
    connection.execute("create type decoy.timer_verdict as (ok int)")
    whole_way(connection)


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
