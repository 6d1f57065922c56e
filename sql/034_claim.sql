-- The fire from outside: claim writes a lease a row and commits, fire verifies token and expiry and delivers, fail backs
-- off. For a firer that works between the two. This path may wait for a partition or a birth, so it keeps the order
-- timers, queues, partitions; but never for a timer row (SKIP LOCKED).

create function queen._check_shards(p_shards smallint[])
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if exists (select from unnest(p_shards) as s (shard) where s.shard is null or s.shard not between 0 and 63) then
    perform queen._refuse('shards', format('"%s" holds something that is no shard', p_shards), 'Accepted are 0 to 63, or null for all.');
  end if;
end
$$;
comment on function queen._check_shards(smallint[]) is 'Refuses numbers that are no shard.';

create function queen.log_timers_due(shards smallint[] default null)
returns table (next_due_at timestamptz, due bigint, lateness interval)
language plpgsql
stable
security definer
rows 1
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set max_parallel_workers_per_gather = 0
set jit = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := queen._now();
  v_shards smallint[] := coalesce(log_timers_due.shards, (select array_agg(i::smallint) from generate_series(0, 63) i));
begin
  perform queen._check_shards(v_shards);
  return query
  select min(w.next_at),
         least(sum(w.n), 10000)::bigint,
         coalesce(greatest(v_now - min(w.oldest), interval '0'), interval '0')
    from unnest(v_shards) as s (shard)
   cross join lateral (
         select (select t.visible_at from queen.log_timers t
                   where t.shard = s.shard and t.visible_at < timestamptz '4000-01-01 00:00+00'    -- where paused ones wait
                   order by t.visible_at limit 1) as next_at,
                d.n, d.oldest
           from (select count(*) as n, min(x.deliver_at) as oldest
                   from (select t.deliver_at from queen.log_timers t
                          where t.shard = s.shard and t.visible_at <= v_now
                          order by t.visible_at
                          limit 10000) x) d) w;
end
$$;
comment on function queen.log_timers_due(smallint[]) is
  'What is due. Arguments: shards, 0 to 63, null for all. Returns one row: next_due_at, when the next timer is visible to a'
  ' firer (past when something is due, null when nothing is pending); due, how many are due, counted to 10,000; lateness of the'
  ' oldest due, 0 when nothing is. Takes no lock. Errors: 22023.';

create function queen.log_timers_claim(
    shards smallint[] default null,
    lease interval default '30 seconds',
    max_rows int default 200,
    per_tenant int default null)
returns table (
    tenant_id uuid, queue text, timer_key text, "partition" text, txn text, message_id uuid, payload bytea, attempts int,
    deliver_at timestamptz, claim_token uuid)
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set max_parallel_workers_per_gather = 0
set jit = off
set plan_cache_mode = force_generic_plan
set work_mem = '64MB'
set enable_sort = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := queen._now();
  v_shards smallint[] := log_timers_claim.shards;
  v_window int := log_timers_claim.max_rows + 1;
  v_seen int;
  v_flat boolean;
  v_fair boolean := false;
  v_waits boolean := exists (select from queen.queue_pauses) or exists (select from queen.log_busy);
  v_tids tid[];
