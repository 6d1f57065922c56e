-- Due times of a call. The clock is read at the statement: a transaction that has been open for a minute does not shorten
-- a delay by a minute.

create function queen._refuse_due(p_argument text, p_what text, p_limits queen._limits, p_hint text default '')
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_horizon record := queen._limit(p_limits, 'horizon');
begin
  if v_horizon.whose is not null then
    perform queen._refuse_limit(p_limits, 'horizon', v_horizon.value, v_horizon.whose, format('argument "%s": %s', p_argument, p_what));
  end if;
  perform queen._refuse(p_argument, p_what, format('The setting horizon allows up to %s from now%s.', v_horizon.value, p_hint));
end
$$;
comment on function queen._refuse_due(text, text, queen._limits, text) is 'Refuses a time beyond the limit horizon.';

create function queen._due(p_now timestamptz, p_delay interval, p_deliver_at timestamptz, p_limits queen._limits)
returns timestamptz
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_horizon interval;
begin
  if (p_delay is null) = (p_deliver_at is null) then
    perform queen._refuse(case when p_delay is null then 'delay' else 'deliver_at' end,
      case when p_delay is null then 'neither delay nor deliver_at is given' else 'both delay and deliver_at are given' end,
      'Give exactly one: delay, an interval from now, or deliver_at, a point in time.');
  elsif not isfinite(p_deliver_at) then
    perform queen._refuse('deliver_at', format('"%s" is out of range', p_deliver_at), 'Accepted is a point in time; one in the past is due at once.');
  end if;
  v_horizon := case when p_limits.own then (queen._limit(p_limits, 'horizon')).value else queen._setting('horizon') end::interval;
  if p_delay is not null then
    if p_delay > v_horizon or (p_delay < -v_horizon and p_delay < interval '-1 day') then
      perform queen._refuse_due('delay', format('"%s" is out of range', p_delay), p_limits);
    end if;
    return p_now + p_delay;
  end if;
  if p_deliver_at > p_now + v_horizon then
    perform queen._refuse_due('deliver_at', format('"%s" is out of range', p_deliver_at), p_limits, '; a time in the past is due at once');
  end if;
  return p_deliver_at;
end
$$;
comment on function queen._due(timestamptz, interval, timestamptz, queen._limits) is
  'The due time meant by delay or deliver_at, exactly one of which must be given.';

create function queen._due_many(p_now timestamptz, p_n int, p_delays interval[], p_deliver_ats timestamptz[], p_limits queen._limits)
returns timestamptz[]
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_horizon interval := (queen._limit(p_limits, 'horizon')).value::interval;
  v_bad bigint;
begin
  if (p_delays is null) = (p_deliver_ats is null) then
    perform queen._refuse(case when p_delays is null then 'delays' else 'deliver_ats' end,
      case when p_delays is null then 'neither delays nor deliver_ats is given' else 'both delays and deliver_ats are given' end,
      'Give exactly one: delays, intervals from now, or deliver_ats, points in time.');
  end if;
  if p_delays is not null then
    perform queen._check_array('delays', p_delays, p_n);
    select min(d.ord) into v_bad
      from unnest(p_delays) with ordinality as d (delay, ord)
     where d.delay is null or d.delay > v_horizon or (d.delay < -v_horizon and d.delay < interval '-1 day');
    if p_delays[v_bad] is null and v_bad is not null then
      perform queen._refuse('delays', format('element %s, "null", is out of range', v_bad), 'Accepted are intervals.');
    elsif v_bad is not null then
      perform queen._refuse_due('delays', format('element %s, "%s", is out of range', v_bad, p_delays[v_bad]), p_limits);
    end if;
    return (select array_agg(p_now + d.delay order by d.ord) from unnest(p_delays) with ordinality as d (delay, ord));
  end if;
  perform queen._check_array('deliver_ats', p_deliver_ats, p_n);
  select min(d.ord) into v_bad
    from unnest(p_deliver_ats) with ordinality as d (due, ord)
   where d.due is null or not isfinite(d.due) or d.due > p_now + v_horizon;
  if v_bad is not null and isfinite(p_deliver_ats[v_bad]) then
    perform queen._refuse_due('deliver_ats', format('element %s, "%s", is out of range', v_bad, p_deliver_ats[v_bad]), p_limits,
      '; a time in the past is due at once');
  elsif v_bad is not null then
    perform queen._refuse('deliver_ats', format('element %s, "%s", is out of range', v_bad, coalesce(p_deliver_ats[v_bad]::text, 'null')),
      'Accepted are points in time; one in the past is due at once.');
  end if;
  return p_deliver_ats;
end
$$;
comment on function queen._due_many(timestamptz, int, interval[], timestamptz[], queen._limits) is 'The due times meant by delays or deliver_ats.';
