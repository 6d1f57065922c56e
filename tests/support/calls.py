"""Calls that would be right, argument by argument, for tests that spoil one argument."""

from __future__ import annotations

from typing import Final

__all__ = ["GOOD", "LEASE", "expression", "literal"]

# For every public function with a name among its arguments, as SQL expressions.
LEASE: Final = "'00000000-0000-0000-0000-000000000000'"
GOOD: Final[dict[str, dict[str, str]]] = {
    "schedule": {
        "queue": "'q'",
        "timer_key": "'k'",
        "payload": "'1'",
        "delay": "'1 h'",
        "partition": "'p'",
        "txn": "'t'",
    },
    "schedule_bytes": {
        "queue": "'q'",
        "timer_key": "'k'",
        "payload": "'\\x00'",
        "delay": "'1 h'",
        "partition": "'p'",
        "txn": "'t'",
    },
    "schedule_many": {
        "queue": "'q'",
        "timer_keys": "array['a', 'b']",
        "payloads": "array['1', '2']::jsonb[]",
        "delays": "array['1 h', '2 h']::interval[]",
        "partitions": "array['a', 'b']",
        "txns": "array['a', 'b']",
    },
    "reschedule": {"queue": "'q'", "timer_key": "'k'", "delay": "'1 h'"},
    "cancel": {"queue": "'q'", "timer_key": "'k'"},
    "peek": {"queue": "'q'", "timer_key": "'k'"},
    "list_timers": {"queue": "'q'", "max_rows": "5"},
    "push": {"queue": "'q'", "payload": "'1'", "partition": "'p'", "txn": "'t'"},
    "push_bytes": {"queue": "'q'", "payload": "'\\x00'", "partition": "'p'", "txn": "'t'"},
    "push_many": {
        "queue": "'q'",
        "payloads": "array['1', '2']::jsonb[]",
        "partition": "'p'",
        "txns": "array['a', 'b']",
    },
    "pop": {"queue": "'q'", "consumer_group": "'g'", "max_messages": "5", "lease": "'1 s'", "partition": "'p'"},
    "pop_segments": {
        "queue": "'q'",
        "consumer_group": "'g'",
        "max_messages": "5",
        "lease": "'1 s'",
        "partition": "'p'",
    },
    "ack": {"queue": "'q'", "consumer_group": "'g'", "partition": "'p'", "lease_id": LEASE},
    "nack": {"queue": "'q'", "consumer_group": "'g'", "partition": "'p'", "lease_id": LEASE},
    "extend": {"queue": "'q'", "consumer_group": "'g'", "partition": "'p'", "lease_id": LEASE, "lease": "'1 s'"},
    "seek": {"queue": "'q'", "consumer_group": "'g'", "to_offset": "0", "partition": "'p'"},
    "drop_group": {"queue": "'q'", "consumer_group": "'g'"},
    "sent": {"queue": "'q'", "txn": "'t'"},
    "configure_queue": {"queue": "'q'", "options": "'{}'"},
    "pause_queue": {"queue": "'q'"},
    "resume_queue": {"queue": "'q'"},
    "drop_queue": {"queue": "'q'"},
    "dlq_list": {"queue": "'q'"},
    "dlq_requeue": {"queue": "'q'"},
    "dlq_purge": {"queue": "'q'"},
}


def expression(function: str, **changes: str) -> str:
    """A call that is right but for the changes."""
    arguments = {**GOOD[function], **changes}
    return f"select * from queen.{function}({', '.join(f'{quoted(n)} => {v}' for n, v in arguments.items())})"


def quoted(name: str) -> str:
    return f'"{name}"'


def literal(value: str) -> str:
    """A value as an SQL literal."""
    return "E'" + "".join(f"\\u{ord(c):04x}" if not c.isalnum() else c for c in value) + "'"
