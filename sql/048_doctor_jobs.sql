-- What doctor looks at in pg_cron: whether it is there, its jobs, whose they are, and how their last runs ended. Nothing
-- here names cron's tables outside a PL/pgSQL body: pg_cron may come and go.

create type queen._finding as (name text, ok boolean, detail text, hint text);
comment on type queen._finding is 'What one check of queen.doctor found.';

create function queen._doctor_jobs()
returns setof queen._finding
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_workers int;
  v_first text;
  v_wrong text;
  v_start text;
begin
  select coalesce(max(substring(j.command from ', ([0-9]+)[)]$')::int), 0), min(j.schedule) into v_workers, v_first
    from queen._own_jobs() o
    join cron.job j on j.jobid = o.jobid
   where o.worker is not null;
  if v_workers not between 1 and 16 then
    return next row('jobs', false, 'no job of pg_cron fires timers in this database', 'select queen.start();')::queen._finding;
    return;
  end if;
  v_start := format('select queen.start(%s);', v_workers);
  select string_agg(format('"%s" is %s', w.name, case
             when o.jobid is null then 'missing'
             when not j.active then 'disabled'
             when j.nodename <> current_setting('cron.host') or j.nodeport <> current_setting('port')::int then
               format('for the server at %s:%s', j.nodename, j.nodeport)
             else 'not as queen.start makes it' end), ', ' order by w.ord)
    into v_wrong
    from queen._jobs(v_workers, v_first) w
    left join queen._own_jobs() o on o.name = w.name
    left join cron.job j on j.jobid = o.jobid
   where not coalesce(j.active and j.schedule = w.schedule and j.command = w.command
                      and j.nodename = current_setting('cron.host') and j.nodeport = current_setting('port')::int, false);
  return next row('jobs', v_wrong is null, coalesce(v_wrong, format('%s workers and maintenance', v_workers)),
                  case when v_wrong is not null then v_start end)::queen._finding;
end
$$;
comment on function queen._doctor_jobs() is 'Whether the jobs are as queen.start makes them.';

create function queen._doctor_job_owner()
returns queen._finding
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_gone record;
begin
  select string_agg(distinct format('"%s"', j.username), ', ') as names, count(*) as jobs,
         string_agg(format('select cron.unschedule(%s);', j.jobid), ' ' order by j.jobid) as statements,
         max(substring(j.command from '^CALL queen[.]sweep[(]null, [0-9]+, ([0-9]+)[)]$')::int) as workers
    into v_gone
    from cron.job j
   where j.database = current_database() and j.command ~ '^CALL queen[.](sweep|maintain)[(]'
     and not exists (select from pg_roles r where r.rolname = j.username);
  if v_gone.jobs > 0 then
    return row('job owner', false,
      format('%s, for whom %s jobs of this database run, is no role of this server any more: none of them can run', v_gone.names, v_gone.jobs),
      format('%s select queen.start(%s);', v_gone.statements, least(greatest(v_gone.workers - 1, 1), 16)))::queen._finding;
  elsif not (select r.rolcanlogin from pg_roles r where r.rolname = current_user) then
    return row('job owner', false,
      format('"%s", the owner of pg_queen, for whom its jobs run, may not log in', current_user),
      format('alter role %I login;', current_user))::queen._finding;
  end if;
  return row('job owner', true, format('jobs run for "%s"', current_user), null)::queen._finding;
end
$$;
comment on function queen._doctor_job_owner() is 'Whether the roles for whom jobs run exist and may log in.';

-- cron.job_run_details grows with every run and has an index on runid alone, hence the last thousand.
create function queen._doctor_job_runs()
returns queen._finding
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_failed record;
begin
  select w.jobname, w.jobid, w.return_message, w.start_time into v_failed
    from (select distinct on (d.jobid) j.jobname, d.jobid, d.status, d.return_message, d.start_time
            from cron.job_run_details d
            join cron.job j on j.jobid = d.jobid
           where d.runid > (select max(x.runid) - 1000 from cron.job_run_details x)
             and j.database = current_database() and j.command ~ '^CALL queen[.](sweep|maintain)[(]'
             and d.status in ('succeeded', 'failed')
           order by d.jobid, d.runid desc) w
   where w.status = 'failed'
   order by w.start_time desc nulls last
   limit 1;
  if not found then
    return row('job runs', true, 'the last run of each job ended well, as far as there was one', null)::queen._finding;
  end if;
  return row('job runs', false, format('the last run of job "%s" failed: %s', v_failed.jobname, v_failed.return_message),
    case
      when v_failed.return_message ~* 'connection' then
        format('pg_cron connects to %s as the job''s role: allow it in pg_hba.conf, or set cron.use_background_workers = on and restart.', current_setting('cron.host', true))
      when v_failed.return_message ~* 'background process|worker' then
        'Raise max_worker_processes and restart.'
      else format('select * from cron.job_run_details where jobid = %s order by runid desc limit 5;', v_failed.jobid) end)::queen._finding;
end
$$;
comment on function queen._doctor_job_runs() is 'Whether the last finished run of each job failed.';
