-- transaction: acks, pushes and timer operations, all or nothing.
--
-- The canonical lock order of pg_queen, which every path that may wait follows:
--   1 timers       by (queue, timer_key)
--   2 queues       by name, then names of partitions to be born; then buckets of named txns (queen._lock_txns)
--   3 partitions   by ascending id
--   4 consumers    by ascending partition id, then group
--   5 leaves       segments, txns, dead letters: rows of one's own
-- An acquisition that never waits (SKIP LOCKED, as in every pass of the sweeper) is no edge of it.

create function queen._transaction_check(p_op jsonb, p_pos bigint, p_limits queen._limits)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_at text := 'ops[' || p_pos || ']';
  v_kind text := case when jsonb_typeof(p_op) = 'object' then p_op ->> 'op' end;
  v_allowed text[];
  v_field text;
begin
  if v_kind is distinct from 'push' and v_kind is distinct from 'ack' then
    if v_kind in ('schedule', 'reschedule', 'cancel') then
      perform queen._apply_check(p_op, p_pos, p_limits);
      return;
    end if;
    perform queen._refuse('ops', format('%s.op is %s', v_at, coalesce(v_kind, 'missing')),
      'Accepted are objects with op "schedule", "reschedule", "cancel", "push" or "ack".');
  end if;
  v_allowed := case v_kind when 'push' then array['op', 'queue', 'partition', 'payload', 'txn']
                           else array['op', 'queue', 'consumer_group', 'partition', 'lease_id', 'up_to'] end;
  for v_field in select k.name from jsonb_object_keys(p_op) as k (name) order by 1 loop
    if not v_field = any (v_allowed) then
      perform queen._refuse('ops', format('%s.%s is unknown for "%s"', v_at, v_field, v_kind),
        format('Accepted are %s.', array_to_string(v_allowed, ', ')));
    end if;
    if v_field not in ('payload', 'up_to') and jsonb_typeof(p_op -> v_field) <> 'string' then
      perform queen._refuse('ops', format('%s.%s is a JSON %s', v_at, v_field, jsonb_typeof(p_op -> v_field)), 'Accepted is a string.');
    end if;
  end loop;
  perform queen._check_name(v_at || '.queue', p_op ->> 'queue');
  if v_kind = 'push' then
    perform queen._check_name(v_at || '.partition', coalesce(p_op ->> 'partition', 'Default'));
    if p_op ? 'txn' then
      perform queen._check_name(v_at || '.txn', p_op ->> 'txn');
    end if;
    if not p_op ? 'payload' then
      perform queen._refuse('ops', format('%s.payload is missing', v_at), 'Accepted is any JSON, null too.');
    end if;
    perform queen._check_bytes(v_at || '.payload', octet_length(convert_to((p_op -> 'payload')::text, 'UTF8')), p_limits);
    return;
  end if;
  perform queen._check_group(p_op ->> 'consumer_group', v_at || '.consumer_group');
  perform queen._check_name(v_at || '.partition', p_op ->> 'partition');
  if (p_op ->> 'lease_id') is null or (p_op ->> 'lease_id') !~* '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$' then
    perform queen._refuse('ops', format('%s.lease_id is no lease', v_at), 'Accepted is the lease_id as queen.pop returned it.');
  end if;
  if p_op ? 'up_to' and (jsonb_typeof(p_op -> 'up_to') <> 'number' or (p_op ->> 'up_to')::numeric % 1 <> 0
                         or (p_op ->> 'up_to')::numeric not between 0 and 9223372036854775807) then
    perform queen._refuse('ops', format('%s.up_to is no offset', v_at), 'Accepted is a whole number.');
  end if;
end
$$;
comment on function queen._transaction_check(jsonb, bigint, queen._limits) is 'Refuses one bad operation of queen.transaction.';

-- Granted to both roles, so what the operations ask for is asked here; of the session's user, because a definer function
-- cannot see whom it was called by.
create function queen._transaction_allowed(p_ops jsonb)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_role text;
begin
  for v_role in
    select distinct case when o.op ->> 'op' = 'ack' then 'queen_consumer' else 'queen_producer' end from jsonb_array_elements(p_ops) as o (op)
  loop
    if not (pg_has_role(session_user, v_role, 'member') or pg_has_role(session_user, 'queen_admin', 'member')) then
      raise exception using
        errcode = 'insufficient_privilege',
        message = format('permission denied: %s takes the role %s', case v_role when 'queen_consumer' then 'ack' else 'sending' end, v_role),
        hint = format('grant %I to %I;', v_role, session_user);
    end if;
  end loop;
end
$$;
comment on function queen._transaction_allowed(jsonb) is 'Refuses a session user who may not do what the operations do.';

create function queen.transaction(ops jsonb, tenant uuid default null)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant uuid := queen._find_tenant(transaction.tenant);
  v_n int;
  v_results jsonb[];
  v_timers jsonb;
  v_item record;
  v_ack queen.ack_result;
