"""One chaos run: a server under load by processes that call it, faults from a seed, and what was there at the end."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.support.database import Database
from tests.support.servers import pg_cron_database
from tests.support.waiting import wait_for
from tools.cluster import ROOT

from .client import QUEUES, Recorder
from .ending import drain, take_stock
from .faults import CRASHES, FAULTS, Stage
from .history import read
from .run import Run

__all__ = ["Report", "chaos"]

_MARGIN = 2.5
"""Steps of the time function are up to a second, and a commit can come a while after its time."""


@dataclass
class Report:
    """A run and what was done to it."""

    seed: int
    run: Run
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    """Seconds from the server taking connections after a crash to the first timer that fired."""


class _Clients:
    """The processes that call; one that was killed is followed by another with a number of its own."""

    def __init__(self, database: Database, dice: random.Random, folder: Path, many: int) -> None:
        self._conninfo = database.conninfo("chaos_client")
        self._dice = dice
        self._folder = folder
        self._next = 1
        self._running: list[subprocess.Popen[bytes]] = []
        for _ in range(many):
            self._start()

    def _start(self) -> None:
        arguments = [self._conninfo, str(self._next), str(self._dice.randrange(2**31)), str(self._folder), "100000"]
        self._next += 1
        self._running.append(subprocess.Popen([sys.executable, "-m", "tests.chaos.client", *arguments], cwd=ROOT))

    def kill_one(self) -> None:
        """SIGKILL of one in whatever it does, and another in its place."""
        client = self._running.pop(self._dice.randrange(len(self._running)))
        client.kill()
        client.wait()
        self._start()

    def stop(self) -> None:
        """End them all, and say if one had ended by itself."""
        ended = [client.args for client in self._running if client.poll() is not None]
        for client in self._running:
            client.kill()
            client.wait()
        assert not ended, f"clients ended by themselves: {ended}"


@contextlib.contextmanager
def _served(many_connections: int) -> Iterator[Database]:
    settings = {"max_connections": str(many_connections), "full_page_writes": "on", "restart_after_crash": "on"}
    with pg_cron_database(settings) as database:
        database.execute("create role chaos_client login in role queen_producer, queen_consumer")
        for tenant in list(QUEUES)[1:]:
            database.execute(
                "select queen.create_tenant(%s::uuid), queen.grant_tenant(%s::uuid, 'chaos_client')", tenant, tenant
            )
        for tenant, queues in QUEUES.items():
            # So that letters come about: a batch that is refused again and again loses its head.
            options = '{"delivery_max_attempts": 2}'
            database.execute("select queen.configure_queue(%s, %s, %s::uuid)", queues[0], options, tenant)
        database.execute("select queen.start(2)")
        database.restart()
        yield database


def _first_fired(run: Run, since: float) -> float | None:
    """Seconds from then to the first timer that came into the log."""
    later = [m.created_at - since for m in run.final.log if m.due is not None and m.created_at >= since]
    return min(later, default=None)


def chaos(
    seed: int,
    seconds: float,
    *,
    clients: int = 4,
    every: float = 2.0,
    kinds: list[str] | None = None,
    say: Callable[[str], None] = print,
) -> Report:
    """Load for so long, with a fault about every so many seconds; the same seed makes the same faults."""
    dice = random.Random(seed)
    names = kinds or [name for name in FAULTS if name != "disk full"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, _served(clients + 30) as database:
        folder = Path(name)
        # Its clients start after every server fault of the setup, and their numbers begin at 1; 0 drains at the end.
        callers = _Clients(database, random.Random(dice.randrange(2**31)), folder, clients)
        stage = Stage(database, dice, callers.kill_one)
        done: Counter[str] = Counter()
        begin = time.monotonic()
        try:
            while time.monotonic() < begin + seconds:
                time.sleep(dice.uniform(0.5, 1.5) * every)
                fault = dice.choice(names)
                say(f"{time.monotonic() - begin:7.1f} s  {fault}")
                # A fault may meet another's effect: a server that has no connection left, or is recovering.
                for attempt in range(20):
                    try:
                        FAULTS[fault](stage)
                        done[fault] += 1
                        break
                    except psycopg.Error as error:
                        if attempt == 19:
                            raise
                        say(f"           not yet: {str(error).splitlines()[0]}")
                        time.sleep(0.5)
        finally:
            callers.stop()
        database.restart()
        say("the load has ended; draining")
        recorder = Recorder(database.conninfo("chaos_client"), 0, folder)
        wait_for(lambda: database.value("select workers_alive from queen.status()") >= 1, 90, what="a worker is alive")
        drain(database, recorder)
        final = take_stock(database)
        run = Run(read(sorted(folder.glob("*.jsonl"))), final, _MARGIN)
        recovered = [_first_fired(run, at) for at in stage.accepting]
        return Report(seed, run, done, [seconds for seconds in recovered if seconds is not None])


assert set(CRASHES) <= set(FAULTS)
