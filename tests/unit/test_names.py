"""Names of every kind work everywhere."""

from __future__ import annotations

from typing import Final

from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database

NAMES: Final = [
    "a.b.c",
    "with space",
    " leading and trailing ",
    "UPPER lower",
    "it's",
    'a "quoted" one',
    "'; drop table queen.queues; --",
    "%s %I $1 :x",
    "back\\slash",
    "-dash",
    "*",
    "null",
    "Default",
    "gr\u00fc\u00dfe",
    "\u65e5\u672c\u8a9e",
    "\U0001f600",
    "e\u0301",
    "\u00e9",
    "\u202eright to left",
    "x" * 255,
    "\u00e4" * 127,
]


def test_every_name_in_every_place(db: Database, admin: Connection) -> None:
    for i, name in enumerate(NAMES):
        other = NAMES[i - 1]
        group = NAMES[i - 2]

        def one(expression: str, *arguments: object) -> tuple[object, ...]:
            row = admin.execute(f"select * from queen.{expression}", arguments).fetchone()
            assert row is not None, expression
            return row

        def status(expression: str, *arguments: object) -> object:
            row = admin.execute(f"select status from queen.{expression}", arguments).fetchone()
            assert row is not None
            return row[0]

        named = (name, other, Jsonb(i))
        assert status("schedule(%s, %s, %s, '1 h', \"partition\" => %s, txn => %s)", *named, other, name) == "scheduled"
        assert status("reschedule(%s, %s, '2 h')", name, other) == "rescheduled"
        assert one("peek(%s, %s)", name, other)[1:4] == (name, other, other)
        assert [row[2] for row in admin.execute("select * from queen.list_timers(%s)", [name])] == [other]
        op = {"op": "reschedule", "queue": name, "timer_key": other, "delay_ms": 0}
        (answers,) = one("apply(%s)", Jsonb([op]))
        assert answers[0]["status"] == "rescheduled"  # type: ignore[index]
        assert one("fire_due()") == (1,)
        assert status("cancel(%s, %s)", name, other) == "absent"
        assert one("sent(%s, %s)", name, name)[:2] == (other, 1)
        assert status("push(%s, '0', %s, %s)", name, other, name) == "duplicate"
        assert status("push(%s, '0', %s, %s)", name, other, other + "!" if len(other) < 200 else "t") == "queued"
        message = admin.execute(
            'select queue, "partition", "offset", txn, payload, lease_id from queen.pop(%s, %s, 1, "partition" => %s)',
            [name, group, other],
        ).fetchone()
        assert message is not None
        assert message[:5] == (name, other, 1, name, i)
        lease = message[5]
        place = (name, group, other, lease)
        assert status("extend(%s, %s, %s, %s, '1 min')", *place) == "extended"
        assert status("nack(%s, %s, %s, %s, %s)", *place, name) == "nacked"
        (lease,) = admin.execute("select distinct lease_id from queen.pop(%s, %s)", [name, group]).fetchone() or (None,)
        assert status("ack(%s, %s, %s, %s)", name, group, other, lease) == "acked"
        assert one("seek(%s, %s, 0)", name, group) == (1,)
        (options,) = one("configure_queue(%s, '{\"delivery_max_attempts\": 1}')", name)
        assert options["delivery_max_attempts"] == "1"  # type: ignore[index, call-overload]
        (lease,) = admin.execute("select distinct lease_id from queen.pop(%s, %s, 1)", [name, group]).fetchone() or (
            None,
        )
        assert status("nack(%s, %s, %s, %s)", name, group, other, lease) == "nacked"
        letter = admin.execute(
            'select queue, "partition", consumer_group, txn from queen.dlq_list(%s)', [name]
        ).fetchone()
        assert letter == (name, other, group, name)
        assert one("dlq_requeue(%s)", name) == (1,)
        requeued = admin.execute(
            'select txn from queen.pop(%s, \'new\', "partition" => %s) order by "offset" desc limit 1', [name, other]
        ).fetchone()
        assert requeued is not None
        assert requeued[0].startswith("dlq:")
        assert requeued[0].endswith(f":1:{name}")
        assert one("sent(%s, %s)", name, requeued[0])[:2] == (other, 3)
    assert db.value("select count(*) from queen.queues") == len(NAMES)
    for name in NAMES:
        (dropped,) = admin.execute("select queen.drop_queue(%s)", [name]).fetchone() or (None,)
        assert dropped["existed"] is True
    assert db.value("select count(*) from queen.queues") == 0


def test_names_that_look_alike_are_different(db: Database, producer: Connection) -> None:
    """Whatever the collation of the database says of case, accents and spaces."""
    for name in ("a", "A", "a ", "\u00e4", "a\u0308"):
        assert producer.execute("select status from queen.schedule('q', %s, '1', '0')", [name]).fetchone() == (
            "scheduled",
        )
        producer.execute("select queen.push(%s, '1', %s, %s)", [name, name, name])
    assert db.value("select count(*) from queen.log_timers") == 5
    assert db.value("select count(*) from queen.queues") == 5
    assert db.rows("select timer_key from queen.list_timers('q')") == sorted(
        [("a",), ("A",), ("a ",), ("\u00e4",), ("a\u0308",)], key=lambda row: row[0].encode()
    )
    for name in ("a", "A", "a ", "\u00e4", "a\u0308"):
        assert producer.execute("select count(*) from queen.sent(%s, %s)", [name, name]).fetchone() == (1,)
        assert producer.execute("select status from queen.cancel('q', %s)", [name]).fetchone() == ("cancelled",)
