"""Every function body is sound, though CREATE EXTENSION looks at none that is a string."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg
import pytest

from tests.support.database import Connection, Database
from tests.support.servers import Server
from tools.cluster import extension_files, give

# Complaints that are none: a loop that only a RETURN leaves, and a column that the contract names offset.
ENDLESS = "control reached end of function without RETURN"
RESERVED = 'name of parameter "offset" is reserved keyword'
ACCEPTED = {
    ("_cancel", ENDLESS),
    ("_fire_safely", ENDLESS),
    ("_reschedule", ENDLESS),
    ("_schedule_one", ENDLESS),
    ("_read", RESERVED),
    ("_seen", RESERVED),
    ("log_timers_fire", RESERVED),
    ("sent", RESERVED),
}

# As somebody would write it, who believes that a timer knows its partition; and one whose columns all exist.
LEGS = {
    "by partition": "and not exists (select from queen.log_timers t where t.partition_id = p_partition_id)",
    "by name": "and not exists (select from queen.log_timers t"
    ' join queen.log_partitions p on p.name = t."partition" where p.id = p_partition_id)',
}
# The body of queen.log_partition_dead, from its head to its end.
DEAD_HEAD, DEAD_END = "create function queen.log_partition_dead", "\nend;\n"


def complaints(db: Database) -> list[str]:
    """What the validator of each function's own language says of it, and plpgsql_check of those in PL/pgSQL."""
    found = []
    # Of the validators, those of SQL and PL/pgSQL look at a body only under this setting, the default.
    db.execute("set check_function_bodies = on")
    for oid, name, validator in db.rows(
        "select p.oid, p.oid::regprocedure::text, l.lanvalidator::regproc::text from pg_proc p"
        " join pg_language l on l.oid = p.prolang where p.pronamespace = 'queen'::regnamespace"
    ):
        try:
            db.execute(f"select {validator}({oid})")
        except psycopg.Error as error:
            found.append(f"{name}: {error}")
    for name, message, place in db.rows(
        "select p.proname, c.message, format('%s: %s: %s, line %s', p.oid::regprocedure, c.level, c.message, c.lineno)"
        " from pg_proc p join pg_language l on l.oid = p.prolang and l.lanname = 'plpgsql'"
        " cross join lateral plpgsql_check_function_tb(p.oid::regprocedure, fatal_errors => false,"
        "   extra_warnings => true, security_warnings => true) c"
        " where p.pronamespace = 'queen'::regnamespace"
    ):
        if (name, message) not in ACCEPTED:
            found.append(place)
    return found


# A body with a fault, and what its complaint says.
BROKEN = [
    ("returns int language plpgsql", "begin return (select nowhere from queen.log_timers); end", "nowhere"),
    ("returns int language plpgsql", "begin perform queen._refuse('a'); return 1; end", "_refuse"),
    ("returns int language plpgsql", "declare v_unused int; begin return 1; end", "v_unused"),
    ("returns int language plpgsql", "begin if true then return 1 end", "syntax error"),
    ("returns int language plpgsql", "begin if true then return 1; end if; end", ENDLESS),
    ("returns int language plpython3u", "return (1", "could not compile"),
    ("returns int language sql", "select nowhere from queen.log_timers", "nowhere"),
]


def test_every_body_is_sound(own_cron_db: Callable[[Mapping[str, str]], Database]) -> None:
    # Some bodies name pg_cron's tables.
    db = own_cron_db({})
    db.execute("create extension plpgsql_check")
    kinds = dict(
        db.rows(
            "select l.lanname, count(*) from pg_proc p join pg_language l on l.oid = p.prolang"
            " where p.pronamespace = 'queen'::regnamespace group by 1"
        )
    )
    assert kinds.keys() == {"plpgsql", "plpython3u", "sql"}
    assert kinds["plpgsql"] > 70
    assert complaints(db) == []

    for header, body, complaint in BROKEN:
        # Goes in unseen in the way CREATE EXTENSION runs its script, and is found.
        db.execute("set check_function_bodies = off")
        db.execute(f"create function queen._broken() {header} as $body$ {body} $body$")
        found = complaints(db)
        assert found, body
        assert all(each.startswith(("queen._broken()", "_broken")) for each in found), found
        assert any(complaint in each for each in found), found
        db.execute("drop function queen._broken()")


def as_another_extension(server: Server, name: str, change: Callable[[str], str]) -> Connection:
    """Install this checkout's script, changed, as extension `name` of a private server; a fresh database for it."""
    directory = server.cluster.programs.extension_directory
    control, script, *_ = extension_files()
    shutil.copy(control, directory / f"{name}.control")
    text = script.read_text(encoding="utf-8")
    (directory / script.name.replace(control.stem, name)).write_text(change(text), encoding="utf-8")
    give(Path(directory))
    with server.connect() as connection:
        connection.execute(f"create database {name} template template0")
    return server.connect(name)


def change_log_partition_dead(script: str, change: Callable[[str], str]) -> str:
    """The script with a changed queen.log_partition_dead."""
    assert script.count(DEAD_HEAD) == 1
    before, _, rest = script.partition(DEAD_HEAD)
    body, end, after = rest.partition(DEAD_END)
    # It stands before the table of timers, so it cannot name that.
    assert "create table queen.log_timers" not in before + body
    return before + DEAD_HEAD + change(body + end) + after


def with_leg(leg: str) -> Callable[[str], str]:
    """Add a leg to queen.log_partition_dead in the script."""
    return lambda script: change_log_partition_dead(
        script, lambda body: body.replace(DEAD_END, "").removesuffix(";") + f"\n       {leg};{DEAD_END}"
    )


def test_a_leg_on_the_timers_fails_create_extension(own_server: Callable[[Mapping[str, str]], Server]) -> None:
    server = own_server({})
    # The same script under another name installs: what fails below fails for the leg.
    with as_another_extension(server, "same", lambda text: text) as connection:
        connection.execute("create extension same cascade")
        assert connection.execute("select queen.log_partition_dead(1)").fetchone() == (False,)

    for n, leg in enumerate(LEGS.values()):
        with as_another_extension(server, f"leg{n}", with_leg(leg)) as connection:
            # Though nobody asks for a check, even where the session forbids one.
            connection.execute("set check_function_bodies = off")
            with pytest.raises(psycopg.errors.UndefinedTable, match=r'relation "queen\.log_timers" does not exist'):
                connection.execute(f"create extension leg{n} cascade")
            assert connection.execute("select count(*) from pg_namespace where nspname = 'queen'").fetchone() == (0,)


def test_nothing_else_guards_it(own_server: Callable[[Mapping[str, str]], Server]) -> None:
    # The same leg in a body that is a string goes in unseen: so the body must stay a standard one.
    def as_string(script: str) -> str:
        return change_log_partition_dead(
            with_leg(LEGS["by name"])(script),
            lambda body: body.replace("begin atomic", "as $$").replace(DEAD_END, "\n$$;\n"),
        )

    with as_another_extension(own_server({}), "unseen", as_string) as connection:
        connection.execute("create extension unseen cascade")


def test_log_partition_dead_is_a_standard_body(db: Database) -> None:
    assert db.value("select prosqlbody is not null from pg_proc where oid = 'queen.log_partition_dead'::regproc")
    depends = {
        name
        for (name,) in db.rows(
            "select refobjid::regclass::text from pg_depend where classid = 'pg_proc'::regclass"
            " and objid = 'queen.log_partition_dead'::regproc and refclassid = 'pg_class'::regclass"
        )
    }
    assert depends == {"queen.log_partitions", "queen.log_segments", "queen.log_consumers"}
