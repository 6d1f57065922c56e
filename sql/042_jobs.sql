-- start and stop: pg_cron's jobs, in the way its version offers.

-- Where pg_cron is. It can be created in one database only, so it may be here, in another one, or not installed.
create function queen._cron_problem()
returns text
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_home text := current_setting('cron.database_name', true);
begin
  -- Without the library a value in the configuration is a placeholder, which pg_settings does not list.
  if not exists (select from pg_settings s where s.name = 'cron.database_name') then
    return 'pg_cron is not loaded: shared_preload_libraries does not name it';
  elsif v_home <> current_database() then
    return format('pg_cron keeps its jobs in database "%s"', v_home);
  elsif to_regclass('cron.job') is null then
    return 'extension pg_cron is not created in this database';
  end if;
  return null;
end
$$;
comment on function queen._cron_problem() is 'Why jobs cannot be made from here, or null.';

create function queen._jobs(p_workers int, p_schedule text)
returns table (ord int, name text, schedule text, command text)
language sql
stable
begin atomic
    select n, 'pg_queen worker ' || n, p_schedule, format('CALL queen.sweep(null, %s, %s)', n, p_workers)
      from generate_series(0, p_workers - 1) as n
    union all
    -- Right after a start of the server, until the minute jobs take over.
    select 100, 'pg_queen boot', '@reboot', format('CALL queen.sweep(null, %s, %s)', p_workers, p_workers + 1)
     where p_schedule = '* * * * *'
    union all
    select 101, 'pg_queen maintenance', '* * * * *', 'CALL queen.maintain()';
end;
comment on function queen._jobs(int, text) is 'The jobs of pg_cron that so many workers need.';

create function queen._cron_hint(p_problem text, p_workers int)
returns text
language sql
stable
begin atomic
    select case
             when p_problem like 'pg_cron is not loaded%' then
               format('Install pg_cron (Debian: postgresql-%s-cron), set', current_setting('server_version_num')::int / 10000)
               || ' shared_preload_libraries = ''pg_cron'' and cron.database_name = '''
               || current_database() || ''', restart the server, and run create extension pg_cron.'
             when current_setting('cron.database_name', true) <> current_database() then
               'In that database run: ' || (
                 select string_agg(format('select cron.schedule_in_database(%L, %L, %L, %L);', w.name || ' in ' || current_database(), w.schedule, w.command, current_database()), ' ' order by w.ord)
                   from queen._jobs(p_workers, '* * * * *') w)
             else 'Run create extension pg_cron, then select queen.start().' end;
end;
comment on function queen._cron_hint(text, int) is 'The way out of what queen._cron_problem says.';

-- Others may have jobs with names like ours, in this database or, on behalf of the same owner, in another one.
create function queen._own_jobs()
returns table (jobid bigint, name text, worker int)
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return query
  select j.jobid, j.jobname::text, substring(j.jobname from '^pg_queen worker ([0-9]+)$')::int
    from cron.job j
   where j.database = current_database() and j.username = current_user
     and j.jobname ~ '^pg_queen (worker [0-9]{1,2}|boot|maintenance)$';
end
$$;
comment on function queen._own_jobs() is 'The jobs of this database that queen.start made.';

create function queen.start(workers int default 2)
returns setof text
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_problem text := queen._cron_problem();
  v_schedule text := '* * * * *';
  v_job record;
begin
  if start.workers is null or start.workers not between 1 and 16 then
    perform queen._refuse('workers', format('"%s" is out of range', start.workers), 'Accepted is 1 to 16.');
  end if;
  if v_problem is not null then
    raise exception using
      errcode = 'QN001',
      message = v_problem,
      hint = queen._cron_hint(v_problem, start.workers);
  end if;
  -- 1.5 and later know seconds: a worker that died is back within one.
  if (select (regexp_match(e.extversion, '^([0-9]+)[.]([0-9]+)'))[1:2]::int[] >= array[1, 5]
        from pg_extension e where e.extname = 'pg_cron') then
    v_schedule := '1 second';
  end if;
  select j.jobname, j.database into v_job
    from cron.job j
    join queen._jobs(start.workers, v_schedule) w on w.name = j.jobname
   where j.username = current_user and j.database <> current_database()
   limit 1;
  if found then
    -- pg_cron would turn that job round to this database.
    raise exception using
      errcode = 'QN001',
      message = format('a job "%s" of "%s" is there already, for database "%s"', v_job.jobname, current_user, v_job.database),
      hint = format('Jobs for other databases need other names: "%s in %s".', v_job.jobname, v_job.database);
  end if;
  perform cron.unschedule(j.jobid) from queen._own_jobs() j where j.worker >= start.workers;
  for v_job in
    select w.name, w.schedule, w.command from queen._jobs(start.workers, v_schedule) w order by w.ord
  loop
    -- A job that is as it should be is left alone, so that calling this again disturbs nothing.
    if not exists (select from cron.job j
                    where j.database = current_database() and j.jobname = v_job.name and j.schedule = v_job.schedule
                      and j.command = v_job.command and j.active and j.username = current_user
                      -- Kept with the job when it was made: a restored dump, or a new cron.host, has others.
                      and j.nodename = current_setting('cron.host') and j.nodeport = current_setting('port')::int) then
      perform cron.unschedule(j.jobid) from queen._own_jobs() j where j.name = v_job.name;
      perform cron.schedule(v_job.name, v_job.schedule, v_job.command);
    end if;
    return next v_job.name;
  end loop;
end
$$;
comment on function queen.start(int) is
  'Makes the pg_cron jobs: workers that fire timers, maintenance, and one for the start of the server. Calling it again with'
  ' another number changes their number. Arguments: workers, 1 to 16, one job each. Returns'
  ' the names of the jobs. They run as the owner of pg_queen. With pg_cron 1.4 the first run begins on the next full minute,'
  ' and at once after a start of the server. Errors: 22023; QN001 when pg_cron is missing or in another database, with the'
  ' way out in the hint.';

create function queen.stop()
returns int
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_stopped int := 0;
begin
  if queen._cron_problem() is null then
    select count(cron.unschedule(j.jobid)) into v_stopped from queen._own_jobs() j;
    -- A run under way would go on to the end of its minute.
    perform pg_cancel_backend(a.pid)
       from pg_stat_activity a
       join queen.sweep_stats s on s.pid = a.pid and a.backend_start <= s.started_at
      where a.datname = current_database() and a.pid <> pg_backend_pid();
  end if;
  return v_stopped;
end
$$;
comment on function queen.stop() is
  'Removes the jobs that queen.start made and ends their runs. Returns how many jobs there were. Pending timers stay, and are'
  ' fired, late, after the next queen.start.';
