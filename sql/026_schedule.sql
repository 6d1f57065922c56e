-- schedule and schedule_bytes. One insert ... on conflict, which writes the timer row and nothing else: no queue, no
-- partition, no lock another key could wait for.

-- The path that runs once a transaction: no arrays, one index probe.
create function queen._schedule_one(
    p_tenant uuid,
    p_queue text,
    p_key text,
    p_partition text,
    p_due timestamptz,
    p_txn text,
    p_payload bytea,
    p_now timestamptz,
    p_encrypt boolean)
returns queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_id uuid := gen_random_uuid();
  v_packed bytea;
  v_verdict queen.timer_verdict;
begin
  -- No setting is read for small ones: 256 is the least it may be.
  if p_encrypt then
    v_packed := (queen._encrypt(p_tenant, p_queue, array[p_partition], array[v_id], array[p_payload]))[1];
  elsif octet_length(p_payload) >= 256 and octet_length(p_payload) >= queen._setting('timer_zstd_bytes')::int then
    v_packed := queen._payload_compress(p_payload);
  end if;
  loop
    insert into queen.log_timers as t (
      tenant_id, queue, timer_key, "partition", deliver_at, txn, message_id, payload, payload_zstd, encrypted, producer_sub, created_at,
      updated_at)
    values (p_tenant, p_queue, p_key, p_partition, p_due, coalesce(p_txn, v_id::text), v_id, coalesce(v_packed, p_payload),
            v_packed is not null and not p_encrypt, p_encrypt, session_user, p_now, p_now)
    on conflict (tenant_id, queue, timer_key) do update
       set "partition" = excluded."partition", deliver_at = excluded.deliver_at, txn = excluded.txn,
           message_id = excluded.message_id, payload = excluded.payload, payload_zstd = excluded.payload_zstd,
           encrypted = excluded.encrypted, producer_sub = excluded.producer_sub, attempts = 0, last_error = null,
           claimed_until = null, claim_token = null, updated_at = excluded.updated_at
     where t.claim_token is null or t.claimed_until is null or t.claimed_until <= p_now
    returning true, case when t.xmax = 0 then 'scheduled' else 'rescheduled' end, t.queue, t.timer_key, t.txn, t.message_id, t.deliver_at
    into v_verdict;
    if found then
      return v_verdict;
    end if;
    select false, 'too_late', t.queue, t.timer_key, t.txn, t.message_id, t.deliver_at into v_verdict
      from queen.log_timers t
     where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key
       and t.claim_token is not null;
    if found then
      return v_verdict;
    end if;
    -- The firer let go, or delivered, between the two statements.
  end loop;
end
$$;
comment on function queen._schedule_one(uuid, text, text, text, timestamptz, text, bytea, timestamptz, boolean) is
  'Writes one timer. Arguments are checked by the caller.';

create function queen._check_schedule(p_queue text, p_key text, p_partition text, p_txn text)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_schedule_enabled();
  perform queen._check_name('queue', p_queue);
  perform queen._check_name('timer_key', p_key, 512);
  perform queen._check_name('partition', p_partition);
  if p_txn is not null then
    perform queen._check_name('txn', p_txn);
  end if;
end
$$;
comment on function queen._check_schedule(text, text, text, text) is 'Refuses bad names of a timer.';

create function queen._schedule_checked(
    p_queue text,
    p_key text,
    p_payload bytea,
    p_bytes bigint,
    p_delay interval,
    p_deliver_at timestamptz,
    p_partition text,
    p_txn text,
    p_tenant uuid)
returns queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_now timestamptz := queen._now();
  v_limits queen._limits;
  v_due timestamptz;
  v_tenant uuid;
begin
  perform queen._check_schedule(p_queue, p_key, p_partition, p_txn);
  v_tenant := case when p_tenant is null then '00000000-0000-0000-0000-000000000001'::uuid else queen._check_tenant(p_tenant) end;
  v_limits := queen._limits(v_tenant, p_queue);
  perform queen._check_bytes('payload', p_bytes, v_limits);
  v_due := queen._due(v_now, p_delay, p_deliver_at, v_limits);
  if v_limits.counted then
    perform queen._check_pending(v_limits, array[p_key]);
    perform queen._check_pending_tenant(v_limits, array[p_queue], array[p_key]);
  end if;
  return queen._schedule_one(v_tenant, p_queue, p_key, p_partition, v_due, p_txn, p_payload, v_now, v_limits.encrypt);
end
$$;
comment on function queen._schedule_checked(text, text, bytea, bigint, interval, timestamptz, text, text, uuid) is
  'Checks the arguments of a timer and writes it.';

create function queen.schedule(
    queue text,
    timer_key text,
    payload jsonb,
    delay interval default null,
    deliver_at timestamptz default null,
    "partition" text default 'Default',
    txn text default null,
    tenant uuid default null)
returns queen.timer_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_payload bytea := convert_to(schedule.payload::text, 'UTF8');
begin
  return queen._schedule_checked(schedule.queue, schedule.timer_key, v_payload, octet_length(v_payload), schedule.delay, schedule.deliver_at,
    schedule."partition", schedule.txn, schedule.tenant);
end
$$;
comment on function queen.schedule(text, text, jsonb, interval, timestamptz, text, text, uuid) is
  'Schedules a message; the same key again replaces everything. Arguments: queue and partition, the destination, made at the'
  ' fire if missing; timer_key, your own key, 1 to 512 bytes; payload, JSON up to payload_max_bytes; exactly one of delay (an'
  ' interval from the server''s clock now) and deliver_at (a time in the past is due at once), up to the setting horizon;'
  ' txn, a name for the message, null for its id; tenant, null for the default one. Returns a verdict: scheduled, rescheduled'
  ' (the key was pending) or too_late (a firer holds it: what it holds is what is delivered). Errors: 22023, QN002, QN005 (scheduling'
  ' is switched off), QN006 (over a limit of the tenant or queue), QN011 (an encrypted queue without a key).';

create function queen.schedule_bytes(
    queue text,
    timer_key text,
    payload bytea,
    delay interval default null,
    deliver_at timestamptz default null,
    "partition" text default 'Default',
    txn text default null,
    tenant uuid default null)
returns queen.timer_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return queen._schedule_checked(schedule_bytes.queue, schedule_bytes.timer_key, decode('00', 'hex') || schedule_bytes.payload,
    octet_length(schedule_bytes.payload), schedule_bytes.delay, schedule_bytes.deliver_at, schedule_bytes."partition", schedule_bytes.txn,
    schedule_bytes.tenant);
end
$$;
comment on function queen.schedule_bytes(text, text, bytea, interval, timestamptz, text, text, uuid) is
  'queen.schedule for a payload of bytes, which pop returns in payload_bytes. Arguments, result and errors as of'
  ' queen.schedule.';
