-- Which partitions a pop delivers, and the locks on their consumer rows.
--
-- Cost. A pop without a partition looks at two small sets: partitions that are hot (appended to since maintenance last
-- looked) and consumer rows of its group that are behind. queen._cool moves a partition from the first to the second, so
-- partitions that exist, or that other groups lag in, are never read.
-- A look-up by key is written as a lateral query with limit 1 where it matters, here and elsewhere: with statistics of an
-- emptied table the planner took joins that read every partition (20,000 of them: 40 ms a pop, 2026-12-01).
-- Peek, then lock: candidates are chosen without locks and taken with SKIP LOCKED, so consumers of one group never wait for
-- one another, and hold only what they deliver.

create function queen._pop_candidates(p_queue_id bigint, p_group text, p_max int, p_now timestamptz)
returns table (partition_id bigint, fresh boolean, backlog bigint)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_sort = off
set jit = off
set plan_cache_mode = force_generic_plan
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_first bigint;
  v_last bigint;
  v_start bigint;
begin
  -- Beginning anywhere and going round once: consumers spread, and nobody starves behind the first partitions.
  select least(min(h.lo), min(b.lo)), greatest(max(h.hi), max(b.hi)) into v_first, v_last
    from (select (select p.id from queen.log_partitions p where p.queue_id = p_queue_id and p.hot order by p.id limit 1) as lo,
                 (select p.id from queen.log_partitions p where p.queue_id = p_queue_id and p.hot order by p.id desc limit 1) as hi) h
   cross join (select (select c.partition_id from queen.log_consumers c
                        where c.queue_id = p_queue_id and c.consumer_group = p_group and c.behind order by c.partition_id limit 1) as lo,
                      (select c.partition_id from queen.log_consumers c
                        where c.queue_id = p_queue_id and c.consumer_group = p_group and c.behind order by c.partition_id desc limit 1) as hi) b;
  if v_first is null then
    return;
  end if;
  v_start := v_first + floor(random() * (v_last - v_first + 1))::bigint;
  return query
  select w.pid, w.fresh, w.backlog
    from (values (v_start, v_last), (v_first, v_start - 1)) as r (lo, hi)
   cross join lateral (
         (select p.id as pid, c.partition_id is null as fresh, p.last_offset - greatest(c.committed, p.log_start - 1) as backlog
            from queen.log_partitions p
            left join lateral (select x.partition_id, x.committed, x.lease_expires_at, x.retry_at
                                 from queen.log_consumers x where x.partition_id = p.id and x.consumer_group = p_group limit 1) c on true
           where p.queue_id = p_queue_id and p.hot and p.id between r.lo and r.hi
             and p.last_offset > greatest(c.committed, p.log_start - 1)
             and (c.lease_expires_at is null or c.lease_expires_at <= p_now)
             and (c.retry_at is null or c.retry_at <= p_now)
           order by p.id
           limit p_max)
         union all
         (select p.id, false, p.last_offset - greatest(c.committed, p.log_start - 1)
            from queen.log_consumers c
           cross join lateral (select x.id, x.hot, x.last_offset, x.log_start from queen.log_partitions x where x.id = c.partition_id limit 1) p
           where c.queue_id = p_queue_id and c.consumer_group = p_group and c.behind and c.partition_id between r.lo and r.hi
             and not p.hot
             and p.last_offset > greatest(c.committed, p.log_start - 1)
             and (c.lease_expires_at is null or c.lease_expires_at <= p_now)
             and (c.retry_at is null or c.retry_at <= p_now)
           order by c.partition_id
           limit p_max)) w;
end
$$;
comment on function queen._pop_candidates(bigint, text, int, timestamptz) is
  'Partitions of a queue with something for a group that nobody has; at most twice p_max each way round. Takes no lock.';

