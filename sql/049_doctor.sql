-- doctor: what is wrong, a row a check, and the statement that mends it.

create function queen._server_python()
returns text
language plpython3u
stable
as $$
import platform

import zstandard

return "Python %s, zstandard %s" % (platform.python_version(), zstandard.__version__)
$$;
comment on function queen._server_python() is 'Versions of the server''s Python and of what it needs; fails when that is missing.';

create function queen._doctor_pg_cron()
returns setof queen._finding
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_problem text := queen._cron_problem();
  v_elsewhere boolean := current_setting('cron.database_name', true) <> current_database();
begin
  if v_problem is null then
    return next row('pg_cron', true, (select 'version ' || e.extversion from pg_extension e where e.extname = 'pg_cron'), null)::queen._finding;
    return query select f.* from queen._doctor_jobs() f;
    return query select f.* from queen._doctor_job_owner() f;
    return query select f.* from queen._doctor_job_runs() f;
  elsif v_elsewhere and v_problem not like '%not loaded%' and queen._workers_alive() > 0 then
    return next row('pg_cron', true, v_problem || ', and workers come from there', null)::queen._finding;
  else
    return next row('pg_cron', false, v_problem, queen._cron_hint(v_problem, 2))::queen._finding;
  end if;
end
$$;
comment on function queen._doctor_pg_cron() is 'Whether there is a pg_cron for us, and what it does.';

create function queen._workers_alive()
returns int
language sql
stable
begin atomic
    select count(*)::int from queen.sweep_stats s where s.last_seen_at > queen._now() - interval '12 seconds';
end;
comment on function queen._workers_alive() is 'Workers seen in the last 12 s.';

create function queen._doctor_fire()
returns setof queen._finding
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_status record;
  v_error record;
  v_busy record;
  v_agenda timestamptz;
begin
  select * into v_status from queen.status();
  return next row('workers', v_status.workers_alive > 0,
    case when v_status.last_pass_at is null then 'no worker has ever run here'
         else format('%s seen in the last 12 s, the last one %s ago', v_status.workers_alive, date_trunc('milliseconds', greatest(queen._now() - v_status.last_pass_at, interval '0'))) end,
    case when v_status.workers_alive = 0 then
      'select queen.start(); if the jobs are there already: they begin on the full minute, and the checks above say what hinders them.' end)::queen._finding;
  select s.worker, s.last_error, s.last_error_at into v_error
    from queen.sweep_stats s
   where s.last_error_at > queen._now() - interval '10 minutes'
   order by s.last_error_at desc
   limit 1;
  return next row('passes', v_error.worker is null,
    case when v_error.worker is null then 'no error within ten minutes'
         else format('worker %s met an error at %s: %s', v_error.worker, date_trunc('seconds', v_error.last_error_at), v_error.last_error) end,
    case when v_error.worker is not null then 'select worker, errors, last_error_at, last_error from queen.sweep_stats;' end)::queen._finding;
  return next row('switches', v_status.schedule_enabled and v_status.fire_enabled,
    format('schedule_enabled is %s, fire_enabled is %s, %s queues are paused',
           v_status.schedule_enabled::text, v_status.fire_enabled::text, v_status.paused_queues),
    nullif(concat_ws(' ', case when not v_status.schedule_enabled then 'select queen.configure(''schedule_enabled'', ''true'');' end,
                   case when not v_status.fire_enabled then 'select queen.configure(''fire_enabled'', ''true'');' end), ''))::queen._finding;
  return next row('timers', v_status.due = 0 or v_status.oldest_lateness < interval '10 seconds',
    format('%s are due, the oldest for %s', v_status.due, v_status.oldest_lateness),
    case when v_status.due > 0 and v_status.oldest_lateness >= interval '10 seconds' then
      case when not v_status.fire_enabled then 'The switch above holds them.'
           when v_status.workers_alive = 0 then 'No worker fires them: see above.'
           when v_status.busy_partitions > 0 then 'Partitions are held: see below.'
           else 'More have come due than workers fire: select queen.start(workers => 4);' end end)::queen._finding;
  select b.queue, b."partition", b.since, count(*) over () as held into v_busy
    from queen.log_busy b
   where not b.paused and b.since < queen._now() - interval '1 minute'
   order by b.since
   limit 1;
  return next row('partitions', v_busy.queue is null,
    case when v_busy.queue is null then 'none is held for over a minute'
         else format('%s are held by an open transaction, the longest is partition "%s" of queue "%s" since %s',
                     v_busy.held, v_busy."partition", v_busy.queue, date_trunc('seconds', v_busy.since)) end,
    case when v_busy.queue is not null then
      'select pid, usename, state, xact_start, query from pg_stat_activity where xact_start < now() - interval ''1 minute'' order by xact_start; then select pg_terminate_backend(PID);' end)::queen._finding;
  select min(p.due_at) into v_agenda from queen.log_partitions p where p.due_at < queen._now() - interval '10 minutes';
  return next row('maintenance', v_agenda is null,
    case when v_agenda is null then 'no partition waits for it' else format('partitions wait for it since %s', date_trunc('seconds', v_agenda)) end,
    case when v_agenda is not null then 'call queen.maintain(); and for every minute: select queen.start();' end)::queen._finding;
