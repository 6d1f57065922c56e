"""What the catalog says of functions, types and comments: the contract's signatures, definer rights, the manual."""

from __future__ import annotations

import re

from tests.support.database import Database

# Name: arguments and defaults, result. Another name or default here is another contract.
PUBLIC = {
    # Timers
    "schedule": (
        "queue text, timer_key text, payload jsonb, delay interval = null, deliver_at timestamptz = null,"
        " partition text = 'Default', txn text = null, tenant uuid = null",
        "queen.timer_verdict",
    ),
    "schedule_bytes": (
        "queue text, timer_key text, payload bytea, delay interval = null, deliver_at timestamptz = null,"
        " partition text = 'Default', txn text = null, tenant uuid = null",
        "queen.timer_verdict",
    ),
    "schedule_many": (
        "queue text, timer_keys text[], payloads jsonb[], delays interval[] = null, deliver_ats timestamptz[] = null,"
        " partitions text[] = null, txns text[] = null, tenant uuid = null",
        "SETOF queen.timer_verdict",
    ),
    "reschedule": (
        "queue text, timer_key text, delay interval = null, deliver_at timestamptz = null, tenant uuid = null",
        "queen.timer_verdict",
    ),
    "cancel": ("queue text, timer_key text, tenant uuid = null", "queen.timer_verdict"),
    "apply": ("ops jsonb, tenant uuid = null", "jsonb"),
    "peek": ("queue text, timer_key text, tenant uuid = null", "SETOF queen.timer"),
    "list_timers": (
        "queue text, after text = null, max_rows integer = 100, tenant uuid = null",
        "SETOF queen.timer",
    ),
    # The fire
    "fire_due": ("max_rows integer = 1000", "integer"),
    "sweep": ("run_for interval = '00:00:58', worker integer = 0, workers integer = 1", None),
    "log_timers_due": ("shards smallint[] = null", "TABLE(next_due_at timestamptz, due bigint, lateness interval)"),
    "log_timers_claim": (
        "shards smallint[] = null, lease interval = '00:00:30', max_rows integer = 200, per_tenant integer = null",
        "TABLE(tenant_id uuid, queue text, timer_key text, partition text, txn text, message_id uuid, payload bytea,"
        " attempts integer, deliver_at timestamptz, claim_token uuid)",
    ),
    "log_timers_fire": (
        "tenants uuid[], queues text[], timer_keys text[], tokens uuid[]",
        "TABLE(tenant_id uuid, queue text, timer_key text, status text, partition text, offset bigint)",
    ),
    "log_timers_fail": (
        "tenants uuid[], queues text[], timer_keys text[], tokens uuid[], error text, backoff interval = null,"
        " count_attempt boolean = true",
        "TABLE(tenant_id uuid, queue text, timer_key text, status text, attempts integer, retry_at timestamptz)",
    ),
    "start": ("workers integer = 2", "SETOF text"),
    "stop": ("", "integer"),
    # The log
    "push": (
        "queue text, payload jsonb, partition text = 'Default', txn text = null, tenant uuid = null",
        "queen.push_result",
    ),
    "push_bytes": (
        "queue text, payload bytea, partition text = 'Default', txn text = null, tenant uuid = null",
        "queen.push_result",
    ),
    "push_many": (
        "queue text, payloads jsonb[], partition text = 'Default', txns text[] = null, tenant uuid = null",
        "SETOF queen.push_result",
    ),
    "pop": (
        "queue text, consumer_group text = 'default', max_messages integer = 100, lease interval = '00:00:30',"
        " partition text = null, auto_ack boolean = false, tenant uuid = null",
        "SETOF queen.message",
    ),
    "pop_segments": (
        "queue text, consumer_group text = 'default', max_messages integer = 1000, lease interval = '00:00:30',"
        " partition text = null, auto_ack boolean = false, tenant uuid = null",
        "SETOF queen.segment_slice",
    ),
    "ack": (
        "queue text, consumer_group text, partition text, lease_id uuid, up_to bigint = null, tenant uuid = null",
        "queen.ack_result",
    ),
    "nack": (
        "queue text, consumer_group text, partition text, lease_id uuid, error text = null, delay interval = null,"
        " tenant uuid = null",
        "queen.ack_result",
    ),
    "extend": (
        "queue text, consumer_group text, partition text, lease_id uuid, lease interval, tenant uuid = null",
        "queen.ack_result",
    ),
    "sent": (
        "queue text, txn text, tenant uuid = null",
        "TABLE(partition text, offset bigint, message_id uuid, created_at timestamptz)",
    ),
    "seek": (
        "queue text, consumer_group text, to_offset bigint = null, to_time timestamptz = null, partition text = null,"
        " tenant uuid = null",
        "bigint",
    ),
    "configure_queue": ("queue text, options jsonb, tenant uuid = null", "jsonb"),
    "pause_queue": ("queue text, tenant uuid = null", "boolean"),
    "resume_queue": ("queue text, tenant uuid = null", "boolean"),
    "drop_queue": ("queue text, tenant uuid = null", "jsonb"),
    "drop_group": ("queue text, consumer_group text, tenant uuid = null", "bigint"),
    "create_tenant": ("tenant uuid, name text = null", "uuid"),
    "grant_tenant": ("tenant uuid, role_name text", "boolean"),
    "revoke_tenant": ("tenant uuid, role_name text", "boolean"),
    "configure_tenant": ("tenant uuid, options jsonb", "jsonb"),
    "drop_tenant": ("tenant uuid", "jsonb"),
    "dlq_list": (
        "queue text, after uuid = null, max_rows integer = 100, tenant uuid = null",
        "SETOF queen.dead_letter",
    ),
    "dlq_requeue": ("queue text, ids uuid[] = null, tenant uuid = null", "bigint"),
    "dlq_purge": ("queue text, ids uuid[] = null, tenant uuid = null", "bigint"),
    "transaction": ("ops jsonb, tenant uuid = null", "jsonb"),
    # The operator
    "configure": ("key text, value text", "text"),
    "status": (
        "",
        "TABLE(version text, pg_cron text, jobs integer, workers_alive integer, last_pass_at timestamptz, fired bigint,"
        " due bigint, next_due_at timestamptz, oldest_lateness interval, busy_partitions integer, paused_queues bigint,"
        " dead_letters bigint, schedule_enabled boolean, fire_enabled boolean)",
    ),
    "doctor": ("", "TABLE(name text, ok boolean, detail text, hint text)"),
    "maintain": ("run_for interval = '00:00:50'", None),
}

