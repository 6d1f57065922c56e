"""Who may do what, written out: every function, table and view against every role."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.database import LOGIN_ROLES, Database

PRODUCER, CONSUMER, READER, ADMIN, NOBODY = "alice_producer", "carl_consumer", "rita_reader", "ada_admin", "nobody_role"

# producer, consumer, reader, admin, nobody; x may execute it.
FUNCTIONS = {
    "schedule": "x--x-",
    "schedule_bytes": "x--x-",
    "schedule_many": "x--x-",
    "reschedule": "x--x-",
    "cancel": "x--x-",
    "apply": "x--x-",
    "push": "x--x-",
    "push_bytes": "x--x-",
    "push_many": "x--x-",
    "peek": "x-xx-",
    "list_timers": "x-xx-",
    "sent": "x-xx-",
    "pop": "-x-x-",
    "pop_segments": "-x-x-",
    "ack": "-x-x-",
    "nack": "-x-x-",
    "extend": "-x-x-",
    "seek": "-x-x-",
    "dlq_list": "-xxx-",
    "dlq_requeue": "-x-x-",
    "dlq_purge": "-x-x-",
    "status": "xxxx-",
    "transaction": "xx-x-",
    "configure": "---x-",
    "configure_queue": "---x-",
    "pause_queue": "---x-",
    "resume_queue": "---x-",
    "drop_queue": "---x-",
    "drop_group": "---x-",
    "create_tenant": "---x-",
    "grant_tenant": "---x-",
    "revoke_tenant": "---x-",
    "configure_tenant": "---x-",
    "drop_tenant": "---x-",
    "fire_due": "---x-",
    "log_timers_due": "---x-",
    "log_timers_claim": "---x-",
    "log_timers_fire": "---x-",
    "log_timers_fail": "---x-",
    "start": "---x-",
    "doctor": "---x-",
    "stop": "---x-",
    "sweep": "---x-",
    "maintain": "---x-",
    # Internal ones that a procedure or a view calls as its caller.
    "_sweep_begin": "---x-",
    "_sweep_step": "---x-",
    "_sweep_wait": "---x-",
    "_sweep_finish": "---x-",
    "_maintain_end": "---x-",
    "_maintain_step": "---x-",
    "_is_past": "---x-",
    "_setting_catalog": "--xx-",
    "_now": "--xx-",
    "_tenant_open": "--xx-",
}

# Views for those who look; all the rest is tables, and for admin alone.
VIEWS = {
    "settings": "--xx-",
    "lagging_groups": "--xx-",
    "expired_leases": "--xx-",
    "paused_queues": "--xx-",
    "_timers_by_time": "-----",
}

ROLES = [PRODUCER, CONSUMER, READER, ADMIN, NOBODY]

# Arguments of a real call. Where nulls would do something long, others.
CALLS = {
    "sweep": "call queen.sweep('0')",
    "maintain": "call queen.maintain('0')",
    "_maintain_step": "select queen._maintain_step('cool', 0)",
}


def roles(marks: str) -> set[str]:
    """Those marked in a row of the matrix."""
    return {role for role, mark in zip(ROLES, marks, strict=True) if mark != "-"}


def calls(db: Database) -> list[tuple[str, str]]:
    """A call of every function with arguments that are null, and its name."""
    found = []
    for name, kind, arguments in db.rows(
        "select p.proname, p.prokind::text,"
        " (select coalesce(string_agg('null::' || format_type(t, null), ', ' order by n), '')"
        "    from unnest(p.proargtypes) with ordinality as a (t, n))"
        " from pg_proc p where p.pronamespace = 'queen'::regnamespace"
        # A null of a pseudo-type cannot be written.
        " and not exists (select from unnest(p.proargtypes) t join pg_type y on y.oid = t where y.typtype = 'p')"
    ):
        found.append((name, CALLS.get(name, f"{'call' if kind == 'p' else 'select'} queen.{name}({arguments})")))
    return found


def test_the_matrix_of_functions(db: Database) -> None:
    found: dict[str, set[str]] = {}
    for name, role in db.rows(
        "select p.proname, r.rolname from pg_proc p cross join pg_roles r"
        " where p.pronamespace = 'queen'::regnamespace and r.rolname = any (%s)"
        " and has_function_privilege(r.oid, p.oid, 'execute')",
        ROLES,
    ):
        found.setdefault(name, set()).add(role)
    assert found == {name: roles(marks) for name, marks in FUNCTIONS.items()}


@pytest.mark.parametrize("role", ROLES)
def test_real_calls_agree_with_the_matrix(db: Database, role: str) -> None:
    connection = db.connect(role)
    wrong = []
    for name, call in calls(db):
        allowed = role in roles(FUNCTIONS.get(name, "-----"))
        try:
            connection.execute(call)
            refused = None
        except psycopg.errors.InsufficientPrivilege as error:
            refused = str(error)
        except psycopg.Error:
            # Nulls are bad input; the call went in.
            refused = None
        if allowed == (refused is not None):
            wrong.append((call, refused))
    assert wrong == []


def test_the_matrix_of_tables(db: Database) -> None:
    privileges = ["select", "insert", "update", "delete", "truncate", "references", "trigger"]
    found: dict[str, set[tuple[str, str]]] = {}
    for name, role, privilege in db.rows(
        "select c.relname, r.rolname, p from pg_class c cross join pg_roles r cross join unnest(%s::text[]) p"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'v', 'm', 'p', 'f')"
        " and r.rolname = any (%s)"
        " and case when p in ('delete', 'truncate', 'trigger') then has_table_privilege(r.oid, c.oid, p)"
        "          else has_any_column_privilege(r.oid, c.oid, p) end",
        privileges,
        ROLES,
    ):
        found.setdefault(name, set()).add((role, privilege))
    tables = {
        name
        for (name,) in db.rows(
            "select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind in ('r', 'p')"
        )
    }
    assert len(tables) >= 12
    expected = {name: {(ADMIN, "select")} for name in tables}
    expected |= {name: {(role, "select") for role in roles(marks)} for name, marks in VIEWS.items() if roles(marks)}
    assert found == expected
    views = {
        name
        for (name,) in db.rows(
            "select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind in ('v', 'm')"
        )
    }
    assert views == VIEWS.keys()


def test_reading_for_real(db: Database) -> None:
    db.execute("select queen.push('q', '1')")
    db.execute("select queen.pop('q', lease => '1 ms')")
    relations = [
        name
        for (name,) in db.rows(
            "select relname from pg_class where relnamespace = 'queen'::regnamespace and relkind in ('r', 'v')"
        )
    ]
    for role in ROLES:
        connection = db.connect(role)
        readable = set()
        for name in relations:
            try:
                connection.execute(f"select * from queen.{name}").fetchall()
                readable.add(name)
            except psycopg.errors.InsufficientPrivilege:
                pass
        expected = {name for name, marks in VIEWS.items() if role in roles(marks)}
        if role == ADMIN:
            expected |= set(relations) - VIEWS.keys()
        assert readable == expected, role


def test_nobody_may_touch_a_sequence(db: Database) -> None:
    assert (
        db.rows(
            "select c.relname, r.rolname from pg_class c cross join pg_roles r"
            " where c.relnamespace = 'queen'::regnamespace and r.rolname = any (%s) and c.relkind = 'S'"
            " and has_sequence_privilege(r.oid, c.oid, 'usage, select, update')",
            ROLES,
        )
        == []
    )
    assert db.value("select count(*) from pg_class where relnamespace = 'queen'::regnamespace and relkind = 'S'") >= 2


def test_the_schema(db: Database) -> None:
    assert dict(db.rows("select r, has_schema_privilege(r, 'queen', 'usage') from unnest(%s::text[]) r", ROLES)) == {
        PRODUCER: True,
        CONSUMER: True,
        READER: True,
        ADMIN: True,
        NOBODY: False,
    }
    assert not db.value("select bool_or(has_schema_privilege(r, 'queen', 'create')) from unnest(%s::text[]) r", ROLES)


def test_the_roles(db: Database) -> None:
    assert db.rows(
        "select rolname, rolsuper, rolcreaterole, rolcreatedb, rolcanlogin, rolreplication, rolbypassrls from pg_roles"
        " where rolname like 'queen\\_%' order by 1"
    ) == [(name, *[False] * 6) for name in ("queen_admin", "queen_consumer", "queen_producer", "queen_reader")]
    assert sorted(
        db.rows(
            "select m.member::regrole::text, m.roleid::regrole::text, m.admin_option from pg_auth_members m"
            " where m.member::regrole::text like 'queen\\_%' or m.roleid::regrole::text like 'queen\\_%'"
        )
    ) == sorted(
        [("queen_admin", f"queen_{each}", False) for each in ("producer", "consumer", "reader")]
        + [(login, group, False) for login, group in LOGIN_ROLES.items() if group is not None]
    )
