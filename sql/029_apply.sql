-- apply: a batch of timer operations as JSON, for callers that speak JSON. Everything is checked before anything is
-- written; then the operations run in (queue, timer_key) order, one key after the other. Not as three sets by kind: two
-- batches that schedule and cancel the same keys crosswise would then wait for each other.

create function queen._apply_check(p_op jsonb, p_pos bigint, p_limits queen._limits)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_at text := 'ops[' || p_pos || ']';
  v_kind text := p_op ->> 'op';
  v_allowed text[] := array['op', 'queue', 'timer_key'];
  v_field text;
  v_horizon interval;
begin
  if jsonb_typeof(p_op) is distinct from 'object' then
    perform queen._refuse('ops', format('%s is no object', v_at), 'Accepted is {"op": ..., "queue": ..., "timer_key": ...}.');
  end if;
  if jsonb_typeof(p_op -> 'op') is distinct from 'string' or v_kind not in ('schedule', 'reschedule', 'cancel') then
    perform queen._refuse('ops', format('%s.op is %s', v_at, coalesce(p_op ->> 'op', 'missing')),
      'Accepted are "schedule", "reschedule" and "cancel".');
  end if;
  v_allowed := v_allowed || case v_kind
    when 'schedule' then array['partition', 'delay_ms', 'txn', 'payload']
    when 'reschedule' then array['delay_ms']
    else '{}'::text[] end;
  for v_field in select k.name from jsonb_object_keys(p_op) as k (name) order by 1 loop
    if v_field in ('producer_sub', 'message_id', 'tenant', 'tenant_id', 'attempts', 'last_error', 'claim_token',
                   'claimed_until', 'visible_at', 'shard', 'encrypted', 'payload_zstd', 'created_at', 'updated_at') then
      perform queen._refuse('ops', format('%s.%s is set by the server', v_at, v_field), 'Leave the field out.');
    elsif not v_field = any (v_allowed) then
      perform queen._refuse('ops', format('%s.%s is unknown for "%s"', v_at, v_field, v_kind),
        format('Accepted are %s.', array_to_string(v_allowed, ', ')));
    end if;
  end loop;
  foreach v_field in array array['queue', 'timer_key', 'partition', 'txn'] loop
    if p_op ? v_field or v_field in ('queue', 'timer_key') then
      if p_op ? v_field and jsonb_typeof(p_op -> v_field) <> 'string' then
        perform queen._refuse('ops', format('%s.%s is a JSON %s', v_at, v_field, jsonb_typeof(p_op -> v_field)), 'Accepted is a string.');
      end if;
      perform queen._check_name(v_at || '.' || v_field, p_op ->> v_field, case v_field when 'timer_key' then 512 else 255 end);
    end if;
  end loop;
  if v_kind in ('schedule', 'reschedule') then
    if jsonb_typeof(p_op -> 'delay_ms') is distinct from 'number' then
      perform queen._refuse('ops', format('%s.delay_ms is %s', v_at, coalesce((p_op -> 'delay_ms')::text, 'missing')),
        'Accepted is a number of milliseconds.');
    end if;
    v_horizon := (queen._limit(p_limits, 'horizon')).value::interval;
    if (p_op ->> 'delay_ms')::numeric not between least(-extract(epoch from v_horizon) * 1000, -86400000) and extract(epoch from v_horizon) * 1000 then
      perform queen._refuse_due('ops', format('%s.delay_ms is out of range', v_at), p_limits);
    end if;
  end if;
  if v_kind = 'schedule' then
    if not p_op ? 'payload' then
      perform queen._refuse('ops', format('%s.payload is missing', v_at), 'Accepted is any JSON, null too.');
    end if;
    perform queen._check_bytes(v_at || '.payload', octet_length(convert_to((p_op -> 'payload')::text, 'UTF8')), p_limits);
  end if;
end
$$;
comment on function queen._apply_check(jsonb, bigint, queen._limits) is 'Refuses one bad operation of queen.apply; the message names it, counted from 0.';

create function queen.apply(ops jsonb, tenant uuid default null)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant uuid := queen._find_tenant(apply.tenant);
  v_now timestamptz;
  v_item record;
  v_verdict queen.timer_verdict;
  v_results jsonb[];
begin
  perform queen._check_ops(apply.ops, v_tenant);
  perform queen._apply_check(w.op, w.ord - 1, w.l)
     from (select o.op, o.ord, k.l
             from jsonb_array_elements(apply.ops) with ordinality as o (op, ord)
             left join queen._limits_of(apply.ops, v_tenant) k on k.queue = o.op ->> 'queue'
            order by o.ord
           offset 0) w;
  select min(o.ord) - 1 as pos into v_item
    from (select o.ord, row_number() over (partition by (o.op ->> 'queue') collate "C", (o.op ->> 'timer_key') collate "C" order by o.ord) as nth
            from jsonb_array_elements(apply.ops) with ordinality as o (op, ord)) o
   where o.nth > 1;
  if v_item.pos is not null then
    perform queen._refuse('ops', format('ops[%s].timer_key is there twice', v_item.pos), 'Give each key of a queue once in a call.');
  end if;

  -- Without a schedule there is nothing to tell of a tenant that is not open: its keys are absent.
  if exists (select from jsonb_array_elements(apply.ops) as o (op) where o.op ->> 'op' = 'schedule') then
    perform queen._check_schedule_enabled();
    perform queen._check_tenant(apply.tenant);
    perform queen._check_pending_ops(apply.ops, v_tenant);
  end if;
  v_results := array_fill(null::jsonb, array[jsonb_array_length(apply.ops)]);
  v_now := queen._now();
  for v_item in
    select o.ord, o.op ->> 'op' as kind, o.op ->> 'queue' as queue, o.op ->> 'timer_key' as timer_key,
           coalesce(o.op ->> 'partition', 'Default') as part, o.op ->> 'txn' as txn,
           v_now + make_interval(secs => ((o.op ->> 'delay_ms')::numeric / 1000)::double precision) as due,
           convert_to((o.op -> 'payload')::text, 'UTF8') as payload, (k.l).encrypt
      from jsonb_array_elements(apply.ops) with ordinality as o (op, ord)
      join queen._limits_of(apply.ops, v_tenant) k on k.queue = o.op ->> 'queue'
     order by (o.op ->> 'queue') collate "C", (o.op ->> 'timer_key') collate "C"
  loop
    v_verdict := case v_item.kind
      when 'schedule' then queen._schedule_one(v_tenant, v_item.queue, v_item.timer_key, v_item.part, v_item.due, v_item.txn, v_item.payload, v_now,
                                                v_item.encrypt)
      when 'reschedule' then queen._reschedule(v_tenant, v_item.queue, v_item.timer_key, v_item.due, v_now)
      else queen._cancel(v_tenant, v_item.queue, v_item.timer_key, v_now) end;
    v_results[v_item.ord] := to_jsonb(v_verdict);
  end loop;
  return to_jsonb(v_results);
end
$$;
comment on function queen.apply(jsonb, uuid) is
  'Timer operations as one JSON array, all or nothing. Arguments: ops, each {"op": "schedule", "reschedule" or "cancel",'
  ' "queue", "timer_key"} with delay_ms (a number of milliseconds from now) for the first two, and payload, optionally'
  ' partition and txn, for schedule; tenant. Everything is checked before the first write, each key of a queue may be there'
  ' once, unknown fields and fields of the server are refused. Applied in (queue, timer_key) order. Returns an array of'
  ' verdicts aligned with ops. Cancels do not count for batch_max_ops. Errors: 22023, QN002, QN005, QN006, QN011.';
