-- pop, and reading the log for it: what queen._pop_take chose is decoded, leased and returned.

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
as $$
#variable_conflict use_column
begin
  return query
  select w.pid, u."offset", s.created_at, u.message_id, u.txn, u.producer_sub, u.deliver_at_us, u.encrypted, u.payload
    from unnest(p_partitions, p_from, p_to) as w (pid, lo, hi)
   cross join lateral (
         select g.base_offset, g.blob, g.created_at
           from queen.log_segments g
          where g.partition_id = w.pid
            and g.end_offset >= w.lo
            and g.end_offset <= (select min(x.end_offset) from queen.log_segments x where x.partition_id = w.pid and x.end_offset >= w.hi)
          order by g.end_offset) s
   cross join lateral queen._segment_unpack(array[s.blob], array[s.base_offset], w.lo, w.hi) u;
end
$$;
comment on function queen._read(bigint[], bigint[], bigint[]) is 'The messages from one offset to another, of several partitions.';

-- How far a batch may go so that its frames stay within p_max_bytes; always at least the segment of the first message.
create function queen._byte_cut(p_partition bigint, p_from bigint, p_to bigint, p_max_bytes bigint)
returns bigint
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_segment record;
  v_bytes bigint := 0;
  v_end bigint;
begin
  for v_segment in
    select g.end_offset, g.raw_bytes
      from queen.log_segments g
     where g.partition_id = p_partition
       and g.end_offset >= p_from
     order by g.end_offset
  loop
    v_bytes := v_bytes + v_segment.raw_bytes;
    exit when v_bytes > p_max_bytes and v_end is not null;
    v_end := v_segment.end_offset;
    exit when v_end >= p_to;
  end loop;
  return least(coalesce(v_end, p_to), p_to);
end
$$;
comment on function queen._byte_cut(bigint, bigint, bigint, bigint) is 'Last offset of a batch that is bounded in bytes.';

create function queen._pop_messages(
    p_queue text,
    p_partitions bigint[],
    p_from bigint[],
    p_to bigint[],
    p_tries int[],
    p_tried_to bigint[],
    p_lease uuid,
    p_careful boolean)
returns setof queen.message
language sql
stable
set search_path = pg_catalog, queen, pg_temp
begin atomic
    select p_queue, p.name, r."offset", r.message_id, r.txn, j.payload,
           case when r.encrypted then r.payload when j.payload is null then coalesce(queen._payload_bytes(r.payload), r.payload) end,
           r.created_at, r.producer_sub,
           case when r."offset" <= w.tried_to then w.tries else 1 end,
           p_lease
      from queen._read(p_partitions, p_from, p_to) r
      join unnest(p_partitions, p_tries, p_tried_to) as w (pid, tries, tried_to) on w.pid = r.partition_id
      join queen.log_partitions p on p.id = r.partition_id
     cross join lateral (
           select case when r.encrypted then null
                       when p_careful then queen._payload_json_or_null(r.payload)
                       else queen._payload_json(r.payload) end as payload) j
     order by r.partition_id, r."offset";
end;
comment on function queen._pop_messages(text, bigint[], bigint[], bigint[], int[], bigint[], uuid, boolean) is
  'The messages of a pop. p_careful: JSON that cannot be read comes as payload_bytes instead of an error, at the price of a'
  ' subtransaction a message.';

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
  v_tenant uuid := queen._check_tenant(pop.tenant);
  v_now timestamptz;
  v_limit int;
  v_max_bytes bigint;
  v_lease uuid;
  v_left int := pop.max_messages;
  v_row record;
  v_head bigint;
  v_to bigint;
  v_attempts int;
  v_pids bigint[] := array[]::bigint[];
  v_from bigint[] := array[]::bigint[];
  v_upto bigint[] := array[]::bigint[];
  v_tries int[] := array[]::int[];
  v_tried_to bigint[] := array[]::bigint[];
