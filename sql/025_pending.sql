-- The limit pending_max: how many timers a queue, or a tenant altogether, may have waiting.
--
-- No counter is kept: every schedule would lock its row to the end of the transaction, and the sweeper would wait for it.
-- A limit up to 10,000 is held against a count made by the call, which reads no more entries of the primary key than the
-- limit says. A larger one is held against the count that queen.maintain made last, once a minute.

create table queen.pending_counts (
    tenant_id  uuid not null,
    queue      text collate "C" not null,
    pending    bigint not null,
    counted_at timestamptz not null,
    constraint pending_counts_pkey primary key (tenant_id, queue)
);
comment on table queen.pending_counts is 'Timers that wait, of those tenants and queues with a pending_max over 10,000, as counted last.';
comment on column queen.pending_counts.tenant_id is 'tenant';
comment on column queen.pending_counts.queue is 'queue; empty for the tenant altogether';
comment on column queen.pending_counts.pending is 'how many, counted to one more than the limit';
comment on column queen.pending_counts.counted_at is 'when';

create function queen._pending(p_tenant uuid, p_queue text, p_most bigint)
returns bigint
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
set max_parallel_workers_per_gather = 0
as $$
begin
  if p_queue is null then
    return (select count(*) from (select from queen.log_timers t where t.tenant_id = p_tenant limit p_most) w);
  end if;
  return (select count(*) from (select from queen.log_timers t where t.tenant_id = p_tenant and t.queue = p_queue limit p_most) w);
end
$$;
comment on function queen._pending(uuid, text, bigint) is 'How many timers of a queue, or of all of the tenant, wait; counted to p_most.';

-- p_queues and p_keys are what the call schedules, p_gone how many it cancels: a key that is pending takes no new place.
create function queen._check_pending_of(
    p_limits queen._limits, p_whose text, p_max bigint, p_queues text[], p_keys text[], p_gone bigint)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_new bigint := cardinality(p_keys) - p_gone;
  v_pending bigint;
begin
  if p_max <= 10000 then
    v_pending := queen._pending(p_limits.tenant_id, case when p_whose = 'queue' then p_limits.queue end, p_max + cardinality(p_keys) + p_gone);
  else
    select c.pending into v_pending from queen.pending_counts c
     where c.tenant_id = p_limits.tenant_id and c.queue = case when p_whose = 'queue' then p_limits.queue else '' end;
  end if;
  if coalesce(v_pending, 0) + v_new <= p_max then
    return;
  end if;
  select v_new - count(*) into v_new
    from unnest(p_queues, p_keys) as k (queue, timer_key)
   cross join lateral (select from queen.log_timers t
                        where t.tenant_id = p_limits.tenant_id and t.queue = k.queue and t.timer_key = k.timer_key limit 1) x;
  if v_new > 0 and coalesce(v_pending, 0) + v_new > p_max then
    perform queen._refuse_limit(p_limits, 'pending_max', p_max::text, p_whose, format('%s more pending timers are too many', v_new));
  end if;
end
$$;
comment on function queen._check_pending_of(queen._limits, text, bigint, text[], text[], bigint) is 'Refuses timers over one limit pending_max.';

create function queen._check_pending(p_limits queen._limits, p_keys text[], p_gone bigint default 0)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_queue text := coalesce(p_limits.queue_options ->> 'pending_max', queen._setting('pending_max'));
begin
  if v_queue <> 'none' then
    perform queen._check_pending_of(p_limits, 'queue', v_queue::bigint, array_fill(p_limits.queue, array[cardinality(p_keys)]), p_keys, p_gone);
  end if;
end
$$;
comment on function queen._check_pending(queen._limits, text[], bigint) is 'Refuses timers over the limit pending_max of their queue.';

create function queen._check_pending_tenant(p_limits queen._limits, p_queues text[], p_keys text[], p_gone bigint default 0)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if coalesce(p_limits.tenant_options ->> 'pending_max', 'none') <> 'none' then
    perform queen._check_pending_of(p_limits, 'tenant', (p_limits.tenant_options ->> 'pending_max')::bigint, p_queues, p_keys, p_gone);
  end if;
