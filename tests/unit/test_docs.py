"""README and docs say what is so: sessions are run, signatures, settings, rights and names compared with the catalog.

Fences by their info string: `console` is a psql session whose output is compared, `sql` is run, `sql signature` is
compared with the catalog, `conf` goes into the server's configuration, `python` and `sh` are run where a test can, else
checked.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import psycopg
import pytest

from tests.support.database import Database
from tests.support.servers import Server, install_extension, running_server
from tests.support.waiting import wait_for
from tools.cluster import ROOT, pg_config

README = ROOT / "README.md"
REFERENCE = ROOT / "docs" / "reference.md"
CONCEPTS = ROOT / "docs" / "concepts.md"
OPERATIONS = ROOT / "docs" / "operations.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
OURS = (README, REFERENCE, CONCEPTS, OPERATIONS, TUTORIAL)
ROLES = ("queen_producer", "queen_consumer", "queen_reader", "queen_admin")

UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
# What differs from run to run, in the order in which it is looked for.
VOLATILE = (
    (UUID, "<uuid>"),
    (re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?[+-]\d\d(:\d\d)?"), "<time>"),
    (re.compile(r"-?\d\d:\d\d:\d\d(\.\d+)?"), "<interval>"),
)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its info string, its text without the indent of its list item."""

    file: Path
    line: int
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.file.name}:{self.line}"


def blocks(file: Path, info: str, heading: str | None = None) -> list[Block]:
    """The blocks of a file with this info string, all of them or those of one section."""
    found: list[Block] = []
    section: list[str] = []
    opened: Block | None = None
    lines: list[str] = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        fence = re.match(r"( *)```(.*)$", line)
        if opened is not None:
            if fence and not fence[2]:
                if opened.info == info and (heading is None or heading in section):
                    indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
                    text = "\n".join(x[indent:] for x in lines)
                    found.append(Block(file, opened.line, opened.info, text))
                opened, lines = None, []
            else:
                lines.append(line)
        elif fence:
            opened = Block(file, number, fence[2], "")
        elif title := re.match(r"(#+) (.*)$", line):
            section = [*section[: len(title[1]) - 1], title[2]]
    assert opened is None, f"{opened} is not closed"
    return found


def turns(text: str) -> list[tuple[str, str, str]]:
    """A psql session as (prompt, statement, output)."""
    parts = re.split(r"^(app=[>#]) ", text, flags=re.MULTILINE)
    assert parts[0] == "", f"a session begins with a prompt: {text[:60]}"
    found = []
    for prompt, rest in zip(parts[1::2], parts[2::2], strict=True):
        statement, ended, output = rest.partition(";\n") if ";\n" in rest else (*rest.partition(";")[:2], "")
        assert ended, f"a statement without an end: {rest[:60]}"
        statement = re.sub(r"^app[-('\"][>#] ", "", statement, flags=re.MULTILINE)
        found.append((prompt, statement, output))
    return found


def shape(output: str) -> list[str]:
    """Output without what differs from run to run: volatile values, widths of columns, empty lines."""
    lines = []
    for line in output.splitlines():
        for pattern, name in VOLATILE:
            line = pattern.sub(name, line)
        line = " ".join(line.split())
        if line and not re.fullmatch(r"[-+]+", line):
            lines.append(re.sub(r"-\[ RECORD (\d+) \][-+]*", r"-[ RECORD \1 ]-", line))
    return lines


ENCRYPTION = [block for info in ("sh", "console") for block in blocks(OPERATIONS, info, "Encryption")]