# Without an underscore, because the specification names it so, but nobody but the owner calls it.
INTERNAL_BY_ANOTHER_NAME = {"log_partition_dead"}

# A procedure that commits can be neither a definer's nor have a SET clause.
COMMITTING = {"sweep", "maintain"}

# Internal functions that somebody beside the owner may execute, and why.
OPEN_INTERNAL = {
    "_sweep_begin": {"queen_admin"},  # sweep, which runs as its caller
    "_sweep_step": {"queen_admin"},
    "_sweep_wait": {"queen_admin"},
    "_sweep_finish": {"queen_admin"},
    "_maintain_end": {"queen_admin"},  # maintain, likewise
    "_maintain_step": {"queen_admin"},
    "_is_past": {"queen_admin"},
    "_setting_catalog": {"queen_admin", "queen_reader"},  # the view queen.settings calls it as its reader
    "_now": {"queen_admin", "queen_reader"},  # so do the views that tell ages
    "_tenant_open": {"queen_admin", "queen_reader"},  # and those that hide what is not open
}

TYPES = {
    "timer_verdict": "ok boolean, status text, queue text, timer_key text, txn text, message_id uuid,"
    " deliver_at timestamptz",
    "timer": "tenant_id uuid, queue text, timer_key text, partition text, deliver_at timestamptz, txn text,"
    " message_id uuid, payload jsonb, payload_bytes bytea, encrypted boolean, producer_sub text, attempts integer,"
    " last_error text, claimed boolean, created_at timestamptz, updated_at timestamptz",
    "message": "queue text, partition text, offset bigint, message_id uuid, txn text, payload jsonb,"
    " payload_bytes bytea, created_at timestamptz, producer_sub text, delivery_attempt integer, lease_id uuid",
    "push_result": "status text, partition text, offset bigint, message_id uuid, txn text",
    "ack_result": "ok boolean, status text, acked bigint, committed bigint",
    "dead_letter": "id uuid, queue text, partition text, consumer_group text, offset bigint, message_id uuid, txn text,"
    " payload jsonb, payload_bytes bytea, error text, attempts integer, failed_at timestamptz",
}

