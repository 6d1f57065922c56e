-- Append and delete: the one place where a timer turns into a message. Both ways to hold a row end here, with the
-- partitions locked by the caller; so the frame and the disappearance of the row are one commit.
--
-- The rows are taken FOR UPDATE SKIP LOCKED (again, in a leased fire, which costs nothing). A row that changed between
-- the snapshot and the lock comes back as its new version, with another ctid; the delete below would not see it, so it
-- is left for the next pass. So is a ctid that a vacuum gave to another timer: the destination is compared.
--
-- Names are compared with IS NOT DISTINCT FROM, which no index can serve: with "=" the planner once read every timer of a
-- queue by the primary key to find those of a pass (7 s instead of 80 ms, 2026-12-01).

create type queen._fired as (
    fired  int,
    failed int,
    late   bigint[],    -- how many by lateness: queen._late_bounds()
    ords   bigint[],    -- of each row fired: its place in the arrays handed over,
    pids   bigint[],    --   its partition
    ranks  int[],       --   and its place in the segment, from 1
    places bigint[],    -- of each segment: partition
    bases  bigint[]     --   and first offset
);
comment on type queen._fired is 'What became of rows handed to queen._fire_rows.';

create function queen._late_bounds()
returns float8[]
language sql
immutable
parallel safe
return array[0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 600]::float8[];
comment on function queen._late_bounds() is 'Lower bounds of the lateness histogram in seconds; bucket i counts from bound i to bound i + 1.';

create function queen._fire_rows(
    p_tids tid[],
    p_partitions bigint[],
    p_now timestamptz,
    p_leased boolean,
    p_fault text)
returns queen._fired
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_mergejoin = off
set jit = off
set plan_cache_mode = force_generic_plan
set work_mem = '64MB'
as $$
declare
  v_result queen._fired;
  v_max_payload bigint := queen._setting('payload_max_bytes')::bigint + 1;
  v_pids bigint[];
  v_counts int[];
  v_raws bytea[];
  v_txn_pids bigint[];
  v_txn_ranks int[];
  v_txn_hashes bytea[];
  v_txn_ids uuid[];
  v_gone bigint;
  v_bounds float8[] := queen._late_bounds();
  v_at timestamptz := greatest(queen._now(), p_now);
  v_bad tid[];
  v_bad_why text[];
begin
  v_result.fired := 0;
  v_result.failed := 0;
  with place as materialized (
    select p.id as pid, q.tenant_id, q.name as queue, p.name as part
      from (select distinct u.pid from unnest(p_partitions) as u (pid)) d
     cross join lateral (select x.id, x.queue_id, x.name from queen.log_partitions x where x.id = d.pid limit 1) p
     cross join lateral (select x.tenant_id, x.name from queen.queues x where x.id = p.queue_id limit 1) q
  ), held as materialized (
    select t.ctid as tid, l.pid, w.ord, t.ctid = w.tid as same, t.deliver_at, t.message_id, t.producer_sub, t.encrypted,
           t.txn, nullif(t.txn, t.message_id::text) as own_txn, t.payload, t.payload_zstd,
           coalesce(p_fault, queen._timer_problem(t.txn, t.producer_sub, t.payload, t.payload_zstd, v_max_payload)) as problem
      from unnest(p_tids, p_partitions) with ordinality as w (tid, pid, ord)
      join place l on l.pid = w.pid
      join queen.log_timers t on t.ctid = w.tid
     where (t.visible_at <= p_now or (p_leased and t.deliver_at <= v_at))
       and t.tenant_id is not distinct from l.tenant_id and t.queue is not distinct from l.queue
       and t."partition" is not distinct from l.part
       for update of t skip locked
  ), good as materialized (
    -- Frames are made here, so what is sorted and passed on below is narrow.
    select h.tid, h.pid, h.ord, h.deliver_at, queen._txn_hash(h.txn) as hash,
           case when h.own_txn is not null then h.message_id end as mid,
           case when h.payload_zstd
                then queen._frame(h.message_id, h.own_txn, h.producer_sub, h.deliver_at, h.encrypted, queen._payload_expand(h.payload))
                else queen._frame(h.message_id, h.own_txn, h.producer_sub, h.deliver_at, h.encrypted, h.payload) end as frame
      from held h
     where h.problem is null and h.same
  ), gone as (
    delete from queen.log_timers t using (select g.tid from good g) g where t.ctid = g.tid returning 1
  ), segment as (
    select g.pid, count(*)::int as n, string_agg(g.frame, ''::bytea order by g.ord) as raw
      from good g
     group by g.pid
  ), segments as (
    select array_agg(s.pid) as pids, array_agg(s.n) as counts, array_agg(s.raw) as raws, sum(s.n)::int as n
      from segment s
  ), txns as (
    select array_agg(r.pid) as pids, array_agg(r.rank) as ranks, array_agg(r.hash) as hashes, array_agg(r.mid) as ids,
           array_agg(r.ord) as ords
      from (select g.pid, g.ord, g.hash, g.mid, (row_number() over (partition by g.pid order by g.ord))::int as rank from good g) r
  ), late as (
    select array_agg(coalesce(c.n, 0) order by b.i) as counts
      from generate_series(1, 16) as b (i)
      left join (select width_bucket(date_part('epoch', v_at - g.deliver_at), v_bounds) as i, count(*) as n from good g group by 1) c on c.i = b.i
  ), bad as (
    select array_agg(h.tid) as tids, array_agg(h.problem) as why from held h where h.problem is not null and h.same
  )
  select s.pids, s.counts, s.raws, coalesce(s.n, 0), l.counts, t.pids, t.ranks, t.hashes, t.ids, t.ords, b.tids, b.why,
         (select count(*) from gone)
    into v_pids, v_counts, v_raws, v_result.fired, v_result.late, v_txn_pids, v_txn_ranks, v_txn_hashes, v_txn_ids,
         v_result.ords, v_bad, v_bad_why, v_gone
    from segments s cross join txns t cross join late l cross join bad b;
  if v_gone <> v_result.fired then
    raise exception 'fire took % timers and deleted %', v_result.fired, v_gone using errcode = 'XX000';
  end if;
  if v_result.fired > 0 then
    v_result.pids := v_txn_pids;
    v_result.ranks := v_txn_ranks;
    select array_agg(a.partition_id), array_agg(a.base_offset) into v_result.places, v_result.bases
      from queen._append(v_pids, v_counts, v_raws, v_at, v_txn_pids, v_txn_ranks, v_txn_hashes, v_txn_ids) a;
  end if;
  if v_bad is not null then
    perform queen._timers_failed(v_bad, v_bad_why, null, true, p_now);
    v_result.failed := cardinality(v_bad);
  end if;
  return v_result;
end
$$;
comment on function queen._fire_rows(tid[], bigint[], timestamptz, boolean, text) is
  'Takes the rows and moves them into their partitions, in the order of the arrays within each; the partitions are locked by'
  ' the caller. A row with a fault of its own is backed off or archived instead; with p_fault, every one is. p_leased: the rows'
  ' are held by a lease that the caller verified.';
