-- The one path into the log. Pushes, both kinds of fire and requeues end here.
--
-- The caller holds the row locks of the partitions (taken in ascending id). Arrays in, sets inside: one update, one
-- insert of segments and one of txns, whatever the number of partitions.

create function queen._append(
    p_partitions bigint[],
    p_counts int[],
    p_raws bytea[],
    p_at timestamptz,
    p_txn_partitions bigint[],
    p_txn_ranks int[],
    p_txn_hashes bytea[],
    p_txn_ids uuid[])
returns table (partition_id bigint, base_offset bigint, created_at timestamptz)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
#variable_conflict use_column
begin
  return query
  with seg as materialized (
    select u.pid, u.n, u.raw
      from unnest(p_partitions, p_counts, p_raws) as u (pid, n, raw)
  ), alloc as (
    update queen.log_partitions p
       set last_offset = p.last_offset + s.n,
           last_created_at = greatest(p.last_created_at, p_at),
           hot = true,
           due_at = coalesce(p.due_at, p_at + interval '1 minute')
      from seg s
     -- The row is locked, so its place is certain; as a plain join this could read every partition.
     cross join lateral (select x.ctid as tid from queen.log_partitions x where x.id = s.pid limit 1) k
     where p.ctid = k.tid
    returning p.id, p.last_offset - s.n + 1 as base, p.last_offset as tip, p.last_created_at as stamp
  ), segments as (
    insert into queen.log_segments (partition_id, base_offset, end_offset, created_at, raw_bytes, blob)
    select a.id, a.base, a.tip, a.stamp, octet_length(s.raw), queen._segment_pack(s.raw, s.n)
      from alloc a
      join seg s on s.pid = a.id
  ), txns as (
    insert into queen.log_txns (partition_id, "offset", created_at, txn_hash, message_id)
    select a.id, a.base + t.rank - 1, a.stamp, t.hash, t.mid
      from unnest(p_txn_partitions, p_txn_ranks, p_txn_hashes, p_txn_ids) as t (pid, rank, hash, mid)
      join alloc a on a.id = t.pid
  )
  select a.id, a.base, a.stamp from alloc a;
end
$$;
comment on function queen._append(bigint[], int[], bytea[], timestamptz, bigint[], int[], bytea[], uuid[]) is
  'Appends one segment to each partition named, whose row lock the caller holds; allocates the offsets, stamps created_at'
  ' and records the txns (rank is the place in the segment, from 1). Returns where each segment begins.';