class Psql:
    """A psql as a reader would use it, statement by statement."""

    def __init__(self, database: Database, user: str) -> None:
        self._process = subprocess.Popen(
            [pg_config("--bindir") / "psql", "-X", "-d", database.conninfo(user)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            bufsize=1,
            env={"LC_ALL": "C.UTF-8", "PGTZ": "UTC"},
        )

    def run(self, statement: str) -> str:
        """What psql prints for a statement, without spaces at the ends of lines."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{statement};\n\\echo ~~~\n")
        self._process.stdin.flush()
        output: list[str] = []
        for line in self._process.stdout:
            if line == "~~~\n":
                return "".join(output)
            output.append(line.rstrip() + "\n")
        raise AssertionError(f"psql ended:\n{''.join(output)}")

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def play(database: Database, block: Block, ids: dict[str, str] | None = None) -> Iterator[tuple[str, str, str, str]]:
    """Run a session: prompt, statement as it was sent, the output that the document shows, and what came.

    An id that the document shows in some output is, in later statements, the one that came in its place; in those of
    other blocks too when they share `ids`.
    """
    ids = {} if ids is None else ids
    with contextlib.ExitStack() as stack:
        shells: dict[str, Psql] = {}
        for prompt, statement, shown in turns(block.text):
            if prompt not in shells:
                user = "web" if prompt == "app=>" else "postgres"
                shells[prompt] = stack.enter_context(contextlib.closing(Psql(database, user)))
            sent = UUID.sub(lambda found: ids.get(found[0], found[0]), statement)
            came = shells[prompt].run(sent)
            ids.update(zip(UUID.findall(shown), UUID.findall(came), strict=False))
            yield prompt, sent, shown, came


def check_session(database: Database, block: Block, ids: dict[str, str] | None = None) -> None:
    """The document shows what comes."""
    for _, statement, shown, came in play(database, block, ids):
        assert shape(came) == shape(shown), f"{block}: {statement}"


def run_sql(database: Database, block: Block) -> None:
    """Run the statements of a block as superuser, one after the other."""
    for statement in block.text.split(";\n"):
        database.superuser.execute(statement.encode())


@pytest.fixture(scope="module")
def app(extension: None) -> Iterator[Database]:
    """The reader's server: database app, set up with the very blocks of the README's section on installing."""
    (configuration,) = blocks(README, "conf")
    settings = dict(re.findall(r"^([\w.]+) = '?([^'\n]*)'?$", configuration.text, re.MULTILINE))
    assert len(settings) == len(configuration.text.splitlines())
    with running_server(settings) as server:
        with server.connect() as connection:
            connection.execute("create database app")
        database = Database(server.cluster, "app")
        for block in blocks(README, "sql", "Install into an existing cluster"):
            if "shop" not in block.text:
                run_sql(database, block)
        # The boot job runs at once; without a restart the first worker begins on the next full minute.
        database.restart()
        wait_for(lambda: database.value("select workers_alive > 0 from queen.status()"), 60)
        yield database
        database.close()


@pytest.fixture(scope="module")
def catalog(server: Server) -> Iterator[Database]:
    """A database with the extension, only looked at."""
    with server.connect() as connection:
        connection.execute("create database docs")
        database = Database(server.cluster, "docs")
        install_extension(database.superuser)
        yield database
        database.close()
        connection.execute("drop database docs")


@pytest.mark.parametrize(
    "block",
    [block for file in (README, CONCEPTS, OPERATIONS) for block in blocks(file, "console") if block not in ENCRYPTION],
    ids=str,
)
def test_session_gives_what_is_shown(app: Database, block: Block) -> None:
    check_session(app, block)


def test_encryption_is_set_up_as_shown(app: Database) -> None:
    """The section's commands and sessions, in a folder of the server's user instead of /etc."""
    commands, *sessions = (
        replace(block, text=block.text.replace("/etc/pg_queen", f"{app.cluster.data}/keys")) for block in ENCRYPTION
    )
    script = commands.text.replace("-o postgres -g postgres ", "")
    app.execute(
        f"do $do$\nimport subprocess\nsubprocess.run(['sh', '-ec', {script!r}], check=True)\n$do$ language plpython3u"
    )
    try:
        for block in sessions:
            check_session(app, block)
        app.execute("select queen.push('salaries', '1')")
        assert app.rows("select payload from queen.pop('salaries')") == [(1,)]
        assert app.value("select value from queen.settings where key = 'key_file'").endswith("/keys/keys")
    finally:
        app.execute("select queen.configure('key_file', null)")
        app.execute("select queen.drop_queue('salaries')")


@pytest.mark.parametrize("block", blocks(README, "python"), ids=str)
def test_python_runs(app: Database, block: Block) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", block.text], env=named(app), check=True, timeout=60)


def test_tutorial(app: Database) -> None:
    *sessions, letters = blocks(TUTORIAL, "console")
    (program,) = blocks(TUTORIAL, "python")
    ids: dict[str, str] = {}
    for block in sessions:
        check_session(app, block, ids)

    # Given up after one delivery, to be quick; the page shows what the default gives.
    app.execute("select queen.configure_queue('expiries', '{\"delivery_max_attempts\": 1}')")
    app.execute("insert into orders (id) values (9)")
    consumer = subprocess.Popen([sys.executable, "-W", "error", "-c", program.text], env=named(app))
    try:
        for _, statement, shown, came in play(app, letters):
            assert shape(came) == shape(shown.replace("|        5 |", "|        1 |")), f"{letters}: {statement}"
            if "push" in statement:
                wait_for(lambda: app.rows("select from queen.log_dlq where queue = 'expiries'") != [], 20)
        app.execute("select queen.schedule('expiries', 'expire 9', '{\"order\": 9}', delay => '0')")
        wait_for(lambda: app.value("select status from orders where id = 9") == "expired", 20)
        assert consumer.poll() is None
    finally:
        consumer.terminate()
        consumer.wait(timeout=20)


def named(database: Database, user: str = "web") -> dict[str, str]:
    """The environment that names a database to libpq."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PG")}
    return {
        **inherited,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PGHOST": database.cluster.host,
        "PGPORT": str(database.cluster.port),
        "PGUSER": user,
        "PGDATABASE": database.name,
    }


