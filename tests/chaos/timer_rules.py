"""What must hold of timers. Each rule yields what breaks it."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator

from .history import Message
from .lives import Death, explain
from .run import Run, accepted, mark_of


def delivers(run: Run) -> Iterator[str]:
    """At least one delivery happened; a run in which nothing arrived shows nothing."""
    if not any(message.due is not None for message in run.final.log):
        yield "no timer arrived"


def once(run: Run) -> Iterator[str]:
    """A version is delivered from at most one offset, and is not dead or pending beside that."""
    for mark, messages in run.arrived.items():
        if len(messages) > 1:
            yield f"{mark} at {', '.join(f'{m.queue}/{m.partition}/{m.offset}' for m in messages)}"
    for mark in {*run.arrived, *run.dead, *run.waiting}:
        places = [
            name
            for name, where in (("log", run.arrived), ("dead", run.dead), ("pending", run.waiting))
            if mark in where
        ]
        if len(places) > 1:
            yield f"{mark} is in {' and '.join(places)}"
    ids = Counter(message.message_id for messages in run.arrived.values() for message in messages)
    for message_id, times in ids.items():
        if times > 1:
            yield f"message id {message_id} {times} times"


def sent_by_somebody(run: Run) -> Iterator[str]:
    """Nothing arrives that nobody sent; what arrives has the place, txn and payload of the version that was sent."""
    for message in run.final.log:
        call = run.sent.get(mark_of(message))
        if call is None:
            yield f"nobody sent {message}"
            continue
        again = message.txn.startswith("dlq:")
        txn = call.asked.get("txn") or message.message_id
        if (message.tenant, message.queue, message.partition) != (call.tenant, call.queue, call.asked["partition"]) or (
            message.payload != call.asked["payload"] or (message.txn != txn and not again)
        ):
            yield f"{message} is not what was sent: {call}"
        elif call.ok and not again and call.answer.get("message_id") not in (None, message.message_id):
            yield f"{message} was answered with another id: {call}"
        elif not again and (message.due is None) != (call.op == "push"):
            yield f"{message} came another way than it was sent: {call}"
    for timer in run.final.pending:
        call = run.sent.get(mark_of(timer))
        if call is None or (timer.tenant, timer.queue, timer.key, timer.payload) != (
            call.tenant,
            call.queue,
            call.asked["key"],
            call.asked["payload"],
        ):
            yield f"nobody scheduled {timer}"


def not_after_failure(run: Run) -> Iterator[str]:
    """A version whose call failed for certain, or was answered too_late or duplicate, never arrives."""
    for mark, call in run.sent.items():
        if not accepted(call) and (mark in run.arrived or mark in run.waiting or mark in run.dead):
            yield f"{mark} is there after {call}"


def not_after_cancel(run: Run) -> Iterator[str]:
    """A version that a cancel removed never arrives."""
    for call in run.calls:
        if call.op == "cancel" and call.status == "cancelled":
            mark = run.marks.get(str(call.answer["message_id"]))
            if mark in run.arrived or mark in run.waiting or mark in run.dead:
                yield f"{mark} is there after {call}"


def not_after_replacement(run: Run) -> Iterator[str]:
    """A version that a later confirmed call replaced never arrives, by its payload or by its time."""
    for calls in run.by_key.values():
        for by in (c for c in calls if c.status == "rescheduled"):
            if by.op == "schedule":
                # What it replaced, where nothing else can have been there.
                others = [c for c in calls if c.op == "schedule" and c is not by and accepted(c) and c.begin < by.until]
                last = max((c for c in others if c.ok and c.until < by.begin), key=lambda c: c.until, default=None)
                if last is None or any(c is not last and c.until > last.begin for c in others):
                    continue
                mark = last.asked["payload"]["v"]
                if mark in run.arrived or mark in run.dead or mark in run.waiting:
                    yield f"{mark} is there though {by} replaced it"
                continue
            mark = run.marks.get(str(by.answer["message_id"]), "")
            for arrived in run.arrived.get(mark, []):
                later = [
                    c
                    for c in calls
                    if c.op == "reschedule"
                    and (c.outcome == "unknown" or c.status == "rescheduled")
                    and c.until >= by.begin
                ]
                dues = [c.answer["due"] if c.ok else c.asked.get("due") for c in later]
                if all(due is not None and arrived.due is not None and abs(due - arrived.due) > 2e-6 for due in dues):
                    yield f"{mark} arrived with the time {arrived.due} though {by} had moved it"


def nothing_lost(run: Run) -> Iterator[str]:
    """Every confirmed version that nothing removed arrives or is pending; every confirmed push is in the log."""
    for mark, call in run.sent.items():
        if not (call.ok and accepted(call)) or mark in run.arrived or mark in run.waiting or mark in run.dead:
            continue
        if call.op == "push":
            yield f"{mark} is nowhere after {call}"
            continue
        removers = [
            c
            for c in run.by_key[call.tenant, call.queue, call.asked["key"]]
            if c is not call
            and c.op in ("schedule", "cancel")
            and c.until >= call.begin
            and (c.outcome == "unknown" or c.status in ("cancelled", "rescheduled"))
        ]
        if not removers:
            yield f"{mark} is nowhere after {call}"


def not_early(run: Run) -> Iterator[str]:
    """Nothing is created before its time."""
    for message in run.final.log:
        if message.due is not None and not message.txn.startswith("dlq:") and message.created_at < message.due - 2e-6:
            yield f"{message} is {message.due - message.created_at:.6f} s early"


def books(run: Run) -> Iterator[str]:
    """Per key some order of the calls explains every answer, each delivery and what is left."""
    for key, calls in run.by_key.items():
        marks = {c.asked["payload"]["v"] for c in calls if c.op == "schedule"}
        deaths = [
            *(Death(m, x.due, x.created_at, run.margin) for m in marks for x in run.arrived.get(m, [])),
            *(Death(m, x.due, x.failed_at, run.margin) for m in marks for x in run.dead.get(m, [])),
        ]
        left = next(((m, run.waiting[m].due) for m in marks if m in run.waiting), None)
        if (found := explain(calls, deaths, left, run.marks)) is not True:
            why = "no order explains" if found is False else "given up:"
            yield f"{why} key {key}: {'; '.join(map(str, calls))}; ended {deaths}, left {left}"


def absent_is_true(run: Run) -> Iterator[str]:
    """No ``absent`` for a timer that was pending all through the call."""
    for calls in run.by_key.values():
        for call in (c for c in calls if c.status == "absent"):
            for by in calls:
                mark = by.asked["payload"]["v"] if by.op == "schedule" else None
                if mark is None or not by.ok or not accepted(by) or by.until >= call.begin:
                    continue
                ends = [x.created_at - run.margin for x in run.arrived.get(mark, [])]
                if mark in run.waiting or any(end > call.until for end in ends):
                    yield f"{mark} was pending all through {call}"


def due_order(run: Run) -> Iterator[str]:
    """In a partition timers known a while before they were due come in the order of their times."""
    known = dict(run.timers())
    moved = {
        mark
        for calls in run.by_key.values()
        for c in calls
        if c.op == "reschedule" and c.status != "absent" and c.outcome != "failed"
        for mark in [c2.asked["payload"]["v"] for c2 in calls if c2.op == "schedule"]
    }
    places: dict[tuple[str, str, str], list[Message]] = defaultdict(list)
    for mark, messages in run.arrived.items():
        call = known.get(mark)
        if call is None or not call.ok or mark in moved:
            continue
        for message in messages:
            if message.due is not None and call.until + 5 + run.margin < message.due:
                places[message.tenant, message.queue, message.partition].append(message)
    for messages in places.values():
        messages.sort(key=lambda m: m.offset)
        for before, after in itertools.pairwise(messages):
            if before.due is not None and after.due is not None and before.due > after.due:
                yield f"offset {before.offset} of {before.queue}/{before.partition} is due after offset {after.offset}"
