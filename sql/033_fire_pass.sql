-- One pass of the fire inside one transaction. The row lock is the claim.
--
--   1 peek     without locks: a window of due rows, by time over all 64 shards, grouped by destination
--   2 lock     the partitions of the groups, ascending, SKIP LOCKED
--   3 fire     queen._fire_rows takes the rows, SKIP LOCKED, appends and deletes
--
-- Order. The window is a prefix of what is due, hence so is each group's part of it; where the window ends within one
-- instant, that instant waits for the next pass. Partitions before rows: whoever has a partition is the only one who can
-- take its rows, so nobody overtakes. That reverses the canonical order, and is safe because neither acquisition waits.
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
             ' octet_length(t.payload) as bytes from queen.log_timers t where t.shard = %1$s::smallint order by t.visible_at)', s), ' union all ' order by s)
      from generate_series(0, 63) s);
end
$$;
comment on view queen._timers_by_time is 'queen.log_timers as 64 arms, to be read in order of visible_at with a limit.';

create type queen._pass as (
    fired   int,            -- timers delivered
    failed  int,            -- timers backed off or archived for a fault of their own
    held    int,            -- rows passed over because somebody holds them
    bound   timestamptz,    -- nothing due lies before this but rows somebody holds
    more    boolean,        -- work was left for lack of room
    late    bigint[],       -- how many by lateness: queen._late_bounds()
    stuck   queen._group[]  -- groups left out: missing (to be born), busy (partition locked), away (stepped out),
                            -- other (another worker's share)
);
comment on type queen._pass is 'What one pass of the fire did and what it left.';

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
  v_fired queen._fired;
  v_limit int := p_max_rows * case when p_workers > 1 then 2 else 1 end + 1;
  v_flat boolean;
  v_edge timestamptz;
  v_locked bigint[];
  v_groups queen._group[];
  v_chosen queen._group[];
  v_left timestamptz;
  v_rows bigint;
  v_bytes bigint;
begin
  v_pass.fired := 0;
  v_pass.failed := 0;
  v_pass.held := 0;
  v_pass.more := false;
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
    select e.at, e.flat, (select array_agg(row(g.tenant_id, g.queue, g.part, p.id,
             case when queen._name_problem(g.queue, 255) is not null then 'queue name ' || queen._name_problem(g.queue, 255)
                  when queen._name_problem(g.part, 255) is not null then 'partition name ' || queen._name_problem(g.part, 255)
                  when b.away_from is not null then 'away'
                  when p.id is null then 'missing' end, g.tids, g.sizes, g.visible)::queen._group)
             from grp g
             left join lateral (select x.id from queen.queues x where x.tenant_id = g.tenant_id and x.name = g.queue limit 1) q on true
             left join lateral (select x.id from queen.log_partitions x where x.queue_id = q.id and x.name = g.part collate "C" limit 1) p on true
             left join lateral (select x.away_from from queen.log_busy x
                                 where x.tenant_id = g.tenant_id and x.queue = g.queue and x."partition" = g.part collate "C"
                                   and x.away_from > p_now limit 1) b on true)
      into v_edge, v_flat, v_groups
      from edge e;
    -- A full window that ends within a large instant leaves too little, or nothing whole: look deeper, so that equal times
    -- come in key order as far as a window can see.
    exit when v_edge is null or v_limit > p_max_rows + 30000;
    v_rows := (select sum(cardinality(g.tids)) from unnest(v_groups) g);
    exit when not v_flat and v_rows >= case when p_max_rows > 1000 then p_max_rows / 2 else p_max_rows end;
    v_limit := p_max_rows + case when v_limit < p_max_rows + 2000 then 2000 else 32768 end;
  end loop;

  if v_groups is null then
    v_pass.bound := p_now;
    return v_pass;
  end if;

  -- With much to do, a worker keeps to partitions of its own share while they have something due, and helps with the others
  -- when not: so workers with a backlog do not queue on one another.
  if p_workers > 1 and (select sum(cardinality(g.tids)) from unnest(v_groups) g) > 500
     and exists (select from unnest(v_groups) g where g.why is null and g.pid % p_workers = p_worker) then
    select array_agg(row(g.tenant_id, g.queue, g.part, g.pid,
             case when g.why is null and g.pid % p_workers <> p_worker then 'other' else g.why end,
             g.tids, g.sizes, g.visible)::queen._group)
      into v_groups
      from unnest(v_groups) g;
  end if;
  select array_agg(l.id) into v_locked
    from (select p.id
            from queen.log_partitions p
           where p.id = any (array(select g.pid from unnest(v_groups) g where g.why is null))
           order by p.id
             for no key update skip locked) l;

  -- Which rows: all of the groups that can be fired, or, when that is too much for one pass, a prefix of each: tenants
  -- take turns, within one it goes by time.
  select array_agg(row(g.tenant_id, g.queue, g.part, g.pid,
           case when g.why is null and (g.pid = any (v_locked)) is not true then 'busy' else g.why end,
           g.tids, g.sizes, g.visible)::queen._group)
    into v_groups
    from unnest(v_groups) g;
  select array_agg(g.*) filter (where g.why in ('missing', 'busy', 'away', 'other'))
    into v_pass.stuck
    from unnest(v_groups) g;

  select sum(cardinality(g.tids)), sum(x.bytes) into v_rows, v_bytes
    from unnest(v_groups) g
   cross join lateral (select sum(s.size) as bytes from unnest(g.sizes) as s (size)) x
   where g.why is null;
  if v_rows <= p_max_rows and v_bytes <= p_max_bytes then
    v_chosen := array(select g from unnest(v_groups) g where g.why is null);
  else
    with due as (
      select r.tid, r.bytes, r.visible_at, r.ord, g.pid, g.n, g.tenant_id, g.queue, g.part,
             row_number() over (partition by g.tenant_id order by r.visible_at, g.n, r.ord) as turn
        from unnest(v_groups) with ordinality as g (tenant_id, queue, part, pid, why, tids, sizes, visible, n)
       cross join lateral unnest(g.tids, g.sizes, g.visible) with ordinality as r (tid, bytes, visible_at, ord)
       where g.why is null
    ), placed as (
      select d.*, row_number() over w as place, sum(d.bytes) over w as total
        from due d
      window w as (order by d.turn, d.visible_at, d.n, d.ord rows unbounded preceding)
    ), chosen as (
      select p.*, p.place <= p_max_rows and (p.total <= p_max_bytes or p.place = 1) as taken
        from placed p
    )
    select (select array_agg(g.grp)
              from (select row(c.tenant_id, c.queue, c.part, c.pid, null, array_agg(c.tid order by c.ord), null, null)::queen._group as grp
                      from chosen c
                     where c.taken
                     group by c.n, c.tenant_id, c.queue, c.part, c.pid) g),
           min(c.visible_at) filter (where not c.taken), count(*) filter (where c.taken)
      into v_chosen, v_left, v_rows
      from chosen c;
  end if;

  if v_rows > 0 then
    v_fired := queen._fire_rows(v_chosen, p_now, false, p_fault);
    v_pass.fired := v_fired.fired;
    v_pass.failed := v_fired.failed;
    v_pass.late := v_fired.late;
    v_pass.held := v_rows - v_fired.fired - v_fired.failed;
  end if;
  v_pass.failed := v_pass.failed + coalesce(queen._fail_groups(v_groups, p_now), 0);

  v_pass.more := v_left is not null or v_edge is not null;
  v_pass.bound := least(v_left, v_edge, p_now, (
    select min(x.at) from unnest(v_pass.stuck) g cross join lateral unnest(g.visible) as x (at)));
  return v_pass;
end
$$;
comment on function queen._fire_pass(int, bigint, timestamptz, int, int, timestamptz, text) is
  'One pass over what is due from p_from on: at most p_max_rows timers and p_max_bytes of payload. With p_fault the rows it'
  ' would fire are failed with that text instead.';

-- Rows whose destination has an impossible name, which only a hand can have written.
create function queen._fail_groups(p_groups queen._group[], p_now timestamptz)
returns int
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_tids tid[];
  v_why text[];
begin
  if not exists (select from unnest(p_groups) g where g.why not in ('missing', 'busy', 'away', 'other')) then
    return 0;
  end if;
  select array_agg(h.tid), array_agg(h.why) into v_tids, v_why
    from (select t.ctid as tid, g.why
            from unnest(p_groups) g
           cross join lateral unnest(g.tids) as r (tid)
            join queen.log_timers t on t.ctid = r.tid
           where g.why not in ('missing', 'busy', 'away', 'other')
             and (t.visible_at <= p_now) is true
             and t.tenant_id is not distinct from g.tenant_id and t.queue is not distinct from g.queue
             and t."partition" is not distinct from g.part
             for update of t skip locked) h;
  if v_tids is null then
    return 0;
  end if;
  return (select count(*) from queen._timers_failed(v_tids, v_why, null, true, p_now));
end
$$;
comment on function queen._fail_groups(queen._group[], timestamptz) is 'Fails the rows of groups with an impossible destination; how many.';
