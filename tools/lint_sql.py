"""Rules of this project for sql/*.sql that no common linter knows, and ruff over the PL/Python bodies in them.

Also holds META.json to the version in the control file.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
MAX_LINES: Final = 300

# A line that needs one of the forbidden forms says why: `-- allowed: reason`.
FORBIDDEN: Final = {
    "or replace": re.compile(r"\bcreate\s+or\s+replace\b", re.IGNORECASE),
    "if not exists": re.compile(
        r"\b(table|index|sequence|schema|view|column|extension|type|role|concurrently)\s+if\s+not\s+exists\b",
        re.IGNORECASE,
    ),
}

KEYWORDS: Final = frozenset(
    """
    add all alter always and any array as asc begin between by cascade case check collate column comment commit
    conflict constraint create cross current default delete desc distinct do drop each else elsif end exception
    execute exists false for foreach from full function generated grant group having if immutable in index inner
    insert into is join key language lateral left limit loop not null of offset on only or order outer over
    parallel partition perform primary procedure raise recursive references replace return returning returns revoke
    right rollback row schema security select sequence set setof skip stable stored strict table then to trigger
    true truncate type union unique update using values view volatile when where while window with
    """.split()
)

TOKEN: Final = re.compile(
    r"""
      (?P<comment>--[^\n]*|/\*.*?\*/)
    | (?P<string>[eE]'(?:[^'\\]|\\.|'')*'|'(?:[^']|'')*')
    | (?P<identifier>"(?:[^"]|"")*")
    | (?P<dollar>(?P<tag>\$(?:[A-Za-z_]\w*)?\$)(?P<body>.*?)(?P=tag))
    | (?P<word>[A-Za-z_][\w$]*)
    | (?P<end>;)
    """,
    re.VERBOSE | re.DOTALL,
)

ROUTINE: Final = re.compile(r"\bcreate\s+(?:or\s+replace\s+)?(?:function|procedure)\s+([\w.\"]+)\s*\(", re.IGNORECASE)
PLPYTHON: Final = re.compile(r"\blanguage\s+plpython3u\b", re.IGNORECASE)
MODES: Final = frozenset({"in", "out", "inout", "variadic"})


@dataclass(frozen=True)
class PythonBody:
    """A function body in PL/Python: where it starts, how the function is called, what its parameters are."""

    path: Path
    line: int
    name: str
    parameters: list[str]
    text: str


def parameter_names(statement: str) -> tuple[str, list[str]]:
    """Name and parameter names of the routine that `statement` creates; a DO block has neither."""
    found = ROUTINE.search(statement)
    if found is None:
        return "do", []
    depth, parts, current = 1, [], ""
    for character in statement[found.end() :]:
        depth += (character == "(") - (character == ")")
        if depth == 0:
            break
        if character == "," and depth == 1:
            parts.append(current)
            current = ""
        else:
            current += character
    names = []
    for part in [*parts, current]:
        words = part.split()
        if len(words) > 1 and words[0].lower() in MODES:
            words = words[1:]
        if len(words) > 1:
            names.append(words[0].strip('"'))
    return re.sub(r"\W", "_", found.group(1)), names


def keyword_findings(text: str, line: int) -> Iterator[tuple[int, str]]:
    """Keywords in capitals in SQL or PL/pgSQL code, outside comments and strings. `line` is where `text` begins."""
    for token in TOKEN.finditer(text):
        at = line + text.count("\n", 0, token.start())
        word = token.group("word")
        if word is not None and word.isupper() and word.lower() in KEYWORDS:
            yield at, f"keyword {word} in capitals"
        elif token.group("body") is not None:
            yield from keyword_findings(token.group("body"), at)


def split_bodies(path: Path, text: str) -> tuple[str, list[PythonBody]]:
    """The text with its PL/Python bodies blanked out, and these bodies."""
    bodies = []
    kept = text
    statement_start = 0
    for token in TOKEN.finditer(text):
        if token.group("end") is not None:
            statement_start = token.end()
        elif token.group("body") is not None and PLPYTHON.search(text[statement_start : token.start()]):
            name, parameters = parameter_names(text[statement_start : token.start()])
            line = 1 + text.count("\n", 0, token.start("body"))
            bodies.append(PythonBody(path, line, name, parameters, token.group("body")))
            blank = re.sub(r"[^\n]", " ", token.group("body"))
            kept = kept[: token.start("body")] + blank + kept[token.end("body") :]
    return kept, bodies


def file_findings(path: Path, text: str) -> Iterator[tuple[int, str]]:
    """What is wrong with one file, its PL/Python bodies aside."""
    lines = text.split("\n")
    if not re.fullmatch(r"\d{3}_[a-z0-9_]+\.sql", path.name):
        yield 1, "the name is not of the form NNN_name.sql"
    if len(lines) - 1 > MAX_LINES:
        yield len(lines) - 1, f"more than {MAX_LINES} lines: two concerns"
    if not text.startswith("--"):
        yield 1, "no header that says what this piece is"
    if not text.endswith("\n"):
        yield len(lines), "no newline at the end"
    for number, line in enumerate(lines, 1):
        if "\t" in line or line != line.rstrip():
            yield number, "tab or trailing space"
        code = line.split("--")[0]
        for form, pattern in FORBIDDEN.items():
            if pattern.search(code) and "-- allowed:" not in line:
                yield number, f"`{form}` without `-- allowed: reason` on its line"
    yield from keyword_findings(split_bodies(path, text)[0], 1)


def lint_python(bodies: list[PythonBody]) -> bool:
    """Run ruff over the bodies, each made a function whose lines keep the numbers they have in the SQL file."""
    if not bodies:
        return True
    with tempfile.TemporaryDirectory() as folder:
        for body in bodies:
            header = f"def {body.name}({', '.join(body.parameters)}):"
            inner = "\n".join(f"    {line}" if line.strip() else "" for line in body.text.strip("\n").split("\n"))
            # The header takes the place of the line before the first one of code.
            leading = len(body.text) - len(body.text.lstrip("\n"))
            text = "\n" * (body.line + leading - 2) + header + "\n" + inner.rstrip() + "\n"
            (Path(folder) / f"{body.path.stem}.{body.name}.py").write_text(text, encoding="utf-8")
        done = subprocess.run(
            [
                *(sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--quiet"),
                *("--output-format", "concise", "--target-version", "py39", "--line-length", "124"),
                *("--select", "E,F,W,B,C4,PIE,RET,RUF,SIM,UP", "--ignore", "UP031"),
                *("--config", 'builtins = ["plpy", "SD", "GD", "TD", "args"]'),
                ".",
            ],
            cwd=folder,
            check=False,
        )
    return done.returncode == 0


def main() -> int:
    """Print every finding; 1 if there is any."""
    clean = True
    bodies: list[PythonBody] = []
    for path in sorted((ROOT / "sql").glob("*.sql")):
        text = path.read_text(encoding="utf-8")
        bodies += split_bodies(path, text)[1]
        for line, finding in sorted(file_findings(path, text)):
            print(f"{path.relative_to(ROOT)}:{line}: {finding}")
            clean = False
    clean = lint_python(bodies) and clean
    control = (ROOT / "extension" / "pg_queen.control").read_text(encoding="utf-8")
    version = re.findall(r"^default_version = '(.*)'", control, re.MULTILINE)
    meta = json.loads((ROOT / "extension" / "META.json").read_text(encoding="utf-8"))
    if [meta["version"]] != version or meta["provides"]["pg_queen"]["version"] != meta["version"]:
        print("extension/META.json: another version than extension/pg_queen.control")
        clean = False
    if clean:
        print(f"sql/ is clean, {len(bodies)} PL/Python bodies included")
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
