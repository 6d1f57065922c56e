-- What happens to a timer that could not be fired: a backoff that leaves it cancellable, at last the dead letters.
-- The caller holds the rows. A row in backoff moves forward in the index, so no later pass reads it again before its time.

create function queen._backoff(p_attempts int)
returns interval
language sql
stable
return least(
    queen._setting('timer_backoff_cap')::interval,
    queen._setting('timer_backoff_base')::interval * power(2, least(greatest(p_attempts, 1), 30) - 1));
comment on function queen._backoff(int) is
  'Wait after the n-th failed fire: timer_backoff_base * 2^(n-1), at most timer_backoff_cap. The exponent stops at 29, so nothing overflows.';

create function queen._timers_failed(
    p_tids tid[],
    p_errors text[],
    p_backoff interval,
    p_count_attempt boolean,
    p_now timestamptz)
returns table (tenant_id uuid, queue text, timer_key text, status text, attempts int, retry_at timestamptz)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
#variable_conflict use_column
declare
  v_limit int := queen._setting('timer_max_attempts')::int;
begin
  return query
  with failed as materialized (
    select f.tid, left(f.error, 8192) as error from unnest(p_tids, p_errors) as f (tid, error)
  ), dead as (
    delete from queen.log_timers t
     using failed f
     where t.ctid = f.tid and p_count_attempt and t.attempts >= v_limit - 1
    returning t.*, f.error
  ), letters as (
    insert into queen.log_dlq (
      tenant_id, queue, "partition", consumer_group, "offset", message_id, txn, payload, payload_zstd, encrypted,
      producer_sub, error, attempts, deliver_at, failed_at)
    select d.tenant_id, d.queue, d."partition", '__timer__', null, d.message_id, d.txn, d.payload, d.payload_zstd, d.encrypted,
           d.producer_sub, d.error, least(d.attempts, 2147483646) + 1, d.deliver_at, p_now
      from dead d
  ), backed as (
    update queen.log_timers t
       set attempts = case when p_count_attempt then least(t.attempts, 2147483646) + 1 else t.attempts end,
           last_error = coalesce(f.error, t.last_error),
           claimed_until = p_now + coalesce(p_backoff, queen._backoff(least(t.attempts, 2147483646) + 1)),
           claim_token = null,
           updated_at = p_now
      from failed f
     where t.ctid = f.tid and not (p_count_attempt and t.attempts >= v_limit - 1)
    returning t.tenant_id, t.queue, t.timer_key, t.attempts, t.claimed_until
  )
  select d.tenant_id, d.queue, d.timer_key, 'archived', least(d.attempts, 2147483646) + 1, null::timestamptz from dead d
  union all
  select b.tenant_id, b.queue, b.timer_key, 'backoff', b.attempts, b.claimed_until from backed b;
end
$$;
comment on function queen._timers_failed(tid[], text[], interval, boolean, timestamptz) is
  'Backs off the rows, or archives those whose attempts are used up. The caller holds their locks.';

-- What is wrong with a row by itself, whatever the log says. Names of the destination are asked once a group.
create function queen._timer_problem(p_txn text, p_sub text, p_payload bytea, p_zstd boolean, p_max bigint)
returns text
language sql
stable
return case
    when octet_length(p_txn) not between 1 and 255 then 'txn is ' || octet_length(p_txn) || ' bytes long'
    when octet_length(p_sub) > 32767 then 'producer_sub is ' || octet_length(p_sub) || ' bytes long'
    when octet_length(p_payload) = 0 then 'stored payload is damaged: empty'
    when p_zstd then queen._payload_zstd_problem(p_payload, p_max) end;
comment on function queen._timer_problem(text, text, bytea, boolean, bigint) is 'Why a row, perhaps written by hand, cannot become a frame; or null.';
