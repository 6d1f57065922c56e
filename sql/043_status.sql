-- status: one row that says whether timers are being fired.

create function queen.status()
returns table (
    version text, pg_cron text, jobs int, workers_alive int, last_pass_at timestamptz, fired bigint, due bigint,
    next_due_at timestamptz, oldest_lateness interval, busy_partitions int, paused_queues bigint, dead_letters bigint,
    schedule_enabled boolean, fire_enabled boolean)
language plpgsql
stable
security definer
rows 1
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
#variable_conflict use_column
declare
  v_now timestamptz := queen._now();
  v_due record;
  v_busy queen.log_busy;
  v_tenants uuid[] := queen._open_tenants();
begin
  select e.extversion into version from pg_extension e where e.extname = 'pg_queen';
  pg_cron := coalesce(queen._cron_problem(), (select e.extversion from pg_extension e where e.extname = 'pg_cron'));
  jobs := 0;
  if queen._cron_problem() is null then
    select count(*) into jobs from queen._own_jobs() o join cron.job j on j.jobid = o.jobid where j.active and o.worker is not null;
  end if;
  select count(*) filter (where s.last_seen_at > v_now - interval '12 seconds'), max(s.last_seen_at), coalesce(sum(s.fired), 0)
    into workers_alive, last_pass_at, fired
    from queen.sweep_stats s;
  select d.* into v_due from queen.log_timers_due() d;
  due := v_due.due;
  busy_partitions := 0;
  next_due_at := v_due.next_due_at;
  oldest_lateness := v_due.lateness;
  -- Timers behind a held partition have stepped out of the way of the sweeper; they are due all the same.
  for v_busy in select b.* from queen.log_busy b where not b.paused order by b.since limit 100 loop
    busy_partitions := busy_partitions + 1;
    select least(due + count(*), 10000), greatest(oldest_lateness, v_now - min(w.deliver_at)) into due, oldest_lateness
      from (select t.deliver_at
              from generate_series(0, 63) as s (shard)
              join queen.log_timers t on t.shard = s.shard::smallint
             where t.visible_at > v_now and t.visible_at >= v_busy.away_from and t.visible_at <= v_busy.away_to
               and t.claim_token is null and t.deliver_at <= v_now
               and t.tenant_id is not distinct from v_busy.tenant_id and t.queue is not distinct from v_busy.queue and t."partition" is not distinct from v_busy."partition"
             limit 10000) w;
  end loop;
  select count(*) into paused_queues
    from (select from queen.queue_pauses p where p.resumed_at is null and (v_tenants is null or p.tenant_id = any (v_tenants)) limit 10000) p;
  select count(*) into dead_letters
    from (select from queen.log_dlq d where v_tenants is null or d.tenant_id = any (v_tenants) limit 10000) d;
  schedule_enabled := queen._setting('schedule_enabled')::boolean;
  fire_enabled := queen._setting('fire_enabled')::boolean;
  return next;
end
$$;
comment on function queen.status() is
  'One row on the state of pg_queen: version; pg_cron, its version or what is wrong with it; jobs, active workers'' jobs;'
  ' workers_alive, workers seen in the last 12 s; last_pass_at, when one last looked; fired, timers delivered so far; due, how'
  ' many wait to be fired now (counted to 10,000); next_due_at; oldest_lateness of those due; busy_partitions, held by somebody''s'
  ' open transaction; paused_queues, whose due timers are not counted as due, and dead_letters of the tenants open'
  ' to you (counted to 10,000);'
  ' schedule_enabled and fire_enabled, the switches.';
