"""The package and the extension say the same: names, types, defaults, result columns, roles."""

from __future__ import annotations

import inspect
from typing import Any

from pg_queen import (
    AckResult,
    Check,
    DeadLetter,
    Message,
    PushResult,
    Queen,
    SegmentSlice,
    Sent,
    Status,
    Timer,
    TimerVerdict,
    _core,
)

from tests.support.database import Database

# Methods that call the function of another name, and why.
NOT_ONE_TO_ONE = {
    "iter_timers": "pages through list_timers",
    "iter_dlq": "pages through dlq_list",
    "connection": "the connection",
}

# Public functions that a client has no use for: the fire and the maintenance are the server's.
SERVER_SIDE = {
    "fire_due",
    "sweep",
    "maintain",
    "log_timers_due",
    "log_timers_claim",
    "log_timers_fire",
    "log_timers_fail",
}

RECORDS: dict[str, type[Any]] = {
    **dict.fromkeys(["schedule", "schedule_bytes", "schedule_many", "reschedule", "cancel", "apply"], TimerVerdict),
    **dict.fromkeys(["peek", "list_timers"], Timer),
    **dict.fromkeys(["push", "push_bytes", "push_many"], PushResult),
    **dict.fromkeys(["ack", "nack", "extend"], AckResult),
    "pop": Message,
    "pop_segments": SegmentSlice,
    "dlq_list": DeadLetter,
    "sent": Sent,
    "status": Status,
    "doctor": Check,
}

ALIASES = {"int": "integer", "timestamptz": "timestamp with time zone"}


def _sql_type(declared: str) -> str:
    base = declared.removesuffix("[]")
    return ALIASES.get(base, base) + declared[len(base) :]


def _arguments(db: Database) -> dict[str, list[tuple[str, str, str | None]]]:
    """Of each public function the name, type and default of every input argument, from the catalog."""
    functions: dict[str, list[tuple[str, str, str | None]]] = {
        name: [] for (name,) in db.rows("select proname from pg_proc where pronamespace = 'queen'::regnamespace")
    }
    for function, *argument in db.rows(
        "select p.proname, p.proargnames[a.n], format_type(a.type, null), pg_get_function_arg_default(p.oid, a.n::int)"
        "  from pg_proc p cross join unnest(p.proargtypes) with ordinality as a (type, n)"
        " where p.pronamespace = 'queen'::regnamespace order by p.oid, a.n"
    ):
        functions[function].append((argument[0], argument[1], argument[2]))
    return functions


def test_declared_arguments_are_those_of_the_functions(shared_db: Database) -> None:
    arguments = _arguments(shared_db)
    for function, declared in _core.FUNCTIONS.items():
        assert [(name, _sql_type(type_)) for name, type_ in declared.arguments.items()] == [
            (name, type_) for name, type_, _ in arguments[function]
        ], function


def test_methods_have_the_arguments_and_defaults_of_the_functions(shared_db: Database) -> None:
    for function, arguments in _arguments(shared_db).items():
        if function not in _core.FUNCTIONS:
            continue
        parameters = list(inspect.signature(getattr(Queen, function)).parameters.values())[1:]
        assert [p.name for p in parameters] == [name for name, _, _ in arguments], function
        for parameter, (name, type_, default) in zip(parameters, arguments, strict=True):
            assert (parameter.default is inspect.Parameter.empty) == (default is None), f"{function}: {name}"
            if default is not None:
                same = shared_db.value(f"select {default} is not distinct from %s::{type_}", parameter.default)
                assert same, f"{function}: {name} is {parameter.default!r} here, {default} there"


def test_no_function_is_overloaded(shared_db: Database) -> None:
    # One declaration a name would not be enough.
    assert (
        shared_db.rows(
            "select proname from pg_proc where pronamespace = 'queen'::regnamespace and proname !~ '^_'"
            " group by proname having count(*) > 1"
        )
        == []
    )


def test_records_have_the_columns_of_the_results(shared_db: Database) -> None:
    arguments = _arguments(shared_db)
    for function, record in RECORDS.items():
        nulls = ", ".join(f"null::{type_}" for _, type_, _ in arguments[function])
        source = "null::queen.timer_verdict" if function == "apply" else f"queen.{function}({nulls})"
        # The function is planned, and with the limit not called.
        columns = shared_db.superuser.execute(f"select ({source}).* limit 0").description
        assert _core.columns(record) == ", ".join(f'"{column.name}"' for column in columns or ()), function


def test_the_declared_roles_may_execute(shared_db: Database) -> None:
    for function, declared in _core.FUNCTIONS.items():
        assert shared_db.value(
            "select has_function_privilege(%s, p.oid, 'execute') from pg_proc p"
            " where p.pronamespace = 'queen'::regnamespace and p.proname = %s",
            declared.role,
            function,
        ), f"{declared.role}: {function}"


def test_every_public_function_has_a_method(shared_db: Database) -> None:
    public = shared_db.rows(
        "select distinct p.proname from pg_proc p, aclexplode(p.proacl) a join pg_roles r on r.oid = a.grantee"
        " where p.pronamespace = 'queen'::regnamespace and p.proname !~ '^_' and r.rolname ~ '^queen_'"
    )
    assert {name for (name,) in public} - SERVER_SIDE == set(_core.FUNCTIONS)


def test_every_method_has_a_docstring_that_names_its_function() -> None:
    methods = {name: member for name, member in vars(Queen).items() if not name.startswith("_")}
    assert set(methods) - set(NOT_ONE_TO_ONE) == set(_core.FUNCTIONS)
    for name, method in methods.items():
        assert method.__doc__, name
        if name not in NOT_ONE_TO_ONE:
            assert f"``queen.{name}``" in method.__doc__, name
