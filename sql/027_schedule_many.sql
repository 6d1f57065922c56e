-- schedule_many: the insert of 026_schedule.sql for a whole set. Rows are inserted in key order, so two batches with the
-- same keys cannot deadlock.

create function queen._schedule(
    p_tenant uuid,
    p_queue text,
    p_keys text[],
    p_partitions text[],
    p_due timestamptz[],
    p_txns text[],
    p_payloads bytea[],
    p_now timestamptz,
    p_encrypt boolean)
returns setof queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_zstd_bytes int := queen._setting('timer_zstd_bytes')::int;
  v_ids uuid[];
begin
  if p_encrypt then
    v_ids := array(select gen_random_uuid() from generate_series(1, cardinality(p_keys)));
    p_payloads := queen._encrypt(p_tenant, p_queue, p_partitions, v_ids, p_payloads);
  end if;
  return query
  with item as materialized (
    select u.ord, u.timer_key, u."partition", u.due, coalesce(u.txn, u.id::text) as txn, u.id, coalesce(u.packed, u.payload) as payload,
           u.packed is not null as zstd
      from (select a.timer_key, a."partition", a.due, a.txn, a.payload, a.ord, coalesce(a.given, gen_random_uuid()) as id,
                   case when not p_encrypt and octet_length(a.payload) >= v_zstd_bytes then queen._payload_compress(a.payload) end as packed
              from unnest(p_keys, p_partitions, p_due, p_txns, p_payloads, v_ids)
                   with ordinality as a (timer_key, "partition", due, txn, payload, given, ord)) u
  ), written as (
    insert into queen.log_timers as t (
      tenant_id, queue, timer_key, "partition", deliver_at, txn, message_id, payload, payload_zstd, encrypted, producer_sub, created_at,
      updated_at)
    select p_tenant, p_queue, i.timer_key, i."partition", i.due, i.txn, i.id, i.payload, i.zstd, p_encrypt, session_user, p_now, p_now
      from item i
     order by i.timer_key collate "C"
    on conflict (tenant_id, queue, timer_key) do update
       set "partition" = excluded."partition", deliver_at = excluded.deliver_at, txn = excluded.txn,
           message_id = excluded.message_id, payload = excluded.payload, payload_zstd = excluded.payload_zstd,
           encrypted = excluded.encrypted, producer_sub = excluded.producer_sub, attempts = 0, last_error = null,
           claimed_until = null, claim_token = null, updated_at = excluded.updated_at
     where t.claim_token is null or t.claimed_until is null or t.claimed_until <= p_now
    -- xmax is 0 in a row that was inserted, and our own id in one that was locked and replaced.
    returning t.timer_key, t.xmax = 0 as fresh
  )
  select case when w.timer_key is null then false else true end,
         case when w.timer_key is null then 'too_late' when w.fresh then 'scheduled' else 'rescheduled' end,
         p_queue,
         i.timer_key,
         case when w.timer_key is null then l.txn else i.txn end,
         case when w.timer_key is null then l.message_id else i.id end,
         case when w.timer_key is null then l.deliver_at else i.due end
    from item i
    left join written w on w.timer_key = i.timer_key collate "C"
    -- The leased row as the statement saw it; replaced under our eyes only by its own firer. The limit keeps it a look by
    -- key: as a join it read all of the queue while statistics were those of an empty table.
    left join lateral (select t.txn, t.message_id, t.deliver_at
                         from queen.log_timers t
                        where w.timer_key is null
                          and t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = i.timer_key
                        limit 1) l on true
   order by i.ord;
end
$$;
comment on function queen._schedule(uuid, text, text[], text[], timestamptz[], text[], bytea[], timestamptz, boolean) is
  'Writes timers of one queue; a verdict a row in input order. Arguments are checked by the caller.';

create function queen.schedule_many(
    queue text,
    timer_keys text[],
    payloads jsonb[],
    delays interval[] default null,
    deliver_ats timestamptz[] default null,
    partitions text[] default null,
    txns text[] default null,
    tenant uuid default null)
returns setof queen.timer_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_n int := cardinality(schedule_many.timer_keys);
  v_now timestamptz := queen._now();
  v_payloads bytea[];
  v_sizes bigint[];
  v_due timestamptz[];
  v_partitions text[] := schedule_many.partitions;
  v_twice text;
  v_limits queen._limits;
  v_tenant uuid;
begin
  perform queen._check_schedule_enabled();
  perform queen._check_name('queue', schedule_many.queue);
  perform queen._check_array('timer_keys', schedule_many.timer_keys, null);
  v_tenant := queen._check_tenant(schedule_many.tenant);
  v_limits := queen._limits(v_tenant, schedule_many.queue);
  perform queen._check_batch('timer_keys', v_n, v_limits);
  perform queen._check_array('payloads', schedule_many.payloads, v_n);
  if v_n = 0 then
    return;
  end if;
  perform queen._check_names('timer_keys', schedule_many.timer_keys, 512);
  select min(k.name collate "C") into v_twice
    from unnest(schedule_many.timer_keys) as k (name)
   group by k.name collate "C" having count(*) > 1
   limit 1;
  if found then
    perform queen._refuse('timer_keys', format('"%s" is there twice', v_twice), 'Give each key once in a call.');
  end if;
  v_due := queen._due_many(v_now, v_n, schedule_many.delays, schedule_many.deliver_ats, v_limits);
  if v_partitions is not null then
    perform queen._check_array('partitions', v_partitions, v_n);
    perform queen._check_names('partitions', v_partitions);
  else
    v_partitions := array_fill('Default'::text, array[v_n]);
  end if;
  if schedule_many.txns is not null then
    perform queen._check_array('txns', schedule_many.txns, v_n);
    perform queen._check_names('txns', array_remove(schedule_many.txns, null));
  end if;
  select array_agg(e.bytes order by e.ord), array_agg(octet_length(e.bytes)::bigint order by e.ord)
    into v_payloads, v_sizes
    from (select convert_to(u.payload::text, 'UTF8') as bytes, u.ord
            from unnest(schedule_many.payloads) with ordinality as u (payload, ord)) e;
  perform queen._check_batch_bytes('payloads', v_sizes, v_limits);
  if v_limits.counted then
    perform queen._check_pending(v_limits, schedule_many.timer_keys);
    perform queen._check_pending_tenant(v_limits, array_fill(schedule_many.queue, array[v_n]), schedule_many.timer_keys);
  end if;
  return query
  select s.ok, s.status, s.queue, s.timer_key, s.txn, s.message_id, s.deliver_at
    from queen._schedule(v_tenant, schedule_many.queue, schedule_many.timer_keys,
      v_partitions, v_due, schedule_many.txns, v_payloads, v_now, v_limits.encrypt) s;
end
$$;
comment on function queen.schedule_many(text, text[], jsonb[], interval[], timestamptz[], text[], text[], uuid) is
  'Schedules many timers of one queue in one statement. Arguments: queue; timer_keys, each once, at most batch_max_ops;'
  ' payloads, one each; exactly one of delays and deliver_ats, as many; partitions, as many or null for Default; txns, as many'
  ' or null, null elements for the message id; tenant. Returns a verdict a timer in input order. All or nothing; one bad item'
  ' refuses the call and is named. Errors: 22023, QN002, QN005, QN006, QN011.';
