"""configure_queue: every option within its bounds, merged by whoever calls at the same time, holding nobody up."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from tests.conftest import StartSession
from tests.support.database import Connection, Database
from tests.support.keys import KeyFile
from tests.support.keys import key as key_line

OPTIONS = "select queen.configure_queue('q', %s)"


def configure(connection: Connection, options: Any) -> Any:
    """The options in force."""
    ((found,),) = connection.execute(OPTIONS, [None if options is None else Jsonb(options)]).fetchall()
    return found


def refused(connection: Connection, options: Any) -> psycopg.errors.Diagnostic:
    """What a refusal says."""
    with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
        configure(connection, options)
    return caught.value.diag


def test_the_bounds_of_every_option(db: Database, admin: Connection) -> None:
    # An option `encrypt` is taken where there are keys.
    KeyFile(db).use(key_line("k1"))
    rows = db.rows("select key, kind, min_value, max_value from queen.settings where per_queue order by key")
    assert {key for key, *_ in rows} >= {
        "txn_window",
        "start_at",
        "delivery_max_attempts",
        "retention",
        "retention_consumed",
        "retention_force",
        "partition_idle",
        "dead_letter_retention",
    }
    for key, kind, low, high in rows:
        for value in (low, high):
            assert configure(admin, {key: value})[key] == value
            if kind in ("integer", "limit"):
                assert configure(admin, {key: int(value)})[key] == value
        if kind == "interval":
            outside = db.rows(
                "select (%s::interval - interval '1 microsecond')::text,"
                " (%s::interval + interval '1 microsecond')::text",
                *(low, high),
            )[0]
        elif kind in ("integer", "limit"):
            outside = (str(int(low) - 1), str(int(high) + 1))
        else:
            outside = (low + "x", low.upper())
        for value in (
            *outside,
            "",
            " ",
            "infinity",
            "99999999999999999999",
            "1e400",
            True if kind in ("integer", "limit") else "no",
        ):
            said = refused(admin, {key: value})
            assert key in str(said.message_primary), (key, value)
            assert said.message_hint, (key, value)
        # Refused, so the last one that was accepted stands.
        assert configure(admin, {})[key] == high


def test_what_is_no_object_of_plain_values(db: Database, admin: Connection) -> None:
    for options in (None, [], [{"retention": "1 day"}], "retention", 1, True):
        assert "options" in str(refused(admin, options).message_primary)
    for value in ({}, [], {"days": 1}, ["1 day"]):
        assert "retention" in str(refused(admin, {"retention": value}).message_primary)
    hint = str(refused(admin, {"Retention": "1 day"}).message_hint)
    for (key,) in db.rows("select key from queen.settings where per_queue"):
        assert key in hint
    # Settings of the whole are no options of a queue, nor the other way round for those that are.
    for (key,) in db.rows("select key from queen.settings where not per_queue"):
        refused(admin, {key: None})
    assert db.rows("select from queen.queues") == []


def test_an_unknown_queue_is_made_and_empty_options_only_look(db: Database, admin: Connection) -> None:
    before = configure(admin, {"retention": "2 days"})
    assert configure(admin, {}) == before
    assert configure(admin, {"start_at": None}) == before
    assert db.rows("select name, options from queen.queues") == [("q", {"retention": "2 days"})]
    assert configure(admin, {"retention": None})["retention"] == "7 days"
    assert db.rows("select options from queen.queues") == [({},)]


def test_two_at_once_are_merged(db: Database, session: StartSession) -> None:
    """Of a queue that is there, and of one that both make."""
    for existing in (False, True):
        if not existing:
            db.execute("select queen.drop_queue('q')")
        one, two = (session("ada_admin", autocommit=False) for _ in range(2))
        one.run(OPTIONS, Jsonb({"retention": "2 days", "start_at": "new"}))
        call = two.start(OPTIONS, Jsonb({"txn_window": "3 days", "start_at": "beginning"}))
        two.wait_until_blocked()
        one.connection.commit()
        ((options,),) = call.result(10)
        two.connection.commit()
        assert (options["retention"], options["txn_window"], options["start_at"]) == ("2 days", "3 days", "beginning")
        assert db.value("select options from queen.queues") == {
            "retention": "2 days",
            "txn_window": "3 days",
            "start_at": "beginning",
        }


def test_who_configures_holds_up_nobody(db: Database, session: StartSession) -> None:
    db.execute("select queen.push('q', '1', 'p')")
    db.execute("select queen.pop('q', 'g', 1, auto_ack => true)")
    admin = session("ada_admin", autocommit=False)
    admin.run(OPTIONS, Jsonb({"delivery_max_attempts": 1, "retention": "1 hour"}))
    producer, consumer = session("alice_producer"), session("carl_consumer")
    for each in (producer, consumer):
        each.run("set lock_timeout = '2 s'")
    producer.run("select queen.push('q', '2', 'p')")
    producer.run("select queen.push('q', '2', 'new one')")
    producer.run("select queen.schedule('q', 'k', '3', '0', partition => 'p')")
    firer = session("ada_admin")
    firer.run("set lock_timeout = '2 s'")
    assert firer.run("select queen.fire_due()") == [(1,)]
    for group in ("g", "new group"):
        assert consumer.run("select count(*) > 0 from queen.pop('q', %s)", group) == [(True,)]
    admin.connection.rollback()
    assert db.value("select options from queen.queues") == {}


def test_options_are_in_force_at_the_next_statement(db: Database, admin: Connection, consumer: Connection) -> None:
    db.execute("select queen.push('q', '1', 'p', 't')")
    consumer.execute("select queen.pop('q', 'g', lease => '1 ms')")
    configure(admin, {"delivery_max_attempts": 1})
    db.execute("select pg_sleep(0.01)")
    assert consumer.execute("select * from queen.pop('q', 'g')").fetchall() == []
    assert db.rows("select attempts from queen.log_dlq") == [(1,)]
    assert db.value("select status from queen.push('q', '1', 'p', 't')") == "duplicate"
    configure(admin, {"txn_window": "1 second"})
    db.execute("update queen.log_txns set created_at = created_at - interval '2 seconds'")
    assert db.value("select status from queen.push('q', '1', 'p', 't')") == "queued"
