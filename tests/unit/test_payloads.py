"""What was sent is what arrives: JSON and bytes of every kind, by a timer and by a push."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

import hypothesis
import psycopg
import pytest
from hypothesis import strategies as st
from psycopg.types.json import Jsonb

from tests.support.database import Connection, Database

TEXTS: Final = [
    "null",
    '""',
    "{}",
    "[]",
    "0",
    "-0.0",
    "true",
    "1e-300",
    "123456789012345678901234567890.123456789",
    '"\\u0001\\u001f\\u007f\\u2028"',
    '"\\ud83d\\ude00 \\u00e9"',
    '"\\\\ \\" / \\b\\f\\n\\r\\t"',
    '{"": {"": [[[[[]]]]]}}',
    '{"a": 1, "a": 2}',
    '{"payload_bytes": null, "z": "\\\\u0000"}',
    "[" * 900 + "]" * 900,
]
BYTES: Final = [b"", b"\x00", b"\x00\x00\x00", b"{}", b"\xff\xfe", bytes(range(256)), b"\x28\xb5\x2f\xfd" * 3]


def both_ways(db: Database, column: str, values: list[Any]) -> list[tuple[Any, Any]]:
    """Send values by timers and by pushes; pairs of payload (as text) and payload_bytes in the order of sending."""
    bytes_too = "_bytes" if column == "payload_bytes" else ""
    for i, value in enumerate(values):
        db.execute(f"select queen.schedule{bytes_too}('timers', %s, %s, '0')", f"{i:05}", value)
        db.execute(f"select queen.push{bytes_too}('pushes', %s)", value)
    assert db.value("select queen.fire_due(10000)") == len(values)
    found = []
    for queue in ("timers", "pushes"):
        rows = db.rows(
            "select payload::text, payload_bytes from queen.pop(%s, max_messages => 10000, auto_ack => true)", queue
        )
        found.append(rows)
    # Those of one instant fire in the order of their keys, and these keys are in the order of sending.
    assert found[0] == found[1]
    return found[0]


def test_json(db: Database) -> None:
    expected = [db.value("select %s::jsonb::text", text) for text in TEXTS]
    found = both_ways(db, "payload", TEXTS)
    assert found == [(text, None) for text in expected]


def test_bytes(db: Database) -> None:
    assert both_ways(db, "payload_bytes", BYTES) == [(None, value) for value in BYTES]


def test_a_megabyte_of_each(db: Database) -> None:
    text = '"' + "\u00e9" * (524_288 - 1) + '"'
    assert both_ways(db, "payload", [text]) == [(text, None)]
    random = bytes((i * 7919 + (i >> 3) * 31) % 256 for i in range(1_048_576))
    assert both_ways(db, "payload_bytes", [random]) == [(None, random)]


def test_what_jsonb_cannot_hold_is_refused_at_the_schedule(db: Database, producer: Connection) -> None:
    for text in ('"\\u0000"', '"\\ud800"', "NaN", "Infinity", "{", "", "[1,]", "'x'"):
        for call in ("schedule('q', 'k', %s, '0')", "push('q', %s)"):
            with pytest.raises(psycopg.DataError):
                producer.execute(f"select queen.{call}", [text])
    assert db.value("select count(*) from queen.log_timers") == 0
    assert db.value("select count(*) from queen.log_segments") == 0


def test_peek_shows_what_waits(db: Database, reader: Connection) -> None:
    db.execute("select queen.schedule('q', 'j', '{\"b\": [1, null]}', '1 h')")
    db.execute("select queen.schedule_bytes('q', 'b', '\\x00ff', '1 h')")
    looked = "select payload, payload_bytes from queen.peek('q', %s)"
    assert reader.execute(looked, ["j"]).fetchall() == [({"b": [1, None]}, None)]
    assert reader.execute(looked, ["b"]).fetchall() == [(None, b"\x00\xff")]
    assert reader.execute("select payload, payload_bytes from queen.list_timers('q')").fetchall() == [(None, None)] * 2


def test_round_trips(db: Database) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=50)
    leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=20)

    @hypothesis.given(
        st.lists(values, min_size=1, max_size=20), st.lists(st.binary(max_size=200), min_size=1, max_size=20)
    )
    @hypothesis.settings(max_examples=25, suppress_health_check=list(hypothesis.HealthCheck))
    def check(jsons: list[Any], blobs: list[bytes]) -> None:
        found = both_ways(db, "payload", [Jsonb(value) for value in jsons])
        # Numbers as they are written, so that 1e2 is 100 and nothing is rounded.
        sent = [json.loads(json.dumps(value), parse_int=Decimal, parse_float=Decimal) for value in jsons]
        assert [json.loads(text, parse_int=Decimal, parse_float=Decimal) for text, _ in found] == sent
        assert both_ways(db, "payload_bytes", blobs) == [(None, blob) for blob in blobs]

    check()
