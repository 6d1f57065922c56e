-- The second half of a pass: from due rows, grouped by destination, to the log. Whichever way they were found.
--
--   lock     the partitions of the groups, ascending, SKIP LOCKED
--   choose   as much as a pass may do; tenants take turns
--   fire     queen._fire_rows takes the rows, SKIP LOCKED, appends and deletes
--
-- Partitions before rows: whoever has a partition is the only one who can take its rows, so nobody overtakes. That reverses
-- the canonical order, and is safe because neither acquisition waits.

create type queen._crowd as (
    tenant_id uuid,
    from_at   timestamptz,  -- nothing of the tenant is due before this visible_at
    from_key  text          --   and, at this instant, before this key
);
comment on type queen._crowd is 'A tenant with more due than a pass can do, and where its next rows begin.';

create type queen._pass as (
    fired   int,            -- timers delivered
    failed  int,            -- timers backed off or archived for a fault of their own
    held    int,            -- rows passed over because somebody holds them
    bound   timestamptz,    -- nothing due lies before this but rows somebody holds
    more    boolean,        -- work was left for lack of room
    late    bigint[],       -- how many by lateness: queen._late_bounds()
    stuck   queen._group[], -- groups left out: missing (to be born), busy (partition locked), away (stepped out),
                            -- paused, other (another worker's share)
    behind  queen._crowd[]  -- of each tenant the first row that was seen and not taken
);
comment on type queen._pass is 'What one pass of the fire did and what it left.';

-- Where groups go: their partition, or why they cannot be fired.
create function queen._place_groups(p_groups queen._group[], p_now timestamptz)
returns queen._group[]
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_pauses boolean := exists (select from queen.queue_pauses);
begin
  return array(
    select row(g.tenant_id, g.queue, g.part, p.id,
             case when queen._name_problem(g.queue, 255) is not null then 'queue name ' || queen._name_problem(g.queue, 255)
                  when queen._name_problem(g.part, 255) is not null then 'partition name ' || queen._name_problem(g.part, 255)
                  when b.away_from is not null then 'away'
                  when v_pauses and queen._paused(g.tenant_id, g.queue) then 'paused'
                  when p.id is null then 'missing' end, g.tids, g.sizes, g.visible, g.keys)::queen._group
      from unnest(p_groups) g
      left join lateral (select x.id from queen.queues x where x.tenant_id = g.tenant_id and x.name = g.queue limit 1) q on true
      left join lateral (select x.id from queen.log_partitions x where x.queue_id = q.id and x.name = g.part collate "C" limit 1) p on true
      left join lateral (select x.away_from from queen.log_busy x
                          where x.tenant_id = g.tenant_id and x.queue = g.queue and x."partition" = g.part collate "C"
                            and x.away_from > p_now limit 1) b on true);
end
$$;
comment on function queen._place_groups(queen._group[], timestamptz) is 'Groups with pid and why filled in. Takes no lock.';

create function queen._fire_groups(
    p_groups queen._group[],
    p_max_rows int,
    p_max_bytes bigint,
    p_worker int,
    p_workers int,
    p_now timestamptz,
    p_fault text)
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
  v_locked bigint[];
  v_groups queen._group[] := p_groups;
  v_chosen queen._group[];
  v_rows bigint;
  v_bytes bigint;
begin
  v_pass.fired := 0;
  v_pass.failed := 0;
  v_pass.held := 0;
  v_pass.more := false;
  -- With much to do, a worker keeps to partitions of its own share while they have something due, and helps with the others
  -- when not: so workers with a backlog do not queue on one another.
  if p_workers > 1 and (select sum(cardinality(g.tids)) from unnest(v_groups) g) > 500
     and exists (select from unnest(v_groups) g where g.why is null and g.pid % p_workers = p_worker) then
    select array_agg(row(g.tenant_id, g.queue, g.part, g.pid,
             case when g.why is null and g.pid % p_workers <> p_worker then 'other' else g.why end,
             g.tids, g.sizes, g.visible, g.keys)::queen._group)
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
           g.tids, g.sizes, g.visible, g.keys)::queen._group)
    into v_groups
    from unnest(v_groups) g;
  select array_agg(g.*) filter (where g.why in ('missing', 'busy', 'away', 'paused', 'other'))
    into v_pass.stuck
    from unnest(v_groups) g;
  if v_pass.stuck is not null then
    v_pass.behind := array(
      select distinct on (g.tenant_id) row(g.tenant_id, x.at, x.key)::queen._crowd
        from unnest(v_pass.stuck) g
       cross join lateral unnest(g.visible, g.keys) as x (at, key)
       order by g.tenant_id, x.at, x.key collate "C");
  end if;

  select sum(cardinality(g.tids)), sum(x.bytes) into v_rows, v_bytes
    from unnest(v_groups) g
   cross join lateral (select sum(s.size) as bytes from unnest(g.sizes) as s (size)) x
   where g.why is null;
  if v_rows <= p_max_rows and v_bytes <= p_max_bytes then
    v_chosen := array(select g from unnest(v_groups) g where g.why is null);
  elsif v_rows > 0 then
    with due as (
      select r.tid, r.bytes, r.visible_at, r.key, r.ord, g.pid, g.n, g.tenant_id, g.queue, g.part,
             row_number() over (partition by g.tenant_id order by r.visible_at, g.n, r.ord) as turn
        from unnest(v_groups) with ordinality as g (tenant_id, queue, part, pid, why, tids, sizes, visible, keys, n)
       cross join lateral unnest(g.tids, g.sizes, g.visible, g.keys) with ordinality as r (tid, bytes, visible_at, key, ord)
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
              from (select row(c.tenant_id, c.queue, c.part, c.pid, null, array_agg(c.tid order by c.ord), null, null, null)::queen._group as grp
                      from chosen c
                     where c.taken
                     group by c.n, c.tenant_id, c.queue, c.part, c.pid) g),
           v_pass.behind || array(select distinct on (c.tenant_id) row(c.tenant_id, c.visible_at, c.key)::queen._crowd
                                    from chosen c
                                   where not c.taken
                                   order by c.tenant_id, c.visible_at, c.key collate "C"),
           count(*) filter (where c.taken), bool_or(not c.taken)
      into v_chosen, v_pass.behind, v_rows, v_pass.more
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
  v_pass.bound := least(p_now, (select min(b.from_at) from unnest(v_pass.behind) b));
  return v_pass;
end
$$;
comment on function queen._fire_groups(queen._group[], int, bigint, int, int, timestamptz, text) is
  'Fires what it can of groups that were placed: at most p_max_rows timers and p_max_bytes of payload. With p_fault the rows it'
  ' would fire are failed with that text instead. The caller went through the gate.';

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
  if not exists (select from unnest(p_groups) g where g.why not in ('missing', 'busy', 'away', 'paused', 'other')) then
    return 0;
  end if;
  select array_agg(h.tid), array_agg(h.why) into v_tids, v_why
    from (select t.ctid as tid, g.why
            from unnest(p_groups) g
           cross join lateral unnest(g.tids) as r (tid)
            join queen.log_timers t on t.ctid = r.tid
           where g.why not in ('missing', 'busy', 'away', 'paused', 'other')
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
