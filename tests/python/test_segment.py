"""The decoder of segments: on what the server packs, and on what it never would."""

from __future__ import annotations

import struct
import sys
import tracemalloc
from typing import Any
from uuid import UUID, uuid4

import hypothesis
import pytest
import zstandard
from hypothesis import strategies as st
from pg_queen import DecoderMissing, Queen, SegmentDamaged
from pg_queen.segment import MAX_RAW_BYTES, Frame, decode

from tests.support.database import Connection, Database


def frame(
    payload: bytes = b"1",
    message_id: UUID | None = None,
    txn: bytes = b"",
    producer: bytes = b"",
    due: int | None = None,
    encrypted: bool = False,
) -> bytes:
    """A frame made by hand, after docs/format.md."""
    body = bytes([encrypted + 2 * (due is not None)]) + (message_id or uuid4()).bytes
    for text in (txn, producer):
        body += struct.pack(">H", len(text)) + text
    body += b"" if due is None else struct.pack(">q", due)
    return struct.pack(">I", len(body + payload)) + body + payload


def pack(
    frames: list[bytes], count: int | None = None, length: int | None = None, head: tuple[Any, ...] = (b"QS", 1, 1)
) -> bytes:
    """A segment, truthful unless told otherwise."""
    raw = b"".join(frames)
    header = struct.pack(
        ">2sBBII", *head, len(frames) if count is None else count, len(raw) if length is None else length
    )
    return header + zstandard.ZstdCompressor(level=1, write_checksum=True).compress(raw)


def test_frames_have_every_field() -> None:
    ids = [uuid4(), uuid4(), uuid4()]
    segment = pack(
        [
            frame(b'{"a": 1}', ids[0]),
            frame(b"\x00\xff", ids[1], "ключ".encode(), b"alice", due=-1),
            frame(b"", ids[2], encrypted=True),
        ]
    )
    assert list(decode(segment, 7)) == [
        Frame(7, ids[0], str(ids[0]), None, None, False, b'{"a": 1}'),
        Frame(8, ids[1], "ключ", "alice", -1, False, b"\x00\xff"),
        Frame(9, ids[2], str(ids[2]), None, None, True, b""),
    ]
    assert [f.offset for f in decode(segment, 7, 8, 8)] == [8]
    assert [f.offset for f in decode(segment, 7, from_offset=8)] == [8, 9]
    assert [f.offset for f in decode(segment, 7, to_offset=8)] == [7, 8]
    assert [f.offset for f in decode(segment, 2**53, 2**53 + 1)] == [2**53 + 1, 2**53 + 2]


def test_every_field_that_lies_is_found() -> None:
    good = [frame(b"1", txn=b"t"), frame(b"2")]
    zero_length_text = good[0][:21] + b"\xff\xff" + good[0][23:]
    bad: dict[str, bytes] = {
        "empty": b"",
        "a short header": pack(good)[:11],
        "no content": pack(good)[:12],
        "the magic": pack(good, head=(b"QX", 1, 1)),
        "the version": pack(good, head=(b"QS", 2, 1)),
        "the codec": pack(good, head=(b"QS", 1, 2)),
        "more frames than there are": pack(good, count=3),
        "fewer frames than there are": pack(good, count=1),
        "no frames": pack([]),
        "a count without room": pack(good, count=2**32 - 1),
        "a size too large": pack(good, length=2**32 - 1),
        "a size one too large": pack(good, length=len(b"".join(good)) + 1),
        "a size one too small": pack(good, length=len(b"".join(good)) - 1),
        "bytes behind the last frame": pack([*good, b"\x00"], count=2),
        "a frame longer than the rest": pack([good[0], struct.pack(">I", 2**31) + good[1][4:]]),
        "a frame of no length": pack([b"\x00\x00\x00\x00" + good[0], good[1]], count=3),
        "a text longer than its frame": pack([zero_length_text, good[1]]),
        "a txn that reaches into the next frame": pack([good[0][:21] + b"\x00\x20" + good[0][23:], good[1]]),
        "a text that is no UTF-8": pack([frame(txn=b"\xff\xfe")]),
        "a timer without its time": pack([struct.pack(">I", 21) + b"\x02" + bytes(20)]),
        "content cut off": pack(good)[:-6],
        "a bit of the content": pack(good)[:-8] + bytes([pack(good)[-8] ^ 1]) + pack(good)[-7:],
        "a checksum": pack(good)[:-1] + bytes([pack(good)[-1] ^ 1]),
        "content that is not zstandard": pack(good)[:12] + b"x" * 50,
    }
    for name, segment in bad.items():
        with pytest.raises(SegmentDamaged, match="segment is damaged") as damage:
            print(name, list(decode(segment)))
        assert damage.value.sqlstate == "QN010", name
    for bounds in ((0, 1), (1, 3), (2, 1), (3, 3)):
        with pytest.raises(SegmentDamaged, match="offsets"):
            list(decode(pack(good), 1, *bounds))


