-- Frames and segments; docs/format.md has the layout. SQL packs frames (string_agg of bytea: 20,000 in 160 ms against
-- 350 ms for a loop in PL/Python, measured 2026-11 on 2 cores), PL/Python compresses and unpacks.

-- Must stay one expression without a subquery: then it is inlined into the statements that pack. As a call of its own
-- it made a pass of 7,790 timers take 630 ms instead of 60 (2026-12-01, 2 cores). Pass plain columns, for the same reason.
-- textsend would give the client's encoding, hence convert_to.
create function queen._frame(
    p_message_id uuid,
    p_txn text,
    p_producer_sub text,
    p_deliver_at timestamptz,
    p_encrypted boolean,
    p_payload bytea)
returns bytea
language sql
stable
parallel safe
return int4send(
         21 + coalesce(octet_length(convert_to(p_txn, 'UTF8')), 0) + coalesce(octet_length(convert_to(p_producer_sub, 'UTF8')), 0)
            + case when p_deliver_at is null then 0 else 8 end + octet_length(p_payload))
    || case when p_encrypted
         then case when p_deliver_at is null then '\x01'::bytea else '\x03'::bytea end
         else case when p_deliver_at is null then '\x00'::bytea else '\x02'::bytea end end
    || uuid_send(p_message_id)
    || coalesce(int2send(octet_length(convert_to(p_txn, 'UTF8'))::int2) || convert_to(p_txn, 'UTF8'), '\x0000'::bytea)
    || coalesce(int2send(octet_length(convert_to(p_producer_sub, 'UTF8'))::int2) || convert_to(p_producer_sub, 'UTF8'), '\x0000'::bytea)
    || coalesce(timestamptz_send(p_deliver_at), ''::bytea)
    || p_payload;
comment on function queen._frame(uuid, text, text, timestamptz, boolean, bytea) is
  'One message as bytes. p_txn null: the message id; p_deliver_at null: not a timer.';

-- stable, as convert_to is: declared immutable it could not be inlined, and cost 15 us a call instead of 1.
create function queen._txn_hash(p_txn text)
returns bytea
language sql
stable
parallel safe
return substr(sha256(convert_to(p_txn, 'UTF8')), 1, 16);
comment on function queen._txn_hash(text) is 'First 16 bytes of sha256 over the UTF-8 of a txn.';

create function queen._segment_pack(p_raw bytea, p_count int)
returns bytea
language plpython3u
immutable
parallel safe
as $$
import struct

import zstandard

# Level 1 with a checksum: the checksum turns silent damage of a page into an error at the pop.
pack = SD.get("pack")
if pack is None:
    pack = SD["pack"] = zstandard.ZstdCompressor(level=1, write_checksum=True).compress
return struct.pack(">2sBBII", b"QS", 1, 1, p_count, len(p_raw)) + pack(p_raw)
$$;
comment on function queen._segment_pack(bytea, int) is 'Frames as a segment blob: 12 bytes of header and one zstandard frame.';

create function queen._segment_unpack(
    p_blob bytea,
    p_raw int,
    p_base bigint,
    p_end bigint,
    p_from bigint,
    p_to bigint,
    p_place text)
returns table ("offset" bigint, message_id uuid, txn text, producer_sub text, deliver_at_us bigint, encrypted boolean, payload bytea)
language plpython3u
immutable
parallel safe
as $$
import struct

import zstandard

head = struct.Struct(">2sBBII")
u32, u16, i64 = struct.Struct(">I").unpack_from, struct.Struct(">H").unpack_from, struct.Struct(">q").unpack_from


def damaged(why):
    plpy.error(
        "segment at offset %d of %s is damaged: %s" % (p_base, p_place, why),
        hint="Restore it, or let each group skip it: queen.seek with to_offset = queen.log_segments.end_offset + 1.",
        sqlstate="QN010",
    )


if len(p_blob) < head.size:
    damaged("too short")
magic, version, codec, count, raw_length = head.unpack_from(p_blob)
if magic != b"QS" or version != 1 or codec != 1:
    damaged("unknown header")
# The row was written with the blob and counted when the pop was bounded: a blob that states more must not allocate it.
if count != p_end - p_base + 1 or raw_length != p_raw:
    damaged("states %d messages in %d bytes, its row %d in %d" % (count, raw_length, p_end - p_base + 1, p_raw))
body = p_blob[head.size :]
try:
    if zstandard.frame_content_size(body) != raw_length:
        damaged("sizes differ")
    raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=raw_length)
except zstandard.ZstdError as error:
    damaged(error)
messages = []
at = 0
try:
    for offset in range(p_base, min(p_base + count, p_to + 1)):
        end = at + 4 + u32(raw, at)[0]
        if end > raw_length:
            damaged("offset %d ends behind its end" % offset)
        if offset >= p_from:
            flags = raw[at + 4]
            mid = raw[at + 5 : at + 21].hex()
            mid = "%s-%s-%s-%s-%s" % (mid[:8], mid[8:12], mid[12:16], mid[16:20], mid[20:])
            p = at + 23
            n = u16(raw, at + 21)[0]
            if n:
                txn = raw[p : p + n].decode()
                p += n
            else:
                txn = mid
            n = u16(raw, p)[0]
            p += 2
            sub = raw[p : p + n].decode() if n else None
            p += n
            due = None
            if flags & 2:
                due = i64(raw, p)[0]
                p += 8
            if p > end:
                damaged("offset %d is too short" % offset)
            messages.append((offset, mid, txn, sub, due, flags & 1 == 1, raw[p:end]))
        at = end
except (struct.error, IndexError, UnicodeDecodeError) as error:
    damaged(error)
return messages
$$;
comment on function queen._segment_unpack(bytea, int, bigint, bigint, bigint, bigint, text) is
  'Messages of a segment from one offset to another, in order. p_raw, p_base and p_end are raw_bytes, base_offset and end_offset'
  ' of its row; p_place names the partition in an error. Errors: QN010 for a damaged segment.';