end
$$;
comment on function queen._doctor_fire() is 'Whether timers are being fired, what holds them, and whether the log is maintained.';

create function queen._doctor_server()
returns setof queen._finding
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_message text;
  v_hint text;
  v_queues bigint;
begin
  begin
    return next row('python', true, queen._server_python(), null)::queen._finding;
  exception when others then
    get stacked diagnostics v_message = message_text;
    return next row('python', false, format('the server''s Python lacks what pg_queen needs: %s', v_message),
      'On the server run: apt-get install python3-zstandard')::queen._finding;
  end;
  select count(*) into v_queues from queen.queues q where (q.options ->> 'encrypt')::boolean;
  if v_queues = 0 and not queen._setting('encrypt')::boolean and queen._setting('key_file') = 'none' then
    return next row('encryption', true, 'no queue encrypts', null)::queen._finding;
    return;
  end if;
  begin
    perform queen._check_keys(queen._setting('key_file'));
    return next row('encryption', true, format('the key file can be used; %s queues encrypt by an option of their own', v_queues), null)::queen._finding;
  exception when sqlstate 'QN011' then
    get stacked diagnostics v_message = message_text, v_hint = pg_exception_hint;
    return next row('encryption', false, v_message, v_hint)::queen._finding;
  end;
end
$$;
comment on function queen._doctor_server() is 'Whether the server has what the extension needs of it.';

-- A check that fails is a finding too: nothing must keep the others from being shown.
create function queen.doctor()
returns table (name text, ok boolean, detail text, hint text)
language plpgsql
volatile
security definer
rows 12
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_message text;
begin
  for v_part in 1..3 loop
    begin
      if v_part = 1 then
        return query select f.* from queen._doctor_pg_cron() f;
      elsif v_part = 2 then
        return query select f.* from queen._doctor_fire() f;
      else
        return query select f.* from queen._doctor_server() f;
      end if;
    exception when others then
      get stacked diagnostics v_message = message_text;
      name := (array['pg_cron', 'fire', 'server'])[v_part];
      ok := false;
      detail := format('cannot be checked: %s', v_message);
      hint := 'Look into the server''s log.';
      return next;
    end;
  end loop;
end
$$;
comment on function queen.doctor() is
  'What is wrong with pg_queen in this database, a row a check: name; ok; detail, what was found; hint, when it is not ok, the'
  ' statement that mends it. Looks at pg_cron, its jobs, whom they run for and how their last runs ended; at workers, their'
  ' errors, switches, overdue timers, held partitions and maintenance; at the server''s Python and the key file. Looking'
  ' changes nothing.';
