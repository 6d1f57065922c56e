"""The benchmark measures what it says it does, and its document has a place for every table."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.__main__ import DOCS, WORKLOADS
from tests.bench.report import read_json, write_docs
from tools.cluster import ROOT

QUICK = ["drain", "schedule", "idle"]


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The figures of a quick run of some workloads."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    only = [argument for name in QUICK for argument in ("--only", name)]
    run = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--quick", *only, "--json", str(path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    for name in QUICK:
        assert re.search(rf"^ *{name}: ", run.stdout, re.MULTILINE), run.stdout
    assert "shared_buffers" in run.stdout
    return path


@pytest.mark.slow
def test_a_quick_run_has_its_figures(quick_run: Path) -> None:
    run = read_json(quick_run)
    assert run.quick
    assert list(run.results) == QUICK
    rates = json.loads(quick_run.read_text())
    assert rates["quick"] is True
    drain = run.results["drain"]
    assert [row[1] for row in drain.table.rows] == [1, 2, 1, 1, 2]
    for row in drain.table.rows:
        assert 500 < float(str(row[3])) < 2_000_000
    for figure in run.figures:
        # Ticks of the clock are 10 ms: two seconds of idling can be none.
        assert figure.value > 0 or "idle" in figure.name, figure.name


def test_the_document_has_a_place_for_every_table(quick_run: Path, tmp_path: Path) -> None:
    text = DOCS.read_text(encoding="utf-8")
    places = re.findall(r"^<!-- bench:([a-z]+) -->$", text, re.MULTILINE)
    assert sorted(places) == sorted([*WORKLOADS, "facts", "targets"])
    copy = tmp_path / "benchmarks.md"
    copy.write_text(text, encoding="utf-8")
    assert write_docs(read_json(quick_run), copy) == QUICK
    written = copy.read_text(encoding="utf-8")
    assert "row locks (the default)" in written
    assert re.findall(r"^<!-- /?bench:.*$", written, re.MULTILINE) == re.findall(
        r"^<!-- /?bench:.*$", text, re.MULTILINE
    )