begin
  perform queen._check_name('queue', pop.queue);
  perform queen._check_group(pop.consumer_group);
  perform queen._check_lease(pop.lease);
  if pop."partition" is not null then
    perform queen._check_name('partition', pop."partition");
  end if;
  if pop.max_messages is null or pop.max_messages not between 1 and 100000 then
    perform queen._refuse('max_messages', format('"%s" is out of range', pop.max_messages), 'Accepted is 1 to 100000.');
  end if;
  if pop.auto_ack is null then
    perform queen._refuse('auto_ack', 'must not be null', 'Accepted is true or false.');
  end if;

  v_now := queen._now();
  v_limit := queen._setting('delivery_max_attempts')::int;
  v_max_bytes := queen._setting('pop_max_bytes')::bigint;
  v_lease := gen_random_uuid();

  for v_row in
    select t.* from queen._pop_take(v_tenant, pop.queue, pop.consumer_group, pop."partition", pop.max_messages, v_now) t
  loop
    v_head := v_row.committed + 1;
    v_attempts := v_row.attempts;
    if v_attempts >= v_limit then
      -- Delivered as often as allowed and neither acknowledged nor refused.
      perform queen._bury(v_row.partition_id, pop.consumer_group, v_head, v_attempts,
        coalesce(v_row.last_error, 'delivered ' || v_attempts || ' times without an ack'), v_now);
      v_head := v_head + 1;
      v_attempts := 0;
      v_row.attempted_to := least(v_row.attempted_to, v_head - 1);
    end if;
    if v_left <= 0 or v_head > v_row.last_offset then
      continue;
    end if;
    -- The last delivery that is allowed carries the head alone: its neighbours are not buried for its sake.
    v_to := case when v_attempts > 0 and v_attempts = v_limit - 1 then v_head
                 else least(v_row.last_offset, v_head + v_left - 1) end;
    if v_to > v_head then
      v_to := queen._byte_cut(v_row.partition_id, v_head, v_to, v_max_bytes);
    end if;
    v_left := v_left - (v_to - v_head + 1)::int;
    v_pids := v_pids || v_row.partition_id;
    v_from := v_from || v_head;
    v_upto := v_upto || v_to;
    v_tries := v_tries || (v_attempts + 1);
    v_tried_to := v_tried_to || v_row.attempted_to;
  end loop;

  if cardinality(v_pids) = 0 then
    return;
  end if;

  if pop.auto_ack then
    update queen.log_consumers c
       set committed = w.hi, leased_to = null, lease_id = null, lease_expires_at = null, attempts = 0,
           attempted_to = 0, retry_at = null, last_error = null, updated_at = v_now
      from unnest(v_pids, v_upto) as w (pid, hi)
     where c.partition_id = w.pid and c.consumer_group = pop.consumer_group;
    v_lease := null;
  else
    update queen.log_consumers c
       set committed = w.lo - 1, leased_to = w.hi, lease_id = v_lease, lease_expires_at = v_now + pop.lease,
           attempts = w.tries, attempted_to = greatest(c.attempted_to, w.hi), retry_at = null, updated_at = v_now
      from unnest(v_pids, v_from, v_upto, v_tries) as w (pid, lo, hi, tries)
     where c.partition_id = w.pid and c.consumer_group = pop.consumer_group;
  end if;

  begin
    return query
    select m.* from queen._pop_messages(pop.queue, v_pids, v_from, v_upto, v_tries, v_tried_to, v_lease, false) m;
  exception when data_exception then
    -- Something stored as JSON is none. (A function in the from clause is read whole before its first row is handed on,
    -- so nothing has been returned yet.)
    return query
    select m.* from queen._pop_messages(pop.queue, v_pids, v_from, v_upto, v_tries, v_tried_to, v_lease, true) m;
  end;
end
$$;
comment on function queen.pop(text, text, int, interval, text, boolean, uuid) is
  'Takes messages for a consumer group. Arguments: queue; consumer_group; max_messages, 1 to 100000; lease, how long they are'
  ' yours; partition, null for any partitions of the queue; auto_ack, acknowledge at once (at most once delivery); tenant.'
  ' Returns messages in offset order within a partition, those of several partitions one after the other, all with one'
  ' lease_id; acknowledge each partition with queen.ack. No row when there is nothing, or no such queue. A message whose'
  ' lease ends without an ack comes again, up to delivery_max_attempts, then goes to the dead letters; the last delivery'
  ' carries it alone. Errors: 22023, QN002, QN010 (a damaged segment).';
