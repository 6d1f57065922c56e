"""Payloads and stored rows made to cost more than they are: bounded memory, a clear error, nobody else held up."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import psycopg
import pytest
import zstandard

from tests.support.clock import Clock
from tests.support.database import Connection, Database

GIB: Final = 1 << 30
# What a backend may grow by. Python and zstandard in it are some 30 MB, and a pop's own bound is 32 MiB of frames.
MOST_MB: Final = 160


def bomb(size: int, *, stated: bool = True) -> bytes:
    """A zstandard frame of that many zeros; some 32 KiB for a gibibyte."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=stated)
    packer = compressor.compressobj(size=size if stated else -1)
    zeros = bytes(1 << 20)
    packed = b"".join(packer.compress(zeros) for _ in range(size >> 20))
    return packed + packer.flush()


def segment(body: bytes, count: int, raw: int) -> bytes:
    """A blob that states what it likes."""
    return struct.pack(">2sBBII", b"QS", 1, 1, count, raw) + body


def peak(connection: Connection) -> float:
    """The most memory that a session's backend ever had, in MB."""
    status = Path(f"/proc/{connection.info.backend_pid}/status").read_text(encoding="ascii")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.fixture(scope="module")
def gibibyte() -> bytes:
    return bomb(GIB)


def bounded(connection: Connection, statement: str, *values: Any, code: str | None) -> list[tuple[Any, ...]]:
    """Run it; the backend stays small, and the error is the documented one."""
    connection.execute("select queen._payload_expand(queen._payload_compress(convert_to(repeat('x', 10000), 'UTF8')))")
    before, begin = peak(connection), time.monotonic()
    rows: list[tuple[Any, ...]] = []
    if code is None:
        rows = connection.execute(statement, values or None).fetchall()
    else:
        with pytest.raises(psycopg.Error) as caught:
            connection.execute(statement, values or None)
        assert caught.value.sqlstate == code, caught.value
        assert caught.value.diag.message_hint
    assert peak(connection) - before < MOST_MB
    assert time.monotonic() - begin < 10
    return rows


def test_a_bomb_as_payload_is_bytes_like_others(db: Database, gibibyte: bytes) -> None:
    """Nothing opens what a sender compressed: it waits, fires, dies and comes back as it is."""
    connection = db.connect()
    bounded(connection, "select queen.schedule_bytes('q', 'k', %s, '0')", gibibyte, code=None)
    bounded(connection, "select queen.push_bytes('q', %s)", gibibyte, code=None)
    assert bounded(connection, "select queen.fire_due()", code=None) == [(1,)]
    rows = bounded(connection, "select payload_bytes from queen.pop('q')", code=None)
    assert [bytes(row[0]) for row in rows] == [gibibyte] * 2


# A blob in the place of a good one, from the bomb.
SEGMENTS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "as it states": lambda b: segment(b, 3, GIB),
    "stated small": lambda b: segment(b, 3, 3 * 28),
    "four gibibytes stated": lambda b: segment(b, 3, (1 << 32) - 1),
    "a size unknown": lambda _: segment(bomb(GIB, stated=False), 3, GIB),
    "many messages": lambda b: segment(b, (1 << 32) - 1, GIB),
    "no frame": lambda _: segment(b"\x28\xb5\x2f\xfd" + b"\xff" * 40, 3, 3 * 28),
    "nothing": lambda _: b"",
    "frames that lie": lambda _: segment(
        zstandard.compress(struct.pack(">I", (1 << 32) - 1) + bytes(3 * 28 - 4)), 3, 3 * 28
    ),
}


@pytest.mark.parametrize("how", SEGMENTS)
def test_a_bomb_as_damaged_segment(db: Database, consumer: Connection, gibibyte: bytes, how: str) -> None:
    for part in ("a", "b"):
        db.execute("select queen.push_many('q', array['111', '222', '333']::jsonb[], %s)", part)
    a = db.value("select id from queen.log_partitions where name = 'a'")
    if how in ("stated small", "no frame", "frames that lie"):
        # The row agrees with the header, so that what is behind it is looked at.
        db.execute("update queen.log_segments set raw_bytes = 3 * 28 where partition_id = %s", a)
    db.execute("update queen.log_segments set blob = %s where partition_id = %s", SEGMENTS[how](gibibyte), a)
    connection = db.connect()
    bounded(connection, "select * from queen.pop('q', 'named', partition => 'a')", code="QN010")
    # Who asks for any partition gets the others.
    rows = consumer.execute("select \"partition\", payload from queen.pop('q', 'g')").fetchall()
    assert rows == [("b", n) for n in (111, 222, 333)]


