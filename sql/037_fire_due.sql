-- A pass that survives what it meets: failures are told apart, and one bad row is found by halving the batch.

create function queen._transient(p_sqlstate text)
returns boolean
language sql
immutable
parallel safe
return p_sqlstate ~ '^(08|40|53|55|57|58)';
comment on function queen._transient(text) is
  'Whether a failure is of the moment and not of the row: connection, rollback, resources, locks, shutdown, system.';

create function queen._fire_safely(
    p_max_rows int,
    p_max_bytes bigint,
    p_from timestamptz,
    p_worker int,
    p_workers int,
    p_now timestamptz,
    p_crowd queen._crowd[] default null)
returns queen._pass
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
      return case when p_crowd is null then queen._fire_pass(v_rows, p_max_bytes, p_from, p_worker, p_workers, p_now)
                  else queen._fire_crowd(v_rows, p_max_bytes, p_crowd, p_worker, p_workers, p_now) end;
    exception when others then
      get stacked diagnostics v_state = returned_sqlstate, v_message = message_text;
      if queen._transient(v_state) then
        raise;
      end if;
    end;
    if v_rows = 1 then
      v_message := format('%s (%s)', v_message, v_state);
      return case when p_crowd is null then queen._fire_pass(1, p_max_bytes, p_from, p_worker, p_workers, p_now, v_message)
                  else queen._fire_crowd(1, p_max_bytes, p_crowd, p_worker, p_workers, p_now, v_message) end;
    end if;
    v_rows := v_rows / 2;
  end loop;
end
$$;
comment on function queen._fire_safely(int, bigint, timestamptz, int, int, timestamptz, queen._crowd[]) is
  'queen._fire_pass, or queen._fire_crowd when tenants are named; when it fails for a reason of a row, smaller passes until that row is alone and is failed with the reason.';

create function queen.fire_due(max_rows int default 1000)
returns int
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_now timestamptz := queen._now();
  v_bytes bigint := queen._setting('sweep_max_bytes')::bigint;
  v_pass queen._pass;
  v_fired int := 0;
  v_born int;
begin
  if fire_due.max_rows is null or fire_due.max_rows not between 1 and 100000 then
    perform queen._refuse('max_rows', format('"%s" is out of range', fire_due.max_rows), 'Accepted is 1 to 100000.');
  end if;
  if not queen._fire_enabled() then
    return 0;
  end if;
  if not exists (select from queen.sweep_stats s where s.last_seen_at > v_now - interval '12 seconds') then
    -- What workers do between their passes.
    perform queen._end_pauses(v_now);
    if exists (select from queen.log_busy b where not b.paused) then
      v_fired := coalesce((queen._come_back(least(fire_due.max_rows, 2000), v_now)).fired, 0);
    end if;
  end if;
  while v_fired < fire_due.max_rows loop
    v_pass := queen._fire_safely(fire_due.max_rows - v_fired, v_bytes, '-infinity', 0, 1, v_now);
    v_fired := v_fired + v_pass.fired;
    exit when v_fired >= fire_due.max_rows or v_pass.stuck is null;
    select count(*) into v_born
      from unnest(v_pass.stuck) g
     where g.why = 'missing' and queen._try_birth(g.tenant_id, g.queue, g.part);
    exit when v_born = 0;
  end loop;
  return v_fired;
end
$$;
comment on function queen.fire_due(int) is
  'One pass of the fire in your transaction, for tests, tools and servers without pg_cron. Arguments: max_rows, 1 to 100000.'
  ' Returns the number of timers fired; less than max_rows does not mean that nothing is left (a pass is bounded in bytes, and'
  ' rows or partitions that somebody holds are passed over). The partitions it appended to are yours until you commit. Errors:'
  ' 22023.';
