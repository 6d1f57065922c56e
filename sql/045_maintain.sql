-- Maintenance under pg_cron: bounded steps, a transaction each, one partition lock at a time and never waited for.
--
-- Cost. queen.log_partitions.due_at is the agenda: an append sets it, a visit moves it on or removes the partition. A
-- partition that rests is visited when something of it is due and at no other time.

create function queen._retain(p_partition_id bigint, p_limit int, p_now timestamptz)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_p queen.log_partitions;
  v_options jsonb;
  v_groups int;
  v_floor bigint;
  v_consumed timestamptz;
  v_aged timestamptz;
  v_force boolean;
  v_end bigint;
  v_txn_end bigint;
  v_oldest timestamptz;
  v_more boolean := false;
begin
  select p.* into strict v_p from queen.log_partitions p where p.id = p_partition_id;
  select q.options into v_options from queen.queues q where q.id = v_p.queue_id;
  v_consumed := p_now - queen._option(v_options, 'retention_consumed')::interval;
  v_aged := p_now - queen._option(v_options, 'retention')::interval;
  v_force := queen._option(v_options, 'retention_force')::boolean;
  -- The slowest group; one without a row here has read nothing.
  select count(*), coalesce(min(coalesce(c.committed, 0)), 0) into v_groups, v_floor
    from queen.log_groups g
    left join queen.log_consumers c on c.partition_id = v_p.id and c.consumer_group = g.consumer_group
   where g.queue_id = v_p.queue_id;

  -- Both conditions hold for a prefix: offsets and created_at go up together. The scan begins at log_start, so entries of
  -- segments deleted before, which an old snapshot may keep, are not read again.
  select max(w.end_offset), count(*) >= p_limit into v_end, v_more
    from (select s.end_offset
            from queen.log_segments s
           where s.partition_id = v_p.id and s.end_offset >= v_p.log_start
             and ((v_groups > 0 and s.created_at < v_consumed and s.end_offset <= v_floor)
               or (s.created_at < v_aged and (v_force or v_groups = 0 or s.end_offset <= v_floor)))
           order by s.end_offset
           limit p_limit) w;
  if v_end is not null then
    delete from queen.log_segments s where s.partition_id = v_p.id and s.end_offset between v_p.log_start and v_end;
    v_p.log_start := v_end + 1;
  end if;

  select max(w."offset"), v_more or count(*) >= 20 * p_limit into v_txn_end, v_more
    from (select t."offset"
            from queen.log_txns t
           where t.partition_id = v_p.id and t."offset" >= v_p.txns_start
             and t.created_at < p_now - queen._option(v_options, 'txn_window')::interval
           order by t."offset"
           limit 20 * p_limit) w;
  if v_txn_end is not null then
    delete from queen.log_txns t where t.partition_id = v_p.id and t."offset" between v_p.txns_start and v_txn_end;
    v_p.txns_start := v_txn_end + 1;
  end if;

  if v_p.log_start > v_p.last_offset and v_p.txns_start > v_p.last_offset
     and greatest(v_p.last_created_at, v_p.created_at) < p_now - queen._option(v_options, 'partition_idle')::interval then
    update queen.log_partitions p set log_start = v_p.log_start, txns_start = v_p.txns_start where p.id = v_p.id;
    if queen.log_partition_dead(v_p.id) then
      delete from queen.log_consumers c
       where c.partition_id = v_p.id
         and not exists (select from queen.log_consumers x where x.partition_id = v_p.id and x.lease_expires_at > p_now);
      delete from queen.log_partitions p where p.id = v_p.id;
      return false;
    end if;
  end if;

  if not v_more then
    -- The next visit: when the oldest segment, the oldest txn, or the idle partition may be due.
    select min(w.at) into v_oldest
      from (select (select s.created_at from queen.log_segments s where s.partition_id = v_p.id and s.end_offset >= v_p.log_start
                     order by s.end_offset limit 1) + least(queen._option(v_options, 'retention')::interval,
                             case when v_groups > 0 then queen._option(v_options, 'retention_consumed')::interval end) as at
             union all
            select (select t.created_at from queen.log_txns t where t.partition_id = v_p.id and t."offset" >= v_p.txns_start
                     order by t."offset" limit 1) + queen._option(v_options, 'txn_window')::interval
             union all
            select greatest(v_p.last_created_at, v_p.created_at) + queen._option(v_options, 'partition_idle')::interval) w;
  end if;
  update queen.log_partitions p
     set log_start = v_p.log_start, txns_start = v_p.txns_start,
         -- What is overdue and stays waits for a group that lags: it is asked again every five minutes; and
         -- each hour in any case, for options may have changed.
         due_at = case when v_more then p_now when v_oldest <= p_now then p_now + interval '5 minutes'
                       else least(v_oldest, p_now + interval '1 hour') end
   where p.id = v_p.id;
  return v_more;
end
$$;
comment on function queen._retain(bigint, int, timestamptz) is
  'Removes what retention lets go of one partition, which the caller has locked, at most p_limit segments; whether more is to be'
  ' removed at once.';

create function queen._maintain_step(p_phase text, p_after bigint, out next_after bigint, out more boolean)
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '50ms'
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_now timestamptz := queen._now();
  v_pid bigint;
