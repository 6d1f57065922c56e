-- reschedule and cancel. Both act unless a firer outside holds a live lease (too_late); a row in backoff is fair game.
-- A row that the sweeper holds is locked, not leased: the call waits for that pass, milliseconds, and then finds it gone.
-- The loop is for the row that was let go, or scheduled again, between two statements: absent is answered only of a key
-- that a fresh look did not find.

create function queen._reschedule(p_tenant uuid, p_queue text, p_key text, p_due timestamptz, p_now timestamptz)
returns queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_verdict queen.timer_verdict;
begin
  loop
    update queen.log_timers t
       set deliver_at = p_due, attempts = 0, last_error = null, claimed_until = null, claim_token = null, updated_at = p_now
     where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key
       and (t.claim_token is null or t.claimed_until is null or t.claimed_until <= p_now)
    returning true, 'rescheduled', t.queue, t.timer_key, t.txn, t.message_id, t.deliver_at into v_verdict;
    if found then
      return v_verdict;
    end if;
    v_verdict := queen._unmoved(p_tenant, p_queue, p_key, p_now);
    if v_verdict.status is not null then
      return v_verdict;
    end if;
  end loop;
end
$$;
comment on function queen._reschedule(uuid, text, text, timestamptz, timestamptz) is 'Moves one timer. Arguments are checked by the caller.';

create function queen._cancel(p_tenant uuid, p_queue text, p_key text, p_now timestamptz)
returns queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_verdict queen.timer_verdict;
begin
  loop
    delete from queen.log_timers t
     where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key
       and (t.claim_token is null or t.claimed_until is null or t.claimed_until <= p_now)
    returning true, 'cancelled', t.queue, t.timer_key, t.txn, t.message_id, t.deliver_at into v_verdict;
    if found then
      return v_verdict;
    end if;
    v_verdict := queen._unmoved(p_tenant, p_queue, p_key, p_now);
    if v_verdict.status is not null then
      return v_verdict;
    end if;
  end loop;
end
$$;
comment on function queen._cancel(uuid, text, text, timestamptz) is 'Removes one timer. Arguments are checked by the caller.';

create function queen._unmoved(p_tenant uuid, p_queue text, p_key text, p_now timestamptz)
returns queen.timer_verdict
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_row record;
begin
  select t.txn, t.message_id, t.deliver_at, t.claim_token is not null and t.claimed_until > p_now as leased into v_row
    from queen.log_timers t
   where t.tenant_id = p_tenant and t.queue = p_queue and t.timer_key = p_key;
  if not found then
    return row(false, 'absent', p_queue, p_key, null, null, null)::queen.timer_verdict;
  elsif v_row.leased then
    return row(false, 'too_late', p_queue, p_key, v_row.txn, v_row.message_id, v_row.deliver_at)::queen.timer_verdict;
  end if;
  return null;
end
$$;
comment on function queen._unmoved(uuid, text, text, timestamptz) is 'Why a timer was not moved or removed; null when it could be by now.';

create function queen.reschedule(
    queue text,
    timer_key text,
    delay interval default null,
    deliver_at timestamptz default null,
    tenant uuid default null)
returns queen.timer_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_now timestamptz := queen._now();
  v_tenant uuid := queen._find_tenant(reschedule.tenant);
begin
  perform queen._check_name('queue', reschedule.queue);
  perform queen._check_name('timer_key', reschedule.timer_key, 512);
  return queen._reschedule(v_tenant, reschedule.queue, reschedule.timer_key,
    queen._due(v_now, reschedule.delay, reschedule.deliver_at, queen._limits(v_tenant, reschedule.queue)), v_now);
end
$$;
comment on function queen.reschedule(text, text, interval, timestamptz, uuid) is
  'Moves a pending timer; payload and ids stay, attempts and backoff are forgotten. Arguments: queue, timer_key; exactly one'
  ' of delay and deliver_at, as of queen.schedule; tenant. Returns rescheduled, absent (no longer pending, perhaps delivered:'
  ' see queen.sent) or too_late. Errors: 22023, QN006.';

create function queen.cancel(queue text, timer_key text, tenant uuid default null)
returns queen.timer_verdict
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_name('queue', cancel.queue);
  perform queen._check_name('timer_key', cancel.timer_key, 512);
  return queen._cancel(queen._find_tenant(cancel.tenant), cancel.queue, cancel.timer_key, queen._now());
end
$$;
comment on function queen.cancel(text, text, uuid) is
  'Cancels a pending timer. Arguments: queue, timer_key, tenant. Returns cancelled, absent or too_late (a firer holds it now'
  ' and will deliver it). absent means no longer pending, never "not delivered": ask queen.sent. Errors: 22023, QN002.';
