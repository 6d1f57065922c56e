-- Rows of a partition that is held by somebody's open transaction step out of the head of the index and come back when
-- it is free. Both moves are made behind the gate (024_busy.sql) with no pass under way, and keep the rows in order: the
-- n-th gets a visible_at n microseconds behind the first. Whatever comes due for that partition meanwhile joins the end.
--
-- Names are compared with IS NOT DISTINCT FROM, so that rows are found by ctid or by time, never by the primary key.
--
-- Cost: two writes a row and an episode, however long it lasts. (Rows that moved by a fixed second would be written again
-- each second.) A worker that dies leaves rows that are due again after 10 s by themselves.

create function queen._step_out(p_group queen._group, p_now timestamptz)
returns int
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_pid bigint;
  v_busy queen.log_busy;
  v_from timestamptz;
  v_moved int;
begin
  perform queen._gate(true);
  select b.* into v_busy from queen.log_busy b
   where b.tenant_id = p_group.tenant_id and b.queue = p_group.queue and b."partition" = p_group.part;
  if v_busy.away_from > p_now then
    v_from := v_busy.away_to;
  else
    v_pid := queen._partition_id(p_group.tenant_id, p_group.queue, p_group.part);
    if v_pid is not null then
      perform from queen.log_partitions p where p.id = v_pid for no key update skip locked;
      if found then
        return 0;
      end if;
    end if;
    v_from := p_now + interval '10 seconds';
    insert into queen.log_busy as b (tenant_id, queue, "partition", since, away_from, away_to, tried_at)
    values (p_group.tenant_id, p_group.queue, p_group.part, p_now, v_from, v_from, p_now)
    on conflict on constraint log_busy_pkey do update
       set away_from = excluded.away_from, away_to = excluded.away_to, tried_at = excluded.tried_at;
  end if;
  with held as materialized (
    select t.ctid as tid, u.ord
      from unnest(p_group.tids) with ordinality as u (tid, ord)
      join queen.log_timers t on t.ctid = u.tid
     where (t.visible_at <= p_now) is true
       and t.tenant_id is not distinct from p_group.tenant_id and t.queue is not distinct from p_group.queue
       and t."partition" is not distinct from p_group.part
       for update of t skip locked
  ), moved as (
    update queen.log_timers t
       set claimed_until = v_from + h.n * interval '1 microsecond', claim_token = null
      from (select h.tid, row_number() over (order by h.ord) as n from held h) h
     where t.ctid = h.tid
    returning 1
  )
  select count(*) into v_moved from moved;
  update queen.log_busy b
     set away_to = v_from + v_moved * interval '1 microsecond'
   where b.tenant_id = p_group.tenant_id and b.queue = p_group.queue and b."partition" = p_group.part;
  return v_moved;
end
$$;
comment on function queen._step_out(queen._group, timestamptz) is
  'Moves the rows of one destination out of the way, unless its partition is free by now; how many. May wait for the gate.';

create function queen._come_back(p_now timestamptz)
returns int
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_busy queen.log_busy;
  v_all queen.log_busy[];
  v_free queen.log_busy[];
  v_pids bigint[];
  v_pid bigint;
  v_got boolean;
  v_waits int := 0;
  v_back int := 0;
begin
  v_all := array(select b from queen.log_busy b order by b.tried_at limit 256);
  v_pids := array(select queen._partition_id(b.tenant_id, b.queue, b."partition") from unnest(v_all) b);
  with got as materialized (
    select b.tenant_id, b.queue, b."partition", b.since, b.away_from, b.away_to, b.tried_at
      from unnest(v_all, v_pids) as b (tenant_id, queue, "partition", since, away_from, away_to, tried_at, pid)
      join queen.log_partitions p on p.id = b.pid
     where p.id = any (v_pids) and b.away_from > p_now
     order by p.id
       for no key update of p skip locked
  )
  select array_agg(row(g.*)::queen.log_busy) into v_free
    from (select * from got
          union all
          select b.* from unnest(v_all) b where b.away_from <= p_now) g;
  -- Once a second a wait for each, a short one and few a call: a look that never waits is never served in a crowd, and
  -- only an attempt tells whether somebody is still at a birth.
  foreach v_busy in array v_all loop
    exit when v_waits >= 4;
    continue when v_busy = any (v_free) or v_busy.tried_at > p_now - interval '1 second';
    v_pid := queen._partition_id(v_busy.tenant_id, v_busy.queue, v_busy."partition");
    v_got := case when v_pid is null then queen._try_birth(v_busy.tenant_id, v_busy.queue, v_busy."partition")
                  else queen._try_partition(v_pid) end;
    if v_got then
      v_free := v_free || v_busy;
    else
      v_waits := v_waits + case when v_pid is null then 1 else 4 end;
      update queen.log_busy b set tried_at = p_now
       where b.tenant_id = v_busy.tenant_id and b.queue = v_busy.queue and b."partition" = v_busy."partition";
    end if;
  end loop;
  if v_free is null then
    return 0;
  end if;
  perform queen._gate(true);
  foreach v_busy in array v_free loop
    with held as materialized (
      select t.ctid as tid
        from generate_series(0, 63) as s (shard)
        join queen.log_timers t on t.shard = s.shard::smallint
       where t.visible_at >= v_busy.away_from and t.visible_at <= v_busy.away_to
         and t.tenant_id is not distinct from v_busy.tenant_id and t.queue is not distinct from v_busy.queue
         and t."partition" is not distinct from v_busy."partition"
         and t.claim_token is null and t.deliver_at <= p_now
         for update of t skip locked
    ), moved as (
      update queen.log_timers t set claimed_until = null from held h where t.ctid = h.tid returning 1
    )
    select v_back + count(*) into v_back from moved;
    delete from queen.log_busy b
     where b.tenant_id = v_busy.tenant_id and b.queue = v_busy.queue and b."partition" = v_busy."partition";
  end loop;
  return v_back;
end
$$;
comment on function queen._come_back(timestamptz) is
  'Brings back the rows of partitions that are free by now; how many. May wait for the gate, and some 10 ms for partitions.';

create function queen._try_birth(p_tenant uuid, p_queue text, p_partition text)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '2ms'
as $$
begin
  perform queen._provision(p_tenant, p_queue, p_partition);
  return true;
exception when lock_not_available then
  return false;
end
$$;
comment on function queen._try_birth(uuid, text, text) is 'Makes a destination, waiting at most 2 ms for an uncommitted birth of the same names.';

create function queen._try_partition(p_partition_id bigint)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '10ms'
as $$
begin
  perform from queen.log_partitions p where p.id = p_partition_id for no key update;
  return found;
exception when lock_not_available then
  return false;
end
$$;
comment on function queen._try_partition(bigint) is
  'Takes a partition, waiting at most 10 ms in the queue of its lock: under a stream of short pushes SKIP LOCKED alone may never get it.';