IN_QUEEN = "p.pronamespace = 'queen'::regnamespace"


def as_in_the_contract(text: str | None) -> str | None:
    """What PostgreSQL prints of arguments or a result, in the contract's words."""
    if text is None:
        return None
    text = text.replace("timestamp with time zone", "timestamptz").replace('"', "")
    text = re.sub(r"\bIN (?=\w+ )", "", text)
    text = re.sub(r" DEFAULT NULL(::[\w]+(\[\])?)?", " = null", text)
    text = re.sub(r" DEFAULT ('[^']*')::\w+", r" = \1", text)
    return re.sub(r" DEFAULT ", " = ", text)


def test_public_signatures_are_the_contract(db: Database) -> None:
    found = db.rows(
        "select p.proname, pg_get_function_arguments(p.oid), pg_get_function_result(p.oid)"
        f" from pg_proc p where {IN_QUEEN} and p.proname not like '\\_%%' and p.proname <> all (%s)",
        sorted(INTERNAL_BY_ANOTHER_NAME),
    )
    # One function a name: default arguments rather than overloads.
    assert len({name for name, _, _ in found}) == len(found)
    signatures = {
        name: (as_in_the_contract(arguments), as_in_the_contract(result)) for name, arguments, result in found
    }
    assert signatures == PUBLIC


def test_public_types_are_the_contract(db: Database) -> None:
    found = db.rows(
        "select t.typname, string_agg(a.attname || ' ' || format_type(a.atttypid, a.atttypmod), ', ' order by a.attnum)"
        " from pg_type t join pg_attribute a on a.attrelid = t.typrelid and a.attnum > 0 and not a.attisdropped"
        " where t.typnamespace = 'queen'::regnamespace and t.typname = any (%s) group by 1",
        sorted(TYPES),
    )
    assert {name: as_in_the_contract(columns) for name, columns in found} == TYPES


def test_every_function_is_public_or_internal(db: Database) -> None:
    for name in (*OPEN_INTERNAL, *INTERNAL_BY_ANOTHER_NAME):
        assert db.value(f"select count(*) from pg_proc p where {IN_QUEEN} and p.proname = %s", name) == 1


def test_public_may_do_nothing(db: Database) -> None:
    assert (
        db.rows(
            "select p.oid::regprocedure::text from pg_proc p"
            " cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a"
            f" where {IN_QUEEN} and a.grantee = 0"
        )
        == []
    )
    assert (
        db.rows(
            "select n.nspname from pg_namespace n"
            " cross join lateral aclexplode(coalesce(n.nspacl, acldefault('n', n.nspowner))) a"
            " where n.nspname = 'queen' and a.grantee = 0"
        )
        == []
    )
    assert (
        db.rows(
            "select c.oid::regclass::text from pg_class c"
            " cross join lateral aclexplode(coalesce(c.relacl,"
            "   acldefault(case c.relkind when 'S' then 's' else 'r' end::\"char\", c.relowner))) a"
            " where c.relnamespace = 'queen'::regnamespace and a.grantee = 0 and c.relkind in ('r', 'v', 'm', 'S', 'p')"
        )
        == []
    )
    assert (
        db.rows(
            "select c.oid::regclass::text, t.attname from pg_class c join pg_attribute t on t.attrelid = c.oid"
            " where c.relnamespace = 'queen'::regnamespace and t.attacl is not null"
        )
        == []
    )
    # The row types of tables keep their default: it opens no row, and the schema is closed.
    assert (
        db.rows(
            "select t.oid::regtype::text from pg_type t left join pg_class c on c.oid = t.typrelid"
            " cross join lateral aclexplode(coalesce(t.typacl, acldefault('T', t.typowner))) a"
            " where t.typnamespace = 'queen'::regnamespace and a.grantee = 0 and t.typelem = 0"
            " and (c.oid is null or c.relkind = 'c')"
        )
        == []
    )


