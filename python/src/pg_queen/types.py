"""Frozen dataclasses that mirror what the SQL functions return, and the types that arguments accept.

Each has the fields of its SQL type (or of the function's result columns) under the same names and in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any, Literal, TypeAlias
from uuid import UUID

from psycopg.types.json import Jsonb

__all__ = [
    "AckResult",
    "AckStatus",
    "Check",
    "DeadLetter",
    "Delay",
    "DroppedQueue",
    "Json",
    "Message",
    "PushResult",
    "PushStatus",
    "SegmentSlice",
    "Sent",
    "Status",
    "Timer",
    "TimerStatus",
    "TimerVerdict",
]

Json: TypeAlias = Mapping[str, Any] | Sequence[Any] | str | int | float | bool | Jsonb | None
"""A JSON payload as Python values; ``None`` is JSON null. A ``Jsonb`` is passed on with the dumps it has."""

Delay: TypeAlias = timedelta | int | float | Decimal | str
"""A length of time: a timedelta, a number of seconds, or an SQL interval such as ``'24 hours'``.

Timedeltas and numbers are elapsed time. In a string, days and months follow SQL's rules for intervals.
"""

TimerStatus: TypeAlias = Literal["scheduled", "rescheduled", "cancelled", "absent", "too_late"]
PushStatus: TypeAlias = Literal["queued", "duplicate"]
AckStatus: TypeAlias = Literal["acked", "nacked", "extended", "lease_lost", "absent"]


@dataclass(frozen=True, slots=True)
class TimerVerdict:
    """What became of a timer call: ``queen.timer_verdict``.

    ``ok`` is true for ``scheduled``, ``rescheduled`` and ``cancelled``. ``absent`` means no longer pending, perhaps
    delivered: ask :meth:`Queen.sent`. ``too_late`` means that a firer holds the timer at this moment.
    """

    ok: bool
    status: TimerStatus
    queue: str
    timer_key: str
    txn: str | None
    message_id: UUID | None
    deliver_at: datetime | None


@dataclass(frozen=True, slots=True)
class Timer:
    """A pending timer: ``queen.timer``.

    ``payload`` is the JSON payload, ``payload_bytes`` the one of :meth:`Queen.schedule_bytes`; a list carries neither.
    """

    tenant_id: UUID
    queue: str
    timer_key: str
    partition: str
    deliver_at: datetime
    txn: str
    message_id: UUID
    payload: Any
    payload_bytes: bytes | None
    encrypted: bool
    producer_sub: str | None
    attempts: int
    last_error: str | None
    claimed: bool
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True, slots=True)
class Message:
    """A delivered message: ``queen.message``.

    A message sent as bytes has ``payload_bytes``; any other has ``payload`` (``None`` is then a JSON null).
    ``lease_id`` goes back with ack, nack and extend, and is ``None`` under ``auto_ack``.
    """

    queue: str
    partition: str
    offset: int
    message_id: UUID
    txn: str
    payload: Any
    payload_bytes: bytes | None
    created_at: datetime
    producer_sub: str | None
    delivery_attempt: int
    lease_id: UUID | None


@dataclass(frozen=True, slots=True)
class SegmentSlice:
    """A compressed segment and the messages of it that were delivered: ``queen.segment_slice``.

    ``base_offset`` is the offset of the segment's first message; ``from_offset`` to ``to_offset`` is what to read.
    ``delivery_attempt`` counts for offsets up to ``attempted_to``, later ones are delivered for the first time.
    """

    queue: str
    partition: str
    from_offset: int
    to_offset: int
    base_offset: int
    created_at: datetime
    delivery_attempt: int
    attempted_to: int
    lease_id: UUID | None
    segment: bytes


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that a group gave up on, or a timer that could not be fired: ``queen.dead_letter``.

    For a timer ``consumer_group`` is ``__timer__`` and ``offset`` is None. A payload that cannot be read, because it is
    damaged or encrypted, is in ``payload_bytes`` as it was stored.
    """

    id: UUID
    queue: str
    partition: str
    consumer_group: str
    offset: int | None
    message_id: UUID
    txn: str
    payload: Any
    payload_bytes: bytes | None
    error: str | None
    attempts: int
    failed_at: datetime


@dataclass(frozen=True, slots=True)
class PushResult:
    """Where a pushed message is: ``queen.push_result``. A ``duplicate`` has the place of the first of its txn."""

    status: PushStatus
    partition: str
    offset: int
    message_id: UUID
    txn: str


@dataclass(frozen=True, slots=True)
class AckResult:
    """What became of an ack, nack or extend: ``queen.ack_result``.

    ``lease_lost``: the lease is not, or no longer, the one in force, and nothing changed. ``acked`` counts the messages
    newly acknowledged, ``committed`` is the last offset acknowledged by now.
    """

    ok: bool
    status: AckStatus
    acked: int
    committed: int | None


@dataclass(frozen=True, slots=True)
class Sent:
    """Where a message is in the log: a row of ``queen.sent``."""

    partition: str
    offset: int
    message_id: UUID
    created_at: datetime


@dataclass(frozen=True, slots=True)
class DroppedQueue:
    """What ``queen.drop_queue`` removed; ``existed`` is false when there was no such queue (it may have had timers)."""

    queue: str
    existed: bool
    timers: int
    partitions: int
    messages: int
    groups: int
    dead_letters: int


@dataclass(frozen=True, slots=True)
class Check:
    """One check of ``queen.doctor``: what was found and, when it is not ``ok``, the statement that mends it."""

    name: str
    ok: bool
    detail: str
    hint: str | None


@dataclass(frozen=True, slots=True)
class Status:
    """The state of the extension in this database: the row of ``queen.status``.

    ``pg_cron`` is its version, or what is wrong with it. ``due`` and ``dead_letters`` are counted up to 10,000.
    ``oldest_lateness`` is how long the oldest due timer has been waiting, zero when none is due.
    """

    version: str
    pg_cron: str
    jobs: int
    workers_alive: int
    last_pass_at: datetime | None
    fired: int
    due: int
    next_due_at: datetime | None
    oldest_lateness: timedelta
    busy_partitions: int
    paused_queues: int
    dead_letters: int
    schedule_enabled: bool
    fire_enabled: bool
