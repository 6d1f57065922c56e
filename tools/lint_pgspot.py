"""pgspot over the built script: names and operators that somebody's search_path could redirect.

pgspot 0.9 stops at three things of ours. It does not know SQL-standard bodies: those are parsed when the script runs,
so they are checked as statements of the script. Its parser takes a variable of a composite type for a scalar, and it
hands over some expressions of PL/pgSQL without a SELECT. Each is worked around here, so that every body is looked at;
what cannot be parsed is a finding.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from pglast import parse_plpgsql
from pglast.parser import ParseError
from pgspot import visitors
from pgspot.state import Counter, State

ROOT: Final = Path(__file__).resolve().parent.parent

# A finding that is none, up to its line number, and why.
ACCEPTED: Final = {
    "PS005: Function without explicit search_path: queen.sweep(run_for interval,worker integer,workers integer)": (
        "commits between passes, which a procedure with SET cannot; its names are qualified, and it has no operator"
    ),
    "PS005: Function without explicit search_path: queen.maintain(run_for interval)": "as queen.sweep",
}


def parse_body(text: str) -> Any:
    """A PL/pgSQL function parsed, its composite types replaced by such as the parser knows."""
    text = re.sub(r"\bqueen\.\w+\[\]", "text[]", text)
    return parse_plpgsql(re.sub(r"(\n\s*v_\w+) queen\.\w+;", r"\1 record;", text))


class Script(visitors.SQLVisitor):  # type: ignore[misc]
    """pgspot's visitor, which also takes SQL-standard bodies."""

    def visit_CreateFunctionStmt(self, ancestors: Any, node: Any) -> Any:  # noqa: N802
        """Checks a routine; the statements of a standard body are visited as its children."""
        if node.sql_body is None:
            return super().visit_CreateFunctionStmt(ancestors, node)
        if any(option.defname == "security" and option.arg.boolval for option in node.options or ()):
            self.state.error("PS003", visitors.format_function(node))
        return None


def findings(script: str) -> list[str]:
    """What pgspot says of a script, a line each."""
    counter = Counter(
        SimpleNamespace(
            ignore=[],
            # Python has no search_path; what it sends to the server through plpy is SQL of the same rules.
            ignore_lang=["plpython3u"],
            plpgsql=True,
            proc_without_search_path=[],
            summary_only=False,
            sql_fn=[],
            sql_accepting=[],
        )
    )
    plain = visitors.visit_sql

    def visit(state: State, text: str, toplevel: bool = False) -> None:
        try:
            plain(state, text, toplevel)
        except ParseError as error:
            with contextlib.suppress(ParseError):
                if not toplevel:
                    plain(state, f"select {text}")
                    return
            state.unknown(f"cannot parse{'' if toplevel else f' {text!r}'}: {error}")

    patched = {"visit_sql": visit, "parse_plpgsql": parse_body, "SQLVisitor": Script}
    before = {name: getattr(visitors, name) for name in patched}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        try:
            for name, value in patched.items():
                setattr(visitors, name, value)
            visit(State(counter), script, toplevel=True)
        finally:
            for name, value in before.items():
                setattr(visitors, name, value)
    return printed.getvalue().splitlines()


def main() -> int:
    """Print every finding that is not accepted and every acceptance that is not needed; 1 if there is any."""
    script = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "sql").glob("*.sql")))
    found = findings(script)
    heads = {re.sub(r" at line \d+$", "", line) for line in found}
    wrong = [line for line in found if re.sub(r" at line \d+$", "", line) not in ACCEPTED]
    wrong += [f"no longer found, so no exception: {line}" for line in ACCEPTED if line not in heads]
    print("\n".join(wrong) or f"pgspot finds nothing, {len(ACCEPTED)} exceptions aside")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
