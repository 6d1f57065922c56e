-- The steps of the resident sweeper, a transaction each.

-- What a pass left: destinations to be born, partitions held by others. Each kind is seen to in a transaction of its own,
-- which holds no timer. True when something was done and the pass should be tried again at once.
create function queen._place_key(p_group queen._group)
returns text
language sql
immutable
return p_group.tenant_id || '/' || p_group.queue || '/' || p_group.part;
comment on function queen._place_key(queen._group) is 'A key for a destination, to tell one from another in a list.';

create function queen._sweep_note(p_state queen._sweep_state, p_pass queen._pass, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  p_state.held := p_pass.held;
  p_state.fresh := p_state.fresh + p_pass.fired;
  p_state.passes := p_state.passes + 1;
  p_state.fired := p_state.fired + p_pass.fired;
  p_state.failed := p_state.failed + p_pass.failed;
  p_state.late := queen._add(p_state.late, p_pass.late);
  select array_agg(k.key), array_agg(coalesce(m.at, p_now)) into p_state.met, p_state.met_at
    from (select queen._place_key(g) as key from unnest(p_pass.stuck) g where g.why = 'busy') k
    left join unnest(p_state.met, p_state.met_at) as m (key, at) on m.key = k.key;
  -- Most partitions are held for a moment only, by a push or by a colleague: those met lately are left alone.
  select array_agg(g.*) into p_state.stuck
    from unnest(p_pass.stuck) g
   where g.why in ('missing', 'away', 'paused')
      or (g.why = 'busy' and p_state.met_at[array_position(p_state.met, queen._place_key(g))] <= p_now - interval '150 milliseconds');
  p_state.wait := case
    -- Small passes one after the other would keep two cores busy: timers gather for a moment, and one worker sees to them
    -- while the others stand by.
    when p_pass.fired + p_pass.failed >= 100 or (p_pass.more and p_pass.fired + p_pass.failed > 0) then 0
    when p_pass.fired + p_pass.failed > 0 then least(0.003 + 0.007 * p_state.worker, 0.02)
    when exists (select from unnest(p_pass.stuck) g where g.why = 'missing') and p_state.step_at <= p_now then 0
    else 0.005 end;
  return p_state;
end
$$;
comment on function queen._sweep_note(queen._sweep_state, queen._pass, timestamptz) is
  'What a pass did, counted; what it left, to be seen to; and how long to wait for the next.';

create function queen._sweep_pass(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_pass queen._pass;
  v_from timestamptz := case when p_state.full_scan or not p_state.dear then '-infinity' else p_state.bound - interval '100 milliseconds' end;
begin
  v_pass := queen._fire_safely(p_state.max_rows, p_state.max_bytes, v_from, p_state.worker, p_state.workers, p_now);
  -- A pass from the start that only met rows somebody holds must not throw the bound back.
  if v_from > '-infinity' or v_pass.fired > 0 or v_pass.stuck is not null or p_state.bound = '-infinity' then
    p_state.bound := v_pass.bound;
  end if;
  p_state := queen._sweep_note(p_state, v_pass, p_now);
  if v_pass.more then
    p_state.crowd := coalesce(v_pass.behind, '{}');
    p_state.walk_after := null;
    p_state.walk_at := p_now;
    p_state.walk_tail := p_now;
  end if;
  return p_state;
end
$$;
comment on function queen._sweep_pass(queen._sweep_state, timestamptz) is 'One pass of the resident sweeper under row locks.';

create function queen._sweep_fire(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return case when p_state.crowd is null then queen._sweep_pass(p_state, p_now) else queen._sweep_crowd(p_state, p_now) end;
end
$$;
comment on function queen._sweep_fire(queen._sweep_state, timestamptz) is 'A pass, in a backlog by tenants.';

-- The time spent waiting in one step is bounded, however many are held: four births of 2 ms and one partition of 10 ms
-- (036_step_out.sql). Those beyond it are left for the next step, or step out unasked.
create function queen._sweep_stuck(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_group queen._group;
  v_moved int := 0;
  v_waits int := 0;
  v_asked boolean := false;
  v_unborn text[] := array[]::text[];
begin
  foreach v_group in array p_state.stuck loop
    if v_group.why = 'missing' and v_group.tenant_id || v_group.queue <> all (v_unborn) then
      if v_waits >= 4 then
        continue;
      end if;
      if queen._try_birth(v_group.tenant_id, v_group.queue, v_group.part) then
        p_state.again := true;
        continue;
      end if;
      v_waits := v_waits + 1;
      if not exists (select from queen.queues q where q.tenant_id = v_group.tenant_id and q.name = v_group.queue) then
        v_unborn := v_unborn || (v_group.tenant_id || v_group.queue);
      end if;
    elsif v_group.why = 'busy' and not v_asked then
      v_asked := true;
      if queen._try_partition(v_group.pid) then
        continue;
      end if;
    end if;
    if v_group.tids is not null then
      v_moved := v_moved + queen._step_out(v_group, p_now);
    end if;
  end loop;
  p_state.stuck := null;
  p_state.step_at := p_now + case when v_moved > 0 or v_waits > 0 then interval '50 milliseconds' else interval '0' end;
  p_state.wait := 0;
  if v_asked and v_moved = 0 then
    -- A partition asked for is ours until the end of this transaction, so this pass finds it free.
    return queen._sweep_fire(p_state, p_now);
  end if;
  return p_state;
end
$$;
comment on function queen._sweep_stuck(queen._sweep_state, timestamptz) is 'Births and moves for what the last pass left out.';

create function queen._sweep_step(p_state queen._sweep_state)
returns queen._sweep_state
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
  v_next timestamptz;
  v_began timestamptz;
  v_cost interval;
  v_pages bigint;
  v_lsn pg_lsn;
  v_watch boolean := false;
  v_back queen._fired;
  v_state text;
  v_message text;
begin
  p_state.wait := 0;
  p_state.again := false;
  if p_state.settled_at is null or p_state.settled_at <= v_now - interval '500 milliseconds' then
    p_state.settled_at := v_now;
    p_state.mode := queen._setting('sweep_mode');
    p_state.max_rows := queen._setting('sweep_max_rows')::int;
    p_state.max_bytes := queen._setting('sweep_max_bytes')::bigint;
    p_state.idle := queen._setting('sweep_idle')::interval;
    p_state.enabled := queen._fire_enabled();
  end if;
  -- A clock that was set back must not leave the worker waiting for marks in the future.
  if p_state.bound > v_now or p_state.full_at > v_now + interval '10 seconds' then
    p_state.bound := '-infinity';
    p_state.full_at := v_now;
  end if;
  if p_state.wrote_at <= v_now - interval '1 second' then
    -- In a block of its own: counts and errors are written also when no pass succeeds.
    begin
      p_state := queen._sweep_write(p_state, v_now);
    exception when others then
      p_state.errors := p_state.errors + 1;
      p_state.error := format('%s (%s)', sqlerrm, sqlstate);
    end;
  end if;
  if not p_state.enabled then
    p_state.wait := extract(epoch from least(p_state.idle, interval '500 milliseconds'));
    return p_state;
  end if;
  begin
    if p_state.settled_at = v_now then
      perform queen._end_pauses(v_now);
    end if;
    if p_state.tokens is not null then
      if p_state.stuck is not null then
        return queen._sweep_stuck(p_state, v_now);
      end if;
      return queen._sweep_fire_leased(p_state);
    end if;
    if p_state.back_at <= v_now then
      p_state.back_at := v_now + interval '50 milliseconds';
      v_watch := exists (select from queen.log_busy b where not b.paused);
      if v_watch then
        v_back := queen._come_back(2000, v_now);
        if v_back.fired + v_back.failed > 0 then
          p_state.passes := p_state.passes + 1;
          p_state.fired := p_state.fired + v_back.fired;
          p_state.failed := p_state.failed + v_back.failed;
          p_state.late := queen._add(p_state.late, v_back.late);
          p_state.full_at := v_now;
          p_state.back_at := v_now;
          p_state.again := true;
          return p_state;
        end if;
      end if;
    end if;
    if p_state.stuck is not null and p_state.step_at <= v_now then
      return queen._sweep_stuck(p_state, v_now);
    end if;

    if p_state.crowd is not null and p_state.mode = 'lock' then
      return queen._sweep_crowd(p_state, v_now);
    end if;

    -- While nothing is due, look several times in one transaction: beginning one costs more than a probe. Not for
    -- long, for its table locks and its snapshot keep others.
    for v_look in 1..case when v_watch then 1 else 5 end loop
      v_lsn := pg_current_wal_insert_lsn();
      p_state.full_scan := false;
      if v_lsn = p_state.quiet_lsn and v_now >= p_state.quiet_from and v_now + p_state.idle <= p_state.quiet_to then
        -- Nothing was written on this server since a look at a moment when no transaction was writing: it is all still so.
        v_next := p_state.quiet_next;
      else
        p_state.full_scan := p_state.full_at <= v_now;
        p_state.quiet_lsn := case when p_state.full_scan and queen._nobody_writes() then v_lsn end;
        p_state.quiet_from := v_now;
        p_state.quiet_to := v_now + greatest(p_state.idle, interval '1 second');
        v_began := clock_timestamp();
        v_pages := queen._pages_read();
        v_next := queen._probe(case when p_state.full_scan then '-infinity' else p_state.bound - interval '100 milliseconds' end,
                               p_state.quiet_to);
        p_state.quiet_next := v_next;
      end if;
      if p_state.full_scan then
        -- Looks from the start find what was committed late or scheduled in the past. They are the expensive ones while an
        -- old snapshot is held: then their period stretches with their cost. 64 descents are 130 to 200 pages, and entries
        -- of rows fired since the last look are met once.
        v_cost := clock_timestamp() - v_began;
        p_state.dear := queen._pages_read() - v_pages > 1500 + 3 * p_state.workers * p_state.fresh or v_cost > interval '50 milliseconds';
        p_state.fresh := 0;
        p_state.full_at := v_now + case when p_state.dear then least(greatest(100 * v_cost, interval '500 milliseconds'), interval '4 seconds')
                                        else p_state.idle / 2 end;
      end if;
      exit when v_next <= v_now;
      p_state.bound := greatest(p_state.bound, v_now);
      p_state.wait := least(extract(epoch from v_next - v_now), queen._until_look(v_now, p_state.idle, p_state.worker, p_state.workers));
      exit when v_look = 5 or v_watch or clock_timestamp() + p_state.idle > p_state.end_at;
      perform pg_sleep(p_state.wait);
      v_now := queen._now();
    end loop;
    if v_next > v_now or v_next is null then
      p_state.stuck := null;
      p_state.met := null;
      p_state.met_at := null;
    elsif p_state.mode = 'lease' then
      p_state := queen._sweep_claim(p_state);
    else
      -- Something that far behind the bound was committed late, and there may be more of it: from the start, though dear.
      p_state.full_scan := p_state.full_scan or v_next < p_state.bound - interval '50 milliseconds';
      p_state := queen._sweep_pass(p_state, v_now);
      if p_state.held > 200 then
        -- Every pass from the start reads them again, about 10 us each (2026-12-01).
        p_state.dear := true;
        p_state.full_at := greatest(p_state.full_at, v_now + least(p_state.held * interval '300 microseconds', interval '4 seconds'));
      end if;
    end if;
  exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text;
    p_state.errors := p_state.errors + 1;
    p_state.error := format('%s (%s)', v_message, v_state);
    p_state.stuck := null;
    p_state.wait := 0.02;
  end;
  return p_state;
end
$$;
comment on function queen._sweep_step(queen._sweep_state) is
  'One transaction of the resident sweeper. queen_admin may execute it, because queen.sweep runs as its caller.';

