-- peek and list_timers: what is pending. list pages by the key, so rows that come, go and fire do not move a page.

create function queen._timer(p_row queen.log_timers, p_with_payload boolean, p_now timestamptz)
returns queen.timer
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_payload bytea;
  v_json jsonb;
  v_bytes bytea;
begin
  if p_with_payload and not p_row.encrypted then
    v_payload := p_row.payload;
    if p_row.payload_zstd and queen._payload_zstd_problem(v_payload, 67108865) is null then
      v_payload := queen._payload_expand(v_payload);
    end if;
    begin
      v_json := queen._payload_json(v_payload);
      v_bytes := queen._payload_bytes(v_payload);
    exception when data_exception then
      -- Damaged: shown as it is stored.
      v_json := null;
      v_bytes := v_payload;
    end;
  end if;
  return row(p_row.tenant_id, p_row.queue, p_row.timer_key, p_row."partition", p_row.deliver_at, p_row.txn, p_row.message_id,
    v_json, v_bytes, p_row.encrypted, p_row.producer_sub, p_row.attempts, p_row.last_error,
    p_row.claim_token is not null and coalesce(p_row.claimed_until > p_now, false), p_row.created_at, p_row.updated_at)::queen.timer;
end
$$;
comment on function queen._timer(queen.log_timers, boolean, timestamptz) is 'A stored row as the public type.';

create function queen.peek(queue text, timer_key text, tenant uuid default null)
returns setof queen.timer
language plpgsql
stable
security definer
rows 1
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_row queen.log_timers;
begin
  perform queen._check_name('queue', peek.queue);
  perform queen._check_name('timer_key', peek.timer_key, 512);
  select t.* into v_row
    from queen.log_timers t
   where t.tenant_id = queen._find_tenant(peek.tenant) and t.queue = peek.queue and t.timer_key = peek.timer_key;
  if found then
    return next queen._timer(v_row, true, queen._now());
  end if;
end
$$;
comment on function queen.peek(text, text, uuid) is
  'Looks at a pending timer, payload included. Arguments: queue, timer_key, tenant. Returns one row, or none when the key is'
  ' not pending. Takes no lock. Errors: 22023, QN002.';

create function queen.list_timers(queue text, after text default null, max_rows int default 100, tenant uuid default null)
returns setof queen.timer
language plpgsql
stable
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_row queen.log_timers;
  v_tenant uuid := queen._find_tenant(list_timers.tenant);
  v_now timestamptz := queen._now();
begin
  perform queen._check_name('queue', list_timers.queue);
  if list_timers.max_rows is null or list_timers.max_rows not between 1 and 100000 then
    perform queen._refuse('max_rows', format('"%s" is out of range', list_timers.max_rows), 'Accepted is 1 to 100000.');
  end if;
  for v_row in
    select t.*
      from queen.log_timers t
     where t.tenant_id = v_tenant
       and t.queue = list_timers.queue
       and t.timer_key > coalesce(list_timers.after, '')
     order by t.timer_key
     limit list_timers.max_rows
  loop
    return next queen._timer(v_row, false, v_now);
  end loop;
end
$$;
comment on function queen.list_timers(text, text, int, uuid) is
  'Pending timers of a queue in byte order of the key, payload left out. Arguments: queue; after, the last key of the page'
  ' before, null for the first page; max_rows, 1 to 100000; tenant. Every timer that stays pending is seen once. Errors:'
  ' 22023, QN002.';