@pytest.mark.parametrize(
    "block",
    [block for file in (README, OPERATIONS) for block in blocks(file, "sh") if block not in ENCRYPTION],
    ids=str,
)
def test_shell_commands_are_right(app: Database, block: Block) -> None:
    targets = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    setup = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8").replace("$major", "15")
    for command in block.text.splitlines():
        words = command.split()
        match words[0]:
            case "make":
                assert words[1] in targets, f"{block}: {command}"
            case "apt-get":
                assert [word for word in words[2:] if word != "make" and word not in setup] == [], f"{block}: {command}"
            case "pip":
                assert words[1:] == ["install", "'./python[binary]'"]
                assert (ROOT / "python" / "pyproject.toml").is_file()
            case "pg-queen":
                subprocess.run(command, shell=True, env=named(app), check=True, timeout=60)
            case "pg_dump":
                dump = subprocess.run(
                    command,
                    shell=True,
                    env=named(app, "postgres"),
                    check=True,
                    timeout=60,
                    capture_output=True,
                    text=True,
                ).stdout
                assert "create extension if not exists pg_queen" in dump.lower()
                assert "queen.sweep(" not in dump
            case _:
                pytest.fail(f"{block}: nothing checks {command}")


def test_pg_cron_in_another_database(app: Database) -> None:
    start, stop = (block for block in blocks(README, "sql", "pg_cron in another database"))
    app.execute("create database shop")
    shop = Database(app.cluster, "shop")
    try:
        shop.execute("create extension pg_queen cascade")
        with pytest.raises(psycopg.Error) as refused:
            shop.execute("select queen.start()")
        assert refused.value.diag.message_hint == f"In that database run: {' '.join(start.text.splitlines())}"
        run_sql(app, start)
        commands = [command for (command,) in app.rows("select command from cron.job where database = 'shop'")]
        assert len(commands) == len(start.text.splitlines())
        assert app.value("select jobs from queen.status()") == 2, "the jobs of app are as they were"
        for command in commands:
            shop.execute(command.replace("null", "'0'"))
        problem, jobs, alive = shop.rows("select pg_cron, jobs, workers_alive from queen.status()")[0]
        assert '"app"' in problem
        assert jobs == 0
        assert alive > 0
    finally:
        run_sql(app, stop)
        shop.close()
        app.execute("drop database shop with (force)")
    assert app.rows("select from cron.job where database = 'shop'") == []


