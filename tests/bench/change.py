"""Cancel and reschedule, one a transaction."""

from __future__ import annotations

from typing import Final

from tests.bench.bench import Bench, load_timers
from tests.bench.figures import Cell, Column, Figure, Result, Table

__all__ = ["run"]

_CANCEL: Final = """\
\\set n :n + 1
\\set key :n * :clients + :client_id
select * from queen.cancel('q0', 'k' || :key);
"""
_RESCHEDULE: Final = """\
\\set key random(1, :timers)
\\set seconds random(3600, 36000)
select * from queen.reschedule('q0', 'k' || :key, make_interval(secs => :seconds));
"""


def run(bench: Bench) -> Result:
    """Each call with one client and with four, on a table of its own that holds 100,000 pending timers."""
    timers = bench.pick(100_000, 20_000)
    seconds = bench.pick(4, 1)
    rows: list[list[Cell]] = []
    figures = []
    with bench.database() as loaded:
        bench.say(f"scheduling {timers:,} timers")
        load_timers(loaded, timers, queues=1, due="now() + (1 + 9 * random()) * interval '1 hour'")
        loaded.close()
        for call, script in (("reschedule", _RESCHEDULE), ("cancel", _CANCEL)):
            for clients in (1, 4):
                bench.checkpoint()
                with bench.database(loaded.name) as database:
                    done = bench.run_pgbench(
                        database,
                        script,
                        clients=clients,
                        seconds=seconds,
                        variables={"timers": timers, "clients": clients},
                    )
                    left = database.value("select count(*) from queen.log_timers")
                    assert left == timers - (done.transactions if call == "cancel" else 0), (call, left, done)
                name = f"{call}, {clients} client{'s' if clients > 1 else ''}"
                rows.append([name, done.rate, done.p50, done.p99])
                bench.say(f"{name}: {done.rate:,.0f}/s")
                figures.append(Figure(name, done.rate, "calls/s"))
    return Result(
        Table([Column("call"), Column("calls/s", 0), Column("p50 ms", 2), Column("p99 ms", 2)], rows),
        figures,
        {"pending timers": timers},
    )
