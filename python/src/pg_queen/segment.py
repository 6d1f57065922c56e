"""Segments of the log decoded outside the server; docs/format.md has the layout byte by byte.

Needs the package ``zstandard``: ``pip install 'pg_queen[segments]'``. Nothing that a segment says of itself is believed
before it is checked, so a damaged one is an error and neither a crash nor a large allocation.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, Final, NamedTuple
from uuid import UUID

from .errors import DecoderMissing, SegmentDamaged

__all__ = ["MAX_RAW_BYTES", "Frame", "decode", "zstandard"]

MAX_RAW_BYTES: Final = (1 << 30) - 1
"""What the frames of a segment can be in all: the server packs them as one ``bytea``."""

_HEADER: Final = Struct(">2sBBII")
_LENGTH: Final = Struct(">I")
_SHORT: Final = Struct(">H")
_MICROSECONDS: Final = Struct(">q")
_FIXED: Final = 21  # flags, message id, and the lengths of txn and producer
_ENCRYPTED, _TIMER = 1, 2
# A block of zstandard takes four bytes or more and holds 128 KiB or less.
_MAX_RATIO: Final = 128 * 1024 // 4


class Frame(NamedTuple):
    """One message of a segment. ``payload`` is as stored: JSON text, or a zero byte and the bytes of the sender."""

    offset: int
    message_id: UUID
    txn: str
    producer_sub: str | None
    deliver_at_us: int | None
    """When the timer was due, in microseconds since 2000-01-01 UTC; None for a message that was pushed."""
    encrypted: bool
    payload: bytes


def zstandard() -> Any:
    """The package ``zstandard``, or :class:`DecoderMissing`."""
    try:
        import zstandard as module
    except ImportError as error:
        raise DecoderMissing(
            "segments are decoded with the package zstandard, which cannot be imported",
            hint="Run: pip install 'pg_queen[segments]'. Or use pop, which decodes in the server.",
        ) from error
    return module


def decode(
    segment: bytes, base_offset: int = 1, from_offset: int | None = None, to_offset: int | None = None
) -> Iterator[Frame]:
    """The messages of a segment from one offset to another, both included, in order; without bounds, all of them.

    ``base_offset`` is the offset of the segment's first message. Raises :class:`SegmentDamaged`, and
    :class:`DecoderMissing`.
    """
    raw, count = _unpack(segment)
    first = base_offset if from_offset is None else from_offset
    last = base_offset + count - 1 if to_offset is None else to_offset
    if not base_offset <= first <= last < base_offset + count:
        raise _damaged(f"offsets {first} to {last} are not among its {count} from {base_offset}")
    at = 0
    for offset in range(base_offset, last + 1):
        if at + 4 > len(raw):
            raise _damaged(f"it ends before offset {offset}")
        (size,) = _LENGTH.unpack_from(raw, at)
        at += 4
        end = at + size
        if size < _FIXED or end > len(raw):
            raise _damaged(f"the frame of offset {offset} cannot be {size} bytes long")
        if offset >= first:
            yield _frame(raw, at, end, offset)
        at = end
    if last == base_offset + count - 1 and at != len(raw):
        raise _damaged(f"{len(raw) - at} bytes follow its last frame")


def _unpack(segment: bytes) -> tuple[bytes, int]:
    """The frames and their number."""
    zstd = zstandard()
    if len(segment) < _HEADER.size:
        raise _damaged("it is too short")
    magic, version, codec, count, raw_length = _HEADER.unpack_from(segment)
    if (magic, version, codec) != (b"QS", 1, 1):
        raise _damaged(f"magic {magic!r}, version {version}, codec {codec} are unknown")
    body = memoryview(segment)[_HEADER.size :]
    if not count * (4 + _FIXED) <= raw_length <= min(MAX_RAW_BYTES, _MAX_RATIO * len(body)):
        raise _damaged(f"{len(segment)} bytes cannot hold {count} messages of {raw_length} bytes")
    try:
        # The decompressor allocates what the frame states. It must be what the header states, which is bounded.
        if zstd.frame_content_size(body) != raw_length:
            raise _damaged("its header and its content state different sizes")
        raw: bytes = zstd.ZstdDecompressor().decompress(body, max_output_size=raw_length)
    except zstd.ZstdError as error:
        raise _damaged(str(error)) from error
    if len(raw) != raw_length:
        raise _damaged("its header and its content differ in size")
    return raw, count


def _frame(raw: bytes, at: int, end: int, offset: int) -> Frame:
    flags = raw[at]
    message_id = UUID(bytes=raw[at + 1 : at + 17])
    at += 17
    due: int | None = None
    try:
        txn, at = _text(raw, at)
        producer, at = _text(raw, at)
        if flags & _TIMER:
            (due,) = _MICROSECONDS.unpack_from(raw, at)
            at += 8
    except (StructError, UnicodeDecodeError) as error:
        raise _damaged(f"the frame of offset {offset}: {error}") from error
    if at > end:
        raise _damaged(f"the frame of offset {offset} is shorter than its fields")
    return Frame(
        offset, message_id, txn or str(message_id), producer or None, due, flags & _ENCRYPTED != 0, raw[at:end]
    )


def _text(raw: bytes, at: int) -> tuple[str, int]:
    (size,) = _SHORT.unpack_from(raw, at)
    at += 2
    return raw[at : at + size].decode(), at + size


def _damaged(problem: str) -> SegmentDamaged:
    return SegmentDamaged(f"the segment is damaged: {problem}", sqlstate="QN010")
