-- Limits: of the database (settings), of a tenant and of a queue (options). A tenant's and a queue's replace the setting,
-- and of the two the smaller counts. A value over a setting is a bad argument (22023), one over a limit that somebody was
-- given is QN006: his operator can help. Cancel asks for none.

create type queen._limits as (
    tenant_id      uuid,
    queue          text,
    tenant_options jsonb,
    queue_options  jsonb,
    own            boolean,     -- either has limits of its own
    counted        boolean,     -- a pending_max is set somewhere
    encrypt        boolean      -- the queue's payloads are to be encrypted
);
comment on type queen._limits is 'What a tenant and a queue were given, read once a call.';

create function queen._limits(p_tenant uuid, p_queue text)
returns queen._limits
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_limits queen._limits;
begin
  v_limits.tenant_id := p_tenant;
  v_limits.queue := p_queue;
  -- One statement, and nothing more is asked of whoever has no limits: 10 us of a schedule (2026-12-06).
  select t.options, q.options, coalesce(t.options ?| k.names, false) or coalesce(q.options ?| k.names, false),
         coalesce(t.options ? 'pending_max', false) or coalesce(q.options ? 'pending_max', false) or c.key is not null,
         coalesce(q.options ->> 'encrypt', (select e.value from queen.config e where e.key = 'encrypt'))::boolean is true
    into v_limits.tenant_options, v_limits.queue_options, v_limits.own, v_limits.counted, v_limits.encrypt
    from (select array['payload_max_bytes', 'horizon', 'batch_max_ops'] as names) k
    left join queen.config c on c.key = 'pending_max'
    left join queen.tenants t on t.id = p_tenant
    left join queen.queues q on q.tenant_id = p_tenant and q.name = p_queue;
  return v_limits;
end
$$;
comment on function queen._limits(uuid, text) is
  'The options of a tenant that is open to the caller, and of a queue. With null for the tenant, those of none: the settings hold.';

-- A row a queue, so that ten thousand operations do not read the same options ten thousand times.
create function queen._limits_of(p_ops jsonb, p_tenant uuid)
returns table (queue text, l queen._limits)
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return query
  select k.queue, queen._limits(p_tenant, k.queue)
    from (select distinct o.op ->> 'queue' as queue from jsonb_array_elements(p_ops) as o (op)) k;
end
$$;
comment on function queen._limits_of(jsonb, uuid) is 'The limits of each queue that operations name.';

create function queen._limit(p_limits queen._limits, p_key text, out value text, out whose text)
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant text := p_limits.tenant_options ->> p_key;
begin
  value := p_limits.queue_options ->> p_key;
  if value is null and v_tenant is null then
    value := queen._setting(p_key);
    return;
  end if;
  if value is null or (p_key = 'horizon' and v_tenant::interval < value::interval)
     or (p_key <> 'horizon' and v_tenant::bigint < value::bigint) then
    value := v_tenant;
    whose := 'tenant';
  else
    whose := 'queue';
  end if;
end
$$;
comment on function queen._limit(queen._limits, text) is 'The limit of that name in force, and whose it is: queue, tenant, or null for the setting.';

