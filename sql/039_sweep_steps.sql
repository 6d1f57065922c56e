-- The steps of the resident sweeper, a transaction each.

-- What a pass left: destinations to be born, partitions held by others. Each kind is seen to in a transaction of its own,
-- which holds no timer. True when something was done and the pass should be tried again at once.
create function queen._place_key(p_group queen._group)
returns text
language sql
immutable
return p_group.tenant_id || '/' || p_group.queue || '/' || p_group.part;
comment on function queen._place_key(queen._group) is 'A key for a destination, to tell one from another in a list.';

create function queen._sweep_pass(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_pass queen._pass;
  v_from timestamptz := case when p_state.full_scan then '-infinity' else p_state.bound - interval '100 milliseconds' end;
begin
  v_pass := queen._fire_safely(p_state.max_rows, p_state.max_bytes, v_from, p_state.worker, p_state.workers, p_now);
  -- A scan from the start that only met rows somebody holds must not throw the bound back.
  if not p_state.full_scan or v_pass.fired > 0 or p_state.bound = '-infinity' then
    p_state.bound := v_pass.bound;
  end if;
  p_state.passes := p_state.passes + 1;
  p_state.fired := p_state.fired + v_pass.fired;
  p_state.failed := p_state.failed + v_pass.failed;
  p_state.late := queen._add(p_state.late, v_pass.late);
  select array_agg(g.*) into p_state.stuck from unnest(v_pass.stuck) g where g.why <> 'other';
  select array_agg(k.key), array_agg(coalesce(m.at, p_now)) into p_state.met, p_state.met_at
    from (select queen._place_key(g) as key from unnest(p_state.stuck) g where g.why = 'busy') k
    left join unnest(p_state.met, p_state.met_at) as m (key, at) on m.key = k.key;
  p_state.wait := case
    when v_pass.fired + v_pass.failed > 0 then 0
    when exists (select from unnest(v_pass.stuck) g where g.why = 'missing') and p_state.step_at <= p_now then 0
    else 0.005 end;
  return p_state;
end
$$;
comment on function queen._sweep_pass(queen._sweep_state, timestamptz) is 'One pass of the resident sweeper under row locks.';

create function queen._sweep_stuck(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_group queen._group;
  v_moved int := 0;
  v_got boolean := false;
begin
  foreach v_group in array p_state.stuck loop
    if v_group.why = 'missing' then
      if queen._try_birth(v_group.tenant_id, v_group.queue, v_group.part) then
        p_state.again := true;
      elsif v_group.tids is not null then
        v_moved := v_moved + queen._step_out(v_group, p_now);
      end if;
    elsif v_group.why = 'busy'
          and coalesce(p_state.met_at[array_position(p_state.met, queen._place_key(v_group))], p_now) > p_now - interval '150 milliseconds' then
      -- Most partitions are held for a moment only, by a push or by a colleague.
      continue;
    elsif v_group.why = 'busy' and queen._try_partition(v_group.pid) then
      v_got := true;
    else
      v_moved := v_moved + queen._step_out(v_group, p_now);
    end if;
  end loop;
  p_state.stuck := null;
  p_state.step_at := p_now + interval '50 milliseconds';
  p_state.wait := 0;
  if v_got and v_moved = 0 then
    -- Ours until the end of this transaction, so this pass finds it free.
    return queen._sweep_pass(p_state, p_now);
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
  v_cost interval;
  v_watch boolean := false;
  v_state text;
  v_message text;
begin
  p_state.wait := 0;
  p_state.again := false;
  if p_state.settled_at is null or p_state.settled_at <= v_now - interval '1 second' then
    p_state.settled_at := v_now;
    p_state.mode := queen._setting('sweep_mode');
    p_state.max_rows := queen._setting('sweep_max_rows')::int;
    p_state.max_bytes := queen._setting('sweep_max_bytes')::bigint;
    p_state.idle := queen._setting('sweep_idle')::interval;
  end if;
  -- A clock that was set back must not leave the worker waiting for marks in the future.
  if p_state.bound > v_now or p_state.full_at > v_now + interval '10 seconds' then
    p_state.bound := '-infinity';
    p_state.full_at := v_now;
  end if;
  begin
    p_state := queen._sweep_write(p_state, v_now);
    if p_state.tokens is not null then
      if p_state.stuck is not null then
        return queen._sweep_stuck(p_state, v_now);
      end if;
      return queen._sweep_fire_leased(p_state);
    end if;
    if p_state.back_at <= v_now then
      p_state.back_at := v_now + interval '50 milliseconds';
      v_watch := exists (select from queen.log_busy);
      if v_watch and queen._come_back(v_now) > 0 then
        p_state.full_at := v_now;
        p_state.again := true;
        return p_state;
      end if;
    end if;
    if p_state.stuck is not null and p_state.step_at <= v_now then
      return queen._sweep_stuck(p_state, v_now);
    end if;

    -- While nothing is due, look several times in one transaction: beginning one costs more than a probe. Not for
    -- long, for its table locks and its snapshot keep others.
    for v_look in 1..case when v_watch then 1 else 5 end loop
      p_state.full_scan := p_state.full_at <= v_now;
      v_next := queen._probe(case when p_state.full_scan then '-infinity' else p_state.bound - interval '100 milliseconds' end,
                             v_now + p_state.idle);
      v_cost := queen._now() - v_now;
      exit when v_next <= v_now;
      p_state.bound := greatest(p_state.bound, v_now);
      p_state.wait := extract(epoch from coalesce(v_next - v_now, p_state.idle));
      exit when p_state.full_scan or v_look = 5 or v_watch or clock_timestamp() + p_state.idle > p_state.end_at;
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
      p_state := queen._sweep_pass(p_state, v_now);
    end if;
    if p_state.full_scan then
      -- The scan from the start is the expensive one while an old snapshot is held: its period stretches with its cost.
      p_state.full_at := v_now + least(greatest(30 * v_cost, interval '500 milliseconds'), interval '4 seconds');
      p_state.full_scan := false;
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

