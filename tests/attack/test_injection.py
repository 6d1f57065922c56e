"""SQL in every text that a caller can hand over: it stays text, in the server and through the command.

The canary is a sequence: what it handed out stays so after a rollback, so a refused call that ran the text shows too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

import psycopg
import pytest
import typer
from pg_queen.cli import app
from psycopg.types.json import Jsonb

from tests.python.conftest import Cli, cli
from tests.support.calls import GOOD, LEASE, expression
from tests.support.database import Connection, Database

__all__ = ["cli"]

HOSTILE: Final = (
    "'; select public.hit(); --",
    "' || public.hit()::text || '",
    "'||public.hit()||'",
    '"; select public.hit(); --',
    "\\'; select public.hit(); --",
    "$$; select public.hit(); --",
    "$x$ || public.hit() || $x$",
    "public.hit()",
    "(select public.hit())",
    "%s %I %L %1$s %n %(x)s {0} $1 :a",
    "{\"', public.hit(), '\"}",
    "queen.log_timers; select public.hit()",
    "1) from queen.queues, public.hit() --",
    "/* */ public.hit() /*",
    "; call queen.sweep(); drop schema queen cascade; --",
    "\u2019; select public.hit(); --",
    "\uff07; select public.hit(); --",
)
TENANT: Final = "00000000-0000-0000-0000-0000000000aa"
# Beside those of GOOD: what takes a text that is no name of the log.
MORE: Final[dict[str, dict[str, str]]] = {
    "apply": {
        "ops": """'[{"op": "schedule", "queue": "q", "timer_key": "a", "delay_ms": 5, "payload": 1, "txn": "t",'
          '"partition": "p"}, {"op": "cancel", "queue": "q", "timer_key": "b"}]'"""
    },
    "transaction": {
        "ops": """'[{"op": "push", "queue": "q", "payload": 1, "txn": "t", "partition": "p"},'
          '{"op": "reschedule", "queue": "q", "timer_key": "a", "delay_ms": 5}]'"""
    },
    "nack": {"error": "'no'"},
    "list_timers": {"after": "'k'"},
    "configure": {"key": "'horizon'", "value": "'1 year'"},
    "configure_queue": {"options": '\'{"horizon": "1 day"}\''},
    "configure_tenant": {"tenant": f"'{TENANT}'", "options": '\'{"horizon": "1 day"}\''},
    "create_tenant": {"tenant": "gen_random_uuid()", "name": "'a name'"},
    "grant_tenant": {"tenant": f"'{TENANT}'", "role_name": "'alice_producer'"},
    "revoke_tenant": {"tenant": f"'{TENANT}'", "role_name": "'alice_producer'"},
    "log_timers_fail": {
        "tenants": f"array['{TENANT}']::uuid[]",
        "queues": "array['q']",
        "timer_keys": "array['k']",
        "tokens": f"array[{LEASE}]::uuid[]",
        "error": "'no'",
    },
    "log_timers_fire": {
        "tenants": f"array['{TENANT}']::uuid[]",
        "queues": "array['q']",
        "timer_keys": "array['k']",
        "tokens": f"array[{LEASE}]::uuid[]",
    },
}
TEXTS: Final = ("text", "text[]", "jsonb", "jsonb[]")


@pytest.fixture
def canary(db: Database) -> Iterator[Database]:
    """A function open to everybody that leaves a trace; whether the schema is as it was is asked at the end."""
    db.execute("create sequence public.hits")
    db.execute(
        "create function public.hit() returns text language sql security definer"
        " as $$ select nextval('public.hits')::text $$"
    )
    db.execute("select queen.create_tenant(%s::uuid)", TENANT)
    db.execute("select queen.schedule('q', 'a', '1', '1 hour'), queen.schedule('q', 'b', '1', '1 hour')")
    before = _catalog(db)
    yield db
    assert not _hit(db)
    assert _catalog(db) == before


def _hit(db: Database) -> bool:
    """Whether anything ran the canary."""
    return bool(db.value("select is_called from public.hits"))


def _catalog(db: Database) -> list[tuple[Any, ...]]:
    return db.rows(
        "select relname, relkind::text from pg_class where relnamespace = 'queen'::regnamespace"
        " union all select proname, 'f' from pg_proc"
        "  where pronamespace in ('queen'::regnamespace, 'public'::regnamespace)"
        " union all select rolname, 'r' from pg_roles order by 1, 2"
    )


def _arguments(db: Database) -> list[tuple[str, str, str]]:
    """Function, argument and type of every text that a public function takes."""
    return db.rows(
        "select p.proname, a.name, format_type(a.type, null) from pg_proc p cross join lateral unnest("
        " p.proargnames, coalesce(p.proallargtypes, p.proargtypes::oid[]), p.proargmodes) as a (name, type, mode)"
        " where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_' and coalesce(a.mode, 'i') = 'i'"
        " and format_type(a.type, null) = any (%s) order by 1, 2",
        list(TEXTS),
    )


def _spoiled(good: Any, text: str) -> Iterator[Any]:
    """A document with the text in the place of each value and of each key, one after the other."""
    yield text
    if isinstance(good, list):
        for i, item in enumerate(good):
            for other in _spoiled(item, text):
                yield [*good[:i], other, *good[i + 1 :]]
    elif isinstance(good, dict):
        yield {**good, text: text}
        for key, item in good.items():
            for other in _spoiled(item, text):
                yield {**good, key: other}
            yield {text if k == key else k: v for k, v in good.items()}


def _try(connection: Connection, statement: str, *values: Any) -> bool:
    """Whether the call was answered; if not, that it was refused by one of us and for what the text is."""
    try:
        connection.execute(statement, values or None).fetchall()
    except psycopg.Error as error:
        # 22P02: jsonb and arrays refuse what is none before we see it. 42704: grant_tenant, no such role.
        assert error.sqlstate in ("22023", "QN001", "42704", "QN002", "QN006", "QN007", "22P02"), (statement, error)
        return False
    return True


def test_the_canary_sings(canary: Database) -> None:
    """One careless function, to show that the texts below would be noticed; and then the sequence is set back."""
    canary.execute(
        "create function public.careless(t text) returns void language plpgsql as $$ begin execute t; end $$"
    )
    heard = 0
    for text in HOSTILE:
        for statement in (f"select '{text}'", f'select 1 as "{text}"', f"select {text}", f"select $${text}$$"):
            try:
                canary.execute("select public.careless(%s)", statement.replace("--", "\n--"))
            except psycopg.Error:
                canary.superuser.rollback()
            if _hit(canary):
                heard += 1
                canary.execute("alter sequence public.hits restart")
    canary.execute("drop function public.careless")
    assert heard >= 8


def test_every_text_of_every_function(canary: Database, admin: Connection) -> None:
    arguments = _arguments(canary)
    known = {name: {**GOOD.get(name, {}), **MORE.get(name, {})} for name in {**GOOD, **MORE}}
    assert {(function, argument) for function, argument, _ in arguments} <= {
        (function, argument) for function, given in known.items() for argument in given
    }
    answered = dict.fromkeys(known, 0)
    for function, argument, kind in arguments:
        given = known[function]
        good = canary.value(f"select to_jsonb({given[argument]}::{kind})")
        for text in HOSTILE:
            spoiled = list(_spoiled(good, text)) if kind.startswith("json") else [text]
            if kind == "text[]":
                spoiled = [[*good[1:], text]]
            elif kind == "jsonb[]":
                spoiled = [[*good[1:], other] for other in _spoiled({"k": 1}, text)]
            for value in spoiled:
                if kind == "jsonb":
                    value = Jsonb(value)
                elif kind == "jsonb[]":
                    value = [Jsonb(v) for v in value]
                call = ", ".join(f'"{n}" => {v}' for n, v in {**given, argument: f"%s::{kind}"}.items())
                answered[function] += _try(admin, f"select * from queen.{function}({call})", value)
    # Whatever takes a name took these, and whatever is a document took some.
    assert {function for function, n in answered.items() if n == 0} <= {
        *("configure", "configure_tenant", "grant_tenant", "revoke_tenant")
    }


def test_hostile_names_the_whole_way(canary: Database, admin: Connection) -> None:
    """Born, fired, refused, sent again, looked at, swept, maintained and dropped under such names."""

    def one(statement: str, *values: Any) -> Any:
        return (admin.execute(statement, values).fetchone() or (None,))[0]

    for text in HOSTILE:
        admin.execute("select queen.configure_queue(%s, '{\"delivery_max_attempts\": 1}')", [text])
        admin.execute(
            "select queen.schedule(%s, %s, %s, '0', partition => %s, txn => %s)", [text, text, Jsonb(text), text, text]
        )
    canary.execute("call queen.sweep('100 ms')")
    for text in HOSTILE:
        row = admin.execute(
            'select "partition", txn, payload, lease_id from queen.pop(%s, %s, partition => %s)', [text] * 3
        ).fetchall()
        assert [r[:3] for r in row] == [(text, text, text)]
        assert one("select status from queen.nack(%s, %s, %s, %s, %s)", text, text, text, row[0][3], text) == "nacked"
        assert one("select error from queen.dlq_list(%s)", text) == text
        assert one("select queen.dlq_requeue(%s)", text) == 1
        assert one("select queen.seek(%s, %s, 0, partition => %s)", text, text, text) == 1
        assert one("select count(*) from queen.sent(%s, %s)", text, text) == 1
    assert one("select queen.status()") is not None
    canary.execute("call queen.maintain('100 ms')")
    for text in HOSTILE:
        admin.execute("select queen.drop_group(%s, %s), queen.drop_queue(%s)", [text] * 3)
    assert canary.value("select count(*) from queen.queues where name <> 'q'") == 0


def _commands() -> Iterator[tuple[list[str], Any]]:
    """Every command with its words."""

    def walk(command: Any, words: list[str]) -> Iterator[tuple[list[str], Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield words, command
        else:
            for name, one in inner.items():
                yield from walk(one, [*words, name])

    yield from walk(typer.main.get_command(app), [])


# What a command needs to run, by its words; a file that exists and a program that ends are not ours to name.
NEEDS: Final[dict[str, list[str]]] = {
    "schedule": ["q", "k", "1", "--delay", "1 h"],
    "reschedule": ["q", "a", "--delay", "1 h"],
    "cancel": ["q", "b"],
    "list": ["q"],
    "push": ["q", "1"],
    "pop": ["q"],
    "seek": ["q", "--to-offset", "0"],
    "dlq list": ["q"],
    "dlq requeue": ["q", "00000000-0000-0000-0000-000000000000"],
    "dlq purge": ["q", "00000000-0000-0000-0000-000000000000"],
    "install": [],
    "start": [],
    "stop": [],
    "status": [],
    "doctor": [],
}
# A second place for one of these takes its value away.
INSTEAD: Final = {"--at": "--delay", "--file": "1", "--to-time": "--to-offset"}
EXIT_CODES: Final = range(7)


def test_every_argument_and_option_of_the_command(canary: Database, cli: Cli) -> None:
    codes = set()
    for words, command in _commands():
        needs = NEEDS[" ".join(words)]
        values = [i + 1 for i, need in enumerate(needs) if need.startswith("--")]
        places = [i for i, need in enumerate(needs) if i not in values and not need.startswith("--")]
        options = [p.opts[0] for p in command.params if p.opts[0].startswith("--") and not p.is_flag]
        assert len(places) <= sum(p.param_type_name == "argument" for p in command.params)
        for text in HOSTILE:
            lines = [[*needs[:i], text, *needs[i + 1 :]] for i in places]
            for option in options:
                rest = list(needs)
                if (other := INSTEAD.get(option)) is not None:
                    at = rest.index(other)
                    del rest[at : at + (2 if other.startswith("--") else 1)]
                lines.append([*rest, f"{option}={text}"])
            if words == ["install"]:
                lines = [["--files-only", *line] for line in lines]
            for line in lines:
                done = cli(*words, "--", *line) if not any(o.startswith("--") for o in line) else cli(*words, *line)
                assert done.exit_code in EXIT_CODES, (words, line, done.output, done.exception)
                assert done.exception is None or isinstance(done.exception, SystemExit), (words, line)
                assert "Traceback" not in done.output
                codes.add(done.exit_code)
    assert {0, 1, 2, 5} <= codes, codes


def test_what_the_command_prints_is_one_line_of_json(canary: Database, cli: Cli) -> None:
    """Text that ends a line or a string, in what a script reads."""
    text = '", "ok": true}\n{"injected": 1} \u001b[31m\u202e'
    assert cli("push", "q", json.dumps(text)).exit_code == 0
    done = cli("pop", "q", "--json")
    assert [json.loads(line)["payload"] for line in done.stdout.splitlines()] == [text]
    assert "\u001b" not in cli("pop", "q", "--group", "other").stdout


def test_good_calls_of_this_file_are_good(canary: Database, admin: Connection) -> None:
    for function in MORE:
        given = {**GOOD.get(function, {}), **MORE[function]}
        with admin.transaction(force_rollback=True):
            arguments = ", ".join(f'"{n}" => {v}' for n, v in given.items())
            admin.execute(f"select * from queen.{function}({arguments})")
    assert expression("cancel")
