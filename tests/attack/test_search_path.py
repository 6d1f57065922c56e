"""Whatever bears our names in front of ours: temporary tables, functions, operators and types of the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import psycopg
import pytest

from tests.conftest import StartSession
from tests.support.database import Connection, Database
from tests.support.servers import Server, install_extension
from tests.support.whole_way import whole_way

# Made by whoever would like to be called in our name. A decoy leaves a trace in a sequence, which no rollback takes
# back, and raises; so it is noticed both where it is called and where its error is swallowed.
TRAP: Final = (
    "language plpgsql as $$ begin perform pg_catalog.nextval('public.hits');"
    " raise exception 'a decoy was called'; end $$"
)
OPERATORS: Final = tuple("= <> < <= > >= + - * / % || -> ->> ? & | ~ !~".split())


def _prepare(db: Database) -> None:
    db.execute("create sequence public.hits")
    db.execute("grant all on sequence public.hits to public")


def _hit(db: Database) -> bool:
    return bool(db.value("select is_called from public.hits"))


def _decoys(connection: Connection, schema: str) -> int:
    """Every function that a body of ours calls, and the operators, made again in this schema; how many there are."""
    names = connection.execute(
        "select distinct f.proname, pg_get_function_identity_arguments(f.oid), pg_get_function_result(f.oid)"
        " from pg_proc f where f.pronamespace = 'pg_catalog'::regnamespace and f.prokind = 'f'"
        " and not exists (select from unnest(f.proargtypes) t join pg_type y on y.oid = t where y.typtype = 'p')"
        " and (select typtype from pg_type y where y.oid = f.prorettype) <> 'p'"
        " and f.provariadic = 0"
        " and exists (select from pg_proc o where o.pronamespace = 'queen'::regnamespace"
        "   and (o.prosrc || coalesce(pg_get_function_sqlbody(o.oid), '')) ~ ('\\m' || f.proname || '\\('))"
    ).fetchall()
    made = 0
    for name, arguments, result in names:
        connection.execute(f'create or replace function {schema}."{name}"({arguments}) returns {result} {TRAP}')
        made += 1
    types = ("text", "int", "bigint", "timestamptz", "uuid", "boolean", "bytea", "jsonb", "interval", '"char"', "name")
    for number, type_ in enumerate(types):
        connection.execute(f"create function {schema}.decoy_{number}({type_}, {type_}) returns boolean {TRAP}")
        for operator in OPERATORS:
            connection.execute(
                f"create operator {schema}.{operator} (leftarg = {type_}, rightarg = {type_},"
                f" function = {schema}.decoy_{number})"
            )
            made += 1
    return made


def _names(db: Database) -> Mapping[str, list[str]]:
    """Names of our relations and of our types."""
    return {
        "table": [
            name
            for (name,) in db.rows(
                "select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind in ('r', 'v', 'S')"
            )
        ],
        "type": [
            name
            for (name,) in db.rows(
                "select typname from pg_type t where typnamespace = 'queen'::regnamespace and typtype = 'c'"
                " and (select relkind from pg_class c where c.oid = t.typrelid) = 'c'"
            )
        ],
    }


def _functions_of_ours(db: Database, schema: str, connection: Connection) -> None:
    """Our own functions again, those inside too, by name and arguments."""
    for name, arguments in db.rows(
        "select proname, array_to_string(array(select format_type(t, null) from unnest(proargtypes) with ordinality"
        " u (t, n) order by n), ', ') from pg_proc where pronamespace = 'queen'::regnamespace and prokind = 'f'"
        " and not exists (select from unnest(proargtypes) t"
        "  where not has_type_privilege('ada_admin', t, 'usage'))"
    ):
        connection.execute(f'create function {schema}."{name}"({arguments}) returns int {TRAP}')


@pytest.fixture
def decoyed(db: Database) -> Iterator[Connection]:
    """An administrator with decoys of everything in front of PostgreSQL's schema, and in pg_temp."""
    _prepare(db)
    db.execute("create schema decoy authorization ada_admin")
    connection = db.connect("ada_admin")
    for schema in ("decoy", "pg_temp"):
        assert _decoys(connection, schema) > 200
        _functions_of_ours(db, schema, connection)
        for name in _names(db)["table"]:
            connection.execute(f'create table {schema}."{name}" (id int, name int, queue int, tenant_id int)')
        for name in _names(db)["type"]:
            connection.execute(f'create type {schema}."{name}" as (ok int)')
        for name in ("pg_class", "pg_proc", "pg_roles", "pg_locks", "pg_stat_activity"):
            connection.execute(f"create table {schema}.{name} (oid int, pid int)")
    connection.execute("set search_path = decoy, pg_temp, public, pg_catalog")
    yield connection
    connection.execute("reset search_path")
    assert not _hit(db)


def test_a_decoy_is_called_where_nothing_is_pinned(db: Database) -> None:
    """What the others rely on: the same decoys, called by a function that pins nothing."""
    _prepare(db)
    connection = db.connect("ada_admin")
    db.execute("create schema decoy authorization ada_admin")
    _decoys(connection, "decoy")
    connection.execute("set search_path = decoy, pg_catalog")
    for careless in ("select octet_length('x'::text)", "select 'a'::text = 'b'::text", "select clock_timestamp()"):
        with pytest.raises(psycopg.errors.RaiseException, match="a decoy was called"):
            connection.execute(careless)
    assert _hit(db)


def test_every_call_of_the_whole_way(decoyed: Connection) -> None:
    whole_way(decoyed)


