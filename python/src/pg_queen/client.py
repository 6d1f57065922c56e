"""The synchronous client: one method a function of the schema ``queen``."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg.adapt import Transformer
from psycopg.pq import Format
from psycopg.rows import RowFactory, args_row, dict_row, tuple_row
from psycopg.types.json import Jsonb

from . import _core, segment
from .errors import KeyUnusable, SegmentDamaged
from .types import (
    AckResult,
    Check,
    DeadLetter,
    Delay,
    DroppedQueue,
    Json,
    Message,
    PushResult,
    SegmentSlice,
    Sent,
    Status,
    Timer,
    TimerVerdict,
)

__all__ = ["Queen"]

_R = TypeVar("_R")
_Result = TimerVerdict | PushResult | AckResult


class Queen:
    """Calls pg_queen on a connection of yours.

    Every call is one statement in the connection's current transaction. Nothing is committed or rolled back here: with
    ``autocommit`` off, a timer is scheduled, a message pushed or acknowledged, when you commit.

    Everywhere: names (queue, timer key, partition, txn, consumer group) are 1 to 255 bytes of text without control
    characters, timer keys up to 512; ``tenant`` is None for the default tenant. Raises :class:`InvalidArgument` for
    what the server or this class refuses, :class:`NotPermitted` with the role to grant, :class:`NotInstalled`, and
    :class:`TenantDenied`; any other database error is psycopg's own. JSON is read and written as the connection is set
    up to (``psycopg.types.json.set_json_loads`` with ``parse_float=Decimal`` keeps every digit of a number).
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection = connection

    @property
    def connection(self) -> psycopg.Connection[Any]:
        """The connection that the calls go to."""
        return self._connection

    # -- timers ---------------------------------------------------------------------------------------------------

    def schedule(
        self,
        queue: str,
        timer_key: str,
        payload: Json | bytes,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        partition: str = "Default",
        txn: str | None = None,
        tenant: UUID | str | None = None,
    ) -> TimerVerdict:
        """Schedule a timer, or replace the pending one of this key: ``queen.schedule``.

        Exactly one of ``delay`` (from the server's clock at this statement; numbers are seconds) and ``deliver_at`` (an
        aware datetime); a time in the past is due at once. ``payload`` is sent as JSON, bytes by
        :meth:`schedule_bytes`. ``txn`` defaults to the message id. The status is ``scheduled``, ``rescheduled`` when it
        replaced one, or ``too_late`` when a firer holds the key.
        """
        function = "schedule_bytes" if isinstance(payload, (bytes, bytearray, memoryview)) else "schedule"
        return self._row(
            TimerVerdict,
            function,
            queue=queue,
            timer_key=timer_key,
            payload=payload,
            delay=delay,
            deliver_at=deliver_at,
            partition=partition,
            txn=txn,
            tenant=tenant,
        )

    def schedule_bytes(
        self,
        queue: str,
        timer_key: str,
        payload: bytes,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        partition: str = "Default",
        txn: str | None = None,
        tenant: UUID | str | None = None,
    ) -> TimerVerdict:
        """:meth:`schedule` for a payload of bytes, which pop returns in ``payload_bytes``: ``queen.schedule_bytes``."""
        return self._row(
            TimerVerdict,
            "schedule_bytes",
            queue=queue,
            timer_key=timer_key,
            payload=payload,
            delay=delay,
            deliver_at=deliver_at,
            partition=partition,
            txn=txn,
            tenant=tenant,
        )

    def schedule_many(
        self,
        queue: str,
        timer_keys: Sequence[str],
        payloads: Sequence[Json],
        delays: Sequence[Delay] | None = None,
        deliver_ats: Sequence[datetime] | None = None,
        partitions: Sequence[str] | None = None,
        txns: Sequence[str | None] | None = None,
        tenant: UUID | str | None = None,
    ) -> list[TimerVerdict]:
        """Schedule many timers of one queue in one statement: ``queen.schedule_many``.

        The lists are aligned, and so are the verdicts. Exactly one of ``delays`` and ``deliver_ats``, with values as
        in :meth:`schedule`; payloads are JSON. All or nothing; a key twice in one call is refused.
        """
        return self._rows(
            TimerVerdict,
            "schedule_many",
            queue=queue,
            timer_keys=timer_keys,
            payloads=payloads,
            delays=delays,
            deliver_ats=deliver_ats,
            partitions=partitions,
            txns=txns,
            tenant=tenant,
        )

    def reschedule(
        self,
        queue: str,
        timer_key: str,
        delay: Delay | None = None,
        deliver_at: datetime | None = None,
        tenant: UUID | str | None = None,
    ) -> TimerVerdict:
        """Move a pending timer in time, keeping its payload and ids: ``queen.reschedule``.

        Exactly one of ``delay`` and ``deliver_at``, as in :meth:`schedule`. The status is ``rescheduled``, ``absent``
        or ``too_late``.
        """
        return self._row(
            TimerVerdict,
            "reschedule",
            queue=queue,
            timer_key=timer_key,
            delay=delay,
            deliver_at=deliver_at,
            tenant=tenant,
        )

    def cancel(self, queue: str, timer_key: str, tenant: UUID | str | None = None) -> TimerVerdict:
        """Cancel a pending timer: ``queen.cancel``.

        The status is ``cancelled``, ``absent`` (no longer pending, perhaps delivered: :meth:`sent` knows) or
        ``too_late`` (a firer holds it now).
        """
        return self._row(TimerVerdict, "cancel", queue=queue, timer_key=timer_key, tenant=tenant)

    def apply(self, ops: Sequence[Mapping[str, Any]], tenant: UUID | str | None = None) -> list[TimerVerdict]:
        """Schedule, reschedule and cancel in one call: ``queen.apply``.

        Each operation is ``{"op": "schedule" | "reschedule" | "cancel", "queue", "timer_key", "partition"?,
        "delay_ms"?, "txn"?, "payload"?}``; ``delay_ms`` is in milliseconds from now. Validated whole before the first
        write, all or nothing, each key of a queue at most once; the verdicts are aligned with ``ops``.
        """
        return self._rows(TimerVerdict, "apply", ops=ops, tenant=tenant)

    def peek(self, queue: str, timer_key: str, tenant: UUID | str | None = None) -> Timer | None:
        """A pending timer with its payload, or None: ``queen.peek``."""
        rows = self._rows(Timer, "peek", queue=queue, timer_key=timer_key, tenant=tenant)
        return rows[0] if rows else None

    def list_timers(
        self, queue: str, after: str | None = None, max_rows: int = 100, tenant: UUID | str | None = None
    ) -> list[Timer]:
        """One page of a queue's pending timers: ``queen.list_timers``.

        In byte order of the key, behind ``after``, without payloads. :meth:`iter_timers` goes through all pages.
        """
        return self._rows(Timer, "list_timers", queue=queue, after=after, max_rows=max_rows, tenant=tenant)

    def iter_timers(
        self, queue: str, after: str | None = None, page_size: int = 1000, tenant: UUID | str | None = None
    ) -> Iterator[Timer]:
        """All pending timers of a queue, read in pages by ``queen.list_timers`` as the iterator is consumed.

        A timer that is pending all the while comes exactly once; one that comes or goes meanwhile may or may not.
        """
        while True:
            page = self.list_timers(queue, after=after, max_rows=page_size, tenant=tenant)
            yield from page
            if len(page) < page_size:
                return
            after = page[-1].timer_key

    # -- the log --------------------------------------------------------------------------------------------------

    def push(
        self,
        queue: str,
        payload: Json | bytes,
        partition: str = "Default",
        txn: str | None = None,
        tenant: UUID | str | None = None,
    ) -> PushResult:
        """Append a message now: ``queen.push``.

        ``payload`` is sent as JSON, bytes by :meth:`push_bytes`. The status is ``queued``, or ``duplicate`` with the
        place of the first when the queue has seen this ``txn`` within its window. Holds the partition until your
        transaction ends.
        """
        function = "push_bytes" if isinstance(payload, (bytes, bytearray, memoryview)) else "push"
        return self._row(
            PushResult, function, queue=queue, payload=payload, partition=partition, txn=txn, tenant=tenant
        )

    def push_bytes(
        self,
        queue: str,
        payload: bytes,
        partition: str = "Default",
        txn: str | None = None,
        tenant: UUID | str | None = None,
    ) -> PushResult:
        """:meth:`push` for a payload of bytes, which pop returns in ``payload_bytes``: ``queen.push_bytes``."""
        return self._row(
            PushResult, "push_bytes", queue=queue, payload=payload, partition=partition, txn=txn, tenant=tenant
        )

    def push_many(
        self,
        queue: str,
        payloads: Sequence[Json],
        partition: str = "Default",
        txns: Sequence[str | None] | None = None,
        tenant: UUID | str | None = None,
    ) -> list[PushResult]:
        """Append many messages to one partition, in order, all or nothing: ``queen.push_many``."""
        return self._rows(
            PushResult, "push_many", queue=queue, payloads=payloads, partition=partition, txns=txns, tenant=tenant
        )

    def pop(
        self,
        queue: str,
        consumer_group: str = "default",
        max_messages: int = 100,
        lease: Delay = "30 seconds",
        partition: str | None = None,
        auto_ack: bool = False,
        tenant: UUID | str | None = None,
    ) -> list[Message]:
        """Take messages under a lease: ``queen.pop``.

        In offset order within a partition; ``partition`` None takes from any partition with work, and all messages of
        one call carry one ``lease_id``. Acknowledge each partition within ``lease`` or they are delivered again.
        ``auto_ack`` acknowledges with the pop. An unknown queue gives an empty list. Under a connection without
        autocommit, commit before you work on the messages.
        """
        return self._rows(
            Message,
            "pop",
            queue=queue,
            consumer_group=consumer_group,
            max_messages=max_messages,
            lease=lease,
            partition=partition,
            auto_ack=auto_ack,
            tenant=tenant,
        )

    def pop_segments(
        self,
        queue: str,
        consumer_group: str = "default",
        max_messages: int = 1000,
        lease: Delay = "30 seconds",
        partition: str | None = None,
        auto_ack: bool = False,
        tenant: UUID | str | None = None,
    ) -> Iterator[Message]:
        """:meth:`pop` for throughput: segments come compressed and are decoded here: ``queen.pop_segments``.

        The messages, leases and acks are those of :meth:`pop`. They are taken when this is called and decoded as the
        iterator is consumed, one segment in memory at a time. Needs ``pip install 'pg_queen[segments]'``, and raises
        :class:`DecoderMissing` before anything is taken. The iterator raises :class:`SegmentDamaged`, and
        :class:`KeyUnusable` at an encrypted message: those are for :meth:`pop`.
        """
        segment.zstandard()
        slices = self._rows(
            SegmentSlice,
            "pop_segments",
            queue=queue,
            consumer_group=consumer_group,
            max_messages=max_messages,
            lease=lease,
            partition=partition,
            auto_ack=auto_ack,
            tenant=tenant,
        )
        return self._decoded(slices)

    def _decoded(self, slices: list[SegmentSlice]) -> Iterator[Message]:
        # The connection's own way with JSON, as for the rows of pop.
        load = Transformer(self._connection).get_loader(psycopg.adapters.types["json"].oid, Format.TEXT).load
        for part in slices:
            try:
                for frame in segment.decode(part.segment, part.base_offset, part.from_offset, part.to_offset):
                    payload, payload_bytes = _payload(frame, load)
                    yield Message(
                        part.queue,
                        part.partition,
                        frame.offset,
                        frame.message_id,
                        frame.txn,
                        payload,
                        payload_bytes,
                        part.created_at,
                        frame.producer_sub,
                        part.delivery_attempt if frame.offset <= part.attempted_to else 1,
                        part.lease_id,
                    )
            except SegmentDamaged as error:
                raise SegmentDamaged(
                    f'queue "{part.queue}", partition "{part.partition}", offsets {part.from_offset} to'
                    f" {part.to_offset}: {error.message}",
                    hint=f"seek with to_offset={part.to_offset + 1} and this partition skips them.",
                    sqlstate=error.sqlstate,
                ) from error

    def ack(
        self,
        queue: str,
        consumer_group: str,
        partition: str,
        lease_id: UUID | str,
        up_to: int | None = None,
        tenant: UUID | str | None = None,
    ) -> AckResult:
        """Acknowledge the messages of a lease in one partition: ``queen.ack``.

        ``up_to`` is the last offset acknowledged, None for the whole batch. The status is ``acked``, ``lease_lost`` or
        ``absent``.
        """
        return self._row(
            AckResult,
            "ack",
            queue=queue,
            consumer_group=consumer_group,
            partition=partition,
            lease_id=lease_id,
            up_to=up_to,
            tenant=tenant,
        )

    def nack(
        self,
        queue: str,
        consumer_group: str,
        partition: str,
        lease_id: UUID | str,
        error: str | None = None,
        delay: Delay | None = None,
        tenant: UUID | str | None = None,
    ) -> AckResult:
        """Give the messages of a lease back, to be delivered again after ``delay``: ``queen.nack``.

        Past the limit of deliveries the head goes to the dead letters with ``error``. The status is ``nacked``,
        ``lease_lost`` or ``absent``.
        """
        return self._row(
            AckResult,
            "nack",
            queue=queue,
            consumer_group=consumer_group,
            partition=partition,
            lease_id=lease_id,
            error=error,
            delay=delay,
            tenant=tenant,
        )

    def extend(
        self,
        queue: str,
        consumer_group: str,
        partition: str,
        lease_id: UUID | str,
        lease: Delay,
        tenant: UUID | str | None = None,
    ) -> AckResult:
        """Let a lease run for ``lease`` from now: ``queen.extend``.

        The status is ``extended``, ``lease_lost`` or ``absent``.
        """
        return self._row(
            AckResult,
            "extend",
            queue=queue,
            consumer_group=consumer_group,
            partition=partition,
            lease_id=lease_id,
            lease=lease,
            tenant=tenant,
        )

    def sent(self, queue: str, txn: str, tenant: UUID | str | None = None) -> list[Sent]:
        """Where a message with this ``txn`` is in the log, if it is, within the txn window: ``queen.sent``."""
        return self._rows(Sent, "sent", queue=queue, txn=txn, tenant=tenant)

    def seek(
        self,
        queue: str,
        consumer_group: str,
        to_offset: int | None = None,
        to_time: datetime | None = None,
        partition: str | None = None,
        tenant: UUID | str | None = None,
    ) -> int:
        """Move a group's cursors, back to read again or forward to skip: ``queen.seek``.

        Exactly one of ``to_offset``, the next offset to deliver, and ``to_time``: deliver what was appended then or
        later. ``partition`` None moves all. Leases that are out are lost. Returns the number of cursors moved.
        """
        return self._number(
            "seek",
            queue=queue,
            consumer_group=consumer_group,
            to_offset=to_offset,
            to_time=to_time,
            partition=partition,
            tenant=tenant,
        )

    def transaction(self, ops: Sequence[Mapping[str, Any]], tenant: UUID | str | None = None) -> list[_Result]:
        """Acks, pushes and timer operations as one, all or nothing: ``queen.transaction``.

        Each operation is ``{"op": "ack", "queue", "consumer_group", "partition", "lease_id", "up_to"?}``, ``{"op":
        "push", "queue", "partition"?, "payload", "txn"?}``, or one of :meth:`apply`; a ``lease_id`` may be a UUID. The
        results are aligned with ``ops``: an :class:`AckResult`, a :class:`PushResult` or a :class:`TimerVerdict`.
        Raises :class:`LeaseLost`, and nothing was done.
        """
        return self._call("transaction", {"ops": _ops(ops), "tenant": tenant}, "*", _result_row)

    # -- dead letters ---------------------------------------------------------------------------------------------

    def dlq_list(
        self,
        queue: str,
        after: UUID | str | None = None,
        max_rows: int = 100,
        tenant: UUID | str | None = None,
    ) -> list[DeadLetter]:
        """One page of a queue's dead letters, by id, behind ``after``: ``queen.dlq_list``.

        :meth:`iter_dlq` goes through all pages.
        """
        return self._rows(DeadLetter, "dlq_list", queue=queue, after=after, max_rows=max_rows, tenant=tenant)

    def iter_dlq(
        self,
        queue: str,
        after: UUID | str | None = None,
        page_size: int = 1000,
        tenant: UUID | str | None = None,
    ) -> Iterator[DeadLetter]:
        """All dead letters of a queue, read in pages by ``queen.dlq_list`` as the iterator is consumed.

        A letter that stays all the while comes exactly once; one that comes or goes meanwhile may or may not.
        """
        while True:
            page = self.dlq_list(queue, after=after, max_rows=page_size, tenant=tenant)
            yield from page
            if len(page) < page_size:
                return
            after = page[-1].id

    def dlq_requeue(self, queue: str, ids: Sequence[UUID | str] | None = None, tenant: UUID | str | None = None) -> int:
        """Append dead letters to their partitions again, for every group: ``queen.dlq_requeue``.

        ``ids`` None is all of the queue. The message keeps its id, its txn is ``dlq:ID:GROUP:OFFSET:TXN``. Returns how
        many: each once whatever runs beside it; those that are locked or damaged stay.
        """
        return self._number("dlq_requeue", queue=queue, ids=ids, tenant=tenant)

    def dlq_purge(self, queue: str, ids: Sequence[UUID | str] | None = None, tenant: UUID | str | None = None) -> int:
        """Delete dead letters, ``ids`` None for all of the queue: ``queen.dlq_purge``.

        Returns how many; those that are locked stay.
        """
        return self._number("dlq_purge", queue=queue, ids=ids, tenant=tenant)

    # -- the operator ---------------------------------------------------------------------------------------------

    def start(self, workers: int = 2) -> list[str]:
        """Make the pg_cron jobs that fire timers, in place of those that are there: ``queen.start``.

        Returns the names of the jobs. Raises :class:`CronUnusable`, with the way out in the hint, when pg_cron is
        missing or works in another database.
        """
        return [name for (name,) in self._values("start", workers=workers)]

    def stop(self) -> int:
        """Remove the pg_cron jobs and end their runs: ``queen.stop``.

        Returns how many jobs there were. Timers stay and fire, late, after the next start.
        """
        ((jobs,),) = self._values("stop")
        return int(jobs)

    def status(self) -> Status:
        """The state of the extension in this database: ``queen.status``."""
        return self._row(Status, "status")

    def doctor(self) -> list[Check]:
        """What is wrong with pg_queen in this database, a row a check: ``queen.doctor``.

        Those whose ``ok`` is False have in ``hint`` the statement that mends it.
        """
        return self._rows(Check, "doctor")

    def configure(self, key: str, value: str | None) -> str:
        """Change a setting for the whole database: ``queen.configure``.

        ``value`` is text, None restores the default. Returns the value in force. ``queen.settings`` lists the keys.
        """
        ((in_force,),) = self._values("configure", key=key, value=value)
        return str(in_force)

    def configure_queue(
        self, queue: str, options: Mapping[str, str | int | float | bool | None], tenant: UUID | str | None = None
    ) -> dict[str, str]:
        """Set options of a queue, which is made if missing: ``queen.configure_queue``.

        Options are the settings that ``queen.settings`` marks ``per_queue``; None restores the setting's value, an
        empty mapping changes nothing. Returns the options in force, as text.
        """
        arguments = {"queue": queue, "options": options, "tenant": tenant}
        return dict(self._call("configure_queue", arguments, "*", tuple_row))

    def pause_queue(self, queue: str, tenant: UUID | str | None = None) -> bool:
        """Stop the fire into one queue, for what comes due to wait: ``queen.pause_queue``.

        Scheduling, cancelling and consuming go on. Returns whether it was not paused before.
        """
        ((new,),) = self._values("pause_queue", queue=queue, tenant=tenant)
        return bool(new)

    def resume_queue(self, queue: str, tenant: UUID | str | None = None) -> bool:
        """Let a paused queue go on: ``queen.resume_queue``. Returns whether it was paused."""
        ((was_paused,),) = self._values("resume_queue", queue=queue, tenant=tenant)
        return bool(was_paused)

    def drop_queue(self, queue: str, tenant: UUID | str | None = None) -> DroppedQueue:
        """Drop a queue whole, pending timers and dead letters included: ``queen.drop_queue``."""
        return self._row(DroppedQueue, "drop_queue", queue=queue, tenant=tenant)

    def drop_group(self, queue: str, consumer_group: str, tenant: UUID | str | None = None) -> int:
        """Forget a consumer group of a queue, so that it no longer holds back retention: ``queen.drop_group``.

        A group of that name begins anew. Returns the number of cursors removed.
        """
        return self._number("drop_group", queue=queue, consumer_group=consumer_group, tenant=tenant)

    def create_tenant(self, tenant: UUID | str, name: str | None = None) -> UUID:
        """Create a tenant, open to nobody but administrators yet, or name one that exists: ``queen.create_tenant``."""
        ((created,),) = self._values("create_tenant", tenant=tenant, name=name)
        return UUID(str(created))

    def grant_tenant(self, tenant: UUID | str, role_name: str) -> bool:
        """Open a tenant to a role and its members: ``queen.grant_tenant``. Returns whether that is new.

        Raises :class:`TenantMissing` for a tenant that was not created.
        """
        ((new,),) = self._values("grant_tenant", tenant=tenant, role_name=role_name)
        return bool(new)

    def revoke_tenant(self, tenant: UUID | str, role_name: str) -> bool:
        """Close a tenant to a role: ``queen.revoke_tenant``. Returns whether it was open to it."""
        ((was_open,),) = self._values("revoke_tenant", tenant=tenant, role_name=role_name)
        return bool(was_open)

    def configure_tenant(
        self, tenant: UUID | str | None, options: Mapping[str, str | int | float | bool | None]
    ) -> dict[str, str]:
        """Set limits of a tenant, None for the default one: ``queen.configure_tenant``.

        Options are the settings that ``queen.settings`` marks ``per_tenant``; None restores the setting's value, an
        empty mapping changes nothing. Returns the options in force, as text. Raises :class:`TenantMissing`.
        """
        return dict(self._call("configure_tenant", {"tenant": tenant, "options": options}, "*", tuple_row))

    def drop_tenant(self, tenant: UUID | str) -> bool:
        """Close a tenant and remove everything of it: ``queen.drop_tenant``.

        Returns whether nothing is left; else the server's maintenance goes on. Raises :class:`TenantMissing`.
        """
        ((dropped,),) = self._values("drop_tenant", tenant=tenant)
        return bool(dropped["done"])

    # -- plumbing -------------------------------------------------------------------------------------------------

    def _rows(self, record: type[_R], function: str, **arguments: object) -> list[_R]:
        return self._call(function, arguments, _core.columns(record), args_row(record))

    def _row(self, record: type[_R], function: str, **arguments: object) -> _R:
        return self._rows(record, function, **arguments)[0]

    def _values(self, function: str, **arguments: object) -> list[tuple[Any, ...]]:
        return self._call(function, arguments, "", tuple_row)

    def _number(self, function: str, **arguments: object) -> int:
        ((number,),) = self._values(function, **arguments)
        return int(number)

    def _call(
        self, function: str, arguments: Mapping[str, object], result: str, row_factory: RowFactory[_R]
    ) -> list[_R]:
        query, parameters = _core.prepare(function, arguments, result)
        with (
            _core.translated(function, self._connection),
            psycopg.Cursor(self._connection, row_factory=row_factory) as cursor,
        ):
            # Binary results do not depend on the session's DateStyle, IntervalStyle or bytea_output.
            cursor.execute(query, parameters, binary=True)
            return cursor.fetchall()


