-- The second half of the fire from outside: deliver or give back what queen.log_timers_claim leased.

-- Arrays are joined, never subscripted: of an array of text the n-th element is found by walking there, which makes 10,000 of
-- them cost half a second a statement (2026-12-01).

-- p_wait false is the sweeper's way: nothing is born here, a locked partition is passed over.
create function queen._fire_claims(
    p_tenants uuid[],
    p_queues text[],
    p_keys text[],
    p_tokens uuid[],
    p_wait boolean,
    out statuses text[],
    out parts text[],
    out offsets bigint[],
    out late bigint[])
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
set plan_cache_mode = force_generic_plan
set work_mem = '64MB'
as $$
declare
  v_now timestamptz := queen._now();
  v_n int := cardinality(p_tenants);
  v_firsts int;
  v_ords bigint[];
  v_tids tid[];
  v_tenants uuid[];
  v_queues text[];
  v_keys text[];
  v_parts text[];
  v_dues timestamptz[];
  v_places queen._group[];
  v_place queen._group;
  v_locked bigint[];
  v_order bigint[];
  v_groups queen._group[];
  v_fired queen._fired;
begin
  statuses := array_fill('stale'::text, array[v_n]);
  parts := array_fill(null::text, array[v_n]);
  offsets := array_fill(null::bigint, array[v_n]);

  select array_agg(f.first) into v_order
    from (select min(u.ord) as first
            from unnest(p_tenants, p_queues, p_keys) with ordinality as u (tenant_id, queue, timer_key, ord)
           group by u.tenant_id, u.queue, u.timer_key) f;
  v_firsts := cardinality(v_order);
  select array_agg(h.ord), array_agg(h.tid), array_agg(h.tenant_id), array_agg(h.queue), array_agg(h.timer_key), array_agg(h.part),
         array_agg(h.deliver_at)
    into v_ords, v_tids, v_tenants, v_queues, v_keys, v_parts, v_dues
    from queen._hold_claims(p_tenants, p_queues, p_keys, p_tokens, v_now) h;
  if v_tids is null then
    return;
  end if;
  if p_wait and cardinality(v_tids) < v_firsts then
    -- A stale token in the call: nothing is fired, and what the call still holds goes back at once. (The sweeper fires what
    -- it holds, and tries again what a colleague's claim has locked in passing.)
    update queen.log_timers t set claimed_until = null, claim_token = null where t.ctid = any (v_tids);
    return;
  end if;
  select array_agg(case when h.ord is not null then 'held' when f.ord is not null then 'stale' else 'duplicate' end order by u.ord)
    into statuses
    from generate_series(1, v_n) as u (ord)
    left join unnest(v_ords) as h (ord) on h.ord = u.ord
    left join unnest(v_order) as f (ord) on f.ord = u.ord;

  -- Destinations: born if missing, then locked, ascending.
  v_places := array(
    select row(g.tenant_id, g.queue, g.part, null, null, null, null, null, null)::queen._group
      from (select distinct u.tenant_id, u.queue, u.part from unnest(v_tenants, v_queues, v_parts) as u (tenant_id, queue, part)) g
     order by g.tenant_id, g.queue collate "C", g.part collate "C");
  for i in 1..cardinality(v_places) loop
    v_place := v_places[i];
    v_place.why := coalesce('queue name ' || queen._name_problem(v_place.queue, 255), 'partition name ' || queen._name_problem(v_place.part, 255));
    if v_place.why is null then
      v_place.pid := case when p_wait then queen._provision(v_place.tenant_id, v_place.queue, v_place.part)
                          else queen._partition_id(v_place.tenant_id, v_place.queue, v_place.part) end;
    end if;
    v_places[i] := v_place;
  end loop;
  if p_wait then
    select array_agg(l.id) into v_locked
      from (select p.id from queen.log_partitions p
             where p.id = any (array(select g.pid from unnest(v_places) g)) order by p.id for no key update) l;
  else
    select array_agg(l.id) into v_locked
      from (select p.id from queen.log_partitions p
             where p.id = any (array(select g.pid from unnest(v_places) g)) order by p.id for no key update skip locked) l;
  end if;

  select array_agg(row(o.tenant_id, o.queue, o.part, o.pid, null, o.tids, null, null, null)::queen._group)
    into v_groups
    from (select g.tenant_id, g.queue, g.part, g.pid, array_agg(u.tid order by u.due, u.timer_key collate "C") as tids
            from unnest(v_tids, v_tenants, v_queues, v_keys, v_parts, v_dues) as u (tid, tenant_id, queue, timer_key, part, due)
            join unnest(v_places) g on g.tenant_id = u.tenant_id and g.queue = u.queue and g.part = u.part
           where g.pid = any (v_locked)
           group by g.tenant_id, g.queue, g.part, g.pid) o;
  if v_groups is not null then
    v_fired := queen._fire_rows(v_groups, v_now, true, null);
    late := v_fired.late;
    if v_fired.fired > 0 then
      select array_agg(case when f.ord is null then u.status else 'fired' end order by u.ord),
             array_agg(f.part order by u.ord),
             array_agg(f."offset" order by u.ord)
        into statuses, parts, offsets
        from unnest(statuses) with ordinality as u (status, ord)
        left join (select h.ord, g.part, v_fired.bases[s.i] + r.rank - 1 as "offset"
                     from unnest(v_fired.segments) with ordinality as s (pid, n, raw, hashes, mids, tids, i)
                    cross join lateral unnest(s.tids) with ordinality as r (tid, rank)
                     join unnest(v_ords, v_tids) as h (ord, tid) on h.tid = r.tid
                     join unnest(v_groups) g on g.pid = s.pid) f on f.ord = u.ord;
    end if;
  end if;

  -- Destinations with impossible names, which only a hand can have written.
  perform queen._timers_failed(array[u.tid], array[g.why], null, true, v_now)
     from unnest(v_tids, v_tenants, v_queues, v_parts) as u (tid, tenant_id, queue, part)
     join unnest(v_places) g on g.tenant_id = u.tenant_id and g.queue = u.queue and g.part = u.part
    where g.why is not null;

  if array_position(statuses, 'held') is null then
    return;
  end if;
  -- What was held and not delivered goes back at once; what has failed is another version of its row already.
  with left_over as materialized (
    select h.ord, h.tid
      from unnest(v_ords, v_tids) as h (ord, tid)
      join unnest(statuses) with ordinality as u (status, ord) on u.ord = h.ord
     where u.status = 'held'
  ), back as (
    update queen.log_timers t
       set claimed_until = case when p_wait then null else v_now + interval '100 milliseconds' end, claim_token = null
      from left_over h
     where t.ctid = h.tid
    returning h.ord
  )
  select array_agg(case when u.status <> 'held' then u.status when b.ord is not null then 'stale' else 'failed' end order by u.ord)
    into statuses
    from unnest(statuses) with ordinality as u (status, ord)
    left join back b on b.ord = u.ord;
end
$$;
comment on function queen._fire_claims(uuid[], text[], text[], uuid[], boolean) is 'Delivers leased timers; a status a row in input order.';

create function queen.log_timers_fire(tenants uuid[], queues text[], timer_keys text[], tokens uuid[])
returns table (tenant_id uuid, queue text, timer_key text, status text, "partition" text, "offset" bigint)
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_fire record;
begin
  perform queen._check_claims(log_timers_fire.tenants, log_timers_fire.queues, log_timers_fire.timer_keys, log_timers_fire.tokens);
  if cardinality(log_timers_fire.tenants) = 0 then
    return;
  end if;
  v_fire := queen._fire_claims(log_timers_fire.tenants, log_timers_fire.queues, log_timers_fire.timer_keys, log_timers_fire.tokens, true);
  return query
  select u.tenant_id, u.queue, u.timer_key, u.status, u.part, u.off
    from unnest(log_timers_fire.tenants, log_timers_fire.queues, log_timers_fire.timer_keys,
                v_fire.statuses, v_fire.parts, v_fire.offsets)
         with ordinality as u (tenant_id, queue, timer_key, status, part, off, ord)
   order by u.ord;
end
$$;
comment on function queen.log_timers_fire(uuid[], text[], text[], uuid[]) is
  'Delivers timers leased by queen.log_timers_claim: appends to the log and deletes the row in one commit. Arguments: tenants,'
  ' queues, timer_keys and tokens, side by side. Returns a row a timer in input order: fired with partition and offset; stale'
  ' (the lease is over, replaced, or the row is locked by somebody); duplicate (the same timer earlier in this call); failed'
  ' (it cannot be fired: backed off or archived). If any is stale, nothing of the call is fired, all answer stale, and the'
  ' rows still held go back at once. Errors: 22023.';

create function queen.log_timers_fail(
    tenants uuid[],
    queues text[],
    timer_keys text[],
    tokens uuid[],
    error text,
    backoff interval default null,
    count_attempt boolean default true)
returns table (tenant_id uuid, queue text, timer_key text, status text, attempts int, retry_at timestamptz)
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := queen._now();
  v_tids tid[];
begin
  perform queen._check_claims(log_timers_fail.tenants, log_timers_fail.queues, log_timers_fail.timer_keys, log_timers_fail.tokens);
  if log_timers_fail.backoff < interval '0' or log_timers_fail.backoff > interval '366 days' then
    perform queen._refuse('backoff', format('"%s" is out of range', log_timers_fail.backoff), 'Accepted is an interval from 0 to 366 days, or null.');
  end if;
  if log_timers_fail.count_attempt is null then
    perform queen._refuse('count_attempt', 'must not be null', 'Accepted is true or false.');
  end if;
  select array_agg(h.tid) into v_tids
    from queen._hold_claims(log_timers_fail.tenants, log_timers_fail.queues, log_timers_fail.timer_keys, log_timers_fail.tokens, v_now) h;
  return query
  select u.tenant_id, u.queue, u.timer_key, coalesce(f.status, 'stale'), f.attempts, f.retry_at
    from unnest(log_timers_fail.tenants, log_timers_fail.queues, log_timers_fail.timer_keys) with ordinality as u (tenant_id, queue, timer_key, ord)
    left join queen._timers_failed(v_tids, array_fill(log_timers_fail.error, array[coalesce(cardinality(v_tids), 0)]),
                                   log_timers_fail.backoff, log_timers_fail.count_attempt, v_now) f
      on f.tenant_id = u.tenant_id and f.queue = u.queue and f.timer_key = u.timer_key
   order by u.ord;
end
$$;
comment on function queen.log_timers_fail(uuid[], text[], text[], uuid[], text, interval, boolean) is
  'Gives leased timers back after a failure. Arguments: tenants, queues, timer_keys, tokens as of queen.log_timers_fire; error,'
  ' kept with the timer; backoff, null for timer_backoff_base doubled with each attempt up to timer_backoff_cap; count_attempt,'
  ' false for failures that are not the timer''s. Returns a row a timer: backoff with retry_at (it can be cancelled'
  ' meanwhile), archived (timer_max_attempts used up: now a dead letter of group __timer__), or stale. Errors: 22023.';
