"""Measure pg_queen on a private server and print, keep and, when asked, document the figures.

make bench                                        everything
make bench BENCH_ARGS='--only drain --only log'   some workloads
make bench BENCH_ARGS=--write-docs                everything, and put it into docs/benchmarks.md
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Final

from rich.console import Console

from tests.bench import change, drain, fair, idle, log, lone, schedule, steady
from tests.bench.bench import SETTINGS, Bench
from tests.bench.figures import Result
from tests.bench.machine import facts
from tests.bench.report import Run, print_run, read_json, write_docs, write_json
from tests.support.servers import build_extension, running_server
from tools.cluster import ROOT

# In the order of a run: those under pg_cron come late, because its workers stay.
WORKLOADS: Final[dict[str, tuple[str, Callable[[Bench], Result]]]] = {
    "drain": ("200,000 due timers, 150 bytes of JSON, 10 queues", drain.run),
    "schedule": ("one a transaction and in batches", schedule.run),
    "change": ("reschedule and cancel, one a transaction", change.run),
    "log": ("push, pop and ack, 150 bytes of JSON, one partition", log.run),
    "idle": ("a worker with nothing due", idle.run),
    "lone": ("lateness of single timers under pg_cron", lone.run),
    "steady": ("lateness under a steady stream, two workers of pg_cron", steady.run),
    # Last, because gigabytes that it drops are written for a while yet.
    "fair": ("tenants in a backlog, all due at one instant", fair.run),
}
DOCS: Final = ROOT / "docs" / "benchmarks.md"


def main() -> int:
    """Run what the command line asks for."""
    arguments = _arguments()
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 160)
    titles = {name: title for name, (title, _) in WORKLOADS.items()}
    if arguments.read is not None:
        run = read_json(arguments.read)
    else:
        run = _measure([name for name in WORKLOADS if name in (arguments.only or WORKLOADS)], arguments.quick, console)
        path = arguments.json or ROOT / ".local" / "bench" / f"{run.date.replace(':', '').replace(' ', '-')}.json"
        write_json(run, path)
    print_run(run, console, titles)
    if arguments.read is None:
        console.print(f"{sum(run.seconds.values()):.0f} s in all. Figures and samples are in {path}")
    if arguments.write_docs:
        console.print(f"Wrote {', '.join(write_docs(run, DOCS))} into {DOCS}")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench BENCH_ARGS=...", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=list(WORKLOADS),
        metavar="NAME",
        help=f"of {', '.join(WORKLOADS)}; repeatable",
    )
    parser.add_argument("--quick", action="store_true", help="a short form of each, to see that it works")
    parser.add_argument("--json", type=Path, help="where to write; by default .local/bench/DATE.json")
    parser.add_argument("--read", type=Path, help="show, and with --write-docs document, an earlier run from its file")
    parser.add_argument("--write-docs", action="store_true", help="put the tables into docs/benchmarks.md")
    arguments = parser.parse_args()
    if arguments.write_docs and arguments.quick:
        parser.error("figures of a quick run are no documentation")
    return arguments


def _measure(names: list[str], quick: bool, console: Console) -> Run:
    """Start a server and run the workloads."""
    begin = time.perf_counter()
    current = ""

    def say(text: str) -> None:
        console.print(f"[dim]{time.perf_counter() - begin:4.0f} s[/]  {current:<9}{text}", highlight=False)

    results: dict[str, Result] = {}
    seconds: dict[str, float] = {}
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    build_extension()
    with running_server(SETTINGS, collation=None) as server:
        bench = Bench(server, quick=quick, say=say)
        with contextlib.closing(bench):
            with contextlib.closing(server.connect("template")) as connection:
                known = facts(connection, server.cluster.path)
            for current in names:
                started = time.perf_counter()
                results[current] = WORKLOADS[current][1](bench)
                seconds[current] = time.perf_counter() - started
    return Run(date, quick, known, results, seconds)


if __name__ == "__main__":
    sys.exit(main())
