"""`make demo`: timers scheduled with SQL, fired inside PostgreSQL by pg_cron, popped from the log, each one checked."""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tools.cluster import Cluster, ClusterError, state_directory

Connection: TypeAlias = psycopg.Connection[tuple[Any, ...]]

SETTINGS: Final = {
    "shared_preload_libraries": "pg_cron",
    "cron.database_name": "postgres",
    "max_worker_processes": "20",
    "log_line_prefix": "%m [%p] %q%u@%d ",
}
QUEUES: Final = ("orders", "emails", "reports.daily", "Überweisungen")
PARTITIONS: Final = ("north", "east", "south", "west")
TIMERS: Final = 400
RESCHEDULED: Final = 60
CANCELLED: Final = 60
# Timers fall due in this span of seconds after their schedule, and so do the rescheduled ones after their reschedule.
# Some are changed in each of the first half seconds.
SPAN: Final = (1.5, 12.0)
CHANGES: Final = 6

console = Console(highlight=False)


class DemoError(Exception):
    """A function of pg_queen answered what it should not."""


@dataclass
class Timer:
    """What the session knows of a timer it scheduled."""

    queue: str
    key: str
    message_id: UUID
    deliver_at: datetime
    cancelled: bool = False
    rescheduled: bool = False
    deliveries: list[datetime] = field(default_factory=list)

    def lateness(self) -> float:
        """Milliseconds from the due time to the append to the log."""
        return (self.deliveries[0] - self.deliver_at) / timedelta(milliseconds=1)


def say(text: str) -> None:
    """Print a line of the story."""
    console.print(text, style="bold", markup=False, soft_wrap=True)


def show(connection: Connection, statement: str) -> None:
    """Run a statement, printing it as psql would show it, with its rows."""
    console.print(f"postgres=# {statement};", style="cyan", markup=False, soft_wrap=True)
    cursor = connection.execute(statement)
    if cursor.description is None:
        return
    lines = [[column.name for column in cursor.description]]
    lines += [["" if value is None else str(value) for value in row] for row in cursor]
    widths = [max(len(line[number]) for line in lines) for number in range(len(lines[0]))]
    for line in lines:
        padded = "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        console.print(padded.rstrip(), markup=False, soft_wrap=True)


def connect(cluster: Cluster, user: str = "postgres") -> Connection:
    """A connection in autocommit mode."""
    return psycopg.connect(cluster.conninfo("postgres", user), autocommit=True)


def start_server(cluster: Cluster) -> None:
    """Bring the demo's server up with this checkout's files in place; make it where there is none."""
    if not cluster.exists():
        say(f"Making a PostgreSQL {cluster.programs.major} cluster in {cluster.path}")
        cluster.create(SETTINGS)
    cluster.programs.install()
    cluster.start()


def remove_extension(connection: Connection) -> None:
    """Take pg_queen of an earlier run away: its jobs, then the sessions in which they run, then the extension."""
    if connection.execute("select from pg_extension where extname = 'pg_queen'").fetchone() is None:
        return
    connection.execute("select queen.stop()")
    deadline = time.monotonic() + 20
    while connection.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where pid <> pg_backend_pid() and query ilike 'call queen.%'"
    ).fetchall():
        if time.monotonic() > deadline:
            raise ClusterError("the workers of an earlier run do not end")
        time.sleep(0.05)
    connection.execute("drop extension pg_queen cascade")


def install(cluster: Cluster) -> None:
    """A fresh pg_queen in the demo's database."""
    with connect(cluster) as connection:
        remove_extension(connection)
        show(connection, "CREATE EXTENSION IF NOT EXISTS pg_cron")
        show(connection, "CREATE EXTENSION pg_queen CASCADE")
        show(connection, "SELECT queen.start()")
        if connection.execute("select from pg_roles where rolname = 'demo'").fetchone() is None:
            connection.execute("create role demo login")
        connection.execute("grant queen_producer, queen_consumer, queen_reader to demo")


def wait_for_workers(cluster: Cluster) -> None:
    """Wait until pg_cron runs the jobs; at the worst that is the next full minute."""
    with connect(cluster) as connection:
        deadline = time.monotonic() + 75
        while connection.execute("select workers_alive > 0 from queen.status()").fetchone() != (True,):
            if time.monotonic() > deadline:
                raise ClusterError(f"pg_cron started no worker; the end of {cluster.log}:\n{cluster.log_tail()}")
            time.sleep(0.05)


