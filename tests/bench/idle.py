"""What a worker costs that has nothing to do."""

from __future__ import annotations

import time

from tests.bench.bench import Bench, cpu_seconds, load_timers
from tests.bench.figures import Column, Figure, Result, Table
from tests.support.sessions import Sweeper

__all__ = ["run"]


def run(bench: Bench) -> Result:
    """Two workers at the same time, one over an empty table, one over a million timers that are due in a year."""
    pending = bench.pick(1_000_000, 10_000)
    seconds = bench.pick(30.0, 2.0)
    with bench.database() as empty, bench.database() as full:
        bench.say(f"scheduling {pending:,} timers")
        load_timers(full, pending, queues=10, due="now() + interval '1 year' + i * interval '1 millisecond'")
        bench.checkpoint()
        sweepers = [Sweeper(empty), Sweeper(full)]
        try:
            time.sleep(bench.pick(3.0, 0.5))
            pids = [sweeper.pid for sweeper in sweepers]
            bench.say(f"doing nothing for {seconds:.0f} s")
            begin, before = time.perf_counter(), cpu_seconds(pids)
            time.sleep(seconds)
            took, after = time.perf_counter() - begin, cpu_seconds(pids)
            shares = [100 * (after[pid] - before[pid]) / took for pid in pids]
        finally:
            for sweeper in sweepers:
                sweeper.stop()
    bench.say(f"{shares[0]:.2f} and {shares[1]:.2f} % of a core")
    return Result(
        Table(
            [Column("pending timers", 0), Column("% of a core", 2)],
            [[0, shares[0]], [pending, shares[1]]],
        ),
        [
            Figure("an idle worker, nothing pending", shares[0], "% of a core", at_most=1),
            Figure(f"an idle worker, {pending:,} timers pending", shares[1], "% of a core", at_most=1),
        ],
        {"seconds": seconds},
    )
