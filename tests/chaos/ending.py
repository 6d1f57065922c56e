"""What there is at the end of a run: everything consumed that can be, and the log read by the package's own decoder."""

from __future__ import annotations

import json
from typing import Any

from pg_queen.segment import decode

from tests.support.database import Database
from tests.support.waiting import wait_for

from .client import GROUPS, QUEUES, Recorder, consume
from .history import Final, Letter, Message, Pending

__all__ = ["drain", "take_stock"]

# Seconds from 1970 to 2000, PostgreSQL's epoch.
_EPOCH = 946_684_800


def drain(database: Database, recorder: Recorder) -> None:
    """Wait until nothing is due, end the fire, then pop and acknowledge for every group until nothing comes."""
    due = "select count(*) from queen.log_timers where deliver_at <= clock_timestamp() and claim_token is null"
    wait_for(lambda: database.value(due) == 0, 90, what="what is due is fired")
    # What comes due from now on stays pending: a group that has consumed a queue is not looked at again.
    database.execute("select queen.stop()")
    sweeping = "select count(*) from pg_stat_activity where query ilike 'call queen.sweep%%' and state = 'active'"
    wait_for(lambda: database.value(sweeping) == 0, 30, what="the workers have ended")
    for tenant, queues in QUEUES.items():
        for queue in queues:
            for group in GROUPS:
                # Leases of the dead end after two seconds, so nothing may come for a while.
                def idle(tenant: str = tenant, queue: str = queue, group: str = group) -> bool:
                    while consume(recorder, tenant, queue, group, most=1000):
                        pass
                    left = (
                        "select count(*) from queen.log_partitions p join queen.queues q on q.id = p.queue_id"
                        " left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = %s"
                        " where q.tenant_id = %s::uuid and q.name = %s and coalesce(c.committed, 0) < p.last_offset"
                    )
                    return bool(database.value(left, group, tenant, queue) == 0)

                wait_for(idle, 60, what=f"group {group} has consumed {queue}")


def _json(payload: bytes) -> Any:
    return json.loads(bytes(payload))


def take_stock(database: Database) -> Final:
    """The log, what is pending, and the dead letters."""
    log = []
    for tenant, queue, partition, base, created, blob in database.rows(
        "select q.tenant_id::text, q.name, p.name, s.base_offset, extract(epoch from s.created_at)::float8, s.blob"
        " from queen.log_segments s join queen.log_partitions p on p.id = s.partition_id"
        " join queen.queues q on q.id = p.queue_id order by p.id, s.base_offset"
    ):
        for frame in decode(bytes(blob), base):
            due = None if frame.deliver_at_us is None else frame.deliver_at_us / 1e6 + _EPOCH
            log.append(
                Message(
                    *(tenant, queue, partition, frame.offset, str(frame.message_id), frame.txn),
                    *(_json(frame.payload), created, due),
                )
            )
    pending = [
        Pending(*row[:4], _json(row[4]), row[5])
        for row in database.rows(
            "select tenant_id::text, queue, timer_key, message_id::text, payload,"
            " extract(epoch from deliver_at)::float8 from queen.log_timers"
        )
    ]
    letters = [
        Letter(*row[:6], _json(row[6]), *row[7:])
        for row in database.rows(
            'select tenant_id::text, queue, "partition", consumer_group, "offset", message_id::text, payload,'
            " extract(epoch from failed_at)::float8, extract(epoch from deliver_at)::float8 from queen.log_dlq"
        )
    ]
    return Final(log, pending, letters)