def prepare(cluster: Cluster) -> Cluster:
    """From whatever an earlier run left to a running server whose pg_queen is new and driven by pg_cron."""
    reused = cluster.exists()
    try:
        start_server(cluster)
        install(cluster)
    except (ClusterError, psycopg.Error) as error:
        if not reused:
            raise
        say(f"The cluster of an earlier run cannot be used ({str(error).splitlines()[0]}); making a new one")
        cluster.remove()
        cluster = Cluster(cluster.path)
        start_server(cluster)
        install(cluster)
    say("Restarting this server once: pg_cron 1.4 starts jobs on the full minute only, but @reboot jobs at once")
    cluster.restart()
    wait_for_workers(cluster)
    return cluster


def schedule(connection: Connection, dice: random.Random) -> dict[UUID, Timer]:
    """Schedule the timers: most in batches, one statement a queue, some alone."""
    timers = {}
    for queue in QUEUES:
        count = TIMERS // len(QUEUES)
        keys = [f"{queue}/{number}" for number in range(count)]
        delays = [timedelta(seconds=dice.uniform(*SPAN)) for _ in keys]
        payloads = [Jsonb({"queue": queue, "number": number}) for number in range(count)]
        partitions = [dice.choice(PARTITIONS) for _ in keys]
        alone = count // 5
        rows = connection.execute(
            "select timer_key, message_id, deliver_at, status"
            " from queen.schedule_many(%s, %s, %s, delays => %s, partitions => %s)",
            [queue, keys[alone:], payloads[alone:], delays[alone:], partitions[alone:]],
        ).fetchall()
        for key, payload, delay, partition in list(zip(keys, payloads, delays, partitions, strict=True))[:alone]:
            rows += connection.execute(
                "select timer_key, message_id, deliver_at, status"
                ' from queen.schedule(%s, %s, %s, delay => %s, "partition" => %s)',
                [queue, key, payload, delay, partition],
            ).fetchall()
        for key, message_id, deliver_at, status in rows:
            if status != "scheduled":
                raise DemoError(f"schedule answered {status} for a new key")
            timers[message_id] = Timer(queue, key, message_id, deliver_at)
    return timers


def change_some(
    connection: Connection, timers: Iterable[Timer], dice: random.Random, reschedule: int, cancel: int
) -> None:
    """Reschedule and cancel so many timers that are not due for a while."""
    now = connection.execute("select clock_timestamp()").fetchone()
    assert now is not None
    waiting = [
        timer
        for timer in timers
        if timer.deliver_at > now[0] + timedelta(seconds=1) and not timer.cancelled and not timer.rescheduled
    ]
    chosen = dice.sample(waiting, min(reschedule + cancel, len(waiting)))
    for timer in chosen[:reschedule]:
        delay = timedelta(seconds=dice.uniform(*SPAN))
        row = connection.execute(
            "select status, deliver_at from queen.reschedule(%s, %s, delay => %s)", [timer.queue, timer.key, delay]
        ).fetchone()
        # `absent`: it fired after all, before the statement came through; then it stands as it was scheduled.
        if row is not None and row[0] == "rescheduled":
            timer.rescheduled, timer.deliver_at = True, row[1]
    for timer in chosen[reschedule:]:
        row = connection.execute("select status from queen.cancel(%s, %s)", [timer.queue, timer.key]).fetchone()
        timer.cancelled = row == ("cancelled",)


def take(connection: Connection, queue: str) -> list[tuple[UUID, datetime]]:
    """Pop what has arrived on a queue and acknowledge it."""
    rows = connection.execute(
        'select "partition", lease_id, message_id, created_at from queen.pop(%s, max_messages => 200)', [queue]
    ).fetchall()
    for partition, lease_id in {(row[0], row[1]) for row in rows}:
        acked = connection.execute(
            "select status from queen.ack(%s, 'default', %s, %s)", [queue, partition, lease_id]
        ).fetchone()
        if acked != ("acked",):
            raise DemoError(f"ack answered {acked} for a lease just taken")
    return [(row[2], row[3]) for row in rows]


