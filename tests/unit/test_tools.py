"""The Makefile's targets and the scripts behind them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools import lint_pgspot, lint_sql
from tools.cluster import ROOT, extension_files, pg_config

HEADER = "-- What this is.\n"


def make(*arguments: str) -> str:
    """Run make as a person would, not as a part of the make that runs the tests."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["make", *arguments], cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    return done.stdout


def test_help_lists_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert phony is not None
    listed = [line.split()[1] for line in make("help").splitlines()]
    assert sorted(listed) == sorted(phony.group(1).split())


def test_script_is_the_sources_in_order(extension: None) -> None:
    script = extension_files()[1]
    assert script.read_text() == "".join(file.read_text() for file in sorted((ROOT / "sql").glob("*.sql")))


def test_install_and_uninstall(extension: None, tmp_path: Path) -> None:
    directory = Path(f"{tmp_path}{pg_config('--sharedir')}/extension")
    directory.mkdir(parents=True)
    (directory / "other.control").touch()
    make("install", f"DESTDIR={tmp_path}")
    assert {file.name for file in directory.iterdir()} == {
        "other.control",
        *(file.name for file in extension_files()),
    }
    make("uninstall", f"DESTDIR={tmp_path}")
    assert [file.name for file in directory.iterdir()] == ["other.control"]


