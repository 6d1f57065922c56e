-- A backlog: more is due than a window holds. Then a pass goes by tenants, so that a million timers of one do not hide
-- the one of another: each tenant with something due gets an equal share of the pass, and what one does not use goes to those who
-- have more. Its rows are read from the tenant's own position, in order of visible_at and key, so the cost of a pass
-- follows the batch, whatever the backlog, and equal due times come in the order of their keys.
--
-- Which tenants have something due is found by walking the index from one to the next, some hundreds a pass; those known
-- already are leapt over. A worker that was not round yet looks, besides, at what has come due since its last pass: so a
-- tenant waits for a whole round only when its timer was due before the backlog came and there are thousands of tenants.
--
-- The index is the second one of queen.log_timers. Its price on schedule, measured 2026-12-01 on 2 cores, medians of three:
-- schedule 88 us of CPU without and 98 with it, schedule_many 15.4 and 16.3 us a timer. Tenant and key are expressions so that the
-- planner never takes it for a look-up by key: with statistics of an empty table it read the whole of it to find one timer.

create index idx_log_timers_tenant on queen.log_timers (uuid_send(tenant_id), visible_at, (timer_key || ''));

create function queen._walk_tenants(
    p_after uuid,
    p_known uuid[],
    p_steps int,
    p_now timestamptz,
    out due uuid[],
    out last uuid)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
as $$
declare
  v_steps int;
begin
  with recursive walk as (
    select p_after as tenant_id, (select count(*) + 1 from unnest(p_known) as k (id) where k.id <= p_after)::int as i,
           null::timestamptz as at, 0 as n
    union all
    select coalesce(x.tenant_id, p_known[w.i]), w.i + case when x.tenant_id is null then 1 else 0 end, x.visible_at, w.n + 1
      from walk w
      left join lateral (select t.tenant_id, t.visible_at
                           from queen.log_timers t
                          where uuid_send(t.tenant_id) > uuid_send(w.tenant_id)
                            and uuid_send(t.tenant_id) < uuid_send(coalesce(p_known[w.i], 'ffffffff-ffff-ffff-ffff-ffffffffffff'))
                          order by uuid_send(t.tenant_id), t.visible_at, t.timer_key || ''
                          limit 1) x on true
     where w.n < p_steps and (x.tenant_id is not null or p_known[w.i] is not null)
  )
  select array_agg(w.tenant_id) filter (where w.at <= p_now), max(w.n), (array_agg(w.tenant_id order by w.n desc))[1]
    into due, v_steps, last
    from walk w;
  if v_steps < p_steps then
    -- Round. The ends, which the comparisons above leave out, are simply tried.
    last := null;
    due := due || array['00000000-0000-0000-0000-000000000000', 'ffffffff-ffff-ffff-ffff-ffffffffffff']::uuid[];
  end if;
end
$$;
comment on function queen._walk_tenants(uuid, uuid[], int, timestamptz) is
  'Tenants behind p_after with something due, at most p_steps of the index; p_known, ascending, are leapt over. last: where to go'
  ' on, null when the walk is round.';

create function queen._peek_tenants(
    p_crowd queen._crowd[],
    p_rows int,
    p_now timestamptz,
    out groups queen._group[],
    out crowd queen._crowd[])
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
  v_first int := greatest(1, least(200, p_rows / greatest(cardinality(p_crowd), 1)));
  v_counts int[];
  v_share int;
begin
  -- A few of each tell who has more; those share what the others leave.
  v_counts := array(
    select (select count(*)::int
              from (select from queen.log_timers t
                     where uuid_send(t.tenant_id) = uuid_send(m.tenant_id) and (t.visible_at, t.timer_key || '') >= (m.from_at, m.from_key collate "C") and t.visible_at <= p_now
                     order by t.visible_at, t.timer_key || ''
                     limit v_first + 1) x)
      from unnest(p_crowd) with ordinality as m (tenant_id, from_at, from_key, ord)
     order by m.ord);
  select v_first + greatest(0, p_rows - sum(least(c.n, v_first))) / greatest(1, count(*) filter (where c.n > v_first)) into v_share
    from unnest(v_counts) as c (n);
  with seen as materialized (
    select m.ord, m.wanted, v.*
      from (select u.ord, u.tenant_id, u.from_at, u.from_key, case when u.n > v_first then v_share else u.n end as wanted, u.n > v_first as crowded
              from unnest(p_crowd, v_counts) with ordinality as u (tenant_id, from_at, from_key, n, ord)
             where u.n > 0
             order by u.ord) m
     cross join lateral (
           select t.ctid as tid, t.tenant_id, t.queue, t."partition" as part, t.deliver_at, t.visible_at, t.timer_key,
                  queen._payload_size(t.payload, t.payload_zstd) as bytes, m.crowded
             from queen.log_timers t
            where uuid_send(t.tenant_id) = uuid_send(m.tenant_id) and (t.visible_at, t.timer_key || '') >= (m.from_at, m.from_key collate "C") and t.visible_at <= p_now
            order by t.visible_at, t.timer_key || ''
            limit m.wanted) v
  ), grp as (
    select row(s.tenant_id, s.queue, s.part, null, null, array_agg(s.tid), array_agg(s.bytes), array_agg(s.visible_at),
               array_agg(s.timer_key))::queen._group as g
      from (select s.* from seen s order by s.deliver_at, s.timer_key) s
     group by s.tenant_id, s.queue, s.part
  ), edge as (
    select row(s.tenant_id, max(s.visible_at), (array_agg(s.timer_key))[count(*)])::queen._crowd as c
      from seen s
     where s.crowded
     group by s.tenant_id
    having count(*) >= max(s.wanted)
  )
  select array(select g.g from grp g), array(select e.c from edge e) into groups, crowd;
