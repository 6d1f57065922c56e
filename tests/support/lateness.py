"""Timers by the thousand, what became of them in the log, and how late that was.

A test prepares its database once and then compares what it scheduled with what the log holds:

    ledger = Ledger(db)
    ledger.schedule("q", 5000, due="now() + i * interval '1 ms'", partition="'p' || i % 4")
    ...
    ledger.check()                              # each once, none early, offsets without gaps, in order
    percentile(ledger.lateness(), 99)           # in milliseconds, from the due time to the append
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from psycopg import sql

from tests.support.database import Database
from tests.support.waiting import wait_for

__all__ = ["Ledger", "percentile", "report"]

_BATCH: Final = 10_000

# A reader of its own (docs/format.md), so that what the log holds is not judged by the code under test.
_DECODE: Final = """
import struct
import zstandard
raw = zstandard.ZstdDecompressor().decompress(p_blob[12:])
at, offset = 0, p_base
while at < len(raw):
    (size,) = struct.unpack_from(">I", raw, at)
    frame, at = raw[at + 4 : at + 4 + size], at + 4 + size
    message_id, p = frame[1:17].hex(), 17
    names = []
    for _ in range(2):
        (n,) = struct.unpack_from(">H", frame, p)
        names.append(frame[p + 2 : p + 2 + n].decode() if n else None)
        p += 2 + n
    due = None
    if frame[0] & 2:
        (due,) = struct.unpack_from(">q", frame, p)
        p += 8
    if names[0] is None:
        names[0] = "-".join((message_id[:8], message_id[8:12], message_id[12:16], message_id[16:20], message_id[20:]))
    yield (offset, message_id, names[0], names[1], due, frame[p:])
    offset += 1
"""


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of a hundred do not exceed."""
    assert values, "no values"
    return sorted(values)[max(math.ceil(len(values) * percent / 100), 1) - 1]


def report(name: str, values: Sequence[float]) -> str:
    """One line of figures; printed too, for `pytest -rP` or `-s`."""
    line = (
        f"{name}: n {len(values)}, p50 {percentile(values, 50):.1f}, p99 {percentile(values, 99):.1f},"
        f" max {max(values):.1f} ms"
    )
    print(line)
    return line