def play(connection: Connection, timers: dict[UUID, Timer], dice: random.Random) -> list[UUID]:
    """Pop and acknowledge until nothing can come any more, changing some timers meanwhile. Returns unknown messages."""
    unknown = []
    begun = time.monotonic()
    changes = 0
    done_since: float | None = None
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f} of {task.total:.0f} delivered, {task.fields[pending]} pending"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        line = progress.add_task("popping", total=len(timers), pending=len(timers))
        while True:
            passed = time.monotonic() - begun
            while changes < CHANGES and passed > 0.5 * (changes + 1):
                change_some(connection, timers.values(), dice, RESCHEDULED // CHANGES, CANCELLED // CHANGES)
                changes += 1
            arrived = [arrival for queue in QUEUES for arrival in take(connection, queue)]
            for message_id, created_at in arrived:
                if message_id in timers:
                    timers[message_id].deliveries.append(created_at)
                else:
                    unknown.append(message_id)
            expected = [timer for timer in timers.values() if not timer.cancelled]
            delivered = sum(bool(timer.deliveries) for timer in expected)
            progress.update(line, completed=delivered, total=len(expected), pending=len(expected) - delivered)
            # When all have come and the last cancelled one would have, two seconds more for those that must not come.
            # Long past the last time that a timer can be due, nothing is waited for any more.
            if delivered == len(expected) and changes == CHANGES and passed > SPAN[1]:
                done_since = done_since or passed
                if passed > done_since + 2:
                    return unknown
            if passed > SPAN[1] + CHANGES / 2 + SPAN[1] + 10:
                return unknown
            if not arrived:
                time.sleep(0.02)


def rank(values: list[float], share: int) -> str:
    """A percentile by nearest rank, as text."""
    return f"{values[math.ceil(len(values) * share / 100) - 1]:.1f}" if values else "-"


def report(timers: Iterable[Timer]) -> None:
    """Print the table."""
    table = Table("queue", title="lateness: created_at in the log minus deliver_at, in ms", title_justify="left")
    for heading in ("delivered", "rescheduled", "cancelled", "p50", "p99", "max"):
        table.add_column(heading, justify="right")
    everything = list(timers)
    for queue in (*QUEUES, None):
        part = [timer for timer in everything if queue in (timer.queue, None)]
        late = sorted(timer.lateness() for timer in part if timer.deliveries)
        if queue is None:
            table.add_section()
        table.add_row(
            queue or "all",
            str(len(late)),
            str(sum(timer.rescheduled for timer in part)),
            str(sum(timer.cancelled for timer in part)),
            rank(late, 50),
            rank(late, 99),
            rank(late, 100),
        )
    console.print(table)


def findings(timers: Iterable[Timer], unknown: list[UUID]) -> list[str]:
    """What is wrong, a line each."""
    wrong: Counter[str] = Counter()
    for timer in timers:
        kind = "rescheduled" if timer.rescheduled else "scheduled"
        if timer.cancelled:
            wrong["cancelled and yet delivered"] += bool(timer.deliveries)
        elif not timer.deliveries:
            wrong[f"{kind} and never delivered"] += 1
        else:
            wrong[f"{kind} and delivered more than once"] += len(timer.deliveries) > 1
            wrong[f"{kind} and delivered early"] += min(timer.deliveries) < timer.deliver_at
    wrong["delivered and never scheduled"] = len(unknown)
    return [f"{count} timers {what}" for what, count in wrong.items() if count]


def session(cluster: Cluster) -> bool:
    """The scripted session; whether all came as promised."""
    dice = random.Random()
    with connect(cluster, "demo") as connection:
        say(f"Scheduling {TIMERS} timers on {len(QUEUES)} queues as role demo, which is no superuser")
        timers = schedule(connection, dice)
        unknown = play(connection, timers, dice)
        console.print()
        report(timers.values())
    say("Who fired them: the jobs of pg_cron, and the sessions in which they run now")
    with connect(cluster) as connection:
        show(connection, "SELECT jobid, jobname, schedule, command, active FROM cron.job ORDER BY jobid")
        show(
            connection,
            "SELECT pid, application_name, backend_start::timestamptz(0), query FROM pg_stat_activity"
            " WHERE query ILIKE 'call queen.%'",
        )
        show(connection, "SELECT version, pg_cron, jobs, workers_alive, fired, due, dead_letters FROM queen.status()")
    console.print()
    wrong = findings(timers.values(), unknown)
    for line in wrong:
        console.print(f"WRONG: {line}", style="bold red", markup=False)
    if not wrong:
        say("Checked: nothing missing, nothing doubled, nothing early, no cancelled timer delivered.")
    return not wrong


def farewell(cluster: Cluster) -> None:
    """How to go on."""
    print()
    print("The server stays up. Reach it with")
    print(f"    psql -h {cluster.host} -p {cluster.port} -U postgres")
    print("and stop it with")
    print("    make down")


def up(cluster: Cluster) -> Cluster:
    """The server, with pg_queen as it was left or new, and its jobs."""
    start_server(cluster)
    with connect(cluster) as connection:
        if connection.execute("select from pg_extension where extname = 'pg_queen'").fetchone() is not None:
            connection.execute("select queen.start()")
            return cluster
    return prepare(cluster)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo", description=__doc__)
    parser.add_argument("--up", action="store_true", help="start the server with the extension, without the session")
    parser.add_argument("--cluster", default="demo", metavar="NAME", help="use another cluster than the demo's")
    arguments = parser.parse_args()
    try:
        cluster = Cluster(state_directory() / arguments.cluster)
        if arguments.up:
            cluster = up(cluster)
            good = True
        else:
            cluster = prepare(cluster)
            good = session(cluster)
    except (ClusterError, DemoError, psycopg.Error) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    farewell(cluster)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
