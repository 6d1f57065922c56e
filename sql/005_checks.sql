-- Refusals at the door. Every public function checks its arguments with these before it reads or writes anything.

create function queen._refuse(p_argument text, p_message text, p_hint text)
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  raise exception using
    errcode = '22023',
    message = format('argument "%s": %s', p_argument, p_message),
    hint = p_hint;
end
$$;
comment on function queen._refuse(text, text, text) is 'Raises 22023 with the argument''s name and a hint.';

create function queen._name_problem(p_name text, p_max_bytes int)
returns text
language sql
stable
parallel safe
return case
  when p_name is null then 'must not be null'
  when p_name = '' then 'must not be empty'
  when octet_length(p_name) > p_max_bytes then format('is %s bytes long', octet_length(p_name))
  when p_name ~ '[\u0001-\u001f\u007f-\u009f]' then 'holds a control character'
end;
comment on function queen._name_problem(text, int) is 'What is wrong with a name, or null. Also asked at the fire, for rows written by hand.';

create function queen._check_name(p_argument text, p_name text, p_max_bytes int default 255)
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_problem text := queen._name_problem(p_name, p_max_bytes);
begin
  if v_problem is not null then
    perform queen._refuse(p_argument, v_problem,
      format('Accepted are 1 to %s bytes of text without control characters.', p_max_bytes));
  end if;
end
$$;
comment on function queen._check_name(text, text, int) is 'Refuses a null, empty, over-long (in bytes) or control-character name.';

create function queen._check_names(p_argument text, p_names text[], p_max_bytes int default 255)
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_bad record;
begin
  select n.pos, queen._name_problem(n.name, p_max_bytes) as problem into v_bad
    from unnest(p_names) with ordinality as n (name, pos)
   where queen._name_problem(n.name, p_max_bytes) is not null
   order by n.pos
   limit 1;
  if found then
    perform queen._refuse(p_argument, format('element %s %s', v_bad.pos, v_bad.problem),
      format('Accepted are 1 to %s bytes of text without control characters.', p_max_bytes));
  end if;
end
$$;
comment on function queen._check_names(text, text[], int) is 'queen._check_name for every element; the message names the first bad one.';

create function queen._check_group(p_group text, p_argument text default 'consumer_group')
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_name(p_argument, p_group);
  if p_group = '__timer__' then
    perform queen._refuse(p_argument, '"__timer__" is reserved', 'It marks dead letters of timers; choose another name.');
  end if;
end
$$;
comment on function queen._check_group(text, text) is 'Refuses a bad or reserved consumer group.';

create function queen._check_lease(p_lease interval)
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_lease is null or p_lease < interval '1 millisecond' or p_lease > interval '1 day' then
    perform queen._refuse('lease', format('"%s" is no lease', coalesce(p_lease::text, 'null')),
      'Accepted is an interval from 1 millisecond to 1 day.');
  end if;
end
$$;
comment on function queen._check_lease(interval) is 'Refuses a lease that is null, not positive, or longer than a day.';

create function queen._check_schedule_enabled()
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if exists (select from queen.config c where c.key = 'schedule_enabled' and c.value = 'false') then
    raise exception using
      errcode = 'QN005',
      message = 'scheduling is switched off',
      hint = 'An administrator switches it on: select queen.configure(''schedule_enabled'', ''true''). Cancel and reschedule work all the same.';
  end if;
end
$$;
comment on function queen._check_schedule_enabled() is 'Refuses new timers (QN005) while the setting schedule_enabled is false.';

create function queen._fire_enabled()
returns boolean
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return not exists (select from queen.config c where c.key = 'fire_enabled' and c.value = 'false');
end
$$;
comment on function queen._fire_enabled() is 'The setting fire_enabled.';

create function queen._check_array(p_argument text, p_array anyarray, p_items int)
returns void
language plpgsql
stable
parallel safe
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_array is null then
    perform queen._refuse(p_argument, 'must not be null', 'Accepted is an array.');
  elsif array_ndims(p_array) > 1 then
    perform queen._refuse(p_argument, format('has %s dimensions', array_ndims(p_array)), 'Accepted is an array of one dimension.');
  elsif array_lower(p_array, 1) <> 1 then
    perform queen._refuse(p_argument, format('begins at index %s', array_lower(p_array, 1)), 'Accepted is an array that begins at 1.');
  elsif p_items is not null and cardinality(p_array) <> p_items then
    perform queen._refuse(p_argument, format('holds %s items', cardinality(p_array)),
      format('The call holds %s items; give as many here.', p_items));
  end if;
end
$$;
comment on function queen._check_array(text, anyarray, int) is 'Refuses an array that is null, of several dimensions, or of another length.';
