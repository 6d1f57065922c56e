-- Rows of a partition that is held by somebody's open transaction, or of a paused queue, step out of the head of the index
-- into a line: the n-th gets a visible_at n microseconds behind the first, so they keep their order, and whatever comes due
-- for that partition meanwhile joins the end. Moves are made behind the gate (024_busy.sql) with no pass under way. When the
-- partition is free, or the queue resumed, they are fired from the line (036_come_back.sql).
--
-- Names are compared with IS NOT DISTINCT FROM, so that rows are found by ctid or by time, never by the primary key.
--
-- Cost: one write a row and an episode, however long it lasts. (Rows that moved by a fixed second would be written again
-- each second.) The line of a held partition begins 10 to 15 s ahead: when the workers die, its rows are due again by
-- themselves. The line of a paused queue begins between the years 4000 and 9900, each elsewhere, since lines that overlap
-- read one another. (Years of four digits, because clients cannot read longer ones.)

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
  elsif queen._paused(p_group.tenant_id, p_group.queue) then
    v_from := timestamptz '4000-01-01 00:00+00' + random() * interval '5900 years';
    insert into queen.log_busy as b (tenant_id, queue, "partition", since, away_from, away_to, tried_at, paused)
    values (p_group.tenant_id, p_group.queue, p_group.part, p_now, v_from, v_from, p_now, true)
    on conflict on constraint log_busy_pkey do update
       set away_from = excluded.away_from, away_to = excluded.away_to, tried_at = excluded.tried_at, paused = true;
  elsif p_group.why = 'paused' then
    return 0;
  else
    v_pid := queen._partition_id(p_group.tenant_id, p_group.queue, p_group.part);
    if v_pid is not null then
      perform from queen.log_partitions p where p.id = v_pid for no key update skip locked;
      if found then
        return 0;
      end if;
    end if;
    v_from := p_now + interval '10 seconds' + random() * interval '5 seconds';
    insert into queen.log_busy as b (tenant_id, queue, "partition", since, away_from, away_to, tried_at)
    values (p_group.tenant_id, p_group.queue, p_group.part, p_now, v_from, v_from, p_now)
    on conflict on constraint log_busy_pkey do update
       set away_from = excluded.away_from, away_to = excluded.away_to, tried_at = excluded.tried_at;
  end if;
  with held as materialized (
    select t.ctid as tid, u.ord
      from unnest(p_group.tids[:5000]) with ordinality as u (tid, ord)
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
  'Moves rows of one destination out of the way, 5,000 at most, unless its partition is free by now; how many. May wait for the gate.';

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
