"""A large backlog of stale segments goes at a constant rate, beside pushes to the same partitions."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.database import Database

PARTITIONS, SEGMENTS = 20, 200_000


@pytest.mark.slow
def test_two_hundred_thousand_segments(db: Database) -> None:
    db.execute("select queen.configure_queue('q', '{\"retention\": \"1 hour\"}')")
    db.execute("select queen.push('q', '1', 'p' || i) from generate_series(1, %s) i", PARTITIONS)
    each = SEGMENTS // PARTITIONS
    db.execute(
        "insert into queen.log_segments select s.partition_id, i, i, now() - interval '1 day', s.raw_bytes, s.blob"
        " from queen.log_segments s cross join generate_series(2, %s) i",
        each,
    )
    db.execute("update queen.log_segments set created_at = now() - interval '1 day'")
    db.execute("update queen.log_partitions set last_offset = %s, due_at = now()", each)
    stop = threading.Event()
    slowest, pushed = [0.0], [0]

    def push() -> None:
        with db.connect("alice_producer") as connection:
            while not stop.is_set():
                begun = time.monotonic()
                connection.execute("select queen.push('q', '1', 'p' || 1 + %s %% 20)", [pushed[0]])
                slowest[0] = max(slowest[0], time.monotonic() - begun)
                pushed[0] += 1
                time.sleep(0.005)

    pusher = threading.Thread(target=push)
    pusher.start()
    marks = [(time.monotonic(), SEGMENTS)]
    try:
        worker = threading.Thread(target=lambda: db.connect().execute("call queen.maintain('60 seconds')"))
        worker.start()
        stale = f"select {SEGMENTS} - sum(least(log_start - 1, {each}))::int from queen.log_partitions"
        while marks[-1][1] > 0 and time.monotonic() - marks[0][0] < 60:
            time.sleep(0.02)
            marks.append((time.monotonic(), db.value(stale)))
        worker.join()
    finally:
        stop.set()
        pusher.join()
    assert marks[-1][1] == 0

    def at(left: float) -> float:
        """When so many were left."""
        return next(moment for moment, count in marks if count <= left)

    first, last = at(0.75 * SEGMENTS) - marks[0][0], at(0) - at(0.25 * SEGMENTS)
    took = marks[-1][0] - marks[0][0]
    figures = f"{took:.1f} s, first quarter {first:.2f}, last {last:.2f} s, {pushed[0]} pushes"
    print(figures)
    assert last < 2.5 * first + 0.2, figures
    assert pushed[0] > 20, figures
    assert slowest[0] < 1, (slowest, figures)
    # Nothing but the stale ones: what was pushed meanwhile is there, and can be read.
    assert db.value("select count(*) from queen.log_segments") == pushed[0]
    assert db.value("select count(*) from queen.pop('q', 'g', 100000)") == pushed[0]
