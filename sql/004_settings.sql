-- Settings: a catalog of known keys with their defaults, and a table that holds only what was changed. (A table that
-- held the defaults too would be filled by CREATE EXTENSION and again by the restore of a dump.)

create table queen.config (
    key        text collate "C" not null,
    value      text not null,
    updated_at timestamptz not null default now(),
    updated_by text not null default session_user,
    constraint config_pkey primary key (key)
);
comment on table queen.config is 'Settings that differ from their defaults. Read queen.settings; write with queen.configure.';
comment on column queen.config.key is 'name of the setting';
comment on column queen.config.value is 'value as text, checked by queen.configure';
comment on column queen.config.updated_at is 'when it was set';
comment on column queen.config.updated_by is 'who set it';

create function queen._setting_catalog()
returns table (key text, kind text, default_value text, min_value text, max_value text, per_queue boolean, per_tenant boolean, description text)
language sql
immutable
parallel safe
begin atomic
    select v.key, v.kind, v.default_value, v.min_value, v.max_value, v.per_queue, v.per_tenant, v.description
      from (values
        ('payload_max_bytes', 'integer', '1048576', '1', '67108864', true, true, 'largest payload in bytes of its UTF-8 text or of the bytea'),
        ('horizon', 'interval', '10 years', '1 second', '1000 years', true, true, 'how far ahead a timer may lie'),
        ('batch_max_ops', 'integer', '10000', '1', '1000000', true, true, 'operations in one call of schedule_many, push_many, apply or transaction; cancels and acks are not counted'),
        ('batch_max_bytes', 'integer', '67108864', '1024', '268435456', false, false, 'payload bytes in one call of schedule_many, push_many, apply or transaction'),
        ('pending_max', 'limit', 'none', '0', '1000000000000', true, true, 'timers of a queue, or as the option of a tenant of all of it, that may wait; over 10000 as counted once a minute'),
        ('encrypt', 'choice', 'false', 'false', 'true', true, false, 'true: payloads are encrypted when they are scheduled or pushed, with the last key of key_file'),
        ('key_file', 'path', 'none', 'none', 'an absolute path', false, false, 'where the keys are that encrypt, on the server; set by the owner of pg_queen alone'),
        ('timer_zstd_bytes', 'integer', '8192', '256', '67108864', false, false, 'payload bytes from which on a timer waits zstd-compressed, when that saves a tenth'),
        ('txn_window', 'interval', '1 day', '1 second', '3650 days', true, false, 'how long a txn is remembered: deduplication of pushes, and queen.sent'),
        ('start_at', 'choice', 'beginning', 'beginning', 'new', true, false, 'where a consumer group starts at its first pop: beginning (the first message stored) or new (what comes after it)'),
        ('delivery_max_attempts', 'integer', '5', '1', '1000000', true, false, 'deliveries of a message to a group before it goes to the dead letters'),
        ('pop_max_bytes', 'integer', '33554432', '1024', '268435456', false, false, 'frame bytes unpacked by one pop; at least one segment is read'),
        ('retention', 'interval', '7 days', '1 second', '36500 days', true, false, 'age at which messages are removed, unless a group has yet to read them'),
        ('retention_consumed', 'interval', '1 day', '0 seconds', '36500 days', true, false, 'age at which messages that every group has read are removed'),
        ('retention_force', 'choice', 'false', 'false', 'true', true, false, 'true: retention removes messages that a group has yet to read'),
        ('partition_idle', 'interval', '7 days', '1 second', '36500 days', true, false, 'a partition without messages is removed when nothing was appended for so long'),
        ('dead_letter_retention', 'interval', '30 days', '1 second', '36500 days', true, false, 'age at which dead letters are removed'),
        ('timer_max_attempts', 'integer', '10', '1', '1000000', false, false, 'failed fires before a timer goes to the dead letters'),
        ('timer_backoff_base', 'interval', '1 second', '10 milliseconds', '1 day', false, false, 'wait after the first failed fire; doubles with each'),
        ('timer_backoff_cap', 'interval', '5 minutes', '10 milliseconds', '30 days', false, false, 'longest wait between two attempts to fire'),
        ('sweep_mode', 'choice', 'lock', 'lock', 'lease', false, false, 'how the sweeper holds due rows: lock (row locks, one transaction) or lease (claim, commit, fire)'),
        ('sweep_max_rows', 'integer', '10000', '1', '100000', false, false, 'timers in one pass of the sweeper'),
        ('sweep_max_bytes', 'integer', '16777216', '1024', '268435456', false, false, 'payload bytes in one pass; at least one timer is fired'),
        ('sweep_idle', 'interval', '50 milliseconds', '1 millisecond', '10 seconds', false, false, 'longest sleep between two passes'),
        ('schedule_enabled', 'choice', 'true', 'false', 'true', false, false, 'false: schedule, schedule_many, schedule_bytes and apply refuse new timers (QN005); reschedule and cancel go on'),
        ('fire_enabled', 'choice', 'true', 'false', 'true', false, false, 'false: nothing is fired, due timers wait'),
        ('run_log_retention', 'interval', '1 day', '1 minute', '3650 days', false, false, 'age at which rows of our own jobs are removed from cron.job_run_details')
      ) as v (key, kind, default_value, min_value, max_value, per_queue, per_tenant, description);