begin
  more := false;
  next_after := 0;
  if p_phase = 'cool' then
    select c.last_id, c.last_id is not null into next_after, more from queen._cool(p_after, 200, v_now) c;
  elsif p_phase = 'retain' then
    -- One that somebody holds is passed over; it is the first again in the next run.
    select p.id into v_pid from queen.log_partitions p where p.due_at <= v_now order by p.due_at limit 1 for update skip locked;
    if found then
      perform queen._retain(v_pid, 500, v_now);
      more := true;
    end if;
  elsif p_phase = 'dead letters' then
    delete from queen.log_dlq d
     where d.ctid = any (array(
           select x.ctid
             from queen.log_dlq x
             left join queen.queues q on q.tenant_id = x.tenant_id and q.name = x.queue
            where x.failed_at < v_now - interval '1 second'
              and x.failed_at < v_now - queen._option(q.options, 'dead_letter_retention')::interval
            order by x.failed_at
            limit 1000
              for update of x skip locked));
    more := found;
  elsif p_phase = 'pending' then
    more := queen._count_next(v_now);
  elsif p_phase = 'tenants' then
    more := queen._drop_tenants();
  elsif p_phase = 'run log' and queen._cron_problem() is null then
    delete from cron.job_run_details r
     where r.ctid = any (array(
           select x.ctid from cron.job_run_details x
            where x.database = current_database()
              and (x.command like 'CALL queen.sweep(%' or x.command like 'CALL queen.maintain(%')
              and coalesce(x.end_time, x.start_time) < v_now - queen._setting('run_log_retention')::interval
            limit 1000));
    more := found;
  end if;
end
$$;
comment on function queen._maintain_step(text, bigint) is
  'One transaction of queen.maintain. queen_admin may execute it, because a procedure that commits runs as its caller.';

-- The procedure commits, so it can pin no search_path: what needs an operator is here.
create function queen._maintain_end(p_run_for interval)
returns timestamptz
language sql
volatile
return clock_timestamp() + coalesce(p_run_for, interval '50 seconds');
comment on function queen._maintain_end(interval) is 'When a run of queen.maintain ends.';

create function queen._is_past(p_time timestamptz)
returns boolean
language sql
volatile
return clock_timestamp() >= p_time;
comment on function queen._is_past(timestamptz) is 'Whether this moment is reached.';

create procedure queen.maintain(run_for interval default '50 seconds')
language plpgsql
as $$
declare
  v_phase text;
  v_after bigint;
  v_more boolean;
  v_end timestamptz := queen._maintain_end(run_for);
begin
  foreach v_phase in array array['pending', 'cool', 'retain', 'dead letters', 'tenants', 'run log'] loop
    v_after := 0;
    loop
      begin
        select s.next_after, s.more into v_after, v_more from queen._maintain_step(v_phase, v_after) s;
      exception when lock_not_available or deadlock_detected then
        v_more := false;
      end;
      commit;
      exit when not v_more or queen._is_past(v_end);
    end loop;
  end loop;
end
$$;
comment on procedure queen.maintain(interval) is
  'Keeps the log small: lets partitions cool, applies retention and the txn window, removes partitions and dead letters past'
  ' their time, and our own old rows in cron.job_run_details. queen.start makes a job of it. Arguments: run_for, how long at'
  ' most. Many short transactions; holds one partition at a time and waits for none. Must be called outside a transaction'
  ' block.';

create view queen.lagging_groups as
select q.tenant_id, q.name as queue, p.name as "partition", g.consumer_group, coalesce(c.committed, p.log_start - 1) as committed,
       p.last_offset, p.last_offset - greatest(coalesce(c.committed, 0), p.log_start - 1) as messages,
       (select s.created_at from queen.log_segments s
         where s.partition_id = p.id and s.end_offset > coalesce(c.committed, 0) order by s.end_offset limit 1) as oldest_at,
       queen._now() - (select s.created_at from queen.log_segments s
         where s.partition_id = p.id and s.end_offset > coalesce(c.committed, 0) order by s.end_offset limit 1) as age,
       c.updated_at as last_seen_at, c.last_error
  from queen.log_partitions p
  join queen.queues q on q.id = p.queue_id
  join queen.log_groups g on g.queue_id = p.queue_id
  left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = g.consumer_group
 where p.last_offset > greatest(coalesce(c.committed, 0), p.log_start - 1)
   and queen._tenant_open(q.tenant_id);
comment on view queen.lagging_groups is
  'Groups with messages to read, by partition: how many, how old the oldest is, and when the group was last seen. Retention keeps'
  ' those messages unless the queue says retention_force.';

create view queen.expired_leases as
select q.tenant_id, q.name as queue, p.name as "partition", c.consumer_group, c.committed + 1 as from_offset, c.leased_to as to_offset,
       c.attempts, c.lease_expires_at, queen._now() - c.lease_expires_at as expired_for
  from queen.log_consumers c
  join queen.log_partitions p on p.id = c.partition_id
  join queen.queues q on q.id = p.queue_id
 where c.lease_expires_at <= queen._now()
   and queen._tenant_open(q.tenant_id);
comment on view queen.expired_leases is 'Batches whose lease ran out without ack or nack: delivered again at the next pop.';
