-- Consumer groups: first contact, seek, removal, and the repairs that a backward move publishes.

-- First contact. The queue's row is locked so that queen._cool, which reads the list of groups, is not under way for this
-- queue: a partition that it cools must know every group. Hot partitions are found without a row; the cold ones get one.
create function queen._join_group(p_queue_id bigint, p_options jsonb, p_group text, p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '10ms'
as $$
declare
  v_new boolean := queen._option(p_options, 'start_at') = 'new';
begin
  perform from queen.queues q where q.id = p_queue_id for no key update;
  if not found then
    return;
  end if;
  insert into queen.log_groups (queue_id, consumer_group, created_at)
  values (p_queue_id, p_group, p_now)
  on conflict on constraint log_groups_pkey do nothing;
  if not found then
    return;
  end if;
  insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed, behind, updated_at)
  select p.id, p.queue_id, p_group, case when v_new then p.last_offset else p.log_start - 1 end, not v_new, p_now
    from queen.log_partitions p
   where p.queue_id = p_queue_id
     and p.last_offset >= p.log_start
     and (v_new or not p.hot)
   order by p.id
     for key share of p
  on conflict on constraint log_consumers_pkey do nothing;
exception when lock_not_available then
  -- Another consumer's open transaction is entering the group: what is hot can be read meanwhile.
  null;
end
$$;
comment on function queen._join_group(bigint, jsonb, text, timestamptz) is
  'Enters a group of a queue at its first pop: at the beginning of what is stored, or behind it when start_at is new.';

create function queen._publish_repair(p_tenant uuid, p_queue text, p_group text, p_partition text, p_now timestamptz)
returns void
language sql
volatile
begin atomic
    insert into queen.hotlist_repairs as r (tenant_id, queue, consumer_group, "partition", requested_at)
    values (p_tenant, p_queue, p_group, p_partition, p_now)
    on conflict (tenant_id, queue, consumer_group) do update
       set "partition" = case when r."partition" = excluded."partition" then r."partition" end, requested_at = excluded.requested_at;
end;
comment on function queen._publish_repair(uuid, text, text, text, timestamptz) is
  'Tells the next pop that cursors of a group moved back: in one partition, or in the whole queue (null, or when two differ).';