def test_a_dump_has_everything_and_the_jobs_can_be_left_out(app: Database) -> None:
    command = next(line for block in blocks(OPERATIONS, "sh") for line in block.text.splitlines() if "pg_dump" in line)
    app.execute("select queen.schedule('restored', 'k', '1', delay => '1 day')")
    app.execute("select queen.push('restored', '{\"sent\": true}', txn => 'sent')")
    app.execute("select queen.configure('horizon', '11 years')")
    app.execute("create database copy")
    copy = Database(app.cluster, "copy")
    try:
        # It goes on after errors: pg_cron cannot be created in a database of this name.
        program = pg_config("--bindir") / "psql"
        restored = subprocess.run(
            f"{command} | '{program}' -X -q -d copy",
            shell=True,
            env=named(app, "postgres"),
            capture_output=True,
            text=True,
            timeout=60,
        )
        errors = re.findall(r"ERROR: .*", restored.stderr)
        assert [error for error in errors if "cron" not in error and "create extension in database" not in error] == []
        assert copy.value("select timer_key from queen.list_timers('restored')") == "k"
        assert copy.value("select value from queen.settings where key = 'horizon'") == "11 years"
        assert copy.value("select \"offset\" from queen.sent('restored', 'sent')") == 1
        assert copy.value("select payload from queen.pop('restored')") == {"sent": True}
        assert copy.value("select \"offset\" from queen.push('restored', '{}')") == 2
        assert copy.value("select status from queen.push('a new one', '{}')") == "queued"
    finally:
        copy.close()
        app.execute("drop database copy")
        app.execute("select queen.configure('horizon', null)")


def test_what_is_said_of_expansion_and_isolation(app: Database) -> None:
    connection = app.connect("web")
    expanded = connection.execute("select (queen.schedule('said', 'k', '1', delay => '1 day')).*").fetchone()
    assert expanded is not None
    assert expanded[1] == "rescheduled"

    connection.execute("begin isolation level repeatable read")
    connection.execute("select 1")
    app.execute("select queen.schedule('said', 'later', '1', delay => '1 day')")
    assert connection.execute("select status from queen.cancel('said', 'later')").fetchone() == ("absent",)
    connection.execute("commit")
    assert connection.execute("select status from queen.cancel('said', 'later')").fetchone() == ("cancelled",)


# The catalog


def normal(database: Database, type_name: str) -> str:
    """A type as the catalog writes it."""
    name: str = database.value("select format_type(to_regtype(%s), null)", type_name)
    assert name != "-", type_name
    return name


def columns(database: Database, text: str) -> list[tuple[str, str, str | None]]:
    """Name, type and default of each line of a signature."""
    found = []
    for line in text.strip().splitlines():
        match = re.fullmatch(r' *"?(\w+)"? +([\w\[\]]+)(?: +default (.+?))?,?', line)
        assert match is not None, line
        found.append((match[1], normal(database, match[2]), match[3]))
    return found


def signatures() -> dict[str, Block]:
    """The signature blocks by the name they are of."""
    found = {}
    for block in blocks(REFERENCE, "sql signature"):
        match = re.match(r"queen\.(\w+) ?\(", block.text)
        assert match is not None, str(block)
        assert match[1] not in found, f"{block}: {match[1]} is there twice"
        found[match[1]] = block
    return found


def functions(database: Database) -> dict[str, int]:
    """The public functions and procedures: oid by name."""
    return dict(
        database.rows(
            "select proname, oid::int from pg_proc where pronamespace = 'queen'::regnamespace and proname !~ '^_'"
        )
    )


def relations(database: Database) -> dict[str, str]:
    """The public tables, views and composite types: kind by name."""
    return dict(
        database.rows(
            "select relname, relkind from pg_class"
            " where relnamespace = 'queen'::regnamespace and relkind in ('r', 'v', 'c') and relname !~ '^_'"
        )
    )


def test_reference_has_every_object_and_no_other(catalog: Database) -> None:
    wanted = set(functions(catalog)) | {name for name, kind in relations(catalog).items() if kind in ("v", "c")}
    assert set(signatures()) == wanted
    tables = re.findall(r"^\| `queen\.(\w+)` \|", section("Tables"), re.MULTILINE)
    assert sorted(tables) == sorted(name for name, kind in relations(catalog).items() if kind == "r")


