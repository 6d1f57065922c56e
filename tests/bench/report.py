"""What was measured, for the terminal, for a file of JSON, and for docs/benchmarks.md."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from tests.bench.figures import Figure, Result, Table

__all__ = ["Run", "print_run", "read_json", "write_docs", "write_json"]


@dataclass(frozen=True)
class Run:
    """One run of the bench."""

    date: str
    quick: bool
    facts: Mapping[str, Mapping[str, str]]
    results: Mapping[str, Result]
    seconds: Mapping[str, float]

    @property
    def figures(self) -> list[Figure]:
        """Those that are held to a target."""
        return [figure for result in self.results.values() for figure in result.figures if figure.target]


def write_json(run: Run, path: Path) -> None:
    """Everything, the samples too."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {
        "date": run.date,
        "quick": run.quick,
        **run.facts,
        "workloads": {
            name: {"seconds": round(run.seconds[name], 1), **result.as_json()} for name, result in run.results.items()
        },
    }
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> Run:
    """What write_json wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    return Run(
        data["date"],
        data["quick"],
        {name: data[name] for name in ("machine", "versions", "settings")},
        {name: Result.from_json(result) for name, result in data["workloads"].items()},
        {name: result["seconds"] for name, result in data["workloads"].items()},
    )


def print_run(run: Run, console: Console, titles: Mapping[str, str]) -> None:
    """Facts, a table a workload, and the targets."""
    facts = RichTable(box=box.SIMPLE, show_header=False, title=f"pg_queen, {run.date}", title_justify="left")
    for group in run.facts.values():
        for name, value in group.items():
            facts.add_row(name, value)
        facts.add_section()
    console.print(facts)
    for name, result in run.results.items():
        _print_table(console, f"{name}: {titles[name]}", result.table)
    if run.figures:
        targets = RichTable(box=box.SIMPLE, title="Targets", title_justify="left")
        for title in ("figure", "measured", "target", ""):
            targets.add_column(title, justify="right" if title == "measured" else "left")
        for figure in run.figures:
            verdict = "[green]holds[/]" if figure.holds else "[red]misses[/]"
            targets.add_row(figure.name, figure.shown, figure.target, verdict)
        console.print(targets)
    if run.quick:
        console.print("A quick run shows that everything works; its figures say nothing.")


def _print_table(console: Console, title: str, table: Table) -> None:
    shown = RichTable(box=box.SIMPLE, title=title, title_justify="left")
    for column in table.columns:
        shown.add_column(column.title, justify="left" if column.digits is None else "right")
    for row in table.text():
        shown.add_row(*row)
    console.print(shown)


def write_docs(run: Run, path: Path) -> list[str]:
    """Rewrite what stands between `<!-- bench:NAME -->` and `<!-- /bench:NAME -->`, for what was measured.

    The facts and the targets are written after a run of everything only: each table names its own date. Returns the
    names that were written. A name without a place in the document is an error.
    """
    text = path.read_text(encoding="utf-8")
    places = set(re.findall(r"^<!-- bench:([a-z]+) -->$", text, re.MULTILINE))
    blocks = {name: _caption(run) + _markdown(result.table) for name, result in run.results.items()}
    if places - {"facts", "targets"} == set(blocks):
        blocks["facts"] = _facts(run)
        blocks["targets"] = _targets(run)
    for name, block in blocks.items():
        if name not in places:
            raise ValueError(f"{path} has no place for {name}: <!-- bench:{name} -->")
        text, found = re.subn(
            rf"(?<=^<!-- bench:{name} -->\n).*?(?=^<!-- /bench:{name} -->$)",
            lambda _, block=block: block,  # type: ignore[misc]
            text,
            flags=re.MULTILINE | re.DOTALL,
        )
        if found != 1:
            raise ValueError(f"{path} has {found} places for {name}")
    path.write_text(text, encoding="utf-8")
    return list(blocks)


def _caption(run: Run) -> str:
    return f"Measured {run.date}, pg_queen {run.facts['versions']['pg_queen']}.\n\n"


def _markdown(table: Table) -> str:
    lines = [[column.title for column in table.columns]]
    lines.append(["---" if column.digits is None else "---:" for column in table.columns])
    lines += table.text()
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _facts(run: Run) -> str:
    rows = [(name, value) for group in run.facts.values() for name, value in group.items()]
    return f"Measured {run.date}.\n\n| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in rows)


def _targets(run: Run) -> str:
    rows = [
        f"| {figure.name} | {figure.shown} | {figure.target} | {'holds' if figure.holds else '**misses**'} |\n"
        for figure in run.figures
    ]
    return "| figure | measured | target | |\n|---|---:|---|---|\n" + "".join(rows)
