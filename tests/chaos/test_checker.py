"""The judge catches every kind of broken promise, and nothing in histories that keep it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.chaos.checker import RULES, Run, judge
from tests.chaos.history import Call, Letter, Message, Pending, read
from tests.chaos.history import Final as End


class Writer:
    """A history written by one client after the other, a second apart, against a queue that keeps its promise."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.end = End()
        self.now = 1000.0
        self.timers: dict[str, tuple[Call, float]] = {}

    def call(self, op: str, *, outcome: str = "ok", answer: Any = None, **asked: Any) -> Call:
        self.now += 1
        number = len(self.calls)
        end = self.now + 0.5 if outcome != "unknown" else None
        call = Call(number % 3, number, op, "t", "q", self.now, end, outcome, asked, answer)  # type: ignore[arg-type]
        self.calls.append(call)
        return call

    def schedule(self, key: str, due: float, **more: Any) -> Call:
        number = len(self.calls)
        answer = {
            "status": "rescheduled" if key in self.timers else "scheduled",
            "message_id": f"id{number}",
            "due": self.now + due,
        }
        asked = {
            "key": key,
            "partition": "p",
            "txn": f"t{number}",
            "due": self.now + due,
            "payload": {"v": f"v{number}"},
        }
        call = self.call("schedule", answer=answer, **asked)
        self.timers[key] = (call, answer["due"])
        return call

    def reschedule(self, key: str, due: float) -> Call:
        there = self.timers.get(key)
        answer: dict[str, Any] = {"status": "absent"}
        if there is not None:
            answer = {"status": "rescheduled", "message_id": there[0].answer["message_id"], "due": self.now + due}
            self.timers[key] = (there[0], self.now + due)
        return self.call("reschedule", key=key, due=self.now + due, answer=answer)

    def cancel(self, key: str) -> Call:
        there = self.timers.pop(key, None)
        answer = {"status": "absent"} if there is None else {
            "status": "cancelled",
            "message_id": there[0].answer["message_id"],
        }  # fmt: skip
        return self.call("cancel", key=key, answer=answer)

    def push(self, outcome: str = "ok") -> Call:
        number = len(self.calls)
        offset = len(self.end.log) + 1
        call = self.call(
            "push",
            outcome=outcome,
            partition="p",
            txn=f"t{number}",
            payload={"v": f"v{number}"},
            answer={"status": "queued", "message_id": f"id{number}", "offset": offset} if outcome == "ok" else None,
        )
        if outcome == "ok":
            self.append(call, f"id{number}", None)
        return call

    def append(self, call: Call, message_id: str, due: float | None) -> Message:
        offset = len(self.end.log) + 1
        message = Message(
            "t", "q", "p", offset, message_id, call.asked["txn"], call.asked["payload"], max(self.now, due or 0), due
        )
        self.end.log.append(message)
        return message

    def fire(self, key: str) -> Message:
        call, due = self.timers.pop(key)
        self.now = max(self.now + 1, due)
        return self.append(call, call.answer["message_id"], due)

    def pop(self, group: str = "g", first: int = 1) -> Call:
        got = [
            {"partition": m.partition, "offset": m.offset, "message_id": m.message_id, "payload": m.payload}
            for m in self.end.log
            if m.offset >= first
        ]
        return self.call("pop", group=group, answer=got)

    def ack(self, group: str = "g") -> Call:
        answer = {"status": "acked", "committed": len(self.end.log)}
        return self.call("ack", group=group, partition="p", answer=answer)

    def run(self) -> Run:
        pending = [
            Pending("t", "q", key, call.answer["message_id"], call.asked["payload"], due)
            for key, (call, due) in self.timers.items()
        ]
        return Run(self.calls, replace(self.end, pending=[*self.end.pending, *pending]))


def good() -> Writer:
    """A little of everything."""
    w = Writer()
    w.schedule("a", 30)
    w.schedule("b", 20)
    w.schedule("c", 500)
    w.schedule("c", 600)
    w.schedule("d", 500)
    w.cancel("d")
    w.cancel("d")
    w.reschedule("c", 700)
    w.push()
    w.fire("b")
    w.fire("a")
    w.schedule("a", 900)
    w.pop()
    w.ack()
    return w


def broken(w: Writer) -> set[str]:
    return {violation.rule for violation in judge(w.run())}


def test_a_good_history() -> None:
    assert judge(good().run()) == []


def _change_log(w: Writer, index: int, **changes: Any) -> None:
    w.end.log[index] = replace(w.end.log[index], **changes)


def _nothing_delivered(w: Writer) -> None:
    w.__init__()  # type: ignore[misc]
    w.schedule("a", 1)


def _twice(w: Writer) -> None:
    again = w.end.log[1]
    w.end.log.append(replace(again, offset=4))