create function queen._refuse_limit(p_limits queen._limits, p_key text, p_value text, p_whose text, p_what text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  raise exception using
    errcode = 'QN006',
    message = case p_whose when 'queue' then format('%s: queue "%s" allows %s', p_what, p_limits.queue, p_value)
                           else format('%s: tenant "%s" allows %s', p_what, p_limits.tenant_id, p_value) end,
    hint = format('An administrator changes the limit %s with %s.', p_key,
             case p_whose when 'queue' then 'queen.configure_queue' else 'queen.configure_tenant' end);
end
$$;
comment on function queen._refuse_limit(queen._limits, text, text, text, text) is 'Raises QN006.';

create function queen._check_bytes(p_argument text, p_bytes bigint, p_limits queen._limits, p_is text default 'is')
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_max record;
begin
  if p_bytes is null then
    perform queen._refuse(p_argument, 'must not be null', 'For a JSON null pass ''null''::jsonb.');
  end if;
  if not p_limits.own and p_bytes <= queen._setting('payload_max_bytes')::bigint then
    return;
  end if;
  v_max := queen._limit(p_limits, 'payload_max_bytes');
  if p_bytes > v_max.value::bigint then
    if v_max.whose is not null then
      perform queen._refuse_limit(p_limits, 'payload_max_bytes', v_max.value, v_max.whose,
        format('argument "%s": %s %s bytes long', p_argument, p_is, p_bytes));
    end if;
    perform queen._refuse(p_argument, format('%s %s bytes long', p_is, p_bytes),
      format('The setting payload_max_bytes allows %s bytes.', v_max.value));
  end if;
end
$$;
comment on function queen._check_bytes(text, bigint, queen._limits, text) is 'Refuses a null payload or one over the limit payload_max_bytes.';

create function queen._check_batch(p_argument text, p_items int, p_limits queen._limits)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_max record := queen._limit(p_limits, 'batch_max_ops');
begin
  if p_items > v_max.value::bigint then
    if v_max.whose is not null then
      perform queen._refuse_limit(p_limits, 'batch_max_ops', v_max.value, v_max.whose, format('argument "%s": holds %s items', p_argument, p_items));
    end if;
    perform queen._refuse(p_argument, format('holds %s items', p_items),
      format('The setting batch_max_ops allows %s in one call.', v_max.value));
  end if;
end
$$;
comment on function queen._check_batch(text, int, queen._limits) is 'Refuses a batch over the limit batch_max_ops.';

create function queen._check_batch_bytes(p_argument text, p_sizes bigint[], p_limits queen._limits)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_max bigint := (queen._limit(p_limits, 'payload_max_bytes')).value::bigint;
  v_most bigint := queen._setting('batch_max_bytes')::bigint;
  v_bad record;
  v_total bigint;
begin
  select s.pos, s.size into v_bad
    from unnest(p_sizes) with ordinality as s (size, pos)
   where s.size is null or s.size > v_max
   order by s.pos
   limit 1;
  if found then
    if v_bad.size is null then
      perform queen._refuse(p_argument, format('element %s must not be null', v_bad.pos), 'For a JSON null pass ''null''::jsonb.');
    end if;
    perform queen._check_bytes(p_argument, v_bad.size, p_limits, format('element %s is', v_bad.pos));
  end if;
  select sum(s.size) into v_total from unnest(p_sizes) as s (size);
  if v_total > v_most then
    perform queen._refuse(p_argument, format('hold %s bytes together', v_total),
      format('The setting batch_max_bytes allows %s bytes in one call.', v_most));
  end if;
end
$$;
comment on function queen._check_batch_bytes(text, bigint[], queen._limits) is 'Refuses a batch with a null or over-long payload, or too many bytes in all.';

-- For queen.apply and queen.transaction: cancels are not counted, and neither are acks, which give back.
create function queen._check_ops(p_ops jsonb, p_tenant uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_queue record;
  v_bytes bigint;
begin
  if jsonb_typeof(p_ops) is distinct from 'array' then
    perform queen._refuse('ops', case when p_ops is null then 'must not be null' else 'is no array' end, 'Accepted is a JSON array of operations.');
  end if;
  for v_queue in
    select k.queue, count(*)::int as n, sum(count(*)) over ()::int as total
      from (select o.op ->> 'queue' as queue from jsonb_array_elements(p_ops) as o (op)
             where (o.op ->> 'op') is null or (o.op ->> 'op') not in ('cancel', 'ack')) k
     group by k.queue
     order by k.queue collate "C"
  loop
    perform queen._check_batch('ops', v_queue.total, queen._limits(p_tenant, null));
    perform queen._check_batch('ops', v_queue.n, l.l)
       from (select queen._limits(p_tenant, v_queue.queue) as l) l
      where (l.l).queue_options ? 'batch_max_ops';
  end loop;
  if octet_length(p_ops::text) > queen._setting('batch_max_bytes')::bigint then
    select sum(octet_length(o.op::text) + 2) into v_bytes
      from jsonb_array_elements(p_ops) as o (op)
     where (o.op ->> 'op') is null or (o.op ->> 'op') not in ('cancel', 'ack');
    if v_bytes > queen._setting('batch_max_bytes')::bigint then
      perform queen._refuse('ops', format('is %s bytes long', v_bytes), 'The setting batch_max_bytes sets the limit.');
    end if;
  end if;
end
$$;
comment on function queen._check_ops(jsonb, uuid) is 'Refuses operations that are no array, or too many, or too long; cancels and acks are not counted.';