create function queen._pop_take(
    p_tenant uuid,
    p_queue_id bigint,
    p_queue text,
    p_options jsonb,
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
set enable_bitmapscan = off
set enable_hashjoin = off
set enable_mergejoin = off
as $$
#variable_conflict use_column
declare
  v_pids bigint[];
  v_fresh boolean[];
  v_backlogs bigint[];
  v_batch bigint[];
  v_new bigint[];
  v_got bigint[];
  v_taken bigint[] := array[]::bigint[];
  v_at int := 0;
  v_sum bigint;
  v_want bigint := p_max;
begin
  perform from queen.log_groups g where g.queue_id = p_queue_id and g.consumer_group = p_group;
  if not found then
    perform queen._join_group(p_queue_id, p_options, p_group, p_now);
  end if;
  if exists (select from queen.hotlist_repairs r where r.tenant_id = p_tenant and r.queue = p_queue and r.consumer_group = p_group) then
    perform queen._repair(p_tenant, p_queue_id, p_queue, p_group);
  end if;

  if p_partition is not null then
    select array_agg(p.id), array_agg(c.partition_id is null), array_agg(p.last_offset) into v_pids, v_fresh, v_backlogs
      from queen.log_partitions p
      left join queen.log_consumers c on c.partition_id = p.id and c.consumer_group = p_group
     where p.id = queen._partition_id(p_tenant, p_queue, p_partition)
       and p.last_offset > greatest(c.committed, p.log_start - 1);
  else
    select array_agg(w.partition_id), array_agg(w.fresh), array_agg(w.backlog) into v_pids, v_fresh, v_backlogs
      from queen._pop_candidates(p_queue_id, p_group, p_max, p_now) w;
  end if;

  <<looks>>
  for v_look in 1..2 loop
    -- As many candidates as promise what is wanted; more of them for those that turn out to be in a colleague's hands.
    while v_want > 0 and v_at < coalesce(cardinality(v_pids), 0) loop
      v_batch := null;
      v_new := null;
      v_sum := 0;
      while v_sum < v_want and v_at < cardinality(v_pids) loop
        v_at := v_at + 1;
        v_batch := v_batch || v_pids[v_at];
        v_sum := v_sum + v_backlogs[v_at];
        if v_fresh[v_at] then
          v_new := v_new || v_pids[v_at];
        end if;
      end loop;
      if v_new is not null then
        perform queen._pop_register(p_queue_id, v_new, p_group, p_now);
      end if;
      v_got := array(
        select l.partition_id
          from queen.log_consumers l
         where l.partition_id = any (v_batch)
           and l.consumer_group = p_group
           and (l.lease_expires_at is null or l.lease_expires_at <= p_now)
           and (l.retry_at is null or l.retry_at <= p_now)
         order by l.partition_id
           for update skip locked);
      v_taken := v_taken || v_got;
      -- Read after the lock: what another consumer has acknowledged meanwhile is not delivered again.
      for partition_id, committed, attempts, attempted_to, last_offset, last_error in
        select c.partition_id, greatest(c.committed, p.log_start - 1), c.attempts, c.attempted_to, p.last_offset, c.last_error
          from unnest(v_got) as g (pid)
         cross join lateral (select x.* from queen.log_consumers x where x.partition_id = g.pid and x.consumer_group = p_group limit 1) c
         cross join lateral (select x.last_offset, x.log_start from queen.log_partitions x where x.id = g.pid limit 1) p
         where p.last_offset > greatest(c.committed, p.log_start - 1)
         order by c.partition_id
      loop
        v_want := v_want - (last_offset - committed);
        return next;
      end loop;
    end loop;
    exit looks when v_want <= 0 or p_partition is not null or coalesce(cardinality(v_pids), 0) < p_max;
    -- Of what the first look saw, colleagues have so much that there may be more behind it: look further, once.
    select array_agg(w.partition_id), array_agg(w.fresh), array_agg(w.backlog) into v_pids, v_fresh, v_backlogs
      from queen._pop_candidates(p_queue_id, p_group, p_max + 1000, p_now) w
     where w.partition_id <> all (v_taken);
    v_at := 0;
  end loop;
end
$$;
comment on function queen._pop_take(uuid, bigint, text, jsonb, text, text, int, timestamptz) is
  'Locks the consumer rows of partitions with something to deliver, enough of them for p_max messages.';

-- First contact of a group with a partition. The partition is locked FOR KEY SHARE, as a foreign key would, so that it is not
-- removed beside a cursor that is not committed yet. Another consumer's first contact, in a transaction that is open, would
-- make the insert wait: so partitions are divided among 256 locks of the group, and what lies behind a lock that somebody
-- has is left to him. (A lock a partition could fill the server's table of locks.)
create function queen._pop_register(p_queue_id bigint, p_partitions bigint[], p_group text, p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '10ms'
as $$
declare
  v_shares bigint[] := array(
    select d.share
      from (select distinct u.pid % 256 as share from unnest(p_partitions) as u (pid) offset 0) d
     where pg_try_advisory_xact_lock(hashtext('pg_queen group'), hashtext(p_queue_id || ' ' || d.share || ' ' || p_group)));
  v_mine bigint[] := array(select u.pid from unnest(p_partitions) as u (pid) where u.pid % 256 = any (v_shares));
  v_held bigint[] := array(select p.id from queen.log_partitions p where p.id = any (v_mine) order by p.id for key share skip locked);
begin
  if v_mine = '{}' then
    return;
  end if;
  if v_held = '{}' then
    -- Maintenance has it for a moment; or it is being dropped.
    v_held := array(select p.id from queen.log_partitions p where p.id = v_mine[1] for key share);
  end if;
  insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed, updated_at)
  select p.id, p.queue_id, p_group, p.log_start - 1, p_now
    from queen.log_partitions p
   where p.id = any (v_held)
   order by p.id
  on conflict on constraint log_consumers_pkey do nothing;
exception when lock_not_available then
  null;
end
$$;
comment on function queen._pop_register(bigint, bigint[], text, timestamptz) is 'Makes the cursors of a group, at the first stored offset.';
