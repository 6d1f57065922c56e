"""docs/format.md is true: its example, its decoder and its rules, against what the server writes and reads."""

from __future__ import annotations

import base64
import re
import struct
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any, Final
from uuid import UUID

import psycopg
import pytest
import zstandard
from cryptography.exceptions import InvalidTag
from pg_queen import segment

from tests.support.database import Connection, Database
from tests.support.keys import KeyFile, key
from tests.support.log import FRAMES
from tools.cluster import ROOT

PAGE: Final = (ROOT / "docs" / "format.md").read_text(encoding="utf-8")
EPOCH: Final = datetime(2000, 1, 1, tzinfo=timezone.utc)
Decoder = Callable[..., Iterator[dict[str, Any]]]


def block(language: str, words: str = "") -> str:
    """The only block of that language with those words on the page."""
    blocks: list[str] = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (found,) = (text for text in blocks if words in text)
    return found


@pytest.fixture(scope="module")
def decode() -> Decoder:
    """The decoder of the page."""
    names: dict[str, Any] = {}
    exec(compile(block("python", "def decode"), "docs/format.md", "exec"), names)
    decoder: Decoder = names["decode"]
    return decoder


def blob(db: Database) -> bytes:
    """The only segment there is."""
    return bytes(db.value("select blob from queen.log_segments"))


def test_the_example(db: Database, decode: Decoder) -> None:
    raw = bytes.fromhex(block("hex"))
    written = db.value(
        "select queen._frame('01234567-89ab-4cde-8123-456789abcdef', 'order-7', 'alice', '2026-12-01 12:00Z', false,"
        " convert_to('{\"n\": 1}'::jsonb::text, 'UTF8'))"
        " || queen._frame('11111111-2222-4333-8444-555555555555', null, 'bob', null, false, '\\x00ff00')"
    )
    assert bytes(written) == raw
    packed = bytes(db.value("select queen._segment_pack(%s, 2)", raw))
    header = struct.unpack(">2sBBII", packed[:12])
    assert header == (b"QS", 1, 1, 2, len(raw))
    assert zstandard.get_frame_parameters(packed[12:]).has_checksum
    assert zstandard.frame_content_size(packed[12:]) == len(raw)
    first, second = decode(packed, 41)
    due = datetime(2026, 12, 1, 12, tzinfo=timezone.utc) - EPOCH
    assert first == {
        "offset": 41,
        "message_id": UUID("01234567-89ab-4cde-8123-456789abcdef"),
        "encrypted": False,
        "txn": "order-7",
        "producer_sub": "alice",
        "deliver_at_us": due.days * 86_400_000_000 + due.seconds * 1_000_000,
        "payload": b'{"n": 1}',
    }
    assert (second["offset"], second["txn"]) == (42, "11111111-2222-4333-8444-555555555555")
    assert (second["producer_sub"], second["deliver_at_us"], second["payload"]) == ("bob", None, b"\x00\xff\x00")


def test_three_readers_agree(db: Database, producer: Connection, decode: Decoder) -> None:
    """The page's decoder, the package's and the server's, on a segment of timers and on one of pushes."""
    keys = ["a", "b\u00fc\U0001f600", "c"]
    producer.execute(
        "select queen.schedule_many('q', %s, array['1', '{\"x\": \"\u00fc\"}', 'null']::jsonb[],"
        " array['0', '0', '-1 h']::interval[], txns => array['t\u00fc', null, null])",
        [keys],
    )
    producer.execute("select queen.schedule_bytes('q', 'd', '\\x0001', '0')")
    assert db.value("select queen.fire_due()") == 4
    check_readers(db, decode)
    db.execute("select queen.drop_queue('q')")
    producer.execute("select queen.push_many('q', array['1', '[]']::jsonb[], txns => array[null, 't'])")
    check_readers(db, decode)


def check_readers(db: Database, decode: Decoder) -> None:
    packed = blob(db)
    base = db.value("select base_offset from queen.log_segments")
    page = list(decode(packed, base))
    package = [frame._asdict() for frame in segment.decode(packed, base)]
    assert package == page
    rows = db.rows(
        'select u."offset", u.message_id, u.txn, u.producer_sub, u.deliver_at_us, u.encrypted, u.payload'
        " from queen.log_segments s"
        f" cross join {FRAMES} order by 1"
    )
    names = ("offset", "message_id", "txn", "producer_sub", "deliver_at_us", "encrypted", "payload")
    assert [dict(zip(names, row, strict=True)) for row in rows] == page
    popped = db.rows("select message_id, txn, producer_sub from queen.pop('q', 'check') order by \"offset\"")
    assert popped == [(m["message_id"], m["txn"], m["producer_sub"]) for m in page]


def test_an_encrypted_payload(db: Database, producer: Connection, decode: Decoder) -> None:
    """The page's two readers together read what the server encrypted."""
    names: dict[str, Any] = {}
    exec(compile(block("python", "def decrypt"), "docs/format.md", "exec"), names)
    KeyFile(db).use(key("old"), key("new"))
    db.execute("select queen.configure('encrypt', 'true')")
    producer.execute("select queen.push('q\u00fc', '{\"n\": 1}', 'p\u20ac')")
    (message,) = decode(blob(db))
    assert message["encrypted"]
    assert message["payload"][:5] == b"\x01\x03new"
    keys = {line.split()[0]: base64.b64decode(line.split()[1]) for line in (key("old"), key("new"))}
    tenant = UUID("00000000-0000-0000-0000-000000000001")
    found = names["decrypt"](message["payload"], keys, tenant, "q\u00fc", "p\u20ac", message["message_id"])
    assert found == b'{"n": 1}'
    with pytest.raises(InvalidTag):
        names["decrypt"](message["payload"], keys, tenant, "q\u00fc", "p", message["message_id"])


def test_damage_is_an_error_and_never_a_message(db: Database, producer: Connection) -> None:
    producer.execute(
        "select queen.push_many('q', array(select to_jsonb(repeat('text ', i)) from generate_series(1, 20) i))"
    )
    good = blob(db)
    spoiled = {
        "nothing": b"",
        "half a header": good[:7],
        "cut short": good[:-5],
        "another magic": b"XS" + good[2:],
        "version 2": good[:2] + b"\x02" + good[3:],
        "codec 2": good[:3] + b"\x02" + good[4:],
        "another size": good[:8] + struct.pack(">I", 5) + good[12:],
        "a huge size": good[:8] + b"\xff\xff\xff\xff" + good[12:],
        **{f"a bit of byte {at}": flip(good, at) for at in range(12, len(good), max(len(good) // 40, 1))},
    }
    read = "select count(*) from queen.pop('q', 'g', partition => 'Default', auto_ack => true)"
    for what, bad in spoiled.items():
        db.execute("update queen.log_segments set blob = %s", bad)
        with pytest.raises(psycopg.Error) as caught:
            db.execute(read)
        assert caught.value.sqlstate == "QN010", (what, caught.value)
        assert 'partition "Default" of queue "q"' in str(caught.value.diag.message_primary), what
        with pytest.raises(Exception, match="damaged"):
            list(segment.decode(bad))
    db.execute("update queen.log_segments set blob = %s", good)
    assert db.value(read) == 20


def flip(blob: bytes, at: int) -> bytes:
    """With one bit changed."""
    return blob[:at] + bytes([blob[at] ^ 0x10]) + blob[at + 1 :]