def test_what_administers(db: Database, decoyed: Connection) -> None:
    for call in (
        "queen.configure_queue('q', '{\"horizon\": \"1 day\"}')",
        "queen.pause_queue('q')",
        "queen.resume_queue('q')",
        "queen.create_tenant('00000000-0000-0000-0000-0000000000aa'::pg_catalog.uuid)",
        "queen.grant_tenant('00000000-0000-0000-0000-0000000000aa'::pg_catalog.uuid, 'alice_producer')",
        "queen.revoke_tenant('00000000-0000-0000-0000-0000000000aa'::pg_catalog.uuid, 'alice_producer')",
        'queen.apply(\'[{"op": "cancel", "queue": "q", "timer_key": "k"}]\')',
        'queen.transaction(\'[{"op": "push", "queue": "q", "payload": 1}]\')',
        "queen.log_timers_due()",
        "queen.log_timers_claim()",
        "queen.status()",
        "queen.dlq_requeue('q')",
        "queen.dlq_purge('q')",
        "queen.drop_group('q', 'g')",
    ):
        decoyed.execute(f"select * from {call}")
    decoyed.execute("select * from queen.drop_tenant('00000000-0000-0000-0000-0000000000aa'::pg_catalog.uuid)")


def test_the_workers_under_such_a_path(db: Database, decoyed: Connection) -> None:
    """Jobs run with the owner's settings: a path of its own makes no difference to sweep and maintain."""
    decoyed.execute("select queen.schedule('q', 'k', '1'::pg_catalog.jsonb, '0'::pg_catalog.interval)")
    worker = db.connect("ada_admin")
    worker.execute("set search_path = decoy, public, pg_catalog")
    worker.execute("call queen.sweep('50 ms'::pg_catalog.interval)")
    worker.execute("call queen.maintain('50 ms'::pg_catalog.interval)")
    worker.execute("reset search_path")
    assert db.value("select count(*) from queen.pop('q')") == 1


def test_a_path_of_the_owner(db: Database, session: StartSession) -> None:
    """As ALTER ROLE ... SET gives it to every job, with decoys that the superuser itself would run."""
    _prepare(db)
    db.execute("create schema decoy")
    _decoys(db.superuser, "decoy")
    _functions_of_ours(db, "decoy", db.superuser)
    db.execute("select queen.schedule('q', 'k', '1', '0')")
    db.execute(f'alter database "{db.name}" set search_path = decoy, public, pg_catalog')
    owner = session()
    assert owner.connection.execute("show search_path").fetchone() == ("decoy, public, pg_catalog",)
    owner.run("call queen.sweep('50 ms'::pg_catalog.interval)")
    owner.run("call queen.maintain('50 ms'::pg_catalog.interval)")
    assert db.value("select count(*) from queen.pop('q')") == 1
    assert not _hit(db)


def test_installing_beside_decoys(own_server: Callable[[Mapping[str, str]], Server]) -> None:
    """CREATE EXTENSION where somebody was first: nothing of theirs runs, and nothing of ours leans on it."""
    server = own_server({})
    with server.connect() as connection:
        connection.execute("create sequence public.hits")
        assert _install_decoys(connection) > 100
        install_extension(connection)
        connection.execute("set search_path = pg_catalog")
        assert connection.execute("select is_called from public.hits").fetchone() == (False,)
        leaning = connection.execute(
            "select pg_describe_object(d.classid, d.objid, 0), pg_describe_object(d.refclassid, d.refobjid, 0)"
            " from pg_depend d where d.refobjid in (select oid from pg_proc where pronamespace = 'public'::regnamespace"
            " union all select oid from pg_operator where oprnamespace = 'public'::regnamespace)"
            " and d.classid <> 'pg_operator'::regclass and not exists ("
            "  select from pg_depend e where e.deptype = 'e' and e.objid = d.objid and e.classid = d.classid"
            "  and e.refobjid in (select oid from pg_extension where extname <> 'pg_queen'))"
        ).fetchall()
        assert leaning == []
        connection.execute("set search_path = public, pg_catalog")
        connection.execute("select queen.schedule('q', 'k', '1', '0')")
        assert connection.execute("select queen.fire_due()").fetchone() == (1,)


def _install_decoys(connection: Connection) -> int:
    # Functions of every common name that SQL of ours has, on the types it has them on.
    made = 0
    for name, arguments in (
        ("format", "text, text"),
        ("format", "text"),
        ("octet_length", "text"),
        ("octet_length", "bytea"),
        ("now", ""),
        ("clock_timestamp", ""),
        ("convert_to", "text, name"),
        ("substr", "bytea, int, int"),
        ("sha256", "bytea"),
        ("gen_random_uuid", ""),
        ("int4send", "int"),
        ("current_setting", "text"),
        ("hashtext", "text"),
        ("mod", "int, int"),
    ):
        connection.execute(f"create function public.{name}({arguments}) returns text {TRAP}")
        made += 1
    for number, type_ in enumerate(("text", "int", "bigint", "timestamptz", "uuid", "bytea", "jsonb", "interval")):
        connection.execute(f"create function public.decoy_{number}({type_}, {type_}) returns boolean {TRAP}")
        for operator in OPERATORS:
            connection.execute(
                f"create operator public.{operator} (leftarg = {type_}, rightarg = {type_},"
                f" function = public.decoy_{number})"
            )
            made += 1
    # As a database where somebody put the schema first.
    connection.execute("set search_path = public, pg_catalog")
    return made