def test_public_functions_are_definer_functions(db: Database) -> None:
    assert (
        db.rows(
            f"select p.proname from pg_proc p where {IN_QUEEN} and p.proname = any (%s) and not p.prosecdef",
            sorted(PUBLIC.keys() - COMMITTING),
        )
        == []
    )
    # And what the others call as their caller is a definer function again, where it reads a table.
    assert (
        db.rows(
            f"select p.proname from pg_proc p where {IN_QUEEN} and p.proname = any (%s) and not p.prosecdef",
            sorted(OPEN_INTERNAL.keys() - {"_setting_catalog", "_now", "_sweep_wait", "_maintain_end", "_is_past"}),
        )
        == []
    )


def test_definer_functions_pin_the_search_path(db: Database) -> None:
    definers = db.rows(
        "select p.proname, (select substr(c, 13) from unnest(p.proconfig) c where c like 'search_path=%%')"
        f" from pg_proc p where {IN_QUEEN} and (p.prosecdef or p.proname = any (%s))",
        sorted(PUBLIC.keys() - COMMITTING),
    )
    assert len(definers) >= len(PUBLIC) - len(COMMITTING)
    unpinned = [
        name
        for name, path in definers
        if path is None or [part.strip() for part in path.split(",")] != ["pg_catalog", "queen", "pg_temp"]
    ]
    assert unpinned == []


def test_committing_procedures_name_nothing_without_its_schema(db: Database) -> None:
    # Without a SET clause they see their caller's search_path. What looks like a call here is a part of SQL itself.
    words = {"coalesce", "extract", "greatest", "least", "and", "or", "not", "in", "if", "exists", "values"}
    bodies = dict(
        db.rows(
            f"select p.proname, p.prosrc from pg_proc p where {IN_QUEEN} and p.prokind = 'p' and p.proconfig is null"
        )
    )
    assert bodies.keys() == COMMITTING
    for name, body in bodies.items():
        assert set(re.findall(r"(?<![\w.])(\w+)\s*\(", body)) <= words, name
        assert re.findall(r"(?:from|join|into|update) (?!v_)(\w+)(?!\.|\w)", body) == [], name


def test_internal_functions_are_the_owners(db: Database) -> None:
    found: dict[str, set[str]] = {}
    for name, role in db.rows(
        "select p.proname, a.grantee::regrole::text from pg_proc p"
        " cross join lateral aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a"
        f" where {IN_QUEEN} and a.grantee <> p.proowner and p.proname <> all (%s)",
        sorted(PUBLIC),
    ):
        found.setdefault(name, set()).add(role)
    assert found == OPEN_INTERNAL


def test_everything_has_its_comment(db: Database) -> None:
    members = db.rows(
        "select pg_describe_object(d.classid, d.objid, 0), obj_description(d.objid, d.classid::regclass::name)"
        " from pg_depend d left join pg_class c on d.classid = 'pg_class'::regclass and c.oid = d.objid"
        " where d.refclassid = 'pg_extension'::regclass and d.deptype = 'e'"
        " and d.refobjid = (select oid from pg_extension where extname = 'pg_queen')"
        # A table's row type has the table's comment; a type's relation, the type's. A sequence belongs to its column.
        " and not (d.classid = 'pg_type'::regclass and exists (select from pg_type t"
        "   left join pg_class r on r.oid = t.typrelid where t.oid = d.objid and (t.typelem <> 0 or r.relkind <> 'c')))"
        " and (c.oid is null or c.relkind not in ('c', 'S', 'i'))"
    )
    assert len(members) > 100
    assert [what for what, comment in members if not (comment or "").strip()] == []
    assert db.value("select obj_description(oid, 'pg_extension') from pg_extension where extname = 'pg_queen'")


def test_every_column_of_every_table_has_its_comment(db: Database) -> None:
    columns = db.rows(
        "select c.relname || '.' || a.attname, col_description(c.oid, a.attnum) from pg_class c"
        " join pg_attribute a on a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped"
        " where c.relnamespace = 'queen'::regnamespace and c.relkind = 'r'"
    )
    assert len(columns) > 80
    assert [name for name, comment in columns if not (comment or "").strip()] == []
