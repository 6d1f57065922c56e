"""The demo, run as a person would, twice; and its check, which must be able to fail."""

from __future__ import annotations

import secrets
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from uuid import uuid4

import psycopg
import pytest

from tools.cluster import ROOT, Cluster, state_directory
from tools.demo import Timer, findings, rank

DUE = datetime(2030, 1, 1, tzinfo=timezone.utc)
LATER = DUE + timedelta(milliseconds=5)


def timer(*deliveries: datetime, cancelled: bool = False, rescheduled: bool = False) -> Timer:
    return Timer("q", "k", uuid4(), DUE, cancelled, rescheduled, list(deliveries))


@pytest.mark.parametrize(
    ("seen", "unknown", "wrong"),
    [
        ([timer(LATER), timer(DUE), timer(LATER, rescheduled=True), timer(cancelled=True)], 0, []),
        ([timer(LATER), timer()], 0, ["1 timers scheduled and never delivered"]),
        ([timer(rescheduled=True)], 0, ["1 timers rescheduled and never delivered"]),
        ([timer(LATER, LATER)], 0, ["1 timers scheduled and delivered more than once"]),
        ([timer(DUE - timedelta(microseconds=1))], 0, ["1 timers scheduled and delivered early"]),
        ([timer(LATER, cancelled=True)], 0, ["1 timers cancelled and yet delivered"]),
        ([], 2, ["2 timers delivered and never scheduled"]),
    ],
)
def test_check(seen: list[Timer], unknown: int, wrong: list[str]) -> None:
    assert findings(seen, [uuid4() for _ in range(unknown)]) == wrong


def test_rank() -> None:
    values = [float(number) for number in range(1, 201)]
    assert [rank(values, share) for share in (50, 99, 100)] == ["100.0", "198.0", "200.0"]
    assert rank([7.0], 50) == "7.0"
    assert rank([], 50) == "-"


def test_demo_twice(extension: None) -> None:
    name = f"test-{secrets.token_hex(4)}"
    cluster = Cluster(state_directory() / name)
    cluster.tie_to_this_process()
    try:
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "tools.demo", "--cluster", name],
                cwd=ROOT,
                check=False,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout
            assert "Checked: nothing missing, nothing doubled, nothing early" in done.stdout
            # The way in that it names leads in.
            assert f"psql -h {cluster.host} -p {cluster.port} -U postgres" in done.stdout
            with psycopg.connect(cluster.conninfo("postgres")) as connection:
                fired = connection.execute("select fired from queen.status()").fetchone()
                assert fired is not None
                assert fired[0] > 0
    finally:
        cluster.remove()