def _log_and_pending(w: Writer) -> None:
    m = w.end.log[1]
    w.end.pending.append(Pending("t", "q", "b", m.message_id, m.payload, 5000.0))


def _unsent(w: Writer) -> None:
    w.end.log.append(Message("t", "q", "p", 4, "idx", "tx", {"v": "nobody's"}, w.now))


def _other_payload(w: Writer) -> None:
    _change_log(w, 1, payload={**w.end.log[1].payload, "more": 1})


def _other_txn(w: Writer) -> None:
    _change_log(w, 1, txn="t0")


def _other_partition(w: Writer) -> None:
    _change_log(w, 2, partition="elsewhere", offset=1)


def _failed_arrives(w: Writer) -> None:
    call = w.push("failed")
    w.append(call, "idf", None)
    w.pop(first=4)


def _cancelled_arrives(w: Writer) -> None:
    call = next(c for c in w.calls if c.op == "schedule" and c.asked["key"] == "d")
    w.append(call, call.answer["message_id"], call.answer["due"])


def _replaced_arrives(w: Writer) -> None:
    call = next(c for c in w.calls if c.op == "schedule" and c.asked["key"] == "c")
    w.append(call, call.answer["message_id"], call.answer["due"])


def _old_time(w: Writer) -> None:
    old = w.timers["c"][0]
    del w.timers["c"]
    w.append(old, old.answer["message_id"], old.answer["due"])


def _lost(w: Writer) -> None:
    del w.timers["a"]


def _push_lost(w: Writer) -> None:
    w.end.log[:] = [replace(m, offset=m.offset - 1) for m in w.end.log[1:]]


def _early(w: Writer) -> None:
    due = w.end.log[2].due
    assert due is not None
    _change_log(w, 2, created_at=due - 0.001)


def _cancelled_twice(w: Writer) -> None:
    call = next(c for c in w.calls if c.status == "cancelled")
    w.call("cancel", key="d", answer=call.answer)


def _scheduled_over_a_pending_one(w: Writer) -> None:
    w.schedule("c", 800)
    w.calls[-1] = replace(w.calls[-1], answer={**w.calls[-1].answer, "status": "scheduled"})


def _rescheduled_nothing(w: Writer) -> None:
    w.call(
        "reschedule", key="b", due=w.now + 5, answer={"status": "rescheduled", "message_id": "id1", "due": w.now + 5}
    )


def _absent_though_pending(w: Writer) -> None:
    w.call("cancel", key="c", answer={"status": "absent"})


def _absent_though_delivered_later(w: Writer) -> None:
    w.call("cancel", key="a", answer={"status": "absent"})
    w.now += 100
    w.fire("a")
    w.pop(first=4)


def _out_of_order(w: Writer) -> None:
    first, second = w.end.log[1], w.end.log[2]
    w.end.log[1:3] = [replace(second, offset=2), replace(first, offset=3, created_at=second.created_at)]


def _gap(w: Writer) -> None:
    _change_log(w, 2, offset=9)


def _never_consumed(w: Writer) -> None:
    w.push()


def _again_after_ack(w: Writer) -> None:
    w.pop()


def _delivered_what_is_not_there(w: Writer) -> None:
    got = {"partition": "p", "offset": 1, "message_id": "other", "payload": {"v": "x"}}
    w.call("pop", group="h", answer=[got])


def _empty_letter(w: Writer) -> None:
    w.end.letters.append(Letter("t", "q", "p", "g", 1, w.end.log[0].message_id, None, w.now))


def _letter_of_another(w: Writer) -> None:
    w.end.letters.append(Letter("t", "q", "p", "g", 1, w.end.log[0].message_id, {"v": "v1"}, w.now))


BREAKS: Final[list[tuple[Callable[[Writer], None], str]]] = [
    (_nothing_delivered, "something is delivered"),
    (_twice, "once"),
    (_log_and_pending, "once"),
    (_unsent, "nothing that nobody sent"),
    (_other_payload, "nothing that nobody sent"),
    (_other_txn, "nothing that nobody sent"),
    (_other_partition, "nothing that nobody sent"),
    (_failed_arrives, "nothing after a failure"),
    (_cancelled_arrives, "nothing after a cancel"),
    (_replaced_arrives, "nothing after a replacement"),
    (_old_time, "nothing after a replacement"),
    (_lost, "nothing lost"),
    (_push_lost, "nothing lost"),
    (_early, "never early"),
    (_cancelled_twice, "the books balance"),
    (_scheduled_over_a_pending_one, "the books balance"),
    (_rescheduled_nothing, "the books balance"),
    (_lost, "the books balance"),
    (_absent_though_pending, "absent is true"),
    (_absent_though_delivered_later, "absent is true"),
    (_out_of_order, "due order"),
    (_gap, "the log is whole"),
    (_never_consumed, "consumed once acknowledged"),
    (_again_after_ack, "consumed once acknowledged"),
    (_delivered_what_is_not_there, "consumed once acknowledged"),
    (_empty_letter, "letters carry their payload"),
    (_letter_of_another, "letters carry their payload"),
]