class Ledger:
    """What a test scheduled (table public.wanted), beside what the log holds (view public.delivered)."""

    def __init__(self, database: Database) -> None:
        self._database = database
        database.execute(
            'create table public.wanted (queue text collate "C", timer_key text collate "C", message_id uuid, txn text,'
            " deliver_at timestamptz)"
        )
        database.execute(
            'create function public.decode_segment(p_blob bytea, p_base bigint) returns table ("offset" bigint,'
            " message_id uuid, txn text, producer_sub text, due_us bigint, payload bytea)"
            f" language plpython3u as $${_DECODE}$$"
        )
        # Frames carry the due time in microseconds since 2000, as timestamptz_send writes it.
        database.execute(
            """
            create view public.delivered as
            select q.tenant_id, q.name as queue, p.name as part, m."offset", m.message_id, m.txn, m.producer_sub,
                   timestamptz '2000-01-01 00:00:00Z' + m.due_us * interval '1 microsecond' as deliver_at,
                   s.created_at, m.payload
              from queen.log_segments s
              join queen.log_partitions p on p.id = s.partition_id
              join queen.queues q on q.id = p.queue_id
             cross join lateral public.decode_segment(s.blob, s.base_offset) m
            """
        )

    def schedule(
        self,
        queue: str,
        count: int,
        *,
        key: str = "'k' || lpad(i::text, 7, '0')",
        due: str = "now() - interval '1 minute'",
        partition: str = "'Default'",
        payload: str = "to_jsonb(i)",
    ) -> None:
        """Schedule timers 1 to `count` in one transaction; key, due, partition and payload are SQL over `i`."""
        with self._database.superuser.transaction():
            for first in range(1, count + 1, _BATCH):
                statement = sql.SQL(
                    """
                    insert into public.wanted
                    select s.queue, s.timer_key, s.message_id, s.txn, s.deliver_at
                      from (select array_agg(({key})::text order by i) as keys,
                                   array_agg({payload} order by i) as payloads,
                                   array_agg(({due})::timestamptz order by i) as dues,
                                   array_agg(({partition})::text order by i) as parts
                              from generate_series({first}, {last}) as i) a
                     cross join lateral queen.schedule_many({queue}, a.keys, a.payloads, deliver_ats => a.dues,
                                                            partitions => a.parts) s
                    """
                ).format(
                    key=sql.SQL(key),
                    payload=sql.SQL(payload),
                    due=sql.SQL(due),
                    partition=sql.SQL(partition),
                    first=first,
                    last=min(first + _BATCH - 1, count),
                    queue=queue,
                )
                self._database.superuser.execute(statement)

    def pending(self, where: str = "true") -> int:
        """How many timers wait."""
        count: int = self._database.value(f"select count(*) from queen.log_timers where {where}")
        return count

    def delivered(self) -> int:
        """How many messages the log holds."""
        count: int = self._database.value(
            "select coalesce(sum(end_offset - base_offset + 1), 0) from queen.log_segments"
        )
        return count

    def wait_until_empty(self, timeout: float = 30.0, where: str = "true") -> None:
        """Wait until no timer is pending."""
        wait_for(lambda: self.pending(where) == 0, timeout, what=f"no timer pending where {where}")

    def check(self, *, missing: int = 0, in_order: bool = True) -> None:
        """Hold the log to what was scheduled.

        Every timer is there once under its message id and txn (but `missing` of them, which must not be there at all),
        nothing else is, none before its due time, offsets of a partition run from 1 without a gap, and by offset
        created_at never goes back and, with in_order, due times and keys go up.
        """
        db = self._database
        db.execute("drop table if exists entries")
        db.execute("create temporary table entries as select * from delivered")
        db.execute("create index on entries (message_id)")
        db.execute("analyze entries, wanted")
        assert db.rows("select message_id, count(*) from entries group by 1 having count(*) > 1 limit 5") == [], "twice"
        lost = "from wanted w where not exists (select from entries d where d.message_id = w.message_id)"
        assert db.value(f"select count(*) {lost}") == missing, db.rows(f"select queue, timer_key {lost} limit 5")
        for what, query in (
            ("unknown", "where not exists (select from wanted w where w.message_id = d.message_id)"),
            ("altered", "join wanted w on w.message_id = d.message_id where (w.queue, w.txn) <> (d.queue, d.txn)"),
            ("early", "where d.created_at < d.deliver_at"),
        ):
            assert db.rows(f"select d.* from entries d {query} limit 5") == [], what
        gaps = 'having min("offset") <> 1 or max("offset") <> count(*) limit 5'
        assert db.rows(f"select queue, part from entries group by 1, 2 {gaps}") == [], "gaps"
        steps = (
            'select d.queue, d.part, d."offset" from (select d.*, w.timer_key,'
            " lag(d.created_at) over o as created_before,"
            " lag(d.deliver_at) over o as due_before, lag(w.timer_key) over o as key_before"
            " from entries d join wanted w on w.message_id = d.message_id"
            ' window o as (partition by d.queue, d.part order by d."offset")) d where {} limit 5'
        )
        assert db.rows(steps.format("d.created_at < d.created_before")) == [], "created_at goes back"
        if in_order:
            assert db.rows(steps.format("(d.deliver_at, d.timer_key) < (d.due_before, d.key_before)")) == [], "order"

    def lateness(self, where: str = "true") -> list[float]:
        """Milliseconds from due time to append, in order of the due time; `where` is SQL over public.delivered."""
        return [
            float(late)
            for (late,) in self._database.rows(
                "select extract(epoch from created_at - deliver_at) * 1000 from delivered"
                f" where {where} order by deliver_at"
            )
        ]
