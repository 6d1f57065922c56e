-- Payloads as they are stored: with a byte in front that tells bytes from JSON, and, in a row that waits, perhaps compressed.

-- What is wrong with a stored payload, or null. max_output_size bounds the memory whatever the frame says of itself.
create function queen._payload_zstd_problem(p_payload bytea, p_max bigint)
returns text
language plpython3u
immutable
parallel safe
as $$
import zstandard

try:
    size = zstandard.frame_content_size(p_payload)
    if size < 0 or size > p_max:
        return "stored payload is damaged: states %d bytes of content, %d are allowed" % (size, p_max)
    zstandard.ZstdDecompressor().decompress(p_payload, max_output_size=max(size, 1))
except zstandard.ZstdError as error:
    return "stored payload is damaged: %s" % error
return None
$$;
comment on function queen._payload_zstd_problem(bytea, bigint) is 'Why a compressed payload cannot be read, or null.';

create function queen._payload_expand(p_payload bytea)
returns bytea
language plpython3u
immutable
parallel safe
as $$
import zstandard

size = zstandard.frame_content_size(p_payload)
return zstandard.ZstdDecompressor().decompress(p_payload, max_output_size=max(size, 1))
$$;
comment on function queen._payload_expand(bytea) is 'A compressed payload as it was before; ask queen._payload_zstd_problem first.';

-- The size of what is compressed, as its frame states it (RFC 8878, section 3.1.1.1). A pass is bounded by this: a megabyte of
-- zeros waits in fifty bytes. What is no frame is damaged and is found so when it is read.
create function queen._payload_zstd_size(p_payload bytea)
returns bigint
language plpgsql
immutable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_head bytea := substr(p_payload, 1, 14);
  v_flags int;
  v_at int;
  v_bytes int;
  v_size bigint := 0;
begin
  if octet_length(v_head) < 6 then
    return octet_length(p_payload);
  end if;
  v_flags := get_byte(v_head, 4);
  v_at := 5 + case when v_flags & 32 = 0 then 1 else 0 end + (array[0, 1, 2, 4])[(v_flags & 3) + 1];
  v_bytes := case v_flags >> 6 when 0 then (v_flags & 32) / 32 when 1 then 2 when 2 then 4 else 8 end;
  if v_bytes = 8 or octet_length(v_head) < v_at + v_bytes then
    return octet_length(p_payload);
  end if;
  for i in reverse v_bytes - 1..0 loop
    v_size := v_size * 256 + get_byte(v_head, v_at + i);
  end loop;
  return greatest(v_size + case when v_bytes = 2 then 256 else 0 end, octet_length(p_payload));
end
$$;
comment on function queen._payload_zstd_size(bytea) is 'Bytes of a compressed payload before, as its frame states them.';

create function queen._payload_size(p_payload bytea, p_zstd boolean)
returns bigint
language sql
immutable
parallel safe
return case when p_zstd then queen._payload_zstd_size(p_payload) else octet_length(p_payload)::bigint end;
comment on function queen._payload_size(bytea, boolean) is 'Bytes of a payload that waits, uncompressed.';

create function queen._payload_compress(p_payload bytea)
returns bytea
language plpython3u
immutable
parallel safe
as $$
import zstandard

pack = SD.get("pack")
if pack is None:
    pack = SD["pack"] = zstandard.ZstdCompressor(level=3, write_checksum=True).compress
packed = pack(p_payload)
return packed if len(packed) * 10 < len(p_payload) * 9 else None
$$;
comment on function queen._payload_compress(bytea) is 'A payload compressed, or null when that saves less than a tenth.';

-- JSON text never begins with a zero byte, so one byte in front tells bytes from JSON without a column of its own.
create function queen._payload_json(p_payload bytea)
returns jsonb
language sql
stable
parallel safe
return case when get_byte(p_payload, 0) <> 0 then convert_from(p_payload, 'UTF8')::jsonb end;
comment on function queen._payload_json(bytea) is 'The JSON of a stored payload, null when it holds bytes.';

create function queen._payload_json_or_null(p_payload bytea)
returns jsonb
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return queen._payload_json(p_payload);
exception when data_exception then
  return null;
end
$$;
comment on function queen._payload_json_or_null(bytea) is 'queen._payload_json; null too when the payload is damaged.';

create function queen._payload_bytes(p_payload bytea)
returns bytea
language sql
immutable
parallel safe
return case when get_byte(p_payload, 0) = 0 then substr(p_payload, 2) end;
comment on function queen._payload_bytes(bytea) is 'The bytes of a stored payload, null when it holds JSON.';
