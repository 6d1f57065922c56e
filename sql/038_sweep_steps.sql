-- The steps of the resident sweeper; the loop is in 040_sweep.sql.
--
-- A procedure that commits can neither be SECURITY DEFINER nor have a SET clause, so queen.sweep only loops and commits;
-- all work is in queen._sweep_step, one call a transaction. The state is a value that the loop hands from step to step:
-- nothing of it is stored, and nothing of it must survive a worker that dies.

create table queen.sweep_stats (
    worker        int not null,
    pid           int not null,
    started_at    timestamptz not null,
    last_seen_at  timestamptz not null,
    last_fire_at  timestamptz,
    passes        bigint not null default 0,
    fired         bigint not null default 0,
    failed        bigint not null default 0,
    errors        bigint not null default 0,
    last_error    text,
    last_error_at timestamptz,
    late          bigint[] not null default array_fill(0::bigint, array[16]),
    constraint sweep_stats_pkey primary key (worker)
) with (fillfactor = 50);
comment on table queen.sweep_stats is 'What each worker has done, a row a worker; written by that worker alone, once a second.';
comment on column queen.sweep_stats.worker is 'number of the worker, from 0';
comment on column queen.sweep_stats.pid is 'its server process';
comment on column queen.sweep_stats.started_at is 'when the current run began';
comment on column queen.sweep_stats.last_seen_at is 'heartbeat';
comment on column queen.sweep_stats.last_fire_at is 'last pass that delivered something';
comment on column queen.sweep_stats.passes is 'passes that found something due';
comment on column queen.sweep_stats.fired is 'timers delivered';
comment on column queen.sweep_stats.failed is 'timers backed off or archived';
comment on column queen.sweep_stats.errors is 'passes given up for a failure of the moment';
comment on column queen.sweep_stats.last_error is 'the last of them';
comment on column queen.sweep_stats.last_error_at is 'when';
comment on column queen.sweep_stats.late is 'timers by lateness at the append, from deliver_at; bounds in queen._late_bounds()';

create type queen._sweep_state as (
    worker      int,
    workers     int,
    started_at  timestamptz,
    settled_at  timestamptz,     -- settings were read
    mode        text,
    max_rows    int,
    max_bytes   bigint,
    idle        interval,
    bound       timestamptz,     -- nothing due lies before it, but late commits
    end_at      timestamptz,     -- the run ends
    full_at     timestamptz,     -- next scan from the start
    full_scan   boolean,         -- this pass is one
    back_at     timestamptz,     -- next look at partitions that were held
    stuck_since timestamptz,     -- passes have met held partitions since
    stuck_n     int,
    step_at     timestamptz,     -- no move of rows before
    stuck       queen._group[],
    again       boolean,         -- something was born or came back: look again at once
    tenants     uuid[],          -- leases taken in the step before, to be fired in this one
    queues      text[],
    keys        text[],
    tokens      uuid[],
    passes      bigint,          -- counted since the last write of queen.sweep_stats
    fired       bigint,
    failed      bigint,
    errors      bigint,
    error       text,
    late        bigint[],
    wrote_at    timestamptz,
    wait        double precision -- seconds to sleep before the next step
);
comment on type queen._sweep_state is 'What a worker remembers between two transactions.';

-- When the next timer is due, looked for no further than the next sleep reaches: far timers cost nothing. An idle probe
-- is 64 descents of the index.
create function queen._probe(p_from timestamptz, p_to timestamptz)
returns timestamptz
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set plan_cache_mode = force_generic_plan
as $$
begin
  return (
    select min(w.visible_at)
      from generate_series(0, 63) as s (shard)
     cross join lateral (
           select t.visible_at
             from queen.log_timers t
            where t.shard = s.shard::smallint and t.visible_at >= p_from and t.visible_at <= p_to
            order by t.visible_at
            limit 1) w);
end
$$;
comment on function queen._probe(timestamptz, timestamptz) is 'Earliest visible_at in a span of time, or null.';

create function queen._sweep_write(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_state.wrote_at > p_now - interval '1 second'
     or (p_state.passes = 0 and p_state.errors = 0 and p_state.wrote_at > p_now - interval '5 seconds') then
    return p_state;
  end if;
  insert into queen.sweep_stats as s (worker, pid, started_at, last_seen_at, last_fire_at, passes, fired, failed, errors, last_error, last_error_at, late)
  values (p_state.worker, pg_backend_pid(), p_state.started_at, p_now, case when p_state.fired > 0 then p_now end,
          p_state.passes, p_state.fired, p_state.failed, p_state.errors, p_state.error, case when p_state.errors > 0 then p_now end, p_state.late)
  on conflict on constraint sweep_stats_pkey do update
     set pid = excluded.pid, started_at = excluded.started_at, last_seen_at = excluded.last_seen_at,
         last_fire_at = coalesce(excluded.last_fire_at, s.last_fire_at),
         passes = s.passes + excluded.passes, fired = s.fired + excluded.fired, failed = s.failed + excluded.failed,
         errors = s.errors + excluded.errors, last_error = coalesce(excluded.last_error, s.last_error),
         last_error_at = coalesce(excluded.last_error_at, s.last_error_at),
         late = (select array_agg(a.n + b.n order by a.i)
                   from unnest(s.late) with ordinality as a (n, i)
                   join unnest(excluded.late) with ordinality as b (n, i) on b.i = a.i);
  p_state.passes := 0;
  p_state.fired := 0;
  p_state.failed := 0;
  p_state.errors := 0;
  p_state.error := null;
  p_state.late := array_fill(0::bigint, array[16]);
  p_state.wrote_at := p_now;
  return p_state;
end
$$;
comment on function queen._sweep_write(queen._sweep_state, timestamptz) is 'Adds what the worker counted to its own row.';

-- What a pass left: destinations to be born, partitions held by others. Each kind is seen to in a transaction of its own,
-- which holds no timer. True when something was done and the pass should be tried again at once.
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
  if v_pass.late is not null then
    p_state.late := (select array_agg(a.n + b.n order by a.i)
                       from unnest(p_state.late) with ordinality as a (n, i)
                       join unnest(v_pass.late) with ordinality as b (n, i) on b.i = a.i);
  end if;
  p_state.stuck := v_pass.stuck;
  p_state.stuck_n := case when v_pass.stuck is null then 0 else p_state.stuck_n + 1 end;
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
    elsif v_group.why = 'busy' and p_state.stuck_n >= 3 and queen._try_partition(v_group.pid) then
      v_got := true;
    elsif v_group.why = 'away' or p_state.stuck_n >= 3 then
      v_moved := v_moved + queen._step_out(v_group, p_now);
    end if;
  end loop;
  p_state.stuck := null;
  p_state.step_at := p_now + interval '50 milliseconds';
  if v_moved > 0 then
    p_state.stuck_n := 0;
  end if;
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
      p_state.stuck_n := 0;
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