end;
comment on function queen._setting_catalog() is
  'Every setting there is: kind, default, bounds (for a choice the two values), and whether a queue or a tenant may have its own.';

-- PL/pgSQL, because its plans are kept for the session: a SQL function that cannot be inlined is parsed and planned again in
-- each transaction.
create function queen._setting(p_key text)
returns text
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_value text;
begin
  select c.value into v_value from queen.config c where c.key = p_key;
  if not found then
    select s.default_value into v_value from queen._setting_catalog() s where s.key = p_key;
  end if;
  return v_value;
end
$$;
comment on function queen._setting(text) is 'The value in force of one setting, as text.';

create view queen.settings as
select s.key,
       coalesce(c.value, s.default_value) as value,
       s.default_value,
       s.kind,
       s.min_value,
       s.max_value,
       s.per_queue,
       s.per_tenant,
       s.description,
       c.updated_at,
       c.updated_by
  from queen._setting_catalog() s
  left join queen.config c on c.key = s.key;
comment on view queen.settings is 'Every setting with its value in force, default and bounds. Change one with queen.configure(key, value).';

create function queen._check_setting(p_argument text, p_key text, p_value text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_def record;
  v_ok boolean;
begin
  select s.* into strict v_def from queen._setting_catalog() s where s.key = p_key;
  begin
    v_ok := case v_def.kind
      when 'integer' then p_value::bigint between v_def.min_value::bigint and v_def.max_value::bigint
      when 'interval' then p_value::interval between v_def.min_value::interval and v_def.max_value::interval
      when 'limit' then p_value = 'none' or (p_value ~ '^[0-9]{1,13}$' and p_value::bigint between v_def.min_value::bigint and v_def.max_value::bigint)
      when 'choice' then p_value in (v_def.min_value, v_def.max_value)
      when 'path' then p_value = 'none' or (p_value ~ '^/[^[:cntrl:]]+$' and octet_length(p_value) <= 1000)
    end;
  exception when data_exception then
    v_ok := false;
  end;
  if not coalesce(v_ok, false) then
    perform queen._refuse(p_argument, format('"%s" is no value for setting "%s"', p_value, p_key),
      case v_def.kind
        when 'choice' then format('Accepted are %s and %s; null restores the default %s.', v_def.min_value, v_def.max_value, v_def.default_value)
        when 'path' then 'Accepted are none and an absolute path on the server; null restores the default none.'
        when 'limit' then format('Accepted are none and an integer from %s to %s; null restores the default none.', v_def.min_value, v_def.max_value)
        else format('Accepted is an %s from %s to %s; null restores the default %s.', v_def.kind, v_def.min_value, v_def.max_value, v_def.default_value)
      end);
  end if;
end
$$;
comment on function queen._check_setting(text, text, text) is 'Refuses a value that is none for a known setting.';

-- A queue may have its own value of some settings (queen.configure_queue).
create function queen._option(p_options jsonb, p_key text)
returns text
language sql
stable
return coalesce(p_options ->> p_key, queen._setting(p_key));
comment on function queen._option(jsonb, text) is 'The value in force of a setting for a queue with these options.';

create function queen.configure(key text, value text)
returns text
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
#variable_conflict use_column
declare
  v_def record;
  v_value text := configure.value;
begin
  select s.* into v_def from queen._setting_catalog() s where s.key = configure.key;
  if not found then
    perform queen._refuse('key', format('there is no setting "%s"', configure.key),
      'select key, value, description from queen.settings lists them.');
  end if;
  -- Whoever sets it has the server read a file.
  if configure.key = 'key_file' and not pg_has_role(session_user, (select e.extowner from pg_extension e where e.extname = 'pg_queen'), 'member') then
    raise exception using
      errcode = 'insufficient_privilege',
      message = 'permission denied: key_file is set by the owner of pg_queen',
      hint = 'select r.rolname from pg_extension e join pg_roles r on r.oid = e.extowner where e.extname = ''pg_queen'' says who that is.';
  end if;
  if v_value is null then
    delete from queen.config c where c.key = configure.key;
    return v_def.default_value;
  end if;
  perform queen._check_setting('value', configure.key, v_value);
  if configure.key = 'key_file' and v_value <> 'none' then
    perform queen._check_keys(v_value);
  elsif configure.key = 'encrypt' and v_value = 'true' then
    perform queen._check_keys(queen._setting('key_file'));
  end if;
  insert into queen.config as c (key, value, updated_at, updated_by)
  values (configure.key, v_value, queen._now(), session_user)
  on conflict on constraint config_pkey do update
     set value = excluded.value, updated_at = excluded.updated_at, updated_by = excluded.updated_by;
  return v_value;
end
$$;
comment on function queen.configure(text, text) is
  'Changes a setting for the whole database; value null restores the default. Arguments: key, a name of queen.settings;'
  ' value, as text. Returns the value in force. The sweepers take it up within a second. Errors: 22023; 42501 for key_file, which the'
  ' owner of pg_queen alone may set; QN011 when its keys cannot be used.';

-- p_of is queue or tenant.
create function queen._check_options(p_options jsonb, p_of text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
#variable_conflict use_column
declare
  v_option record;
begin
  if jsonb_typeof(p_options) is distinct from 'object' then
    perform queen._refuse('options', case when p_options is null then 'must not be null' else 'is no object' end,
      'Accepted is {"option": value, ...}; {} changes nothing and returns the options in force.');
  end if;
  for v_option in
    select o.key, o.value, p_options ->> o.key as plain, s.key is not null as known
      from jsonb_each(p_options) o
      left join queen._setting_catalog() s on s.key = o.key and case p_of when 'queue' then s.per_queue else s.per_tenant end
     order by o.key
  loop
    if not v_option.known then
      perform queen._refuse('options', format('"%s" is no option of a %s', v_option.key, p_of),
        format('Accepted are %s.', (select string_agg(s.key, ', ' order by s.key) from queen._setting_catalog() s
                                     where case p_of when 'queue' then s.per_queue else s.per_tenant end)));
    end if;
    if jsonb_typeof(v_option.value) not in ('string', 'number', 'boolean', 'null') then
      perform queen._refuse('options', format('"%s" is a JSON %s', v_option.key, jsonb_typeof(v_option.value)), 'Accepted is a string, a number, true, false, or null.');
    end if;
    if v_option.plain is not null then
      perform queen._check_setting('options', v_option.key, v_option.plain);
    end if;
  end loop;
end
$$;
comment on function queen._check_options(jsonb, text) is 'Refuses options that a queue, or a tenant, does not have, and bad values.';