def test_reference_has_the_arguments_and_results_of_functions(catalog: Database) -> None:
    for name, oid in functions(catalog).items():
        block = signatures()[name]
        match = re.fullmatch(r"queen\.\w+\((.*?)\n?\)(?: returns (.*))?", block.text, re.DOTALL)
        assert match is not None, str(block)
        documented = columns(catalog, match[1]) if match[1].strip() else []
        there = catalog.rows(
            "select p.proargnames[a.n], format_type(a.type, null), pg_get_function_arg_default(p.oid, a.n::int)"
            "  from pg_proc p cross join unnest(p.proargtypes) with ordinality as a (type, n)"
            " where p.oid = %s order by a.n",
            oid,
        )
        assert [(x, y) for x, y, _ in documented] == [(x, y) for x, y, _ in there], str(block)
        for (argument, type_, ours), (_, _, theirs) in zip(documented, there, strict=True):
            assert (ours is None) == (theirs is None), f"{block}: {argument}"
            if ours is not None:
                same = f"select ({ours})::{type_} is not distinct from ({theirs})"
                assert catalog.value(same), f"{block}: {argument} has the default {theirs}"

        kind, returns_set, result = catalog.rows(
            "select prokind, proretset, pg_get_function_result(oid) from pg_proc where oid = %s", oid
        )[0]
        if kind == "p":
            assert match[2] is None, str(block)
        elif table := re.fullmatch(r"table \((.*)\)", match[2], re.DOTALL):
            there = catalog.rows(
                "select p.proargnames[a.n], format_type(a.type, null), null"
                "  from pg_proc p cross join unnest(p.proallargtypes) with ordinality as a (type, n)"
                " where p.oid = %s and p.proargmodes[a.n] = 't' order by a.n",
                oid,
            )
            assert columns(catalog, table[1]) == there, str(block)
        else:
            documented_result = match[2].removeprefix("setof ")
            assert match[2].startswith("setof ") == returns_set, str(block)
            assert normal(catalog, documented_result) == result.removeprefix("SETOF "), str(block)


def test_reference_has_the_columns_of_types_and_views(catalog: Database) -> None:
    for name, kind in relations(catalog).items():
        if kind == "r":
            continue
        block = signatures()[name]
        there = catalog.rows(
            "select attname, format_type(atttypid, null), null from pg_attribute"
            " where attrelid = %s::regclass and attnum > 0 order by attnum",
            f"queen.{name}",
        )
        assert columns(catalog, block.text.removeprefix(f"queen.{name} (").removesuffix(")")) == there, str(block)


def section(title: str) -> str:
    """The text under a heading of the reference, to the next of the same or a higher level."""
    text = REFERENCE.read_text(encoding="utf-8")
    match = re.search(rf"^(#+) {title}$", text, re.MULTILINE)
    assert match is not None, title
    end = re.search(rf"^#{{1,{len(match[1])}}} ", text[match.end() :], re.MULTILINE)
    return text[match.end() : match.end() + end.start()] if end else text[match.end() :]


def test_reference_says_who_may_call_what(catalog: Database) -> None:
    matrix = {
        row[0]: row[1:]
        for row in re.findall(
            r"^\| `(\w+)` \| (\w*) *\| (\w*) *\| (\w*) *\| (\w*) *\|$", section("Roles"), re.MULTILINE
        )
    }
    may = {
        name: [catalog.value("select has_function_privilege(%s, %s::oid, 'execute')", role, oid) for role in ROLES]
        for name, oid in functions(catalog).items()
    }
    assert {name: ["yes" if x else "" for x in row] for name, row in may.items()} == {
        k: list(v) for k, v in matrix.items()
    }
    for name, row in may.items():
        (line,) = re.findall(r"^Roles: (.*)\.$", section(name), re.MULTILINE)
        roles = [f"`{role}`" for role, yes in zip(ROLES, row, strict=True) if yes]
        assert line == (", ".join(roles) or "none"), name
    assert sorted(re.findall(r"^\| `(queen_\w+)` \|", section("Roles"), re.MULTILINE)) == sorted(
        role for (role,) in catalog.rows("select rolname from pg_roles where rolname like 'queen\\_%%'")
    )


def test_reference_says_who_may_read_what(catalog: Database) -> None:
    for name, kind in relations(catalog).items():
        if kind == "c":
            continue
        readers = [
            role
            for role in ROLES
            if catalog.value("select has_table_privilege(%s, %s, 'select')", role, f"queen.{name}")
        ]
        assert readers == (["queen_admin"] if kind == "r" else ["queen_reader", "queen_admin"]), name