begin
  perform queen._check_shards(v_shards);
  perform queen._check_lease(log_timers_claim.lease);
  if log_timers_claim.max_rows is null or log_timers_claim.max_rows not between 1 and 100000 then
    perform queen._refuse('max_rows', format('"%s" is out of range', log_timers_claim.max_rows), 'Accepted is 1 to 100000.');
  end if;
  if log_timers_claim.per_tenant < 1 then
    perform queen._refuse('per_tenant', format('"%s" is out of range', log_timers_claim.per_tenant), 'Accepted is 1 or more, or null.');
  end if;
  if not queen._fire_enabled() then
    return;
  end if;
  -- Peek, lock, write: three statements. In one, a row that a colleague has just claimed makes PostgreSQL evaluate all of
  -- it again, for each such row (two claimers and 10,000 due: 10 s, 2026-12-01).
  loop
    select count(*), array_agg(r.tid order by r.deliver_at, r.timer_key collate "C")
             filter (where log_timers_claim.per_tenant is null or r.turn <= log_timers_claim.per_tenant),
           max(r.visible_at) = max(r.visible_at) filter (where r.place <= log_timers_claim.max_rows)
      into v_seen, v_tids, v_flat
      from (select s.tid, s.deliver_at, s.timer_key, s.visible_at, row_number() over (order by s.visible_at) as place,
                   row_number() over (partition by s.tenant_id order by s.deliver_at, s.timer_key collate "C") as turn
              from (select v.tid, v.tenant_id, v.deliver_at, v.timer_key, v.visible_at
                      from queen._timers_by_time v
                     where v.visible_at <= v_now and (v_shards is null or v.shard = any (v_shards))
                       and (not v_waits or not queen._waits(v.tenant_id, v.queue, v.part, v_now))
                     order by v.visible_at
                     limit v_window) s) r;
    -- A window that ends within the instant of its last picks would break the order of keys.
    if v_seen = v_window and v_flat and v_window < 32768 and log_timers_claim.shards is not null then
      v_window := v_window * 4;
      continue;
    end if;
    if v_seen = v_window and not v_fair and log_timers_claim.shards is null then
      v_fair := true;
      v_tids := queen._claim_fairly(log_timers_claim.max_rows, log_timers_claim.per_tenant, v_now);
    end if;
    v_tids := array(
      select h.tid
        from (select t.ctid as tid, u.ord
                from unnest(v_tids) with ordinality as u (tid, ord)
                join queen.log_timers t on t.ctid = u.tid
               where (t.visible_at <= v_now) is true    -- which no index can serve: rows are found by ctid
               order by u.ord
               limit log_timers_claim.max_rows
                 for update of t skip locked) h
       order by h.ord);
    -- A window full of rows that others hold, or of one tenant's that has its share, hides those behind it.
    exit when cardinality(v_tids) >= log_timers_claim.max_rows or v_seen < v_window
           or (cardinality(v_tids) > 0 and (v_fair or log_timers_claim.per_tenant is null));
    v_window := least(v_window::bigint * 4, 2000000000);
  end loop;
  return query
  with claimed as (
    update queen.log_timers t
       set claimed_until = v_now + log_timers_claim.lease, claim_token = gen_random_uuid()
     where t.ctid = any (v_tids)
    returning t.tenant_id, t.queue, t.timer_key, t."partition", t.txn, t.message_id, t.payload, t.attempts, t.deliver_at, t.claim_token
  )
  select c.* from claimed c order by c.deliver_at, c.timer_key;
end
$$;
comment on function queen.log_timers_claim(smallint[], interval, int, int) is
  'Leases due timers to a firer. Arguments: shards, 0 to 63, null for all; lease, 1 millisecond to 1 day; max_rows, 1 to'
  ' 100000; per_tenant, at most so many of one tenant. Returns the timers in expiry order, each with a token of its own;'
  ' payload as stored (docs/format.md). Commit, work, then queen.log_timers_fire or queen.log_timers_fail; a lease that runs'
  ' out is claimed by the next. Rows locked by somebody are passed over; none is returned of a paused queue, or while fire_enabled is false. Errors: 22023.';

create function queen._check_claims(p_tenants uuid[], p_queues text[], p_keys text[], p_tokens uuid[])
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_array('tenants', p_tenants, null);
  perform queen._check_array('queues', p_queues, cardinality(p_tenants));
  perform queen._check_array('timer_keys', p_keys, cardinality(p_tenants));
  perform queen._check_array('tokens', p_tokens, cardinality(p_tenants));
end
$$;
comment on function queen._check_claims(uuid[], text[], text[], uuid[]) is 'Refuses arrays that are not side by side.';

create function queen._hold_claims(p_tenants uuid[], p_queues text[], p_keys text[], p_tokens uuid[], p_now timestamptz)
returns table (ord bigint, tid tid, tenant_id uuid, queue text, timer_key text, part text, deliver_at timestamptz)
language sql
volatile
rows 1000
begin atomic
    select h.ord, h.tid, h.tenant_id, h.queue, h.timer_key, h.part, h.deliver_at
      from (select w.ord, t.ctid as tid, w.tenant_id, w.queue, w.timer_key, t."partition" as part, t.deliver_at
              from (select u.tenant_id, u.queue, u.timer_key, min(u.ord) as ord, (array_agg(u.token order by u.ord))[1] as token
                      from unnest(p_tenants, p_queues, p_keys, p_tokens) with ordinality as u (tenant_id, queue, timer_key, token, ord)
                     group by u.tenant_id, u.queue, u.timer_key) w
              join queen.log_timers t on t.tenant_id = w.tenant_id and t.queue = w.queue and t.timer_key = w.timer_key
             where t.claim_token = w.token
               and t.claimed_until > p_now
             order by t.tenant_id, t.queue, t.timer_key
               for update of t skip locked) h;
end;
comment on function queen._hold_claims(uuid[], text[], text[], uuid[], timestamptz) is
  'Locks the rows whose lease is in force with this token; the first of repeated keys. Passes over rows locked by others.';
