-- push, push_bytes, push_many: one implementation. Locks: the partition, to the end of the caller's transaction.
--
-- Deduplication: a txn that the caller names is looked up in the whole queue, within the setting txn_window. Two pushes of
-- one txn into two partitions must see one another, so its bucket is locked first. A timer's fire does not look: its
-- guarantee is that append and delete are one commit.

-- Buckets, and not a lock a txn: a batch of 10,000 names would fill the server's lock table. Of two strangers one in 1,024
-- waits for the other's commit.
create function queen._lock_txns(p_tenant uuid, p_queues text[], p_txns text[])
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform pg_advisory_xact_lock(hashtext('pg_queen txn'), k.bucket)
     from (select distinct hashtext(p_tenant || '/' || u.queue || '/' || (hashtext(u.txn) & 1023)) as bucket
             from unnest(p_queues, p_txns) as u (queue, txn)
            where u.txn is not null
            order by 1) k;
end
$$;
comment on function queen._lock_txns(uuid, text[], text[]) is
  'Locks the buckets of named txns to the end of the transaction, in one order; before partitions, after births.';

create function queen._push(
    p_tenant uuid,
    p_queue text,
    p_partition text,
    p_payloads bytea[],
    p_txns text[],
    p_encrypt boolean)
returns setof queen.push_result
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_pid bigint;
  v_segment queen._segment;
  v_base bigint;
  v_ids uuid[];
  v_txns text[];
  v_first int[];
  v_seen_offset bigint[];
  v_seen_partition text[];
  v_seen_id uuid[];
  v_n int := cardinality(p_payloads);
  v_named boolean := exists (select from unnest(p_txns) as t (txn) where t.txn is not null);
begin
  loop
    v_pid := queen._provision(p_tenant, p_queue, p_partition);
    if v_named then
      perform queen._lock_txns(p_tenant, array_fill(p_queue, array[v_n]), p_txns);
    end if;
    perform from queen.log_partitions p where p.id = v_pid for no key update;
    exit when found;
  end loop;

  select array_agg(g.id order by g.ord), array_agg(coalesce(g.txn, g.id::text) order by g.ord)
    into v_ids, v_txns
    from (select gen_random_uuid() as id, t.txn, o.ord
            from generate_series(1, v_n) as o (ord)
            left join unnest(p_txns) with ordinality as t (txn, ord) on t.ord = o.ord) g;
  if p_encrypt then
    p_payloads := queen._encrypt(p_tenant, p_queue, array_fill(p_partition, array[v_n]), v_ids, p_payloads);
  end if;

  if v_named then
    -- The first of equal txns in this call stands; and those that the queue has seen already.
    select array_agg(f.first order by f.ord) into v_first
      from (select t.ord, min(t.ord) over (partition by t.txn collate "C") as first
              from unnest(v_txns) with ordinality as t (txn, ord)) f;
    select array_agg(s."offset" order by t.ord), array_agg(s.name order by t.ord), array_agg(s.message_id order by t.ord)
      into v_seen_offset, v_seen_partition, v_seen_id
      from unnest(v_txns) with ordinality as t (txn, ord)
      left join lateral queen._seen(p_tenant, p_queue, t.txn) s on true;
  end if;

  select v_pid, count(*), string_agg(queen._frame(m.id, nullif(m.txn, m.id::text), m.sub, null, p_encrypt, m.payload), ''::bytea order by m.ord),
         array_agg(queen._txn_hash(m.txn) order by m.ord), array_agg(case when m.txn <> m.id::text then m.id end order by m.ord)
    into v_segment.pid, v_segment.n, v_segment.raw, v_segment.hashes, v_segment.mids
    from (select u.ord, u.id, u.txn, u.payload, session_user::text as sub
            from unnest(v_ids, v_txns, p_payloads) with ordinality as u (id, txn, payload, ord)
           where not v_named or (v_first[u.ord] = u.ord and v_seen_offset[u.ord] is null)) m;
  if v_segment.n > 0 then
    v_base := (queen._append(array[v_segment], queen._now()))[1];
  end if;

  return query
  with item as (
    select u.ord, u.id, u.txn,
           case when v_named then v_first[u.ord] else u.ord::int end as first,
           case when v_named then v_seen_offset[u.ord] end as seen_offset,
           case when v_named then v_seen_partition[u.ord] end as seen_partition,
           case when v_named then v_seen_id[u.ord] end as seen_id
      from unnest(v_ids, v_txns) with ordinality as u (id, txn, ord)
  ), placed as (
    select i.ord, v_base + row_number() over (order by i.ord) - 1 as "offset"
      from item i
     where i.first = i.ord and i.seen_offset is null
  )
  select case when p.ord = i.ord then 'queued' else 'duplicate' end,
         coalesce(i.seen_partition, p_partition),
         coalesce(i.seen_offset, p."offset"),
         coalesce(i.seen_id, v_ids[i.first]),
         i.txn
    from item i
    left join placed p on p.ord = i.first
   order by i.ord;