def _payload(frame: segment.Frame, load: Callable[[bytes], Any]) -> tuple[Any, bytes | None]:
    """Payload and payload_bytes of a message, by what is stored: as ``queen.pop`` decides it."""
    stored = frame.payload
    if frame.encrypted:
        raise KeyUnusable(
            f"message {frame.message_id} is encrypted, and its key is the server's",
            hint="Use pop, which decrypts in the server.",
            sqlstate="QN011",
        )
    if not stored:
        return None, stored
    if stored[0] == 0:
        return None, stored[1:]
    try:
        return load(stored), None
    except ValueError:
        # Damaged JSON is shown as it is stored.
        return None, stored


def _ops(ops: Sequence[Mapping[str, Any]]) -> object:
    """Operations with a lease_id that is a UUID turned into text; anything else is left for the server to judge."""
    if isinstance(ops, Jsonb) or not isinstance(ops, Sequence) or isinstance(ops, (str, bytes, bytearray)):
        return ops
    return [
        {**op, "lease_id": str(op["lease_id"])}
        if isinstance(op, Mapping) and isinstance(op.get("lease_id"), UUID)
        else op
        for op in ops
    ]


def _result_row(cursor: psycopg.Cursor[Any]) -> Callable[[Sequence[Any]], _Result]:
    """Rows of ``queen.transaction`` as what each operation alone returns, told apart by the fields they have."""
    as_dict = dict_row(cursor)

    def make(values: Sequence[Any]) -> _Result:
        row = as_dict(values)
        record: type[_Result] = (
            TimerVerdict if row["timer_key"] is not None else PushResult if row["offset"] is not None else AckResult
        )
        return record(**{field.name: row[field.name] for field in dataclasses.fields(record)})

    return make