def test_several_who_ask_first_get_one_folder(tmp_path: Path) -> None:
    """As the suite's workers do in a fresh clone."""
    checkout = tmp_path / ("deep" * 20)
    shutil.copytree(ROOT / "tools", checkout / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    ask = [sys.executable, "-c", "from tools.cluster import state_directory; print(state_directory())"]
    started = [subprocess.Popen(ask, cwd=checkout, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    answers = [process.communicate(timeout=60)[0].strip() for process in started]
    try:
        assert [process.returncode for process in started] == [0] * 8
        assert len(set(answers)) == 1
    finally:
        for folder in {answer for answer in answers if answer}:
            shutil.rmtree(folder)


def test_servers_of_a_deep_checkout_lie_elsewhere(tmp_path: Path) -> None:
    checkout = tmp_path / ("deep" * 20)
    shutil.copytree(ROOT / "tools", checkout / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    ask = [sys.executable, "-c", "from tools.cluster import state_directory; print(state_directory())"]
    first, second = (
        subprocess.run(ask, cwd=checkout, check=True, capture_output=True, text=True).stdout.strip() for _ in range(2)
    )
    try:
        assert first == second
        assert not first.startswith(str(checkout))
        assert Path(first).stat().st_mode & 0o777 == 0o700
        # A copy of the checkout, record and all, does not take the first one's folder for its own.
        shutil.move(checkout, tmp_path / ("moved" * 20))
        ask_moved = subprocess.run(
            ask, cwd=tmp_path / ("moved" * 20), check=True, capture_output=True, text=True
        ).stdout.strip()
        shutil.rmtree(ask_moved)
        assert ask_moved != first
    finally:
        shutil.rmtree(first)


@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("1_x.sql", HEADER, "NNN_name"),
        ("001_x.sql", HEADER * 301, "more than 300 lines"),
        ("001_x.sql", "select 1;\n", "no header"),
        ("001_x.sql", HEADER + "select 1;", "no newline"),
        ("001_x.sql", HEADER + "select 1; \n", "tab or trailing space"),
        ("001_x.sql", HEADER + "create or replace function f() returns int return 1;\n", "or replace"),
        ("001_x.sql", HEADER + "create table if not exists t ();\n", "if not exists"),
        ("001_x.sql", HEADER + "SELECT 1;\n", "keyword SELECT"),
        ("001_x.sql", HEADER + "do $x$\nbegin\n  PERFORM 1;\nend $x$;\n", "keyword PERFORM"),
    ],
)
def test_sql_rules_find(name: str, text: str, finding: str) -> None:
    found = list(lint_sql.file_findings(Path(name), text))
    assert len(found) == 1
    assert finding in found[0][1]


@pytest.mark.parametrize(
    "text",
    [
        HEADER * 300,
        HEADER + "-- SELECT in a comment /* FROM */\nselect 'SELECT', e'\\'FROM', \"WHERE\"; /* GROUP\nBY */\n",
        HEADER + "do $$ begin if not exists (select from t) then perform 'FROM'; end if; end $$;\n",
        HEADER + "create or replace view v as select 1;  -- allowed: this is a test\n",
        HEADER + "create function f() returns int language plpython3u as $$\nFROM = 'SELECT'\nreturn 1\n$$;\n",
    ],
)
def test_sql_rules_pass(text: str) -> None:
    assert list(lint_sql.file_findings(Path("001_x.sql"), text)) == []


@pytest.mark.parametrize(
    ("body", "finding"),
    [
        ("return len(p_data) + p_n + SD.get('x', 0)", None),
        ("\nreturn undefined", "4: undefined name `undefined`"),
        ("\n\nimport os\nreturn p_n", "5: `os` imported but unused"),
    ],
)
def test_python_bodies_are_linted(body: str, finding: str | None, capfd: pytest.CaptureFixture[str]) -> None:
    text = (
        HEADER
        + 'create function queen._f(p_data bytea, "p_n" int default abs(-1)) returns int\n'
        + f"language plpython3u as $${body}$$;\n"
    )
    _, bodies = lint_sql.split_bodies(Path("001_x.sql"), text)
    assert [found.parameters for found in bodies] == [["p_data", "p_n"]]
    assert lint_sql.lint_python(bodies) == (finding is None)
    output = capfd.readouterr().out
    if finding is None:
        assert output == ""
    else:
        line, message = finding.split(": ")
        assert f"001_x.queen__f.py:{line}:" in output
        assert message.lower() in output.lower()


WRONG_SQL = {
    "a definer without a path": (
        "create function queen._x() returns int language sql security definer as $$ select 1 $$;",
        "PS003: SECURITY DEFINER function without explicit search_path: queen._x()",
    ),
    "a path without pg_temp": (
        "create function queen._x() returns int language sql security definer set search_path = pg_catalog, queen"
        " as $$ select 1 $$;",
        "PS004: SECURITY DEFINER function with insecure search_path: queen._x()",
    ),
    "public in the path": (
        "create function queen._x() returns int language sql set search_path = pg_catalog, public, pg_temp"
        " as $$ select 1 $$;",
        "PS005: Function without explicit search_path: queen._x()",
    ),
    "a standard body after the path is gone": (
        "reset search_path; create function queen._x() returns bool language sql return 1 = 2;",
        "PS001: Unqualified operator: '=' in 1 = 2",
    ),
    "an operator in a loop of a composite": (
        "create function queen._x() returns int language plpgsql as $$\ndeclare\n  v_a queen._pass;\nbegin\n"
        "  foreach v_a.x in array f(1 + 2) loop return 1; end loop;\nend $$;",
        "PS001: Unqualified operator: '+' in 1 + 2",
    ),
    "replacing": (
        "create or replace function public.x() returns int language sql as $$ select 1 $$;",
        "PS002: Unsafe function creation: public.x()",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_SQL)
def test_pgspot_looks_at_every_body(extension: None, wrong: str) -> None:
    script = extension_files()[1].read_text(encoding="utf-8")
    statement, finding = WRONG_SQL[wrong]
    before, after = lint_pgspot.findings(script), lint_pgspot.findings(f"{script}\n{statement}\n")
    assert {re.sub(" at line .*", "", line) for line in before} == set(lint_pgspot.ACCEPTED)
    assert finding in {re.sub(" at line .*", "", line) for line in after}, set(after) - set(before)


def test_pgspot_tells_what_it_cannot_parse(extension: None) -> None:
    script = extension_files()[1].read_text(encoding="utf-8")
    broken = script.replace("perform pg_catalog.pg_sleep(v_wait);", "perform pg_catalog.pg_sleep(v_wait, ));")
    assert broken != script
    assert any("cannot parse" in line for line in lint_pgspot.findings(broken))
