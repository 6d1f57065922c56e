-- The resident loop under pg_cron: one step of 039_sweep_steps.sql a transaction.

create function queen._sweep_begin(p_run_for interval, p_worker int, p_workers int)
returns queen._sweep_state
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '1s'
as $$
declare
  v_state queen._sweep_state;
begin
  if p_run_for < interval '0' or p_run_for > interval '366 days' then
    perform queen._refuse('run_for', format('"%s" is out of range', p_run_for), 'Accepted is an interval from 0 to 366 days, or null.');
  end if;
  if p_workers is null or p_workers not between 1 and 64 then
    perform queen._refuse('workers', format('"%s" is out of range', p_workers), 'Accepted is 1 to 64.');
  end if;
  if p_worker is null or p_worker not between 0 and p_workers - 1 then
    perform queen._refuse('worker', format('"%s" is out of range', p_worker), format('Accepted is 0 to %s.', p_workers - 1));
  end if;
  v_state.worker := p_worker;
  v_state.workers := p_workers;
  v_state.started_at := queen._now();
  v_state.bound := '-infinity';
  v_state.end_at := queen._sweep_end(p_run_for, p_worker);
  v_state.full_at := '-infinity';
  v_state.full_scan := false;
  v_state.dear := false;
  v_state.fresh := 0;
  v_state.held := 0;
  v_state.back_at := '-infinity';
  v_state.step_at := '-infinity';
  v_state.wrote_at := '-infinity';
  v_state.passes := 0;
  v_state.fired := 0;
  v_state.failed := 0;
  v_state.errors := 0;
  v_state.late := array_fill(0::bigint, array[16]);
  -- Plans and the server's Python are made now, not in the first pass: that one came 20 to 70 ms late (2026-12-01, 2 cores).
  perform queen._fire_pass(1, 1, 'infinity', 0, 1, v_state.started_at);
  perform queen._fire_rows(array[]::queen._group[], v_state.started_at, false, null);
  perform queen._append(array[]::queen._segment[], v_state.started_at);
  perform queen._segment_pack(''::bytea, 0);
  return v_state;
end
$$;
comment on function queen._sweep_begin(interval, int, int) is 'Checks the arguments of queen.sweep and makes its first state.';

create function queen._sweep_end(p_run_for interval, p_worker int)
returns timestamptz
language sql
stable
return case when p_run_for is null
    -- pg_cron starts a job on the full minute, and when it still runs then, as soon as it ends. So end a little past the
    -- minute, each worker at another second: there is always one at work.
    then date_trunc('minute', clock_timestamp() + interval '30 seconds') + interval '1 minute'
         + (1 + 4 * (p_worker % 12)) * interval '1 second'
    else clock_timestamp() + p_run_for end;
comment on function queen._sweep_end(interval, int) is 'When a run of queen.sweep ends.';

create function queen._sweep_finish(p_state queen._sweep_state)
returns void
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '50ms'
as $$
begin
  p_state.wrote_at := '-infinity';
  perform queen._sweep_write(p_state, queen._now());
exception when lock_not_available then
  null;
end
$$;
comment on function queen._sweep_finish(queen._sweep_state) is 'Writes the last counts of a worker.';

-- The procedure commits, so it can pin no search_path: what needs an operator is here.
create function queen._sweep_wait(p_state queen._sweep_state, p_run_for interval)
returns float8
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_run_for = interval '0' then
    -- One pass, with the births it needs and the second look after them.
    if p_state.wait > 0
       or (p_state.passes + p_state.errors > 0 and p_state.stuck is null and p_state.tokens is null and not p_state.again) then
      return null;
    end if;
    return 0;
  end if;
  if clock_timestamp() >= p_state.end_at then
    return null;
  end if;
  return greatest(0, least(coalesce(p_state.wait, 0), extract(epoch from p_state.end_at - clock_timestamp())));
end
$$;
comment on function queen._sweep_wait(queen._sweep_state, interval) is 'Seconds until the next pass of a run of queen.sweep, null when it is over.';

create procedure queen.sweep(run_for interval default '58 seconds', worker int default 0, workers int default 1)
language plpgsql
as $$
declare
  v_state queen._sweep_state;
  v_wait float8;
begin
  v_state := queen._sweep_begin(run_for, worker, workers);
  loop
    v_state := queen._sweep_step(v_state);
    commit;
    v_wait := queen._sweep_wait(v_state, run_for);
    exit when v_wait is null;
    perform pg_catalog.pg_sleep(v_wait);
  end loop;
  perform queen._sweep_finish(v_state);
  commit;
end
$$;
comment on procedure queen.sweep(interval, int, int) is
  'The resident sweeper: fires what comes due until run_for is over, each pass in a transaction of its own. Arguments:'
  ' run_for, ''0'' for one pass, null to run until a little past the next full minute (what the jobs of queen.start use, so'
  ' that pg_cron hands over without a gap); worker, its number from 0; workers, how many there are. Several may run beside'
  ' one another and beside queen.fire_due. Must be called outside a transaction block. Errors: 22023.';