def test_reference_has_every_setting(catalog: Database) -> None:
    rows = re.findall(
        r"^\| `(\w+)` \| `(.*?)` \| `(.*?)` (to|or) `(.*?)` \| (|queue|queue, tenant) \| (.*) \|$",
        section("Settings"),
        re.MULTILINE,
    )
    there = catalog.rows(
        "select key, default_value, min_value, case when kind in ('choice', 'path') then 'or' else 'to' end, max_value,"
        " concat_ws(', ', case when per_queue then 'queue' end, case when per_tenant then 'tenant' end), description"
        " from queen.settings"
    )
    assert sorted(rows) == sorted(there)


def test_reference_has_the_bounds_of_lateness(catalog: Database) -> None:
    (text,) = re.findall(r"buckets that begin at (.*?)\.\n", section("Tables").replace(",\n", ", "), re.DOTALL)
    milliseconds, seconds = (re.findall(r"\d+", part) for part in text.split(" ms, "))
    bounds = [int(x) / 1000 for x in milliseconds] + [float(x) for x in seconds]
    assert bounds == catalog.value("select queen._late_bounds()")


def test_reference_has_every_sqlstate() -> None:
    documented = set(re.findall(r"^\| (\w{5}) \|", section("Errors"), re.MULTILINE))
    sources = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "sql").glob("*.sql"))
    raised = set(re.findall(r"""(?:errcode|sqlstate) ?= ?['"](\w{5})['"]""", sources))
    names = {"insufficient_privilege": "42501"}
    raised |= {names[name] for name in re.findall(r"errcode = '([a-z_]{6,})'", sources)}
    assert documented == raised


def test_comments_and_reference_name_the_same_errors(catalog: Database) -> None:
    comments = dict(
        catalog.rows(
            "select proname, obj_description(oid, 'pg_proc') from pg_proc where pronamespace = 'queen'::regnamespace"
        )
    )
    for name in functions(catalog):
        same_as = re.search(r"errors as of queen\.(\w+)\.", " ".join(comments[name].split()))
        after = comments[same_as[1] if same_as else name].partition("Errors:")[2]
        ours = " ".join(section(name).split()).rpartition("Errors:")[2]
        codes = r"\b(?:QN\d{3}|22023|42501)\b"
        assert set(re.findall(codes, ours)) == set(re.findall(codes, after)), name


# The text


def plain(file: Path) -> str:
    """A document without its outputs, which may say anything."""
    return file.read_text(encoding="utf-8")


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_every_block_is_of_a_kind_that_is_checked(file: Path) -> None:
    checked = {
        README: {"console", "sql", "sh", "conf", "python"},
        REFERENCE: {"sql signature"},
        CONCEPTS: {"console"},
        TUTORIAL: {"console", "python"},
        OPERATIONS: {"console", "sql", "sh"},
    }
    fences = re.findall(r"^ *```(.*)$", plain(file), re.MULTILINE)
    assert set(fences) - {""} <= checked[file]
    assert fences.count("") * 2 == len(fences)


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_names_exist(catalog: Database, file: Path) -> None:
    text = plain(file)
    known = {name for (name,) in catalog.rows("select proname from pg_proc where pronamespace = 'queen'::regnamespace")}
    known |= set(relations(catalog))
    assert set(re.findall(r"\bqueen\.(\w+)", text)) - known - {"start", "x"} == set()
    # The name of a setting in a sentence about settings, a role anywhere.
    roles = set(re.findall(r"\bqueen_\w+", text))
    assert roles - set(ROLES) == set()


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_words_in_code_marks_exist(catalog: Database, file: Path) -> None:
    """A word with an underscore between code marks is a name of ours, of PostgreSQL or of pg_cron."""
    ours = {name for (name,) in catalog.rows("select proname from pg_proc where pronamespace = 'queen'::regnamespace")}
    ours |= set(relations(catalog)) | set(ROLES)
    ours |= {key for (key,) in catalog.rows("select key from queen.settings")}
    ours |= {
        name
        for (name,) in catalog.rows(
            "select attname from pg_attribute a join pg_class c on c.oid = a.attrelid"
            " where c.relnamespace = 'queen'::regnamespace"
        )
    }
    ours |= {
        name
        for (name,) in catalog.rows(
            "select a.name from pg_proc p cross join unnest(p.proargnames) as a (name)"
            " where p.pronamespace = 'queen'::regnamespace"
        )
    }
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "sql").glob("*.sql"))
    foreign = set(
        "shared_preload_libraries max_worker_processes pg_hba lock_timeout statement_timeout max_wal_size"
        " idle_in_transaction_session_timeout hot_standby_feedback autovacuum_vacuum_scale_factor"
        " autovacuum_vacuum_threshold pg_stat_activity pg_monitor pg_locks log_statement log_parameter_max_length"
        " log_min_duration_statement pg_stat_statements"
        " search_path pg_advisory_lock pg_dump pg_dumpall pg_config pg_cron pg_queen pg_roles PG_CONFIG".split()
    )
    for words in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", plain(file), flags=re.DOTALL)):
        for word in re.findall(r"(?<![\w.])[A-Za-z]+(?:_[A-Za-z]+)+\b", words):
            assert word in ours | foreign or f"'{word}'" in sources, f"`{words}`"


