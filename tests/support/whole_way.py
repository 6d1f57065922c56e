"""One message and one timer through everything, for tests of what surrounds them."""

from __future__ import annotations

from psycopg.types.json import Jsonb

from tests.support.database import Connection

__all__ = ["whole_way"]


def whole_way(connection: Connection) -> None:
    """Schedule, look, move, fire, pop, refuse, take again, acknowledge."""

    def one(statement: str, *arguments: object) -> tuple[object, ...]:
        row = connection.execute(statement, arguments or None).fetchone()
        assert row is not None, statement
        return row

    assert one(
        "select status from queen.schedule('q', 'k', %s, delay => '1 hour', txn => 't')", Jsonb({"x": [1.5, "\u00e9"]})
    ) == ("scheduled",)
    assert one("select status from queen.schedule_bytes('q', 'b', %s, '0')", b"\x00\\\xff") == ("scheduled",)
    assert one("select count(*) from queen.schedule_many('q', '{m,n}', array['1', '2']::jsonb[], '{0,0}')") == (2,)
    assert one("select payload from queen.peek('q', 'k')") == ({"x": [1.5, "\u00e9"]},)
    assert one("select status from queen.reschedule('q', 'k', '-1 day')") == ("rescheduled",)
    assert one("select status from queen.push('q', '\"pushed\"', txn => 'u')") == ("queued",)
    assert one("select status from queen.push('q', '\"pushed\"', txn => 'u')") == ("duplicate",)
    assert one("select queen.fire_due()") == (4,)
    messages = connection.execute(
        "select \"offset\", payload, payload_bytes, lease_id from queen.pop('q', 'g')"
    ).fetchall()
    assert [m[:3] for m in messages] == [
        (1, "pushed", None),
        (2, {"x": [1.5, "\u00e9"]}, None),
        (3, None, b"\x00\\\xff"),
        (4, 1, None),
        (5, 2, None),
    ]
    lease = messages[0][3]
    assert one("select status from queen.nack('q', 'g', 'Default', %s, 'no')", lease) == ("nacked",)
    assert one("select status from queen.nack('q', 'g', 'Default', %s, 'no')", lease) == ("lease_lost",)
    (lease,) = one("select distinct lease_id from queen.pop('q', 'g')")
    assert one("select status, acked from queen.ack('q', 'g', 'Default', %s)", lease) == ("acked", 5)
    assert one("select \"offset\" from queen.sent('q', 't')") == (2,)
    (dropped,) = one("select queen.drop_queue('q')")
    assert isinstance(dropped, dict)
    assert dropped["messages"] == 5
