-- ack, nack, extend. Each is one update of the consumer row, guarded by the lease: a holder whose lease is over, by time
-- or because a later pop replaced it, changes nothing. last_offset is read after the row is locked, so a partition that
-- queen._cool put behind in between stays so.

create function queen._lease_lost(p_partition_id bigint, p_group text)
returns queen.ack_result
language sql
stable
begin atomic
    select row(false, coalesce(max('lease_lost'::text), 'absent'), 0::bigint, max(c.committed))::queen.ack_result
      from queen.log_consumers c
     where c.partition_id = p_partition_id
       and c.consumer_group = p_group;
end;
comment on function queen._lease_lost(bigint, text) is 'The refusal of a lease that is not in force: lease_lost, or absent when the group is unknown there.';

create function queen._check_ack(p_queue text, p_group text, p_partition text, p_lease_id uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_name('queue', p_queue);
  perform queen._check_group(p_group);
  perform queen._check_name('partition', p_partition);
  if p_lease_id is null then
    perform queen._refuse('lease_id', 'must not be null', 'Accepted is the lease_id of the messages as queen.pop returned it.');
  end if;
end
$$;
comment on function queen._check_ack(text, text, text, uuid) is 'Refuses bad arguments of ack, nack and extend.';

create function queen.ack(
    queue text,
    consumer_group text,
    "partition" text,
    lease_id uuid,
    up_to bigint default null,
    tenant uuid default null)
returns queen.ack_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_pid bigint;
  v_row record;
  v_now timestamptz;
begin
  perform queen._check_ack(ack.queue, ack.consumer_group, ack."partition", ack.lease_id);
  v_pid := queen._partition_id(queen._find_tenant(ack.tenant), ack.queue, ack."partition");

  select c.committed, c.leased_to into v_row
    from queen.log_consumers c
   where c.partition_id = v_pid and c.consumer_group = ack.consumer_group and c.lease_id = ack.lease_id
     for update;
  v_now := queen._now();
  if found and ack.up_to is not null and ack.up_to not between v_row.committed and v_row.leased_to then
    perform queen._refuse('up_to', format('offset %s is not in your batch', ack.up_to),
      format('Your lease covers offsets %s to %s.', v_row.committed + 1, v_row.leased_to));
  end if;

  update queen.log_consumers c
     set committed = coalesce(ack.up_to, c.leased_to),
         leased_to = case when ack.up_to < c.leased_to then c.leased_to end,
         lease_id = case when ack.up_to < c.leased_to then c.lease_id end,
         lease_expires_at = case when ack.up_to < c.leased_to then c.lease_expires_at end,
         -- What follows the acknowledged part was delivered once by this pop, whatever its head went through.
         attempts = case when ack.up_to = c.committed then c.attempts when ack.up_to < c.leased_to then 1 else 0 end,
         attempted_to = case when ack.up_to < c.leased_to then c.attempted_to else 0 end,
         last_error = case when ack.up_to = c.committed then c.last_error end,
         behind = c.behind and coalesce(ack.up_to, c.leased_to) < p.last_offset,
         updated_at = v_now
    from queen.log_partitions p
   where p.id = v_pid
     and c.partition_id = v_pid
     and c.consumer_group = ack.consumer_group
     and c.lease_id = ack.lease_id
     and c.lease_expires_at > v_now
  returning row(true, 'acked', c.committed - v_row.committed, c.committed)::queen.ack_result as result into v_row;
  if not found then
    return queen._lease_lost(v_pid, ack.consumer_group);
  end if;
  return v_row.result;
end
$$;
comment on function queen.ack(text, text, text, uuid, bigint, uuid) is
  'Acknowledges a batch: it is not delivered to this group again. Arguments: queue, consumer_group and partition of the'
  ' messages; lease_id as pop returned it; up_to, the last offset that is done, null for the whole batch (a shorter ack keeps'
  ' the lease for the rest); tenant. Returns status acked, lease_lost (the lease is over or not yours: nothing changed) or'
  ' absent; acked, how many; committed, the last offset done. Errors: 22023, QN002.';

create function queen.nack(
    queue text,
    consumer_group text,
    "partition" text,
    lease_id uuid,
    error text default null,
    delay interval default null,
    tenant uuid default null)
returns queen.ack_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_pid bigint;
  v_row record;
  v_now timestamptz;
  v_error text := left(nack.error, 8192);
begin
  perform queen._check_ack(nack.queue, nack.consumer_group, nack."partition", nack.lease_id);
  if nack.delay is not null and (nack.delay < interval '0' or nack.delay > interval '366 days') then
    perform queen._refuse('delay', format('"%s" is out of range', nack.delay), 'Accepted is an interval from 0 to 366 days.');
  end if;
  v_pid := queen._partition_id(queen._find_tenant(nack.tenant), nack.queue, nack."partition");

  select c.committed, c.attempts into v_row
    from queen.log_consumers c
   where c.partition_id = v_pid and c.consumer_group = nack.consumer_group and c.lease_id = nack.lease_id
     and c.lease_expires_at > queen._now()
     for update;
  if not found then
    return queen._lease_lost(v_pid, nack.consumer_group);
  end if;
  v_now := queen._now();

  if v_row.attempts >= (select queen._option(q.options, 'delivery_max_attempts')::int
                          from queen.queues q where q.id = (select p.queue_id from queen.log_partitions p where p.id = v_pid)) then
    perform queen._bury(v_pid, nack.consumer_group, v_row.committed + 1, v_row.attempts,
      coalesce(v_error, 'refused ' || v_row.attempts || ' times'), v_now);
    update queen.log_consumers c
       set lease_id = null, leased_to = null, lease_expires_at = null, updated_at = v_now
     where c.partition_id = v_pid and c.consumer_group = nack.consumer_group;
    return row(true, 'nacked', 0, v_row.committed + 1)::queen.ack_result;
  end if;

  update queen.log_consumers c
     set lease_id = null, leased_to = null, lease_expires_at = null,
         retry_at = v_now + nack.delay, last_error = coalesce(v_error, c.last_error), updated_at = v_now
   where c.partition_id = v_pid and c.consumer_group = nack.consumer_group;
  return row(true, 'nacked', 0, v_row.committed)::queen.ack_result;
end
$$;
comment on function queen.nack(text, text, text, uuid, text, interval, uuid) is
  'Gives a batch back: what is not acknowledged of it is delivered again. Arguments: queue, consumer_group and partition;'
  ' lease_id as pop returned it; error, kept with the cursor and the dead letter (the first 8,192 characters); delay, not'
  ' before that, null for at once; tenant. After delivery_max_attempts deliveries the first message of the batch goes to the'
  ' dead letters and the next flow on. Returns status nacked, lease_lost or absent. Errors: 22023, QN002.';

create function queen.extend(
    queue text,
    consumer_group text,
    "partition" text,
    lease_id uuid,
    lease interval,
    tenant uuid default null)
returns queen.ack_result
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_pid bigint;
  v_row record;
begin
  perform queen._check_ack(extend.queue, extend.consumer_group, extend."partition", extend.lease_id);
  perform queen._check_lease(extend.lease);
  v_pid := queen._partition_id(queen._find_tenant(extend.tenant), extend.queue, extend."partition");
  update queen.log_consumers c
     set lease_expires_at = queen._now() + extend.lease, updated_at = queen._now()
   where c.partition_id = v_pid
     and c.consumer_group = extend.consumer_group
     and c.lease_id = extend.lease_id
     and c.lease_expires_at > queen._now()
  returning row(true, 'extended', 0, c.committed)::queen.ack_result as result into v_row;
  if not found then
    return queen._lease_lost(v_pid, extend.consumer_group);
  end if;
  return v_row.result;
end
$$;
comment on function queen.extend(text, text, text, uuid, interval, uuid) is
  'Keeps a batch longer: the lease ends that long from now. Arguments: queue, consumer_group, partition, lease_id as of'
  ' queen.ack; lease, 1 millisecond to 1 day; tenant. Returns status extended, lease_lost or absent. Errors: 22023, QN002.';
