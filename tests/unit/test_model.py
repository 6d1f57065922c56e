"""The log against a plain Python model, driven at random by hypothesis.

Pushes, both forms of pop, acks, nacks, extends, seeks, expiry, cooling, requeues, by several consumers of several
groups. For each group: nothing is lost, nothing is out of order within a partition, nothing comes again after its ack,
and every answer and every cursor is what the model says.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any
from uuid import UUID

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)
from pg_queen import AckResult, Message, Queen

from tests.support.database import Database

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
PARTITIONS = ["a", "b", "c", "d", "e"]
GROUPS = ["g", "h"]

_numbers = itertools.count()

# Which of the leases ever taken, from the newest on: an index, because what is drawn must not depend on answers.
choices = st.integers(0, 3) | st.integers(0, 100)


@dataclass
class Cursor:
    """Where a group stands in a partition."""

    committed: int = 0
    leased_to: int = 0
    lease: UUID | None = None
    expires: datetime = START
    attempts: int = 0
    attempted_to: int = 0
    retry_at: datetime = START

    def release(self) -> None:
        self.lease, self.leased_to = None, 0

    def move(self, committed: int) -> None:
        """To a message that was never tried."""
        self.committed, self.attempts, self.attempted_to, self.retry_at = committed, 0, 0, START


@dataclass
class Entry:
    """A message in the log of the model."""

    payload: Any
    created_at: datetime
    message_id: UUID
    txn: str


@dataclass
class Held:
    """What a consumer has in hand: a token that may or may not be in force."""

    group: str
    partition: str
    lease: UUID


@dataclass
class Model:
    """One queue."""

    limit: int
    now: datetime = START
    log: dict[str, list[Entry]] = field(default_factory=dict)
    txns: dict[str, tuple[str, int]] = field(default_factory=dict)
    cursors: dict[str, dict[str, Cursor]] = field(default_factory=dict)
    # Counted: a group that was dropped may give up on the same message again.
    letters: Counter[tuple[str, str, int]] = field(default_factory=Counter)

    def cursor(self, group: str, partition: str) -> Cursor:
        return self.cursors.setdefault(group, {}).setdefault(partition, Cursor())

    def available(self, group: str) -> set[str]:
        """Partitions with something for a group that nobody has."""
        found = set()
        for partition, entries in self.log.items():
            cursor = self.cursor(group, partition)
            held = cursor.lease is not None and cursor.expires > self.now
            if cursor.committed < len(entries) and not held and cursor.retry_at <= self.now:
                found.add(partition)
        return found

    def holds(self, held: Held) -> bool:
        cursor = self.cursor(held.group, held.partition)
        return cursor.lease == held.lease and cursor.expires > self.now

    def bury(self, group: str, partition: str) -> None:
        cursor = self.cursor(group, partition)
        self.letters[group, partition, cursor.committed + 1] += 1
        cursor.move(cursor.committed + 1)


class Log(RuleBasedStateMachine):
    """Every rule makes one call and compares."""

    def __init__(self, db: Database, sessions: dict[str, Queen]) -> None:
        super().__init__()
        self.db = db
        self.sessions = sessions
        self.queue = f"q{next(_numbers)}"
        self.model = Model(limit=0)
        self.taken: list[Held] = []

    def at(self, now: datetime) -> None:
        self.model.now = now
        self.db.execute("update public.clock set at = %s", now)

    # -- rules

    @initialize(limit=st.sampled_from([1, 2, 2, 3]), partitions=st.permutations(PARTITIONS))
    def configure(self, limit: int, partitions: list[str]) -> None:
        self.model.limit = limit
        self.at(START)
        self.sessions["admin"].configure_queue(self.queue, {"delivery_max_attempts": limit})
        for session in ("consumer 1", "consumer 2"):
            # A pop begins at a random partition; an example must go the same way again.
            self.sessions[session].connection.execute("select setseed(0.5)")
        for count, partition in enumerate(partitions[:3]):
            self.push(partition, [None] * count or ["t"], cool=False)

    @rule(
        partition=st.sampled_from(PARTITIONS),
        cool=st.booleans(),
        txns=st.lists(st.none() | st.sampled_from(["t", "u", "v"]), min_size=1, max_size=4),
    )
    def push(self, partition: str, txns: list[str | None], cool: bool) -> None:
        payloads = [f"{partition} {next(_numbers)}" for _ in txns]
        results = self.sessions["producer"].push_many(self.queue, payloads, partition, txns)
        assert len(results) == len(txns)
        entries = self.model.log.setdefault(partition, [])
        for payload, txn, result in zip(payloads, txns, results, strict=True):
            if txn in self.model.txns:
                assert result.status == "duplicate"
                assert (result.partition, result.offset) == self.model.txns[txn]
                assert result.message_id == self.model.log[result.partition][result.offset - 1].message_id
                continue
            entries.append(Entry(payload, self.model.now, result.message_id, result.txn))
            assert (result.status, result.partition, result.offset) == ("queued", partition, len(entries))
            if txn is not None:
                self.model.txns[txn] = (partition, len(entries))
        if cool:
            self.maintain()

    @rule(
        group=st.sampled_from(GROUPS),
        most=st.sampled_from([1, 2, 5, 100]),
        fate=st.sampled_from(["acked", "half acked", "auto acked", "nacked", "dead"]),
        times=st.integers(1, 3),
        segments=st.booleans(),
    )
    def consume(self, group: str, most: int, fate: str, times: int, segments: bool) -> None:
        """A consumer that takes what there is and does, each time, the same with it."""
        for _ in range(times):
            before = len(self.taken)
            self.pop("consumer 2", group, None, most, 10, fate == "auto acked", segments)
            for choice in range(len(self.taken) - before):
                match fate:
                    case "acked":
                        self.ack(choice, 1.0, True, "consumer 2")
                    case "half acked":
                        self.ack(choice, 0.5, False, "consumer 2")
                    case "nacked":
                        self.nack(choice, None)
            if fate == "dead":
                self.time_passes(15)

    @rule(
        session=st.sampled_from(["consumer 1", "consumer 2"]),
        group=st.sampled_from(GROUPS),
        partition=st.none() | st.sampled_from(PARTITIONS),
        most=st.sampled_from([1, 2, 5, 100]),
        lease=st.sampled_from([1, 10, 60]),
        auto_ack=st.sampled_from([False, False, False, True]),
        segments=st.booleans(),
    )
    def pop(
        self, session: str, group: str, partition: str | None, most: int, lease: int, auto_ack: bool, segments: bool
    ) -> None:
        queen, model = self.sessions[session], self.model
        available = model.available(group) & ({partition} if partition else set(PARTITIONS))
        exhausted = {name for name in available if model.cursor(group, name).attempts >= model.limit}
        backlog = {name: len(model.log[name]) - model.cursor(group, name).committed for name in available}
        messages = list(
            queen.pop_segments(self.queue, group, most, lease, partition, auto_ack)
            if segments
            else queen.pop(self.queue, group, most, lease, partition, auto_ack)
        )
        more = self.letters() - model.letters
        buried = set(more)
        assert more.total() == len(buried)
        assert buried <= {(group, name, model.cursor(group, name).committed + 1) for name in exhausted}
        for _, name, _ in buried:
            model.bury(group, name)

        by_partition = {name: list(part) for name, part in itertools.groupby(messages, lambda m: m.partition)}
        touched = set(by_partition) | {name for _, name, _ in buried}
        assert touched <= available
        # One that was passed over has its turn when there is enough without it.
        assert touched == available or sum(backlog[name] for name in touched) >= most
        births = list(model.log)
        assert list(by_partition) == sorted(by_partition, key=births.index)
        left = most
        for name, part in by_partition.items():
            self.check_batch(group, name, part, left)
            left -= len(part)
            cursor = model.cursor(group, name)
            last = part[-1].offset
            if auto_ack:
                assert {m.lease_id for m in messages} == {None}
                cursor.move(last)
                cursor.release()
            else:
                assert len({m.lease_id for m in messages}) == 1
                cursor.lease, cursor.leased_to = messages[0].lease_id, last
                cursor.expires, cursor.retry_at = model.now + timedelta(seconds=lease), START
                cursor.attempts += 1
                cursor.attempted_to = max(cursor.attempted_to, last)
                assert cursor.lease is not None
                self.taken.append(Held(group, name, cursor.lease))
        assert left >= 0

    def check_batch(self, group: str, partition: str, part: list[Message], left: int) -> None:
        """Contiguous from the cursor, whole, unchanged; alone before the limit."""
        model = self.model
        cursor = model.cursor(group, partition)
        entries = model.log[partition]
        first = cursor.committed + 1
        alone = 0 < cursor.attempts == model.limit - 1
        count = 1 if alone else min(left, len(entries) - cursor.committed)
        assert [m.offset for m in part] == list(range(first, first + count))
        for message in part:
            entry = entries[message.offset - 1]
            assert (message.payload, message.message_id, message.txn) == (entry.payload, entry.message_id, entry.txn)
            assert (message.queue, message.created_at) == (self.queue, entry.created_at)
            attempt = cursor.attempts + 1 if message.offset <= cursor.attempted_to else 1
            assert message.delivery_attempt == attempt

    @rule(
        choice=choices, part=st.floats(0, 1), whole=st.booleans(), session=st.sampled_from(["consumer 1", "consumer 2"])
    )
    def ack(self, choice: int, part: float, whole: bool, session: str) -> None:
        if not self.taken:
            return
        held = self.taken[-1 - choice % len(self.taken)]
        cursor = self.model.cursor(held.group, held.partition)
        in_force = self.model.holds(held)
        to = cursor.leased_to if whole else cursor.committed + round(part * (cursor.leased_to - cursor.committed))
        result = self.sessions[session].ack(
            self.queue, held.group, held.partition, held.lease, None if whole or not in_force else to
        )
        if not in_force:
            self.refused(result)
            return
        assert result == AckResult(True, "acked", to - cursor.committed, to)
        if to == cursor.leased_to:
            cursor.move(to)
            cursor.release()
        elif to > cursor.committed:
            cursor.committed, cursor.attempts = to, 1

    @rule(choice=choices, delay=st.none() | st.sampled_from([0, 3, 20]))
    def nack(self, choice: int, delay: int | None) -> None:
        if not self.taken:
            return
        held = self.taken[-1 - choice % len(self.taken)]
        cursor = self.model.cursor(held.group, held.partition)
        in_force = self.model.holds(held)
        result = self.sessions["consumer 2"].nack(self.queue, held.group, held.partition, held.lease, "no", delay)
        if not in_force:
            self.refused(result)
            return
        if cursor.attempts >= self.model.limit:
            self.model.bury(held.group, held.partition)
        else:
            cursor.retry_at = self.model.now + timedelta(seconds=delay or 0)
        cursor.release()
        assert result == AckResult(True, "nacked", 0, cursor.committed)

    @rule(choice=choices, lease=st.sampled_from([1, 30]))
    def extend(self, choice: int, lease: int) -> None:
        if not self.taken:
            return
        held = self.taken[-1 - choice % len(self.taken)]
        cursor = self.model.cursor(held.group, held.partition)
        in_force = self.model.holds(held)
        result = self.sessions["consumer 1"].extend(self.queue, held.group, held.partition, held.lease, lease)
        if not in_force:
            self.refused(result)
            return
        assert result == AckResult(True, "extended", 0, cursor.committed)
        cursor.expires = self.model.now + timedelta(seconds=lease)

    @rule(
        group=st.sampled_from(GROUPS),
        to=st.integers(0, 12) | st.integers(0, 60).map(lambda s: START + timedelta(seconds=s)),
        partition=st.none() | st.sampled_from(PARTITIONS),
    )
    def seek(self, group: str, to: int | datetime, partition: str | None) -> None:
        place = {"to_offset": to} if isinstance(to, int) else {"to_time": to}
        moved = self.sessions["consumer 1"].seek(self.queue, group, partition=partition, **place)  # type: ignore[arg-type]
        chosen = [name for name in self.model.log if partition in (None, name)]
        assert moved == len(chosen)
        for name in chosen:
            entries = self.model.log[name]
            if isinstance(to, int):
                committed = min(max(to - 1, 0), len(entries))
            else:
                committed = sum(entry.created_at < to for entry in entries)
            cursor = self.model.cursor(group, name)
            cursor.move(committed)
            cursor.release()

    @rule(seconds=st.sampled_from([0.5, 2, 5, 15, 70]))
    def time_passes(self, seconds: float) -> None:
        self.at(self.model.now + timedelta(seconds=seconds))

    @rule(again=st.booleans(), group=st.sampled_from(GROUPS))
    def operate(self, again: bool, group: str) -> None:
        if again:
            self.requeue()
        else:
            self.drop_group(group)

    @rule()
    def maintain(self) -> None:
        """What rests cools: it leaves the hot set, and must be found all the same."""
        self.at(self.model.now + timedelta(seconds=2))
        self.db.execute("call queen.maintain('5 seconds')")
        # Of this example's queue: those of earlier examples may lie in the future.
        hot = (
            "select count(*) from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
            " where p.hot and q.name = %s"
        )
        assert self.db.value(hot, self.queue) == 0

    def drop_group(self, group: str) -> None:
        self.sessions["admin"].drop_group(self.queue, group)
        self.model.cursors.pop(group, None)

    def requeue(self) -> None:
        letters = self.db.rows(
            'select id, consumer_group, partition, "offset", txn from queen.log_dlq where queue = %s'
            " order by failed_at, id",
            self.queue,
        )
        assert self.sessions["consumer 2"].dlq_requeue(self.queue) == len(letters)
        for id_, group, partition, offset, txn in letters:
            entries = self.model.log[partition]
            source = entries[offset - 1]
            assert source.txn == txn
            # However often a message is requeued, its txn keeps the first one only.
            first = txn.split(":", 4)[4] if txn.startswith("dlq:") else txn
            entries.append(
                Entry(source.payload, self.model.now, source.message_id, f"dlq:{id_}:{group}:{offset}:{first}")
            )
        self.model.letters.clear()

    # -- comparison

    def refused(self, result: AckResult) -> None:
        assert (result.ok, result.acked) == (False, 0)
        assert result.status in ("lease_lost", "absent")

    def letters(self) -> Counter[tuple[str, str, int]]:
        return Counter(
            self.db.rows('select consumer_group, partition, "offset" from queen.log_dlq where queue = %s', self.queue)
        )

    @invariant()
    def cursors_agree(self) -> None:
        rows = self.db.rows(
            "select c.consumer_group, p.name, c.committed, c.attempts, c.lease_id, c.lease_expires_at"
            "  from queen.log_consumers c join queen.log_partitions p on p.id = c.partition_id"
            "  join queen.queues q on q.id = p.queue_id where q.name = %s",
            self.queue,
        )
        for group, partition, committed, attempts, lease, expires in rows:
            cursor = self.model.cursor(group, partition)
            assert (committed, attempts) == (cursor.committed, cursor.attempts), (group, partition)
            if cursor.lease is not None and cursor.expires > self.model.now:
                assert (lease, expires) == (cursor.lease, cursor.expires)
            else:
                assert lease is None or expires <= self.model.now
        known = {(group, partition) for group, partition, *_ in rows}
        for group, cursors in self.model.cursors.items():
            for partition, cursor in cursors.items():
                assert (group, partition) in known or cursor == Cursor(), (group, partition)
        assert self.letters() == self.model.letters

    def teardown(self) -> None:
        """Read to the end: whatever was pushed is acknowledged, in order, or a dead letter."""
        if self.model.limit == 0:
            return
        self.at(self.model.now + timedelta(hours=1))
        self.requeue()
        for group in GROUPS:
            # A pop may do nothing but bury, so an empty one is the end only when nothing is available.
            while self.model.available(group):
                self.taken.clear()
                self.pop("consumer 1", group, None, 100, 60, False, False)
                for choice in range(len(self.taken)):
                    self.ack(choice, 1.0, True, "consumer 2")
            assert self.sessions["consumer 1"].pop(self.queue, group) == []
            for partition, entries in self.model.log.items():
                assert self.model.cursor(group, partition).committed == len(entries)
        self.cursors_agree()
        self.sessions["admin"].drop_queue(self.queue)


def _sessions(db: Database) -> Iterator[tuple[str, Queen]]:
    for name, user in [
        ("producer", "alice_producer"),
        ("consumer 1", "carl_consumer"),
        ("consumer 2", "carl_consumer"),
        ("admin", "ada_admin"),
    ]:
        connection = db.connect(user)
        connection.execute("set timezone to 'UTC'")
        yield name, Queen(connection)


def test_the_log_is_what_the_model_says(db: Database) -> None:
    # A clock that moves by an update: replacing queen._now() at each step would have every session plan anew.
    db.execute("create table public.clock (at timestamptz not null)")
    db.execute("insert into public.clock values (%s)", START)
    db.execute(
        "create or replace function queen._now() returns timestamptz language sql volatile parallel safe"
        " return (select c.at from public.clock c)"
    )
    sessions = dict(_sessions(db))
    run_state_machine_as_test(
        lambda: Log(db, sessions),
        settings=hypothesis.settings(
            max_examples=120, stateful_step_count=50, suppress_health_check=list(hypothesis.HealthCheck)
        ),
    )