@pytest.mark.parametrize("file", OURS, ids=lambda file: file.name)
def test_links_lead_somewhere(file: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", plain(file), flags=re.DOTALL)):
        name, _, anchor = target.partition("#")
        other = (file.parent / name).resolve() if name else file
        assert other.is_file(), f"{file.name}: {target}"
        if anchor:
            titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", plain(other), flags=re.DOTALL), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in anchors, f"{file.name}: {target}"


def test_errors_of_the_readme_are_those_of_the_server(app: Database) -> None:
    """What the README's table quotes, where a test can have it."""
    table = README.read_text(encoding="utf-8").partition("## Errors and their cures")[2].partition("\n## ")[0]

    def refusal(statement: str, user: str = "postgres") -> str:
        with pytest.raises(psycopg.Error) as refused:
            app.connect(user).execute(statement)
        message: str = refused.value.diag.message_primary or ""
        return message

    app.execute("create role docs_nobody login")
    app.execute("create role docs_maker login")
    app.execute("grant create on database app to docs_maker")
    seen = [
        refusal("create extension pg_quee"),
        refusal("select queen.push('q', '1')", "docs_nobody"),
        refusal("select queen.start()", "web"),
        refusal("select queen.push('q', '1', tenant => gen_random_uuid())", "web"),
        refusal("begin; call queen.sweep('0')"),
    ]
    patterns = [
        re.compile(re.escape(quoted).replace(r"\.\.\.", ".*").replace("pg_queen", "pg_queen?"))
        for quoted in re.findall(r"`([^`]+)`", table)
    ]
    for message in seen:
        assert any(pattern.fullmatch(message) for pattern in patterns), message


def test_operations_sql_runs_and_removes(app: Database) -> None:
    """In the order of the page, as the role it names: what is removed at the end is gone."""
    app.execute("create role docs_operator login")
    app.execute("grant queen_admin, pg_monitor to docs_operator")
    removal = [block.line for block in blocks(OPERATIONS, "sql", "Removal")]
    shared = blocks(OPERATIONS, "sql", "A database shared with strangers")
    for block in shared:
        run_sql(app, block)
    with app.connect("docs_operator") as operator:
        for block in blocks(OPERATIONS, "sql"):
            if block.line not in [*removal, *(block.line for block in shared)]:
                for statement in block.text.split(";\n"):
                    operator.execute(statement.encode())
    remove, sweep_up, roles = blocks(OPERATIONS, "sql", "Removal")
    run_sql(app, remove)
    assert app.rows("select from pg_extension where extname = 'pg_queen'") == []
    assert app.rows("select from cron.job") == []

    # Not stopped first.
    app.execute("create extension pg_queen")
    app.execute("select queen.start()")
    app.execute("drop extension pg_queen")
    assert app.rows("select from cron.job") != []
    run_sql(app, sweep_up)
    assert app.rows("select from cron.job") == []

    run_sql(app, roles)
    assert app.rows("select from pg_roles where rolname like 'queen\\_%%'") == []