end
$$;
comment on function queen._peek_tenants(queen._crowd[], int, timestamptz) is
  'What is due of the tenants named, about p_rows rows in equal shares, and those of them that have more, with the last row that'
  ' was seen. Takes no lock.';

-- For a claim, which remembers nothing: tenants are looked for anew each time, from anywhere in their row and from its
-- beginning.
create function queen._claim_fairly(p_max_rows int, p_per_tenant int, p_now timestamptz)
returns tid[]
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set jit = off
as $$
declare
  v_due uuid[] := (queen._walk_tenants('00000000-0000-0000-0000-000000000000', '{}', 1000, p_now)).due
               || (queen._walk_tenants(gen_random_uuid(), '{}', 1000, p_now)).due;
  v_groups queen._group[] := (queen._peek_tenants(
    array(select row(d.id, '-infinity', '')::queen._crowd from (select distinct u.id from unnest(v_due) as u (id)) d order by d.id),
    p_max_rows, p_now)).groups;
begin
  return array(
    select w.tid
      from (select r.tid, r.at, r.key, row_number() over (partition by g.tenant_id order by r.at, r.key collate "C") as turn
              from unnest(v_groups) g
             cross join lateral unnest(g.tids, g.visible, g.keys) as r (tid, at, key)
             where not queen._waits(g.tenant_id, g.queue, g.part, p_now)) w
     where p_per_tenant is null or w.turn <= p_per_tenant
     order by w.turn, w.at, w.key collate "C");
end
$$;
comment on function queen._claim_fairly(int, int, timestamptz) is 'What a claim may take of a backlog, tenants by turns, at most p_per_tenant of each. Takes no lock.';

create function queen._fire_crowd(
    p_max_rows int,
    p_max_bytes bigint,
    p_crowd queen._crowd[],
    p_worker int,
    p_workers int,
    p_now timestamptz,
    p_fault text default null)
returns queen._pass
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_pass queen._pass;
  v_peek record;
begin
  perform queen._gate(false);
  v_peek := queen._peek_tenants(p_crowd, p_max_rows * case when p_workers > 1 then 2 else 1 end, p_now);
  v_pass := queen._fire_groups(queen._place_groups(v_peek.groups, p_now), p_max_rows, p_max_bytes, p_worker, p_workers, p_now, p_fault);
  v_pass.behind := array(
    select distinct on (b.tenant_id) row(b.tenant_id, b.from_at, b.from_key)::queen._crowd
      from unnest(v_pass.behind || v_peek.crowd) b
     order by b.tenant_id, b.from_at, b.from_key collate "C");
  v_pass.more := v_pass.behind <> '{}';
  return v_pass;
end
$$;
comment on function queen._fire_crowd(int, bigint, queen._crowd[], int, int, timestamptz, text) is
  'One pass over what is due of the tenants named, as queen._fire_pass; behind says where each of them goes on.';

create function queen._sweep_crowd(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_pass queen._pass;
  v_walk record;
  v_began timestamptz;
  v_found uuid[];
  v_round timestamptz;
begin
  if p_state.full_at <= p_now then
    -- From the start of each, for what was committed late or held by somebody.
    p_state.crowd := array(select row(c.tenant_id, '-infinity', '')::queen._crowd from unnest(p_state.crowd) c order by c.tenant_id);
    v_began := clock_timestamp();
  end if;
  if p_state.walk_at <= p_now then
    if p_state.walk_after is null then
      p_state.walk_after := '00000000-0000-0000-0000-000000000000';
      p_state.walk_began := p_now;
    end if;
    p_state.walk_at := clock_timestamp();
    v_walk := queen._walk_tenants(p_state.walk_after, array(select c.tenant_id from unnest(p_state.crowd) c), 1000, p_now);
    -- Entries of fired rows that an old snapshot keeps make it dear: then rarely.
    p_state.walk_at := p_now + case when clock_timestamp() - p_state.walk_at > interval '20 milliseconds'
                                    then least(20 * (clock_timestamp() - p_state.walk_at), interval '4 seconds') else interval '0' end;
    v_found := v_walk.due;
    p_state.walk_after := v_walk.last;
    if v_walk.last is null then
      v_round := p_state.walk_began;
    end if;
  end if;
  if v_round is null then
    v_found := v_found || array(
      select distinct w.tenant_id
        from (select v.tenant_id from queen._timers_by_time v
               where v.visible_at > p_state.walk_tail and v.visible_at <= p_now
               order by v.visible_at
               limit 2000) w);
  end if;
  p_state.walk_tail := p_now;
  v_pass := queen._fire_safely(p_state.max_rows, p_state.max_bytes, null, p_state.worker, p_state.workers, p_now,
    p_state.crowd || array(select row(f.id, '-infinity', '')::queen._crowd
                             from (select distinct f.id from unnest(v_found) as f (id)) f
                            where f.id not in (select c.tenant_id from unnest(p_state.crowd) c)
                            order by f.id));
  if v_began is not null then
    p_state.full_at := p_now + least(greatest(20 * (clock_timestamp() - v_began), interval '500 milliseconds'), interval '4 seconds');
  end if;
  p_state := queen._sweep_note(p_state, v_pass, p_now);
  p_state.crowd := v_pass.behind;
  if v_pass.behind = '{}' and v_round is not null then
    -- The backlog is gone: whatever was due when this round began was seen.
    p_state.crowd := null;
    p_state.bound := v_round;
    p_state.full_at := p_now;
  end if;
  return p_state;
end
$$;
comment on function queen._sweep_crowd(queen._sweep_state, timestamptz) is 'One pass of the resident sweeper through a backlog.';
