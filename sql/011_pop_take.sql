-- pop: a contiguous scan from committed + 1, one lease a partition.
--
-- Peek, then lock: the partitions to deliver are chosen without locks, their consumer rows are taken with SKIP LOCKED,
-- so consumers of one group never wait for one another and hold only what they deliver. A delivery counts as an attempt
-- here, at the pop: a consumer that is killed each time still brings its message to the dead letters.

create function queen._pop_take(
    p_tenant uuid,
    p_queue text,
    p_group text,
    p_partition text,
    p_max int,
    p_now timestamptz)
returns table (partition_id bigint, committed bigint, attempts int, attempted_to bigint, last_offset bigint, last_error text)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_queue bigint;
  v_pids bigint[];
  v_new bigint[];
begin
  select q.id into v_queue from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue;
  if not found then
    return;
  end if;

  -- Enough partitions to fill the call, the least recently served first.
  select array_agg(c.pid order by c.pid), array_agg(c.pid order by c.pid) filter (where c.fresh)
    into v_pids, v_new
    from (select w.pid, w.fresh, sum(w.backlog) over (order by w.served nulls first, w.pid) - w.backlog as before
            from (select p.id as pid, c.partition_id is null as fresh, c.updated_at as served,
                         p.last_offset - coalesce(c.committed, p.log_start - 1) as backlog
                    from queen.log_partitions p
                    left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = p_group
                   where p.queue_id = v_queue
                     and (p_partition is null or p.name = p_partition)
                     and p.last_offset > coalesce(c.committed, p.log_start - 1)
                     and (c.lease_expires_at is null or c.lease_expires_at <= p_now)
                     and (c.retry_at is null or c.retry_at <= p_now)) w) c
   where c.before < p_max;
  if v_pids is null then
    return;
  end if;

  if v_new is not null then
    perform queen._pop_register(v_new, p_group, p_now);
  end if;

  return query
  select c.partition_id, greatest(c.committed, p.log_start - 1), c.attempts, c.attempted_to, p.last_offset, c.last_error
    from (select l.*
            from queen.log_consumers l
           where l.partition_id = any (v_pids)
             and l.consumer_group = p_group
             and (l.lease_expires_at is null or l.lease_expires_at <= p_now)
             and (l.retry_at is null or l.retry_at <= p_now)
           order by l.partition_id
             for update skip locked) c
    join queen.log_partitions p on p.id = c.partition_id
   where p.last_offset > c.committed
   order by c.partition_id;
end
$$;
comment on function queen._pop_take(uuid, text, text, text, int, timestamptz) is
  'Locks the consumer rows of partitions with something to deliver, enough of them for p_max messages.';

-- First contact of a group with partitions. An uncommitted first contact of another consumer would make the insert wait;
-- after 10 ms that partition is left to it.
create function queen._pop_register(p_partitions bigint[], p_group text, p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '10ms'
as $$
declare
  v_pid bigint;
begin
  begin
    insert into queen.log_consumers (partition_id, consumer_group, committed, updated_at)
    select p.id, p_group, p.log_start - 1, p_now
      from queen.log_partitions p
     where p.id = any (p_partitions)
     order by p.id
    on conflict on constraint log_consumers_pkey do nothing;
    return;
  exception when lock_not_available then
    null;
  end;
  foreach v_pid in array p_partitions loop
    begin
      insert into queen.log_consumers (partition_id, consumer_group, committed, updated_at)
      select p.id, p_group, p.log_start - 1, p_now
        from queen.log_partitions p
       where p.id = v_pid
      on conflict on constraint log_consumers_pkey do nothing;
    exception when lock_not_available then
      null;
    end;
  end loop;
end
$$;
comment on function queen._pop_register(bigint[], text, timestamptz) is 'Makes the cursors of a group, at the first stored offset.';