end
$$;
comment on function queen._check_pending_tenant(queen._limits, text[], text[], bigint) is 'Refuses timers over the limit pending_max of their tenant.';

create function queen._check_pending_ops(p_ops jsonb, p_tenant uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_limits queen._limits := queen._limits(p_tenant, null);
  v_queue record;
  v_queues text[] := array[]::text[];
  v_keys text[] := array[]::text[];
  v_gone bigint := 0;
begin
  if not v_limits.counted and not exists (select from queen._limits_of(p_ops, p_tenant) k where (k.l).counted) then
    return;
  end if;
  for v_queue in
    select w.queue, w.keys, (select count(*) from unnest(w.cancelled) as k (timer_key)
                              cross join lateral (select from queen.log_timers t
                                                   where t.tenant_id = p_tenant and t.queue = w.queue and t.timer_key = k.timer_key limit 1) x) as gone
      from (select o.op ->> 'queue' as queue,
                   coalesce(array_agg(o.op ->> 'timer_key') filter (where o.op ->> 'op' = 'schedule'), '{}') as keys,
                   array_agg(o.op ->> 'timer_key') filter (where o.op ->> 'op' = 'cancel') as cancelled
              from jsonb_array_elements(p_ops) as o (op)
             group by 1) w
  loop
    if cardinality(v_queue.keys) > 0 then
      perform queen._check_pending(queen._limits(p_tenant, v_queue.queue), v_queue.keys, v_queue.gone);
      v_queues := v_queues || array_fill(v_queue.queue, array[cardinality(v_queue.keys)]);
      v_keys := v_keys || v_queue.keys;
    end if;
    v_gone := v_gone + v_queue.gone;
  end loop;
  perform queen._check_pending_tenant(v_limits, v_queues, v_keys, v_gone);
end
$$;
comment on function queen._check_pending_ops(jsonb, uuid) is
  'Refuses operations that leave more pending than a limit allows, those that cancel counted.';

create function queen._count_pending(p_tenant uuid, p_queue text, p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_max text;
begin
  if p_queue is null then
    select t.options ->> 'pending_max' into v_max from queen.tenants t where t.id = p_tenant;
  else
    select q.options ->> 'pending_max' into v_max from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
    v_max := coalesce(v_max, queen._setting('pending_max'));
  end if;
  if v_max is null or v_max = 'none' or v_max::bigint <= 10000 then
    delete from queen.pending_counts c where c.tenant_id = p_tenant and c.queue = coalesce(p_queue, '');
    return;
  end if;
  insert into queen.pending_counts (tenant_id, queue, pending, counted_at)
  values (p_tenant, coalesce(p_queue, ''), queen._pending(p_tenant, p_queue, v_max::bigint + 1), p_now)
  on conflict on constraint pending_counts_pkey do update set pending = excluded.pending, counted_at = excluded.counted_at;
end
$$;
comment on function queen._count_pending(uuid, text, timestamptz) is
  'Counts what a queue, or with null a tenant, has waiting, when its limit is over 10,000; forgets the count when not.';

create function queen._count_next(p_now timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_default text := queen._setting('pending_max');
  v_scope record;
  v_any boolean := false;
begin
  for v_scope in
    select w.tenant_id, w.queue
      from (select t.id as tenant_id, null::text as queue from queen.tenants t
             where t.options ->> 'pending_max' ~ '^[0-9]{5,}$'
             union all
            select q.tenant_id, q.name from queen.queues q
             where coalesce(q.options ->> 'pending_max', v_default) ~ '^[0-9]{5,}$'
             union
            select c.tenant_id, nullif(c.queue, '') from queen.pending_counts c where c.counted_at < p_now - interval '1 hour') w
      left join queen.pending_counts c on c.tenant_id = w.tenant_id and c.queue = coalesce(w.queue, '')
     where c.counted_at is null or c.counted_at < p_now - interval '30 seconds'
     order by c.counted_at nulls first
     limit 20
  loop
    perform queen._count_pending(v_scope.tenant_id, v_scope.queue, p_now);
    v_any := true;
  end loop;
  return v_any;
end
$$;
comment on function queen._count_next(timestamptz) is 'One step of queen.maintain: the counts that are oldest; whether there were any older than half a minute.';