end
$$;
comment on function queen._push(uuid, text, text, bytea[], text[], boolean) is 'Appends stored payloads to one partition in one segment.';

create function queen._check_push(p_queue text, p_partition text, p_txn text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_name('queue', p_queue);
  perform queen._check_name('partition', p_partition);
  if p_txn is not null then
    perform queen._check_name('txn', p_txn);
  end if;
end
$$;
comment on function queen._check_push(text, text, text) is 'Refuses bad names of a push.';

-- First place of a txn within the window. message_id is null in the row when the txn is the message id.
create function queen._seen(p_tenant uuid, p_queue text, p_txn text)
returns table (partition_id bigint, name text, "offset" bigint, message_id uuid, created_at timestamptz)
language plpgsql
stable
rows 1
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_queue bigint;
  v_since timestamptz;
begin
  select q.id, queen._now() - queen._option(q.options, 'txn_window')::interval into v_queue, v_since
    from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
  -- By the hash first, each hit's partition after; the limits keep it so whatever statistics say.
  select t.partition_id, p.name, t."offset", t.message_id, t.created_at
    into partition_id, name, "offset", message_id, created_at
    from queen.log_txns t
   cross join lateral (select x.name, x.queue_id from queen.log_partitions x where x.id = t.partition_id limit 1) p
   where t.txn_hash = queen._txn_hash(p_txn)
     and p.queue_id = v_queue
     and t.created_at >= v_since
   order by t.created_at, t."offset"
   limit 1;
  if found then
    if message_id is null then
      message_id := p_txn::uuid;
    end if;
    return next;
  end if;
end
$$;
comment on function queen._seen(uuid, text, text) is 'Where a txn was first seen in a queue within the txn window; no row when it was not.';

create function queen.push(
    queue text,
    payload jsonb,
    "partition" text default 'Default',
    txn text default null,
    tenant uuid default null)
returns queen.push_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_payload bytea := convert_to(push.payload::text, 'UTF8');
  v_limits queen._limits;
  v_result queen.push_result;
begin
  perform queen._check_push(push.queue, push."partition", push.txn);
  v_limits := queen._limits(queen._find_tenant(push.tenant), push.queue);
  perform queen._check_bytes('payload', octet_length(v_payload), v_limits);
  select p.* into v_result
    from queen._push(queen._check_tenant(push.tenant), push.queue, push."partition", array[v_payload], array[push.txn],
                     v_limits.encrypt) p;
  return v_result;
end
$$;
comment on function queen.push(text, jsonb, text, text, uuid) is
  'Appends one message to a partition; queue and partition are made if missing. Arguments: queue and partition, names of 1'
  ' to 255 bytes; payload, JSON up to payload_max_bytes; txn, a name of your own for this message, null for the message id;'
  ' tenant, null for the default one. Returns status queued, or duplicate with the place of the first when the queue has'
  ' seen this txn within txn_window. Holds the partition until your transaction ends. Errors: 22023, QN002, QN006, QN011.';

create function queen.push_bytes(
    queue text,
    payload bytea,
    "partition" text default 'Default',
    txn text default null,
    tenant uuid default null)
returns queen.push_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_limits queen._limits;
  v_result queen.push_result;
begin
  perform queen._check_push(push_bytes.queue, push_bytes."partition", push_bytes.txn);
  v_limits := queen._limits(queen._find_tenant(push_bytes.tenant), push_bytes.queue);
  perform queen._check_bytes('payload', octet_length(push_bytes.payload), v_limits);
  select p.* into v_result
    from queen._push(queen._check_tenant(push_bytes.tenant), push_bytes.queue, push_bytes."partition",
                     array[decode('00', 'hex') || push_bytes.payload], array[push_bytes.txn], v_limits.encrypt) p;
  return v_result;
end
$$;
comment on function queen.push_bytes(text, bytea, text, text, uuid) is
  'queen.push for a payload of bytes, which pop returns in payload_bytes. Arguments, result and errors as of queen.push.';

create function queen.push_many(
    queue text,
    payloads jsonb[],
    "partition" text default 'Default',
    txns text[] default null,
    tenant uuid default null)
returns setof queen.push_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_payloads bytea[];
  v_sizes bigint[];
  v_limits queen._limits;
begin
  perform queen._check_push(push_many.queue, push_many."partition", null);
  perform queen._check_array('payloads', push_many.payloads, null);
  v_limits := queen._limits(queen._find_tenant(push_many.tenant), push_many.queue);
  perform queen._check_batch('payloads', cardinality(push_many.payloads), v_limits);
  if push_many.txns is not null then
    perform queen._check_array('txns', push_many.txns, cardinality(push_many.payloads));
    perform queen._check_names('txns', array_remove(push_many.txns, null));
  end if;
  select array_agg(e.bytes order by e.ord), array_agg(octet_length(e.bytes)::bigint order by e.ord)
    into v_payloads, v_sizes
    from (select convert_to(u.payload::text, 'UTF8') as bytes, u.ord
            from unnest(push_many.payloads) with ordinality as u (payload, ord)) e;
  perform queen._check_batch_bytes('payloads', v_sizes, v_limits);
  if cardinality(v_payloads) > 0 then
    return query
    select p.status, p."partition", p."offset", p.message_id, p.txn
      from queen._push(queen._check_tenant(push_many.tenant), push_many.queue, push_many."partition",
                       v_payloads, push_many.txns, v_limits.encrypt) p;
  end if;
end
$$;
comment on function queen.push_many(text, jsonb[], text, text[], uuid) is
  'Appends many messages to one partition as one segment, in the order given. Arguments: queue and partition; payloads, at'
  ' most batch_max_ops; txns, null or as many as payloads, null elements for the message id; tenant. Returns a row a message'
  ' in that order, as of queen.push. All or nothing. Errors: 22023, QN002, QN006, QN011.';

create function queen.sent(queue text, txn text, tenant uuid default null)
returns table ("partition" text, "offset" bigint, message_id uuid, created_at timestamptz)
language plpgsql
stable
security definer
rows 1
set search_path = pg_catalog, queen, pg_temp
as $$
#variable_conflict use_column
begin
  perform queen._check_name('queue', sent.queue);
  -- The txn of a requeued dead letter is longer than one that can be sent.
  perform queen._check_name('txn', sent.txn, case when sent.txn like 'dlq:%' then 2048 else 255 end);
  return query
  select s.name, s."offset", s.message_id, s.created_at
    from queen._seen(queen._find_tenant(sent.tenant), sent.queue, sent.txn) s;
end
$$;
comment on function queen.sent(text, text, uuid) is
  'Was it sent? Where a message with this txn is in the log, by an index. Arguments: queue; txn, for a timer that of its'
  ' verdict, and that is what to look at after a cancel that answered absent; tenant. Returns the place of the first; no row'
  ' when it is not there, or older than txn_window. Errors:'
  ' 22023, QN002.';
