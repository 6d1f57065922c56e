-- pop and pop_segments: reading the log for what queen._pop_lease took.

-- Messages of some ranges of offsets, decoded. The segments of a range are one scan of the primary key.
create function queen._read(p_partitions bigint[], p_from bigint[], p_to bigint[])
returns table (
    partition_id bigint, "offset" bigint, created_at timestamptz, message_id uuid, txn text, producer_sub text,
    deliver_at_us bigint, encrypted boolean, payload bytea)
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
begin
  return query
  select w.pid, u."offset", s.created_at, u.message_id, u.txn, u.producer_sub, u.deliver_at_us, u.encrypted, u.payload
    from unnest(p_partitions, p_from, p_to) as w (pid, lo, hi)
   cross join lateral (
         select format('partition "%s" of queue "%s"', p.name, q.name) as place
           from queen.log_partitions p
          cross join lateral (select x.name from queen.queues x where x.id = p.queue_id limit 1) q
          where p.id = w.pid
          limit 1) l
   cross join lateral (
         select g.base_offset, g.end_offset, g.raw_bytes, g.blob, g.created_at
           from queen.log_segments g
          where g.partition_id = w.pid
            and g.end_offset >= w.lo
            and g.end_offset <= (select min(x.end_offset) from queen.log_segments x where x.partition_id = w.pid and x.end_offset >= w.hi)
          order by g.end_offset) s
   cross join lateral queen._segment_unpack(s.blob, s.raw_bytes, s.base_offset, s.end_offset, w.lo, w.hi, l.place) u;
end
$$;
comment on function queen._read(bigint[], bigint[], bigint[]) is 'The messages from one offset to another, of several partitions.';

create function queen._pop_messages(
    p_tenant uuid,
    p_queue text,
    p_batch queen._batch,
    p_careful boolean)
returns setof queen.message
language sql
stable
set search_path = pg_catalog, queen, pg_temp
begin atomic
    select p_queue, w.name, r."offset", r.message_id, r.txn, j.payload,
           case when j.payload is null then coalesce(queen._payload_bytes(o.payload), o.payload) end,
           r.created_at, r.producer_sub,
           case when r."offset" <= w.tried_to then w.tries else 1 end,
           (p_batch).lease_id
      from (select u.pid, u.tries, u.tried_to, x.name
              from unnest((p_batch).partitions, (p_batch).tries, (p_batch).tried_tos) as u (pid, tries, tried_to)
             cross join lateral (select x.name from queen.log_partitions x where x.id = u.pid limit 1) x) w
      join queen._read((p_batch).partitions, (p_batch).froms, (p_batch).tos) r on r.partition_id = w.pid
     cross join lateral (
           select case when r.encrypted then queen._decrypt(p_tenant, p_queue, w.name, r.message_id, r.payload) else r.payload end as payload) o
     cross join lateral (
           select case when p_careful then queen._payload_json_or_null(o.payload) else queen._payload_json(o.payload) end as payload) j
     order by r.partition_id, r."offset";
end;
comment on function queen._pop_messages(uuid, text, queen._batch, boolean) is
  'The messages of a pop. p_careful: JSON that cannot be read comes as payload_bytes instead of an error, at the price of a'
  ' subtransaction a message.';