def test_a_bomb_as_a_row_that_waits(db: Database, clock: Clock, gibibyte: bytes) -> None:
    """Made by hand, since schedule compresses itself: it backs off with the reason, and the next one fires."""
    clock.stop()
    for packed in (gibibyte, bomb(1 << 27, stated=False), bomb((1 << 26) + (1 << 20))):
        db.execute("select queen.schedule('q', 'bad', '1', '1 s'), queen.schedule('q', 'good', '1', '1 s')")
        db.execute("update queen.log_timers set payload = %s, payload_zstd = true where timer_key = 'bad'", packed)
        clock.advance(timedelta(seconds=2))
        connection = db.connect()
        fired = [bounded(connection, "select queen.fire_due()", code=None)[0][0] for _ in range(2)]
        assert sum(fired) == 1
        assert db.value("select payload from queen.pop('q', auto_ack => true)") == 1
        (left,) = db.rows("select timer_key, attempts, last_error from queen.log_timers")
        assert left[:2] == ("bad", 1)
        assert left[2].startswith("stored payload is damaged")
        assert db.value("select status from queen.cancel('q', 'bad')") == "cancelled"


def test_depth(db: Database, producer: Connection, consumer: Connection) -> None:
    """A hundred deep goes every way; what is deeper than the server's stack is refused at the door."""
    for deep in ("[" * 100 + "]" * 100, '{"a":' * 100 + "1" + "}" * 100):
        producer.execute("select queen.schedule('q', %s, %s, '0')", [str(len(deep)), deep])
        producer.execute("select queen.push('q', %s)", [deep])
    assert db.value("select queen.fire_due()") == 2
    rows = consumer.execute("select payload::text from queen.pop('q')").fetchall()
    assert [row[0].replace(" ", "") for row in rows] == ["[" * 100 + "]" * 100, '{"a":' * 100 + "1" + "}" * 100] * 2
    for depth in (100_000, 400_000):
        deep = "[" * depth + "]" * depth
        for call in ("schedule('q', 'k', %s, '0')", "push('q', %s)", "apply(%s)", "transaction(%s)"):
            with pytest.raises(psycopg.Error) as caught:
                producer.execute(f"select queen.{call}", [deep])
            assert caught.value.sqlstate == "54001", caught.value
    assert db.value("select count(*) from queen.log_timers") == 0


def test_a_deep_document_among_operations(db: Database, producer: Connection) -> None:
    deep = "[" * 100 + "]" * 100
    op = '{{"op": "schedule", "queue": "q", "timer_key": "k", "delay_ms": 0, "payload": {}}}'
    producer.execute("select queen.apply(%s)", [f"[{op.format(deep)}]"])
    assert db.value("select queen.fire_due()") == 1
    assert db.value("select payload::text from queen.pop('q')") == deep


def test_texts_that_are_none(db: Database, producer: Connection) -> None:
    """Lone surrogates, NUL and bytes that are no UTF-8: refused by the server, with its code, wherever a text goes."""
    for text in ('"\\ud800"', '"\\udfff x"', '"\\ud800\\ud800"', '"\\u0000"', '{"\\u0000": 1}', '{"\\ud83d": 1}'):
        for call in (
            "schedule('q', 'k', {}, '0')",
            "push('q', {})",
            "schedule_many('q', '{{k}}', array[{}]::jsonb[], '{{0}}')",
            "push_many('q', array[{}]::jsonb[])",
        ):
            with pytest.raises(psycopg.Error) as caught:
                producer.execute(f"select queen.{call.format('%s')}", [text])
            assert caught.value.sqlstate in ("22P02", "22P05"), caught.value
    for call in ("schedule('q', %s::text, '1', '0')", "push('q', '1', %s::text)", "push('q', '1', txn => %s::text)"):
        # psycopg will not send these as str, so as bytes that the server is told are text.
        for raw in (b"a\x00b", b"\xed\xa0\x80", b"\xff", b"\xc0\x80", b"\xf4\x90\x80\x80"):
            with pytest.raises(psycopg.DataError):
                producer.execute(f"select queen.{call}".replace("%s::text", "convert_from(%s, 'UTF8')"), [raw])
    assert db.value("select count(*) from queen.log_timers") == 0
    assert db.value("select count(*) from queen.log_segments") == 0


def test_numbers_that_grow(db: Database, producer: Connection) -> None:
    """1e130000 is a few bytes on the way in and a hundred thousand as stored: what counts is the stored size."""
    db.execute("select queen.configure('payload_max_bytes', '1000')")
    for call in ("schedule('q', 'k', '1e100000', '0')", "push('q', '1e100000')"):
        with pytest.raises(psycopg.Error) as caught:
            producer.execute(f"select queen.{call}")
        assert caught.value.sqlstate == "22023"
        assert "100001 bytes" in str(caught.value.diag.message_primary)