create function queen._repair(p_tenant uuid, p_queue_id bigint, p_queue text, p_group text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_repair queen.hotlist_repairs;
begin
  delete from queen.hotlist_repairs r
   where (r.tenant_id, r.queue, r.consumer_group) in (
         select x.tenant_id, x.queue, x.consumer_group from queen.hotlist_repairs x
          where x.tenant_id = p_tenant and x.queue = p_queue and x.consumer_group = p_group
            for update skip locked)
  returning r.* into v_repair;
  if not found then
    return;
  end if;
  update queen.log_consumers c
     set behind = true
    from (select x.partition_id
            from queen.log_partitions p
            join queen.log_consumers x on x.partition_id = p.id and x.consumer_group = p_group
           where p.queue_id = p_queue_id
             and (v_repair."partition" is null or p.name = v_repair."partition")
             and x.committed < p.last_offset and not x.behind
           order by x.partition_id
             for update of x skip locked) l
   where c.partition_id = l.partition_id and c.consumer_group = p_group;
end
$$;
comment on function queen._repair(uuid, bigint, text, text) is 'Takes a published repair and marks the group behind where it is.';

create function queen.seek(
    queue text,
    consumer_group text,
    to_offset bigint default null,
    to_time timestamptz default null,
    "partition" text default null,
    tenant uuid default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_tenant uuid := queen._find_tenant(seek.tenant);
  v_now timestamptz := queen._now();
  v_queue record;
  v_moved bigint;
  v_back boolean;
begin
  perform queen._check_name('queue', seek.queue);
  perform queen._check_group(seek.consumer_group);
  if seek."partition" is not null then
    perform queen._check_name('partition', seek."partition");
  end if;
  if (seek.to_offset is null) = (seek.to_time is null) then
    perform queen._refuse(case when seek.to_offset is null then 'to_offset' else 'to_time' end,
      case when seek.to_offset is null then 'neither to_offset nor to_time is given' else 'both to_offset and to_time are given' end,
      'Give exactly one: to_offset, the next offset to deliver, or to_time, the earliest created_at to deliver.');
  end if;
  if seek.to_offset < 0 then
    perform queen._refuse('to_offset', format('"%s" is out of range', seek.to_offset), 'Accepted is 0 or more; 0 and 1 are the beginning.');
  end if;
  select q.id, q.options into v_queue from queen.queues q where q.tenant_id = v_tenant and q.name = seek.queue;
  if not found then
    return 0;
  end if;
  perform queen._join_group(v_queue.id, v_queue.options, seek.consumer_group, v_now);

  -- The target of each partition, within what is stored: by offset, or the first segment that is not older.
  with target as materialized (
    select p.id, p.last_offset,
           least(greatest(case when seek.to_offset is not null then seek.to_offset - 1
                               else coalesce((select g.base_offset - 1 from queen.log_segments g
                                               where g.partition_id = p.id and g.created_at >= seek.to_time
                                               order by g.end_offset limit 1), p.last_offset) end,
                          p.log_start - 1), p.last_offset) as committed
      from queen.log_partitions p
     where p.queue_id = v_queue.id
       and (seek."partition" is null or p.name = seek."partition")
     order by p.id
       for key share of p
  ), moved as (
    insert into queen.log_consumers as c (partition_id, queue_id, consumer_group, committed, behind, updated_at)
    select t.id, v_queue.id, seek.consumer_group, t.committed, t.committed < t.last_offset, v_now
      from target t
     order by t.id
    on conflict on constraint log_consumers_pkey do update
       set committed = excluded.committed, behind = excluded.behind, leased_to = null, lease_id = null, lease_expires_at = null,
           attempts = 0, attempted_to = 0, retry_at = null, last_error = null, updated_at = excluded.updated_at
    returning c.behind
  )
  select count(*), bool_or(m.behind) into v_moved, v_back from moved m;
  if v_back then
    perform queen._publish_repair(v_tenant, seek.queue, seek.consumer_group, seek."partition", v_now);
  end if;
  return v_moved;
end
$$;
comment on function queen.seek(text, text, bigint, timestamptz, text, uuid) is
  'Moves the cursors of a group, back to read again or forward to skip. Arguments: queue, consumer_group; exactly one of'
  ' to_offset, the next offset to deliver, and to_time, deliver what was appended then or later (whole segments); partition, null'
  ' for all; tenant. A target outside what is stored means its first or last message. Leases that are out are lost, attempts'
  ' forgotten. Returns the number of cursors moved, 0 for an unknown queue. The very next pop sees it. Errors: 22023, QN002.';

create function queen.drop_group(queue text, consumer_group text, tenant uuid default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_tenant uuid := queen._find_tenant(drop_group.tenant);
  v_queue bigint;
  v_gone bigint;
begin
  perform queen._check_name('queue', drop_group.queue);
  perform queen._check_group(drop_group.consumer_group);
  select q.id into v_queue from queen.queues q where q.tenant_id = v_tenant and q.name = drop_group.queue for no key update;
  if not found then
    return 0;
  end if;
  delete from queen.log_consumers c
   using (select x.partition_id
            from queen.log_partitions p
            join queen.log_consumers x on x.partition_id = p.id and x.consumer_group = drop_group.consumer_group
           where p.queue_id = v_queue
           order by x.partition_id
             for update of x) l
   where c.partition_id = l.partition_id and c.consumer_group = drop_group.consumer_group;
  get diagnostics v_gone = row_count;
  delete from queen.log_groups g where g.queue_id = v_queue and g.consumer_group = drop_group.consumer_group;
  if found then
    perform queen._publish_repair(v_tenant, drop_group.queue, drop_group.consumer_group, null, queen._now());
  end if;
  return v_gone;
end
$$;
comment on function queen.drop_group(text, text, uuid) is
  'Forgets a consumer group of a queue: its cursors no longer hold back retention, and a group of that name begins anew.'
  ' Arguments: queue, consumer_group, tenant. Returns the number of cursors removed. Errors: 22023, QN002.';
