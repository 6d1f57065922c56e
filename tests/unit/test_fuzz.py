"""Every public function with arguments of every kind, by an ordinary role: refused as documented, nothing breaks."""

from __future__ import annotations

import json
import re
from collections import Counter
from datetime import timedelta
from typing import Any, Final

import hypothesis
import psycopg
from hypothesis import strategies as st

from tests.support.clock import Clock
from tests.support.database import Connection, Database
from tools.cluster import ROOT

NAMES: Final = [
    *("q", "k", "p", "g", "t", "Default", "default", "__timer__", "", " ", "é" * 128, "x" * 255, "x" * 256, "k" * 513),
    *(
        "%",
        "%s",
        "$1",
        "\\",
        "'",
        '"',
        "';drop schema queen cascade;--",
        "queen.log_timers",
        "a\nb",
        "\x7f",
        "\u2028",
        "😀",
    ),
    *("dlq:", "dlq:a:b:c:d", "null", "{}", "{a,b}", "NaN", "../../etc/passwd"),
]
text = (
    st.none()
    | st.sampled_from(NAMES)
    | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40)
)
numbers = st.sampled_from([0, 1, -1, 2, 100, 100_000, 100_001, 2**31 - 1, -(2**31)])
bigints = numbers | st.sampled_from([2**31, 2**53, 2**63 - 1, -(2**63)])
uuids = (
    st.none() | st.sampled_from([f"00000000-0000-0000-0000-00000000000{i}" for i in (0, 1, 2)]) | st.uuids().map(str)
)
intervals = st.none() | st.sampled_from(
    [
        "0",
        "1 ms",
        "1 us",
        "-1 s",
        "1 hour",
        "10 years",
        "11 years",
        "-11 years",
        "178000000 years",
        "-178000000 years",
        "1 day 1 month -1 us",
    ]
)
times = st.none() | st.sampled_from(
    ["infinity", "-infinity", "epoch", "now", "294276-12-31Z", "4713-01-01 BC", "2030-01-01Z"]
)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([name for name in NAMES if name.isprintable()])
)
documents = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
)
kinds = st.sampled_from(["schedule", "reschedule", "cancel", "push", "ack", "pop", "", None, 1])
operations = st.lists(
    st.fixed_dictionaries(
        {"op": kinds, "queue": text, "timer_key": text},
        optional={
            "partition": text,
            "delay_ms": leaves,
            "payload": documents,
            "txn": text,
            "consumer_group": text,
            "lease_id": uuids,
            "up_to": leaves,
            "claim_token": uuids,
        },
    ),
    max_size=4,
)
deep = st.sampled_from([100, 1000, 6000]).map(lambda depth: "[" * depth + "]" * depth)
odd = st.sampled_from(['"\\ud800"', '"\\u0000"', '{"a": 1e400000}', "", "[", '[{"op": "push", "queue": "\\ud83d"}]'])
OF_TYPE: Final[dict[str, st.SearchStrategy[Any]]] = {
    "text": text,
    "integer": st.none() | numbers,
    "smallint": st.none() | st.sampled_from([0, 1, 63, 64, -1, 32767]),
    "bigint": st.none() | bigints,
    "boolean": st.none() | st.booleans(),
    "uuid": uuids,
    "interval": intervals,
    "timestamp with time zone": times,
    "bytea": st.none()
    | st.binary(max_size=300)
    | st.sampled_from([b"\0", b"\x28\xb5\x2f\xfd" + b"\xff" * 20, bytes(20_000)]),
    "jsonb": st.none() | documents.map(json.dumps) | operations.map(json.dumps) | deep | odd,
}
# Of PostgreSQL itself, for what does not reach us: no such time.
OF_POSTGRES: Final = {"22008"}
PLANTED: Final = 1000


def signatures(db: Database) -> dict[str, list[str]]:
    """Types of the arguments of every public function."""
    return dict(
        db.rows(
            "select p.proname, array(select format_type(t, null) from unnest(p.proargtypes) with ordinality u (t, n)"
            " order by n) from pg_proc p where p.pronamespace = 'queen'::regnamespace and p.prokind = 'f'"
            " and p.proname !~ '^_' and p.proname <> 'log_partition_dead' order by 1"
        )
    )


def documented() -> set[str]:
    """SQLSTATEs of the reference."""
    section = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8").split("\n## Errors\n")[1].split("\n## ")[0]
    return set(re.findall(r"\b(?:QN\d{3}|[0-9][0-9A-Z]{4})\b", section)) - {"XX000"}


def test_arbitrary_calls_are_answered_or_refused(db: Database, clock: Clock) -> None:
    clock.stop()
    db.execute(
        "select count(*) from queen.schedule_many('planted',"
        " (select array_agg('k' || i) from generate_series(1, %s) i), array_fill('1'::jsonb, array[%s]),"
        " array_fill('30 days'::interval, array[%s]))",
        *[PLANTED] * 3,
    )
    # Something to find for those who look.
    db.execute(
        "select queen.push_many('q', array['1', '2', '3']::jsonb[], 'p'), queen.schedule('q', 'k', '1', '1 hour')"
    )
    db.execute("drop role if exists fuzzy")
    db.execute("create role fuzzy login in role queen_producer, queen_consumer, queen_reader")
    functions = signatures(db)
    allowed = documented() | OF_POSTGRES
    assert {"22023", "42501", "QN002", "QN005", "QN006"} <= allowed
    seen: Counter[tuple[str, str]] = Counter()
    try:
        connection: Connection = db.connect("fuzzy")
        connection.execute("set statement_timeout = '10 s'")

        @hypothesis.settings(
            max_examples=2500, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
        )
        @hypothesis.given(st.data())
        def call(data: st.DataObject) -> None:
            name = data.draw(st.sampled_from(sorted(functions)))
            values, holders = [], []
            for type_ in functions[name]:
                if type_.endswith("[]"):
                    element = OF_TYPE[type_[:-2]]
                    values.append(data.draw(st.none() | st.lists(element, max_size=4)))
                else:
                    values.append(data.draw(OF_TYPE[type_]))
                holders.append(f"%s::{type_}")
            try:
                connection.execute(f"select r::text from queen.{name}({', '.join(holders)}) as r", values).fetchall()
                seen[name, "answered"] += 1
            except psycopg.Error as error:
                assert error.sqlstate in allowed, (name, values, error.sqlstate, str(error))
                seen[name, str(error.sqlstate)] += 1

        call()
    finally:
        db.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'fuzzy'")
        db.execute("drop role fuzzy")
    print(dict(sorted(seen.items())))
    assert {name for name, _ in seen} == set(functions)
    # Most are open to this role; those get through now and then.
    assert len({name for name, how in seen if how == "answered"}) >= 15, seen
    clock.advance(timedelta(days=31))
    while db.value("select queen.fire_due(100000)"):
        pass
    assert db.value("select count(*) from queen.pop('planted', 'g', 100000)") == PLANTED
