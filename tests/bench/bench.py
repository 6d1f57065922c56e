"""What workloads measure with: a server, databases, pgbench, the time a process was on a processor."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Final, TypeVar

from pg_queen import segment
from psycopg import sql

from tests.bench.figures import quantile
from tests.support.database import Database
from tests.support.servers import Server, install_extension
from tests.support.waiting import wait_for
from tools.cluster import pg_config

__all__ = ["PAYLOAD", "SETTINGS", "Bench", "Pgbench", "cpu_seconds", "lateness", "load_timers"]

T = TypeVar("T")

# Unlike the suite's servers, this one keeps its promises on a loss of power.
SETTINGS: Final[Mapping[str, str]] = {
    "fsync": "on",
    "full_page_writes": "on",
    "shared_buffers": "1GB",
    "max_wal_size": "8GB",
    "checkpoint_timeout": "15min",
    "log_lock_waits": "off",
    "cron.database_name": "cron",
}

# What due times in frames are counted from.
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)

# 150 bytes as the log stores them.
PAYLOAD: Final = (
    '{"order": 1748302, "customer": "c-88213", "amount": 129.5, "items": [3, 5, 8], "note": "'
    + "leave it at the neighbour if nobody opens the door".ljust(60, ".")
    + '"}'
)
assert len(PAYLOAD) == 150, len(PAYLOAD)


@dataclass(frozen=True)
class Pgbench:
    """What pgbench measured. Latencies in milliseconds."""

    rate: float
    transactions: int
    p50: float
    p99: float


class Bench:
    """The server of a run and what it was asked for."""

    def __init__(self, server: Server, *, quick: bool, say: Callable[[str], None]) -> None:
        self.server = server
        self.quick = quick
        self.say = say
        self._made = 0
        self._cron: Database | None = None
        self._connection = server.connect()
        self._connection.execute("create database template")
        with server.connect("template") as connection:
            install_extension(connection)

    def pick(self, full: T, quick: T) -> T:
        """The first, or in a quick run the second."""
        return quick if self.quick else full

    @contextlib.contextmanager
    def database(self, template: str = "template") -> Iterator[Database]:
        """A database of its own with pg_queen in it, copied from another one, dropped at the end.

        The copy goes through WAL, so its pages need no full images afterwards and are in memory.
        """
        self._made += 1
        name = f"bench_{self._made}"
        self._connection.execute(
            sql.SQL("create database {} template {} strategy wal_log").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )
        database = Database(self.server.cluster, name)
        try:
            yield database
        finally:
            database.close()
            self._connection.execute(sql.SQL("drop database {} with (force)").format(sql.Identifier(name)))

    def cron_database(self) -> Database:
        """The database of pg_cron, with the two workers of queen.start() at work."""
        if self._cron is None:
            with contextlib.closing(self.server.connect()) as connection:
                connection.execute("create database cron template template")
            self._cron = Database(self.server.cluster, "cron")
            self._cron.execute("create extension pg_cron")
            self._cron.execute("select queen.start()")
            # pg_cron 1.4 begins on the full minute. Jobs for the start of the server bridge that: here one for each
            # worker, where queen.start() makes do with one in all, so that two are at work from the first moment.
            self._cron.execute("select cron.unschedule('pg_queen boot')")
            for worker in range(2):
                self._cron.execute(
                    "select cron.schedule(%s, '@reboot', %s)", f"bench {worker}", f"CALL queen.sweep(null, {worker}, 2)"
                )
            self._connection.close()
            self._cron.close()
            self.server.cluster.restart()
            self._connection = self.server.connect()
            wait_for(lambda: len(self.sweepers()) == 2, 30, what="two workers of pg_cron")
            time.sleep(2)
        return self._cron

    def sweepers(self) -> list[int]:
        """The server processes of pg_cron's workers."""
        rows = self._connection.execute(
            "select pid from pg_stat_activity where query ilike 'call queen.sweep(%' and pid <> pg_backend_pid()"
            " and state = 'active'"
        )
        return [pid for (pid,) in rows]

    def checkpoint(self) -> None:
        """Have one now, so that none falls into what is measured next."""
        self._connection.execute("checkpoint")

    def wal_position(self) -> int:
        """Bytes of WAL written so far."""
        row = self._connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
        assert row is not None
        return int(row[0])

    @contextlib.contextmanager
    def pgbench(
        self,
        database: Database,
        script: str,
        *,
        clients: int,
        seconds: float,
        user: str = "alice_producer",
        rate: float | None = None,
        variables: Mapping[str, object] | None = None,
    ) -> Iterator[Callable[[], Pgbench]]:
        """pgbench at work on a script, one transaction a run of it, prepared; calling what this yields waits for it.

        The script has :client_id, and :n to count its own runs with.
        """
        with tempfile.TemporaryDirectory(prefix="pg_queen-bench-") as folder:
            file = Path(folder) / "script"
            file.write_text(script, encoding="utf-8")
            command = [str(pg_config("--bindir") / "pgbench"), "--no-vacuum", "--protocol=prepared"]
            command += [f"--client={clients}", f"--jobs={clients}", f"--time={max(round(seconds), 1)}"]
            command += ["--log", f"--log-prefix={folder}/log", f"--file={file}"]
            command += [f"--host={database.cluster.host}", f"--port={database.cluster.port}", f"--username={user}"]
            command += [f"--define={name}={value}" for name, value in {"n": 0, **(variables or {})}.items()]
            command += [f"--rate={rate}"] if rate is not None else []
            process = subprocess.Popen(
                [*command, database.name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )

            def finish() -> Pgbench:
                output, _ = process.communicate()
                return _read(output, process.returncode, Path(folder))

            try:
                yield finish
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()

    def run_pgbench(
        self,
        database: Database,
        script: str,
        *,
        clients: int,
        seconds: float,
        user: str = "alice_producer",
        variables: Mapping[str, object] | None = None,
    ) -> Pgbench:
        """pgbench from beginning to end, as fast as it goes."""
        with self.pgbench(database, script, clients=clients, seconds=seconds, user=user, variables=variables) as finish:
            return finish()

    def close(self) -> None:
        """Close the connections; the server is whoever made it's to stop."""
        if self._cron is not None:
            self._cron.close()
        self._connection.close()


def _read(output: str, code: int, folder: Path) -> Pgbench:
    rate = re.search(r"^tps = ([0-9.]+) ", output, re.MULTILINE)
    count = re.search(r"^number of transactions actually processed: ([0-9]+)", output, re.MULTILINE)
    failed = re.search(r"^number of failed transactions: ([0-9]+) ", output, re.MULTILINE)
    if code != 0 or rate is None or count is None or (failed is not None and failed.group(1) != "0"):
        raise RuntimeError(f"pgbench ended with {code}:\n{output}")
    milliseconds = []
    for log in folder.glob("log*"):
        for line in log.read_text(encoding="ascii").splitlines():
            # At a set rate the time counts from the planned moment, and the seventh field is how late it began.
            fields = [int(field) for field in line.split()]
            milliseconds.append((fields[2] - sum(fields[6:7])) / 1000)
    return Pgbench(float(rate.group(1)), int(count.group(1)), quantile(milliseconds, 0.5), quantile(milliseconds, 0.99))


def load_timers(database: Database, count: int, *, queues: int, due: str, batch: int = 10_000) -> None:
    """Schedule timers with the payload of the bench, keys k1 to k`count`, over queues q0 to q`queues - 1`, in batches.

    `due` is SQL over i, the number of the timer.
    """
    statement = sql.SQL(
        "select count(*) from (select array_agg('k' || i order by i) as keys, array_agg({payload}::jsonb) as payloads,"
        " array_agg({due} order by i) as dues from generate_series(%s::int, %s::int, {queues}) as i) a"
        " cross join lateral queen.schedule_many(%s, a.keys, a.payloads, deliver_ats => a.dues)"
    ).format(payload=PAYLOAD, due=sql.SQL(due), queues=queues)
    with contextlib.closing(database.connect("alice_producer")) as connection:
        for first in range(0, count, batch * queues):
            for queue in range(queues):
                low = first + (queue or queues)
                high = min(first + batch * queues, count)
                connection.execute(statement, [low, high, f"q{queue}"])
    database.execute("vacuum analyze queen.log_timers")
    assert database.value("select count(*) from queen.log_timers") == count


def lateness(database: Database, queue: str) -> list[float]:
    """Milliseconds from the due time to the append, of every timer of a queue, in the order of the log.

    The segments say both; they are read by a consumer group of their own.
    """
    late = []
    with contextlib.closing(database.connect("carl_consumer")) as connection:
        while slices := connection.execute(
            "select created_at, base_offset, from_offset, to_offset, segment"
            " from queen.pop_segments(%s, 'lateness', 100000, auto_ack => true)",
            [queue],
        ).fetchall():
            for created_at, base, first, last, blob in slices:
                stamp = (created_at - _EPOCH) / timedelta(microseconds=1)
                for frame in segment.decode(blob, base, first, last):
                    assert frame.deliver_at_us is not None
                    late.append((stamp - frame.deliver_at_us) / 1000)
    return late


def cpu_seconds(pids: Iterable[int]) -> dict[int, float]:
    """How long each process has been on a processor, user and system time; those that are gone are left out."""
    tick = os.sysconf("SC_CLK_TCK")
    seconds = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            seconds[pid] = (int(fields[11]) + int(fields[12])) / tick
    return seconds
