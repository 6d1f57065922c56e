-- One pass of the fire inside one transaction, while all that is due fits into a window or nearly so. The row lock is the
-- claim. First a peek without locks: a window of due rows, by time over all 64 shards, grouped by destination. Then
-- 033_fire_groups.sql.
--
-- Order. The window is a prefix of what is due, hence so is each group's part of it; where the window ends within one
-- instant, that instant waits for the next pass.
-- Cost. The index is read from p_from on (the caller's moving bound): entries of rows fired lately, which an old snapshot
-- may keep alive, are not visited again.

-- One arm a shard, so that a time-ordered read of all shards is a merge of 64 index scans which stops at its limit.
-- The order by in each arm is what offers the planner sorted arms; without it, it reads all that is due and sorts.
-- (shard = any(...) would read one shard after the other, and a limit each reads a third more than it uses.)
do $$
begin
  execute 'create view queen._timers_by_time as ' || (
    select string_agg(format(
             '(select %1$s::smallint as shard, t.ctid as tid, t.tenant_id, t.queue, t."partition" as part, t.deliver_at, t.visible_at, t.timer_key,'
             ' queen._payload_size(t.payload, t.payload_zstd) as bytes from queen.log_timers t where t.shard = %1$s::smallint order by t.visible_at)', s), ' union all ' order by s)
      from generate_series(0, 63) s);
end
$$;
comment on view queen._timers_by_time is 'queen.log_timers as 64 arms, to be read in order of visible_at with a limit.';

create function queen._fire_pass(
    p_max_rows int,
    p_max_bytes bigint,
    p_from timestamptz,
    p_worker int,
    p_workers int,
    p_now timestamptz,
    p_fault text default null)
returns queen._pass
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set enable_sort = off
set max_parallel_workers_per_gather = 0
set jit = off
set plan_cache_mode = force_generic_plan
set work_mem = '64MB'
as $$
declare
  v_pass queen._pass;
  v_limit int := p_max_rows * case when p_workers > 1 then 2 else 1 end + 1;
  v_flat boolean;
  v_edge timestamptz;
  v_groups queen._group[];
  v_rows bigint;
begin
  perform queen._gate(false);
  loop
    with seen as materialized (
      select v.* from queen._timers_by_time v
       where v.visible_at >= p_from and v.visible_at <= p_now
       order by v.visible_at
       limit v_limit
    ), edge as (
      -- A full window may end within an instant: that instant is left out, unless there is nothing else.
      select case when count(*) = v_limit then max(s.visible_at) end as at,
             count(*) = v_limit and min(s.visible_at) = max(s.visible_at) as flat
        from seen s
    ), grp as (
      select s.tenant_id, s.queue, s.part, array_agg(s.tid) as tids, array_agg(s.bytes) as sizes, array_agg(s.visible_at) as visible
        from (select s.* from seen s cross join edge e
               where e.at is null or e.flat or s.visible_at < e.at
               order by s.deliver_at, s.timer_key) s
       group by s.tenant_id, s.queue, s.part
    )
    select e.at, e.flat, (select array_agg(row(g.tenant_id, g.queue, g.part, null, null, g.tids, g.sizes, g.visible, null)::queen._group) from grp g)
      into v_edge, v_flat, v_groups
      from edge e;
    -- A full window that ends within a large instant leaves too little, or nothing whole: look deeper, so that equal times
    -- come in key order as far as a window can see.
    exit when v_edge is null or v_limit > p_max_rows + 30000;
    v_rows := (select sum(cardinality(g.tids)) from unnest(v_groups) g);
    exit when not v_flat and v_rows >= case when p_max_rows > 1000 then p_max_rows / 2 else p_max_rows end;
    v_limit := p_max_rows + case when v_limit < p_max_rows + 2000 then 2000 else 32768 end;
  end loop;

  v_pass := queen._fire_groups(queen._place_groups(v_groups, p_now), p_max_rows, p_max_bytes, p_worker, p_workers, p_now, p_fault);
  v_pass.more := v_pass.more or v_edge is not null;
  v_pass.bound := least(v_pass.bound, v_edge);
  -- A backlog: the next pass goes by tenants (047_crowd.sql), these at first.
  v_pass.behind := case when v_pass.more
    then array(select row(g.tenant_id, '-infinity', '')::queen._crowd from (select distinct g.tenant_id from unnest(v_groups) g) g order by 1) end;
  return v_pass;
end
$$;
comment on function queen._fire_pass(int, bigint, timestamptz, int, int, timestamptz, text) is
  'One pass over what is due from p_from on: at most p_max_rows timers and p_max_bytes of payload. With p_fault the rows it'
  ' would fire are failed with that text instead.';
