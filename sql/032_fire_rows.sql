-- Append and delete: the one place where a timer turns into a message. Both ways to hold a row end here, with the
-- partitions locked by the caller; so the frame and the disappearance of the row are one commit.
--
-- The rows are taken FOR UPDATE SKIP LOCKED (again, in a leased fire, which costs nothing). A row that changed between
-- the snapshot and the lock comes back as its new version, with another ctid; the delete below would not see it, so it
-- is left for the next pass. So is a ctid that a vacuum gave to another timer: the destination is compared.
--
-- Rows are read by "ctid = any (array)", in the order of the heap and with nothing joined below the lock: a tid scan a row
-- asks the kernel for the size of the table each time, and a join there copies its other side whole (together a fifth of
-- a pass, 2026-12-01). Nested loops are switched off because an array parameter is taken for ten rows.

create type queen._group as (
    tenant_id uuid,
    queue     text,
    part      text,
    pid       bigint,
    why       text,             -- null: to be fired; missing, away, paused, busy, other; else the fault of its name
    tids      tid[],            -- its rows in the order of their fire, and of each
    sizes     bigint[],         --   the bytes, uncompressed
    visible   timestamptz[],    --   visible_at
    keys      text[]            --   and, when the pass goes by tenants, the key
);
comment on type queen._group is 'Due rows of one destination.';

create type queen._fired as (
    fired    int,
    failed   int,
    late     bigint[],          -- how many by lateness: queen._late_bounds()
    segments queen._segment[],  -- what was appended,
    bases    bigint[]           --   and the first offset of each
);
comment on type queen._fired is 'What became of rows handed to queen._fire_rows.';

create function queen._late_bounds()
returns float8[]
language sql
immutable
parallel safe
return array[0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60, 600]::float8[];
comment on function queen._late_bounds() is 'Lower bounds of the lateness histogram in seconds; bucket i counts from bound i to bound i + 1.';

create function queen._fire_rows(p_groups queen._group[], p_now timestamptz, p_leased boolean, p_fault text)
returns queen._fired
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_mergejoin = off
set enable_nestloop = off
set jit = off
set plan_cache_mode = force_generic_plan
set work_mem = '64MB'
as $$
declare
  v_result queen._fired;
  -- The most that payload_max_bytes may be, not what it is: what was accepted is delivered.
  v_max_payload constant bigint := 67108865;
  v_bounds float8[] := queen._late_bounds();
  v_at timestamptz := greatest(queen._now(), p_now);
  v_tids tid[] := array(select r.tid from unnest(p_groups) g cross join lateral unnest(g.tids) as r (tid));
  v_dues timestamptz[];
  v_bad tid[];
  v_bad_why text[];
  v_gone int;
begin
  v_result.failed := 0;
  with done as (
    -- What arrives here is sorted by group and place, and aggregates keep that order, by whichever plan. Frames are made before the sort: it copies what it sorts.
    select r.pid, count(*) filter (where r.problem is null)::int as n,
           string_agg(r.frame, ''::bytea) as raw,
           array_agg(r.hash) filter (where r.problem is null) as hashes,
           array_agg(r.mid) filter (where r.problem is null) as mids,
           array_agg(r.tid) filter (where r.problem is null) as tids,
           array_agg(r.deliver_at) filter (where r.problem is null) as dues,
           array_agg(r.tid) filter (where r.problem is not null) as bad,
           array_agg(r.problem) filter (where r.problem is not null) as why
      from (select w.pid, h.tid, h.deliver_at, h.problem, queen._txn_hash(h.txn) as hash,
                   case when h.own_txn is not null then h.message_id end as mid,
                   case when h.problem is not null then null
                        when h.payload_zstd
                        then queen._frame(h.message_id, h.own_txn, h.producer_sub, h.deliver_at, h.encrypted, queen._payload_expand(h.payload))
                        else queen._frame(h.message_id, h.own_txn, h.producer_sub, h.deliver_at, h.encrypted, h.payload) end as frame
              from (select t.ctid as tid, t.tenant_id, t.queue, t."partition" as part, t.deliver_at, t.message_id, t.producer_sub,
                           t.encrypted, t.txn, nullif(t.txn, t.message_id::text) as own_txn, t.payload, t.payload_zstd,
                           coalesce(p_fault, queen._timer_problem(t.txn, t.producer_sub, t.payload, t.payload_zstd, v_max_payload)) as problem
                      from queen.log_timers t
                     where t.ctid = any (v_tids)
                       and (t.visible_at <= p_now or (p_leased and t.deliver_at <= v_at))
                       for update skip locked) h
              join (select g.pid, g.tenant_id, g.queue, g.part, r.tid, r.ord
                      from unnest(p_groups) g
                     cross join lateral unnest(g.tids) with ordinality as r (tid, ord)
                    offset 0) w
                on w.tid = h.tid and w.tenant_id = h.tenant_id and w.queue = h.queue and w.part = h.part
             order by w.pid, w.ord) r
     group by r.pid
  )
  select array_agg(row(d.pid, d.n, d.raw, d.hashes, d.mids, d.tids)::queen._segment) filter (where d.n > 0), coalesce(sum(d.n), 0),
         array(select u.tid from done x cross join lateral unnest(x.tids) as u (tid)),
         array(select u.due from done x cross join lateral unnest(x.dues) as u (due)),
         array(select u.tid from done x cross join lateral unnest(x.bad) as u (tid)),
         array(select u.why from done x cross join lateral unnest(x.why) as u (why))
    into v_result.segments, v_result.fired, v_tids, v_dues, v_bad, v_bad_why
    from done d;
  if v_result.fired > 0 then
    delete from queen.log_timers t where t.ctid = any (v_tids);
    get diagnostics v_gone = row_count;
    if v_gone <> v_result.fired then
      raise exception 'fire took % timers and deleted %', v_result.fired, v_gone using errcode = 'XX000';
    end if;
    select array_agg(coalesce(c.n, 0) order by b.i) into v_result.late
      from generate_series(1, 16) as b (i)
      left join (select width_bucket(date_part('epoch', v_at - u.due), v_bounds) as i, count(*) as n
                   from unnest(v_dues) as u (due) group by 1) c on c.i = b.i;
    v_result.bases := queen._append(v_result.segments, v_at);
  end if;
  if cardinality(v_bad) > 0 then
    perform queen._timers_failed(v_bad, v_bad_why, null, true, p_now);
    v_result.failed := cardinality(v_bad);
  end if;
  return v_result;
end
$$;
comment on function queen._fire_rows(queen._group[], timestamptz, boolean, text) is
  'Takes the rows of the groups and moves them into their partitions, in the order of the arrays; the partitions are locked by'
  ' the caller. A row with a fault of its own is backed off or archived instead; with p_fault, every one is. p_leased: the rows'
  ' are held by a lease that the caller verified.';