@pytest.mark.parametrize(("spoil", "rule"), BREAKS, ids=lambda v: v if isinstance(v, str) else v.__name__.strip("_"))
def test_what_breaks_a_rule_is_caught(spoil: Callable[[Writer], None], rule: str) -> None:
    w = good()
    assert broken(w) == set()
    spoil(w)
    assert rule in broken(w)


def test_every_rule_is_broken_above() -> None:
    assert {rule for _, rule in BREAKS} == set(RULES)


def test_unknown_outcomes_are_bounds() -> None:
    """What may have happened is no violation either way, and what it may have removed is not missed."""
    for happened in (True, False):
        w = good()
        number = len(w.calls)
        asked = {"key": "u", "partition": "p", "txn": f"t{number}", "due": w.now + 9, "payload": {"v": f"v{number}"}}
        call = w.call("schedule", outcome="unknown", **asked)
        if happened:
            w.now += 10
            w.append(call, "idu", asked["due"])
            w.pop(first=4)
        assert broken(w) == set()
    for happened in (True, False):
        w = good()
        w.call("cancel", outcome="unknown", key="c")
        if happened:
            del w.timers["c"]
        assert broken(w) == set()
    w = good()
    w.call("reschedule", outcome="unknown", key="c", due=4242.0)
    w.timers["c"] = (w.timers["c"][0], 4242.0)
    assert broken(w) == set()
    # But nothing more than what was asked.
    w.timers["c"] = (w.timers["c"][0], 4243.0)
    assert "the books balance" in broken(w)


def test_concurrent_calls_may_come_in_either_order() -> None:
    for order in (0, 1):
        w = Writer()
        w.schedule("k", 900)
        w.schedule("k", 950)
        first, second = w.calls
        both = [replace(first, begin=1001.0, end=1003.0), replace(second, begin=1001.0, end=1003.0)]
        if order:
            both = [
                replace(both[0], answer={**both[0].answer, "status": "rescheduled"}),
                replace(both[1], answer={**both[1].answer, "status": "scheduled"}),
            ]
            w.timers["k"] = (both[0], both[0].answer["due"])
        else:
            w.timers["k"] = (both[1], both[1].answer["due"])
        w.calls[:] = both
        assert broken(w) == {"something is delivered"}
        w.timers["k"] = (both[order], both[order].answer["due"])
        assert "the books balance" in broken(w)


@hypothesis.given(st.integers(0, 2**32))
@hypothesis.settings(max_examples=60)
def test_random_good_histories(seed: int) -> None:
    """And one change to each: a message that goes, one that comes twice, a status turned round."""
    dice = random.Random(seed)
    w = Writer()
    for _ in range(60):
        key = dice.choice("abc")
        match dice.randrange(6):
            case 0 | 1:
                w.schedule(key, dice.choice([5, 50, 500]))
            case 2:
                w.reschedule(key, dice.choice([5, 50, 500]))
            case 3:
                w.cancel(key)
            case 4 if key in w.timers:
                w.fire(key)
            case _:
                w.push()
    w.schedule("z", 1)
    w.fire("z")
    w.pop()
    w.ack()
    # Here they fire in no order of their times.
    assert broken(w) <= {"due order"}
    fired = [i for i, m in enumerate(w.end.log) if m.due is not None]
    gone = w.end.log.pop(dice.choice(fired))
    assert broken(w) & {"nothing lost", "the books balance"}
    w.end.log.insert(gone.offset - 1, gone)
    w.end.log.append(replace(gone, offset=len(w.end.log) + 1))
    assert "once" in broken(w)


def test_files(tmp_path: Path) -> None:
    """The line before a call says what is asked, the one after it what came; half a line is none."""
    asked = {"client": 1, "number": 0, "op": "cancel", "tenant": "t", "queue": "q", "begin": 2.0, "asked": {"key": "k"}}
    done = {**asked, "end": 3.0, "outcome": "ok", "answer": {"status": "absent"}}
    one = tmp_path / "1.jsonl"
    other = tmp_path / "2.jsonl"
    one.write_text(json.dumps(asked) + "\n" + json.dumps(done) + "\n" + json.dumps({**asked, "number": 1}) + "\n")
    other.write_text(json.dumps({**asked, "client": 2, "begin": 1.0}) + "\n" + json.dumps(done)[:40])
    calls = read([one, other])
    assert [(c.client, c.number, c.outcome, c.status) for c in calls] == [
        (2, 0, "unknown", None),
        (1, 0, "ok", "absent"),
        (1, 1, "unknown", None),
    ]
