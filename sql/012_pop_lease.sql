-- Takes, counts and leases: what both forms of pop share. A delivery counts as an attempt here, at the pop: a consumer that
-- is killed each time still brings its message to the dead letters.

create type queen._batch as (
    lease_id   uuid,
    partitions bigint[],    -- side by side: partition,
    froms      bigint[],    --   first
    tos        bigint[],    --   and last offset,
    tries      int[],       --   the delivery this is for the first message,
    tried_tos  bigint[]     --   and the last offset that was part of the deliveries before
);
comment on type queen._batch is 'What one pop takes.';

-- How far a batch may go so that its frames stay within p_max_bytes; always at least the segment of the first message.
create function queen._byte_cut(p_partition bigint, p_from bigint, p_to bigint, p_max_bytes bigint)
returns table (cut bigint, bytes bigint)
language plpgsql
stable
rows 1
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_segment record;
begin
  bytes := 0;
  for v_segment in
    select g.end_offset, g.raw_bytes
      from queen.log_segments g
     where g.partition_id = p_partition
       and g.end_offset >= p_from
     order by g.end_offset
  loop
    exit when bytes + v_segment.raw_bytes > p_max_bytes and cut is not null;
    bytes := bytes + v_segment.raw_bytes;
    cut := v_segment.end_offset;
    exit when cut >= p_to;
  end loop;
  cut := least(coalesce(cut, p_to), p_to);
  return next;
end
$$;
comment on function queen._byte_cut(bigint, bigint, bigint, bigint) is
  'Last offset of a batch that is bounded in bytes, and the bytes of the segments to read; always at least one segment.';

create function queen._pop_lease(
    p_tenant uuid,
    p_queue text,
    p_group text,
    p_max int,
    p_lease interval,
    p_partition text,
    p_auto_ack boolean)
returns queen._batch
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_batch queen._batch;
  v_queue record;
  v_now timestamptz;
  v_limit int;
  v_max_bytes bigint;
  v_left int := p_max;
  v_row record;
  v_head bigint;
  v_to bigint;
  v_attempts int;
begin
  perform queen._check_name('queue', p_queue);
  perform queen._check_group(p_group);
  perform queen._check_lease(p_lease);
  if p_partition is not null then
    perform queen._check_name('partition', p_partition);
  end if;
  if p_max is null or p_max not between 1 and 100000 then
    perform queen._refuse('max_messages', format('"%s" is out of range', p_max), 'Accepted is 1 to 100000.');
  end if;
  if p_auto_ack is null then
    perform queen._refuse('auto_ack', 'must not be null', 'Accepted is true or false.');
  end if;
  select q.id, q.options into v_queue from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
  if not found then
    return v_batch;
  end if;
  v_now := queen._now();
  v_limit := queen._option(v_queue.options, 'delivery_max_attempts')::int;
  v_max_bytes := queen._setting('pop_max_bytes')::bigint;

  for v_row in
    select t.* from queen._pop_take(p_tenant, v_queue.id, p_queue, v_queue.options, p_group, p_partition, p_max, v_now) t
  loop
    v_head := v_row.committed + 1;
    v_attempts := v_row.attempts;
    if v_attempts >= v_limit then
      -- Delivered as often as allowed and neither acknowledged nor refused.
      perform queen._bury(v_row.partition_id, p_group, v_head, v_attempts,
        coalesce(v_row.last_error, 'delivered ' || v_attempts || ' times without an ack'), v_now);
      v_head := v_head + 1;
      v_attempts := 0;
    end if;
    if v_left <= 0 or v_head > v_row.last_offset or (v_max_bytes <= 0 and v_batch.partitions is not null) then
      continue;
    end if;
    -- The last delivery that is allowed carries the head alone: its neighbours are not buried for its sake.
    v_to := case when v_attempts > 0 and v_attempts = v_limit - 1 then v_head
                 else least(v_row.last_offset, v_head + v_left - 1) end;
    select b.cut, v_max_bytes - b.bytes into v_to, v_max_bytes from queen._byte_cut(v_row.partition_id, v_head, v_to, v_max_bytes) b;
    v_left := v_left - (v_to - v_head + 1)::int;
    v_batch.partitions := v_batch.partitions || v_row.partition_id;
    v_batch.froms := v_batch.froms || v_head;
    v_batch.tos := v_batch.tos || v_to;
    v_batch.tries := v_batch.tries || (v_attempts + 1);
    v_batch.tried_tos := v_batch.tried_tos || v_row.attempted_to;
  end loop;
  if v_batch.partitions is null then
    return v_batch;
  end if;

  if p_auto_ack then
    update queen.log_consumers c
       set committed = w.hi, leased_to = null, lease_id = null, lease_expires_at = null, attempts = 0,
           attempted_to = 0, retry_at = null, last_error = null, updated_at = v_now,
           behind = c.behind and w.hi < p.last_offset
      from unnest(v_batch.partitions, v_batch.tos) as w (pid, hi)
     cross join lateral (select x.last_offset from queen.log_partitions x where x.id = w.pid limit 1) p
     cross join lateral (select x.ctid as tid from queen.log_consumers x where x.partition_id = w.pid and x.consumer_group = p_group limit 1) k
     where c.ctid = k.tid;
  else
    v_batch.lease_id := gen_random_uuid();
    update queen.log_consumers c
       set committed = w.lo - 1, leased_to = w.hi, lease_id = v_batch.lease_id, lease_expires_at = v_now + p_lease,
           attempts = w.tries, attempted_to = greatest(c.attempted_to, w.hi), retry_at = null, updated_at = v_now
      from unnest(v_batch.partitions, v_batch.froms, v_batch.tos, v_batch.tries) as w (pid, lo, hi, tries)
     cross join lateral (select x.ctid as tid from queen.log_consumers x where x.partition_id = w.pid and x.consumer_group = p_group limit 1) k
     where c.ctid = k.tid;
  end if;
  return v_batch;
end
$$;
comment on function queen._pop_lease(uuid, text, text, int, interval, text, boolean) is
  'Checks the arguments of a pop, takes the partitions, moves what is exhausted to the dead letters, and leases the rest.';