begin
  perform queen._check_ops(transaction.ops, v_tenant);
  v_n := jsonb_array_length(transaction.ops);
  perform queen._transaction_check(w.op, w.ord - 1, w.l)
     from (select o.op, o.ord, k.l
             from jsonb_array_elements(transaction.ops) with ordinality as o (op, ord)
             left join queen._limits_of(transaction.ops, v_tenant) k on k.queue = o.op ->> 'queue'
            order by o.ord
           offset 0) w;
  perform queen._transaction_allowed(transaction.ops);
  if exists (select from jsonb_array_elements(transaction.ops) as o (op) where o.op ->> 'op' in ('schedule', 'push')) then
    perform queen._check_tenant(transaction.tenant);
  end if;
  v_results := array_fill(null::jsonb, array[v_n]);

  -- 1 timers
  select jsonb_agg(o.op order by o.ord) into v_timers
    from jsonb_array_elements(transaction.ops) with ordinality as o (op, ord)
   where o.op ->> 'op' in ('schedule', 'reschedule', 'cancel');
  if v_timers is not null then
    v_timers := queen.apply(v_timers, transaction.tenant);
    for v_item in
      select o.ord, row_number() over (order by o.ord) as n
        from jsonb_array_elements(transaction.ops) with ordinality as o (op, ord)
       where o.op ->> 'op' in ('schedule', 'reschedule', 'cancel')
    loop
      v_results[v_item.ord] := v_timers -> (v_item.n - 1)::int;
    end loop;
  end if;

  -- 2 queues, 3 partitions
  perform queen._provision(v_tenant, w.queue, w.part)
     from (select distinct (o.op ->> 'queue') collate "C" as queue, coalesce(o.op ->> 'partition', 'Default') collate "C" as part
             from jsonb_array_elements(transaction.ops) as o (op)
            where o.op ->> 'op' = 'push'
            order by 1, 2) w;
  perform queen._lock_txns(v_tenant, array_agg(o.op ->> 'queue'), array_agg(o.op ->> 'txn'))
     from jsonb_array_elements(transaction.ops) as o (op)
    where o.op ->> 'op' = 'push' and o.op ? 'txn'
   having count(*) > 0;
  perform from queen.log_partitions p
    where p.id = any (array(
          select distinct queen._partition_id(v_tenant, w.queue, w.part)
            from (select distinct o.op ->> 'queue' as queue, coalesce(o.op ->> 'partition', 'Default') as part
                    from jsonb_array_elements(transaction.ops) as o (op)
                   where o.op ->> 'op' = 'push') w))
    order by p.id
      for no key update;

  -- 4 consumers
  for v_item in
    select o.ord, o.op, queen._partition_id(v_tenant, o.op ->> 'queue', o.op ->> 'partition') as pid
      from jsonb_array_elements(transaction.ops) with ordinality as o (op, ord)
     where o.op ->> 'op' = 'ack'
     order by pid, (o.op ->> 'consumer_group') collate "C", o.ord
  loop
    v_ack := queen.ack(v_item.op ->> 'queue', v_item.op ->> 'consumer_group', v_item.op ->> 'partition',
                       (v_item.op ->> 'lease_id')::uuid, (v_item.op ->> 'up_to')::bigint, transaction.tenant);
    if not v_ack.ok then
      raise exception using
        errcode = 'QN003',
        message = format('ops[%s]: %s', v_item.ord - 1, case v_ack.status when 'absent' then 'the group has no cursor there' else 'the lease is lost' end),
        hint = 'Nothing of the transaction was done. The messages are, or will be, delivered again.';
    end if;
    v_results[v_item.ord] := to_jsonb(v_ack);
  end loop;

  -- 5 leaves: the pushes of a partition as one segment, in input order; repeated txns in a second round, when the first
  -- of each, perhaps in another partition, has its place.
  for v_item in
    select w.queue, w.part, array_agg(w.ord order by w.ord) as ords, array_agg(w.payload order by w.ord) as payloads,
           array_agg(w.txn order by w.ord) as txns,
           (queen._limits(v_tenant, w.queue)).encrypt
      from (select o.ord, o.op ->> 'queue' as queue, coalesce(o.op ->> 'partition', 'Default') as part, o.op ->> 'txn' as txn,
                   convert_to((o.op -> 'payload')::text, 'UTF8') as payload,
                   o.op ? 'txn' and row_number() over (partition by (o.op ->> 'queue') collate "C", (o.op ->> 'txn') collate "C" order by o.ord) > 1 as again
              from jsonb_array_elements(transaction.ops) with ordinality as o (op, ord)
             where o.op ->> 'op' = 'push') w
     group by w.again, w.queue, w.part
     order by w.again, queen._partition_id(v_tenant, w.queue, w.part)
  loop
    declare
      v_push record;
    begin
      for v_push in
        select p.status, p."partition", p."offset", p.message_id, p.txn, row_number() over () as n
          from queen._push(v_tenant, v_item.queue, v_item.part, v_item.payloads, v_item.txns, v_item.encrypt) p
      loop
        v_results[v_item.ords[v_push.n]] := to_jsonb(v_push) - 'n';
      end loop;
    end;
  end loop;
  return to_jsonb(v_results);
end
$$;
comment on function queen.transaction(jsonb, uuid) is
  'Acks, pushes and timer operations as one, all or nothing: consume, work and answer without doing it twice. Arguments: ops, a'
  ' JSON array of {"op": "ack", "queue", "consumer_group", "partition", "lease_id", "up_to"?}, {"op": "push", "queue",'
  ' "partition"?, "payload", "txn"?} and the operations of queen.apply; tenant. Everything is checked before the first write, locks'
  ' are taken in one order whatever the order of ops, so two transactions cannot deadlock. Returns an array of results aligned'
  ' with ops. Acks take the role queen_consumer, the rest queen_producer. Errors: 22023, 42501, QN002, QN005, QN006, QN011;'
  ' QN003 when an ack meets a lease that is lost, and then nothing is done.';
