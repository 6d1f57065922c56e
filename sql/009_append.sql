-- The one path into the log. Pushes, both kinds of fire and requeues end here.
--
-- The caller holds the row locks of the partitions (taken in ascending id). Segments in, sets inside: one update, one
-- insert of segments and one of txns, whatever the number of partitions.

create type queen._segment as (
    pid    bigint,      -- partition
    n      int,         -- messages
    raw    bytea,       -- their frames, one behind the other
    hashes bytea[],     -- of each its hashed txn,
    mids   uuid[],      --   its message id, null when that is the txn,
    tids   tid[]        --   and the row it was, when it was a timer
);
comment on type queen._segment is 'Messages on their way into a partition.';

create function queen._append(p_segments queen._segment[], p_at timestamptz)
returns bigint[]
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_bases bigint[];
begin
  with seg as materialized (
    select u.ord, u.pid, u.n, u.raw, u.hashes, u.mids
      from unnest(p_segments) with ordinality as u (pid, n, raw, hashes, mids, tids, ord)
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
      from alloc a
      join seg s on s.pid = a.id
     cross join lateral unnest(s.hashes, s.mids) with ordinality as t (hash, mid, rank)
  )
  select array_agg(a.base order by s.ord) into v_bases
    from alloc a
    join seg s on s.pid = a.id;
  return v_bases;
end
$$;
comment on function queen._append(queen._segment[], timestamptz) is
  'Appends one segment to each partition named, whose row lock the caller holds; allocates the offsets, stamps created_at and'
  ' records the txns. Returns where each begins.';
