-- What a worker remembers and what it writes down; its steps are in 039_sweep_steps.sql, the loop in 041_sweep.sql.
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
    enabled     boolean,
    bound       timestamptz,     -- nothing due lies before it, but late commits
    end_at      timestamptz,     -- the run ends
    full_at     timestamptz,     -- next look from the start, due or not
    full_scan   boolean,         -- this look is one
    dear        boolean,         -- the last one was dear: passes too begin at the bound
    fresh       bigint,          -- timers fired since that look
    held        int,             -- rows that the last pass found in somebody's hands
    quiet_lsn   pg_lsn,          -- where the log of the server stood when a look from the start saw all there was,
    quiet_from  timestamptz,     --   made at this time
    quiet_to    timestamptz,     --   and reaching that far:
    quiet_next  timestamptz,     --   the first timer, or null
    crowd       queen._crowd[],  -- not null: a backlog; tenants known to have more due
    walk_after  uuid,            -- how far the walk along the tenants is, null at its beginning,
    walk_began  timestamptz,     --   when it began,
    walk_at     timestamptz,     --   no step before
    walk_tail   timestamptz,     -- what was due until then was seen to by a pass, or by the walk
    back_at     timestamptz,     -- next look at partitions that were held
    met         text[],          -- partitions that passes found held, by key,
    met_at      timestamptz[],   --   and since when
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

-- Workers that woke for the same timer would go on in step, and look at the same moments: so each keeps to its own
-- share of the period (two of them: due at once p50 25 ms in step, half of it apart; 2026-12-01).
create function queen._until_look(p_now timestamptz, p_idle interval, p_worker int, p_workers int)
returns double precision
language plpgsql
immutable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_idle numeric := extract(epoch from p_idle);
begin
  return v_idle - mod(extract(epoch from p_now) + v_idle - v_idle * p_worker / greatest(p_workers, 1), v_idle);
end
$$;
comment on function queen._until_look(timestamptz, interval, int, int) is
  'Seconds until the next look of a worker that idles: its place in each period of p_idle, at most one away.';

-- Counted by this backend for itself, so it is exact and needs no clock, which a busy machine would falsify.
create function queen._pages_read()
returns bigint
language sql
volatile
return pg_stat_get_xact_blocks_fetched('queen.idx_log_timers_visible'::regclass) + pg_stat_get_xact_blocks_fetched('queen.log_timers'::regclass);
comment on function queen._pages_read() is 'Pages of the timers and their index that this backend has asked for; 0 while track_counts is off.';

-- A commit record is written before its rows can be seen, so the log alone does not tell: a transaction that waits for its
-- flush or its standby still counts as running. (A snapshot does not tell either: the newest transaction lies beyond its xmax.)
create function queen._nobody_writes()
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform pg_stat_clear_snapshot();
  return not exists (select from pg_stat_get_activity(null) a where a.backend_xid is not null);
end
$$;
comment on function queen._nobody_writes() is 'Whether no session that has written is in a transaction on this server.';

create function queen._add(p_counts bigint[], p_more bigint[])
returns bigint[]
language plpgsql
immutable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  for i in 1..coalesce(cardinality(p_more), 0) loop
    p_counts[i] := p_counts[i] + p_more[i];
  end loop;
  return p_counts;
end
$$;
comment on function queen._add(bigint[], bigint[]) is 'Two histograms as one; null adds nothing.';

create function queen._sweep_write(p_state queen._sweep_state, p_now timestamptz)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_state.passes = 0 and p_state.errors = 0 and p_state.wrote_at > p_now - interval '5 seconds' then
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
         late = queen._add(s.late, excluded.late);
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