-- A partition whose next messages are damaged, or have lost their key, must not stop a pop of any partition: it is set aside for a minute.
create function queen._pop_aside(p_partition_id bigint, p_group text, p_committed bigint, p_error text, p_state text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  update queen.log_consumers c
     set committed = p_committed, leased_to = null, lease_id = null, lease_expires_at = null, attempts = 0, attempted_to = 0,
         retry_at = queen._now() + interval '1 minute', last_error = p_error
   where c.partition_id = p_partition_id and c.consumer_group = p_group;
  raise warning using
    errcode = p_state,
    message = p_error,
    hint = 'The partition is passed over for a minute. '
      || case p_state when 'QN010' then 'Restore the segment, or let the group skip it: queen.seek.' else 'See to the key file.' end;
end
$$;
comment on function queen._pop_aside(bigint, text, bigint, text, text) is 'Passes over a partition that cannot be read, with a warning.';

create function queen.pop(
    queue text,
    consumer_group text default 'default',
    max_messages int default 100,
    lease interval default '30 seconds',
    "partition" text default null,
    auto_ack boolean default false,
    tenant uuid default null)
returns setof queen.message
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant uuid := queen._find_tenant(pop.tenant);
  v_batch queen._batch;
  v_error text;
  v_hint text;
begin
  v_batch := queen._pop_lease(v_tenant, pop.queue, pop.consumer_group, pop.max_messages, pop.lease,
                              pop."partition", pop.auto_ack);
  if v_batch.partitions is null then
    return;
  end if;
  begin
    return query select m.* from queen._pop_messages(v_tenant, pop.queue, v_batch, false) m;
    return;
  exception when data_exception or sqlstate 'QN010' or sqlstate 'QN011' then
    -- Something stored as JSON is none, a segment is damaged, or a key is missing. (A function in the from clause is read whole before its
    -- first row is handed on, so nothing has been returned yet.)
    null;
  end;
  for i in 1..cardinality(v_batch.partitions) loop
    begin
      return query
      select m.*
        from queen._pop_messages(v_tenant, pop.queue, row(v_batch.lease_id, v_batch.partitions[i:i], v_batch.froms[i:i], v_batch.tos[i:i],
               v_batch.tries[i:i], v_batch.tried_tos[i:i])::queen._batch, true) m;
    exception when sqlstate 'QN010' or sqlstate 'QN011' then
      get stacked diagnostics v_error = message_text, v_hint = pg_exception_hint;
      if pop."partition" is not null then
        perform queen._raise(sqlstate, v_error, v_hint);
      end if;
      perform queen._pop_aside(v_batch.partitions[i], pop.consumer_group, v_batch.froms[i] - 1, regexp_replace(v_error, '^plpy[.]Error: ', ''), sqlstate);
    end;
  end loop;
end
$$;
comment on function queen.pop(text, text, int, interval, text, boolean, uuid) is
  'Takes messages for a consumer group. Arguments: queue; consumer_group; max_messages, 1 to 100000; lease, how long they are'
  ' yours; partition, null for any partitions of the queue; auto_ack, acknowledge at once (at most once delivery); tenant.'
  ' Returns messages in offset order within a partition, those of several partitions one after the other, all with one'
  ' lease_id; acknowledge each partition with queen.ack. No row when there is nothing, or no such queue. A message whose'
  ' lease ends without an ack comes again, up to delivery_max_attempts, then goes to the dead letters; the last delivery'
  ' carries it alone. Errors: 22023, QN002, QN010 (a damaged segment) and QN011 (no key, or another) for'
  ' the partition named; without partition these are a warning, and the others are delivered.';

create type queen.segment_slice as (
    queue            text,
    "partition"      text,
    from_offset      bigint,
    to_offset        bigint,
    base_offset      bigint,
    created_at       timestamptz,
    delivery_attempt int,
    attempted_to     bigint,
    lease_id         uuid,
    segment          bytea
);
comment on type queen.segment_slice is
  'A compressed segment and the slice of it that was delivered: messages from_offset to to_offset, where base_offset is that of'
  ' the segment''s first. delivery_attempt counts for offsets up to attempted_to; later ones are delivered for the first time.'
  ' docs/format.md says how to decode segment.';

create function queen.pop_segments(
    queue text,
    consumer_group text default 'default',
    max_messages int default 1000,
    lease interval default '30 seconds',
    "partition" text default null,
    auto_ack boolean default false,
    tenant uuid default null)
returns setof queen.segment_slice
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
declare
  v_batch queen._batch;
begin
  v_batch := queen._pop_lease(queen._find_tenant(pop_segments.tenant), pop_segments.queue, pop_segments.consumer_group,
    pop_segments.max_messages, pop_segments.lease, pop_segments."partition", pop_segments.auto_ack);
  if v_batch.partitions is null then
    return;
  end if;
  return query
  select pop_segments.queue, p.name, greatest(w.lo, s.base_offset), least(w.hi, s.end_offset), s.base_offset, s.created_at,
         w.tries, w.tried_to, v_batch.lease_id, s.blob
    from unnest(v_batch.partitions, v_batch.froms, v_batch.tos, v_batch.tries, v_batch.tried_tos) as w (pid, lo, hi, tries, tried_to)
   cross join lateral (select x.name from queen.log_partitions x where x.id = w.pid limit 1) p
   cross join lateral (
         select g.base_offset, g.end_offset, g.created_at, g.blob
           from queen.log_segments g
          where g.partition_id = w.pid
            and g.end_offset >= w.lo
            and g.end_offset <= (select min(x.end_offset) from queen.log_segments x where x.partition_id = w.pid and x.end_offset >= w.hi)
          order by g.end_offset) s
   order by w.pid, s.end_offset;
end
$$;
comment on function queen.pop_segments(text, text, int, interval, text, boolean, uuid) is
  'queen.pop without unpacking: hands over compressed segments with the slice to read, for consumers that want throughput and'
  ' decode outside (the Python package does). Encrypted payloads stay so. Arguments, leases and acks as of queen.pop. Errors: 22023,'
  ' QN002.';
