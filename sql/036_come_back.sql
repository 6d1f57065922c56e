-- Back from the line (036_step_out.sql): when a partition is free again, or a queue resumed, its due timers are fired from
-- where they wait, in bounded steps. Until the line is empty, what comes due joins its end; so nobody overtakes.

create function queen._fire_lines(p_lines queen.log_busy[], p_max_rows int, p_now timestamptz, p_fault text)
returns queen._fired
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set enable_mergejoin = off
set jit = off
as $$
declare
  v_lines queen.log_busy[] := p_lines[:p_max_rows];
  v_most bigint := queen._setting('sweep_max_bytes')::bigint;
  v_groups queen._group[];
  v_fired queen._fired;
begin
  -- Partitions are the caller's. Of many lines, a few rows each.
  with waiting as materialized (
    select l.n, l.tenant_id, l.queue, l."partition" as part, r.ord, r.tid, sum(r.bytes) over (order by r.ord, l.n) as total
      from unnest(v_lines) with ordinality as l (tenant_id, queue, "partition", since, away_from, away_to, tried_at, paused, n)
     cross join lateral (
           select w.tid, w.bytes, row_number() over (order by w.visible_at) as ord
             from (select t.ctid as tid, t.visible_at, queen._payload_size(t.payload, t.payload_zstd) as bytes
                     from queen.log_timers t
                    where uuid_send(t.tenant_id) = uuid_send(l.tenant_id)
                      and t.visible_at >= l.away_from and t.visible_at <= l.away_to
                      and t.tenant_id is not distinct from l.tenant_id and t.queue is not distinct from l.queue
                      and t."partition" is not distinct from l."partition"
                      and t.claim_token is null and t.deliver_at <= p_now
                    order by t.visible_at
                    limit greatest(1, p_max_rows / cardinality(v_lines))) w) r
  )
  select array_agg(row(g.tenant_id, g.queue, g.part, queen._partition_id(g.tenant_id, g.queue, g.part), null, g.tids, null, null, null)::queen._group)
    into v_groups
    from (select w.tenant_id, w.queue, w.part, array_agg(w.tid order by w.ord) as tids
            from waiting w
           where w.total <= v_most or w.ord = 1
           group by w.n, w.tenant_id, w.queue, w.part) g;
  v_fired := queen._fire_rows(v_groups, p_now, true, p_fault);
  delete from queen.log_busy b
   using unnest(v_lines) l
   where b.tenant_id = l.tenant_id and b.queue = l.queue and b."partition" = l."partition"
     and not exists (select from queen.log_timers t
                      where uuid_send(t.tenant_id) = uuid_send(l.tenant_id)
                        and t.visible_at >= l.away_from and t.visible_at <= l.away_to
                        and t.tenant_id is not distinct from l.tenant_id and t.queue is not distinct from l.queue
                        and t."partition" is not distinct from l."partition");
  update queen.log_busy b set tried_at = p_now
    from unnest(v_lines) l
   where b.tenant_id = l.tenant_id and b.queue = l.queue and b."partition" = l."partition";
  return v_fired;
end
$$;
comment on function queen._fire_lines(queen.log_busy[], int, timestamptz, text) is
  'Fires what waits in lines, about p_max_rows, and ends the lines that are empty then. The caller is alone behind the gate and'
  ' holds their partitions. With p_fault the rows are failed with that text instead.';

create function queen._fire_lines_safely(p_lines queen.log_busy[], p_max_rows int, p_now timestamptz)
returns queen._fired
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_rows int := p_max_rows;
  v_state text;
  v_message text;
begin
  loop
    begin
      return queen._fire_lines(p_lines, v_rows, p_now, null);
    exception when others then
      get stacked diagnostics v_state = returned_sqlstate, v_message = message_text;
      if queen._transient(v_state) then
        raise;
      end if;
    end;
    if v_rows = 1 then
      return queen._fire_lines(p_lines, 1, p_now, format('%s (%s)', v_message, v_state));
    end if;
    v_rows := v_rows / 2;
  end loop;
  return null;
end
$$;
comment on function queen._fire_lines_safely(queen.log_busy[], int, timestamptz) is
  'queen._fire_lines; when it fails for a reason of a row, fewer rows until that one is alone and is failed with the reason.';

create function queen._come_back(p_max_rows int, p_now timestamptz)
returns queen._fired
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
begin
  v_all := array(select b from queen.log_busy b where not b.paused order by b.tried_at limit 256);
  v_pids := array(select queen._partition_id(b.tenant_id, b.queue, b."partition") from unnest(v_all) b);
  select array_agg(g.busy) into v_free
    from (select b.busy
            from unnest(v_all, v_pids) with ordinality as u (tenant_id, queue, "partition", since, away_from, away_to, tried_at, paused, pid, n)
            join queen.log_partitions p on p.id = u.pid
           cross join lateral (select v_all[u.n] as busy) b
           where p.id = any (v_pids) and u.away_from > p_now and not queen._paused(u.tenant_id, u.queue)
           order by p.id
             for no key update of p skip locked) g;
  -- Once a second a wait for each, a short one and few a call: a look that never waits is never served in a crowd, and
  -- only an attempt tells whether somebody is still at a birth.
  foreach v_busy in array v_all loop
    exit when v_waits >= 4;
    continue when v_busy = any (v_free) or v_busy.tried_at > p_now - interval '1 second' or v_busy.away_from <= p_now
               or queen._paused(v_busy.tenant_id, v_busy.queue);
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
  if v_free is null and not exists (select from unnest(v_all) b where b.away_to <= p_now) then
    return null;
  end if;
  perform queen._gate(true);
  -- Lines whose time is past are due by themselves. (Each is looked at again, behind the gate: rows may have joined.)
  delete from queen.log_busy b where not b.paused and b.away_to <= p_now;
  v_free := array(
    select b from queen.log_busy b
      join unnest(v_free) f on f.tenant_id = b.tenant_id and f.queue = b.queue and f."partition" = b."partition"
     where not b.paused and b.away_from > p_now
     order by b.tried_at);
  return queen._fire_lines_safely(v_free, p_max_rows, p_now);
end
$$;
comment on function queen._come_back(int, timestamptz) is
  'Fires what waits for partitions that are free by now; what it did, null when there was nothing. May wait for the gate, and'
  ' some 10 ms for partitions.';

create function queen._end_pauses(p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_ended queen.queue_pauses[];
begin
  if not exists (select from queen.queue_pauses p where p.resumed_at is not null) then
    return;
  end if;
  perform queen._gate(true);
  v_ended := array(select p from queen.queue_pauses p where p.resumed_at is not null order by p.resumed_at limit 100 for update skip locked);
  update queen.log_busy b set paused = false, tried_at = p_now - interval '1 second'
    from unnest(v_ended) e
   where b.tenant_id = e.tenant_id and b.queue = e.queue and b.paused;
  delete from queen.queue_pauses p using unnest(v_ended) e where p.tenant_id = e.tenant_id and p.queue = e.queue;
end
$$;
comment on function queen._end_pauses(timestamptz) is 'What the sweeper does about queues that were resumed. May wait for the gate.';
