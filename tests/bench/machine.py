"""What the figures were measured on: machine, versions, settings."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import time
from importlib.metadata import version
from pathlib import Path

from tests.support.database import Connection
from tools.cluster import ROOT

__all__ = ["facts", "load_average"]


def facts(connection: Connection, data: Path) -> dict[str, dict[str, str]]:
    """Machine, versions and settings in words; `connection` is to a database with pg_queen."""
    return {"machine": _machine(data), "versions": _versions(connection), "settings": _settings(connection)}


def load_average() -> float:
    """Processes that ran or wanted to, on average over the last minute."""
    return os.getloadavg()[0]


def _machine(data: Path) -> dict[str, str]:
    return {
        "processor": _from("/proc/cpuinfo", r"^model name\s*: (.*)$") or platform.processor() or platform.machine(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": f"{int(_from('/proc/meminfo', r'^MemTotal: *([0-9]+) kB$') or 0) / 2**20:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release()}",
        "write and fdatasync of 8 KiB": f"{_sync_microseconds(data):.0f} µs (median)",
        "load average before": f"{load_average():.2f}",
    }


def _from(file: str, pattern: str) -> str | None:
    try:
        found = re.search(pattern, Path(file).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return None
    return found.group(1).strip() if found else None


def _sync_microseconds(directory: Path, times: int = 300) -> float:
    """What a commit waits for at least."""
    path = directory / "sync-probe"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.write(descriptor, bytes(8192))
        os.fsync(descriptor)
        took = []
        for _ in range(times):
            begin = time.perf_counter()
            os.pwrite(descriptor, bytes(8192), 0)
            os.fdatasync(descriptor)
            took.append(time.perf_counter() - begin)
        return statistics.median(took) * 1e6
    finally:
        os.close(descriptor)
        path.unlink()


def _versions(connection: Connection) -> dict[str, str]:
    connection.execute(
        "create function pg_temp.server_python() returns text language plpython3u as"
        " 'import sys, zstandard\n"
        'return "%d.%d.%d/%s" % (*sys.version_info[:3], zstandard.__version__)\''
    )
    row = connection.execute(
        "select current_setting('server_version'), pg_temp.server_python(),"
        " (select extversion from pg_extension where extname = 'pg_queen'),"
        " (select default_version from pg_available_extensions where name = 'pg_cron')"
    ).fetchone()
    assert row is not None
    python, zstandard = row[1].split("/")
    return {
        "pg_queen": f"{row[2]}{_commit()}",
        "PostgreSQL": row[0],
        "pg_cron": row[3],
        "Python in the server": python,
        "zstandard in the server": zstandard,
        "Python of the clients": platform.python_version(),
        "psycopg": version("psycopg"),
    }


def _commit() -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)
        return done.stdout.strip() if done.returncode == 0 else ""

    commit = git("rev-parse", "--short", "HEAD")
    changed = ", sql/ changed since" if commit and git("status", "--porcelain", "--", "sql") else ""
    return f" (commit {commit}{changed})" if commit else ""


def _settings(connection: Connection) -> dict[str, str]:
    """What the bench sets, and what decides about a commit whether set or not."""
    rows = connection.execute(
        "select name, current_setting(name) from pg_settings"
        " where (source = 'configuration file' and sourcefile like '%/pg_queen.conf')"
        " or name in ('synchronous_commit', 'autovacuum', 'wal_compression')"
        " order by name"
    )
    # Where things are, and what only concerns the log of the server.
    private = {
        "port",
        "unix_socket_directories",
        "listen_addresses",
        "cron.host",
        "cron.database_name",
        "log_line_prefix",
    }
    return {name: value for name, value in rows if name not in private}