def test_a_lying_size_allocates_little() -> None:
    # Header and content agree on a size that is not there.
    for claim in (10**8, MAX_RAW_BYTES, 2**32 - 1):
        body = bytearray(zstandard.ZstdCompressor(level=1, write_checksum=True).compress(bytes(70_000)))
        # Single segment, a content size of four bytes: FHD then the size.
        assert body[4] & 0b11100000 in (0b10100000, 0b01100000, 0b00100000)
        fields = body[4]
        old_size = {0: 1, 1: 2, 2: 4, 3: 8}[fields >> 6]
        lying = (
            bytes(body[:4]) + bytes([0b10100000 | (fields & 0b11111)]) + struct.pack("<I", claim) + body[5 + old_size :]
        )
        assert zstandard.frame_content_size(lying) == claim
        segment = struct.pack(">2sBBII", b"QS", 1, 1, 1, claim) + lying
        tracemalloc.start()
        with pytest.raises(SegmentDamaged):
            list(decode(segment))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 10_000_000, claim


@hypothesis.given(noise=st.data())
@hypothesis.settings(max_examples=300)
def test_noise_is_damage_or_frames(noise: st.DataObject) -> None:
    good = pack([frame(b'"payload"' * 5, txn=b"txn", producer=b"someone", due=5), frame(b"2")])
    raw = bytearray(zstandard.ZstdDecompressor().decompress(good[12:]))
    for _ in range(noise.draw(st.integers(1, 3))):
        raw[noise.draw(st.integers(0, len(raw) - 1))] = noise.draw(st.integers(0, 255))
    segment = pack([bytes(raw)], count=noise.draw(st.integers(0, 3)))
    try:
        for decoded in decode(segment):
            assert isinstance(decoded, Frame)
    except SegmentDamaged:
        pass


def test_without_zstandard_nothing_is_taken(db: Database, queen: Queen, monkeypatch: pytest.MonkeyPatch) -> None:
    queen.push("q", 1)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(DecoderMissing, match="zstandard") as missing:
        queen.pop_segments("q")
    assert "pip install 'pg_queen[segments]'" in str(missing.value.hint)
    assert isinstance(missing.value, ImportError)
    assert db.rows("select * from queen.log_consumers") == []
    with pytest.raises(DecoderMissing):
        list(decode(pack([frame()])))
    monkeypatch.undo()
    assert [m.payload for m in queen.pop_segments("q")] == [1]


def test_the_package_loads_without_zstandard(queen: Queen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    queen.push("q", 1)
    assert [m.payload for m in queen.pop("q")] == [1]


def test_a_damaged_segment_is_named_with_the_way_past_it(db: Database, consumer: Connection) -> None:
    for number in range(3):
        db.execute("select queen.push('q', to_jsonb(%s))", number)
    db.execute("update queen.log_segments set blob = substr(blob, 1, length(blob) - 1) || '\\x00' where end_offset = 2")
    queen = Queen(consumer)
    taken = queen.pop_segments("q")
    assert next(taken).payload == 0
    with pytest.raises(SegmentDamaged) as damage:
        next(taken)
    assert 'queue "q", partition "Default", offsets 2 to 2' in damage.value.message
    assert "to_offset=3" in str(damage.value.hint)
    # The server says the same by the same code.
    db.execute("select queen.seek('q', 'default', 0)")
    with pytest.raises(SegmentDamaged) as told:
        queen.pop("q", partition="Default")
    assert told.value.sqlstate == damage.value.sqlstate == "QN010"
    assert queen.seek("q", "default", to_offset=3, partition="Default") == 1
    assert [m.payload for m in queen.pop_segments("q")] == [2]
