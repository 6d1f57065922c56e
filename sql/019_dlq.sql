-- Dead letters as their owner sees them: list, requeue, purge. Rows are taken with SKIP LOCKED, so each id is requeued or
-- purged once whatever runs beside it.

create function queen.dlq_list(queue text, after uuid default null, max_rows int default 100, tenant uuid default null)
returns setof queen.dead_letter
language plpgsql
stable
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_tenant uuid := queen._check_tenant(dlq_list.tenant);
  v_row queen.log_dlq;
  v_payload bytea;
  v_json jsonb;
begin
  perform queen._check_name('queue', dlq_list.queue);
  if dlq_list.max_rows is null or dlq_list.max_rows not between 1 and 100000 then
    perform queen._refuse('max_rows', format('"%s" is out of range', dlq_list.max_rows), 'Accepted is 1 to 100000.');
  end if;
  for v_row in
    select d.* from queen.log_dlq d
     where d.tenant_id = v_tenant and d.queue = dlq_list.queue
       and d.id > coalesce(dlq_list.after, '00000000-0000-0000-0000-000000000000')
     order by d.id
     limit dlq_list.max_rows
  loop
    v_payload := v_row.payload;
    if v_row.payload_zstd and queen._payload_zstd_problem(v_payload, queen._setting('payload_max_bytes')::bigint + 1) is null then
      v_payload := queen._payload_expand(v_payload);
    end if;
    v_json := case when not v_row.encrypted and octet_length(v_payload) > 0 then queen._payload_json_or_null(v_payload) end;
    -- What is damaged, or encrypted, is shown as it is stored.
    return next row(v_row.id, v_row.queue, v_row."partition", v_row.consumer_group, v_row."offset", v_row.message_id, v_row.txn, v_json,
      case when v_json is not null then null
           when v_row.encrypted or octet_length(v_payload) = 0 then v_payload
           else coalesce(queen._payload_bytes(v_payload), v_payload) end,
      v_row.error, v_row.attempts, v_row.failed_at)::queen.dead_letter;
  end loop;
end
$$;
comment on function queen.dlq_list(text, uuid, int, uuid) is
  'Dead letters of a queue by id. Arguments: queue; after, the last id of the page before, null for the first; max_rows, 1 to'
  ' 100000; tenant. Returns a row a letter: consumer_group is the group that gave up, __timer__ for a timer that could not be'
  ' fired (its offset is null); a payload that cannot be read is shown as stored in payload_bytes. Errors: 22023, QN002.';

create function queen._check_ids(p_ids uuid[])
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if array_position(p_ids, null) is not null then
    perform queen._refuse('ids', 'holds a null', 'Accepted are ids of queen.dlq_list, or null for all of the queue.');
  end if;
end
$$;
comment on function queen._check_ids(uuid[]) is 'Refuses a null among dead letter ids.';

create function queen.dlq_requeue(queue text, ids uuid[] default null, tenant uuid default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_tenant uuid := queen._check_tenant(dlq_requeue.tenant);
  v_max bigint := queen._setting('payload_max_bytes')::bigint + 1;
  v_ids uuid[];
  v_place record;
  v_at timestamptz;
  v_done bigint := 0;
begin
  perform queen._check_name('queue', dlq_requeue.queue);
  perform queen._check_ids(dlq_requeue.ids);
  -- Leaves before partitions, against the lock order; safe, because this acquisition never waits.
  select array_agg(l.id) into v_ids
    from (select d.id, d.payload, d.payload_zstd
            from queen.log_dlq d
           where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue
             and (dlq_requeue.ids is null or d.id = any (dlq_requeue.ids))
             for update skip locked) l
   where queen._timer_problem('-', l.payload, l.payload_zstd, v_max) is null;
  for v_place in
    select queen._provision(v_tenant, dlq_requeue.queue, w.part) as pid, w.part
      from (select distinct d."partition" as part from queen.log_dlq d
             where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue and d.id = any (v_ids)) w
     order by 1
  loop
    perform from queen.log_partitions p where p.id = v_place.pid for update;
    v_at := queen._now();
    perform queen._append(array[v_place.pid], array[b.n], array[b.raw], v_at, b.pids, b.ranks, b.hashes, b.mids)
       from (select count(*)::int as n,
                    string_agg(queen._frame(m.message_id, m.txn, m.producer_sub, m.deliver_at, m.encrypted, m.payload), ''::bytea order by m.rank) as raw,
                    array_agg(v_place.pid order by m.rank) as pids,
                    array_agg(m.rank order by m.rank) as ranks,
                    array_agg(queen._txn_hash(m.txn) order by m.rank) as hashes,
                    array_agg(m.message_id order by m.rank) as mids
               from (select d.message_id, d.producer_sub, d.deliver_at, d.encrypted, queen._requeued_txn(d) as txn,
                            case when d.payload_zstd then queen._payload_expand(d.payload) else d.payload end as payload,
                            (row_number() over (order by d.failed_at, d.id))::int as rank
                       from queen.log_dlq d
                      where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue and d.id = any (v_ids)
                        and d."partition" = v_place.part) m) b;
  end loop;
  delete from queen.log_dlq d
   where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue and d.id = any (v_ids);
  get diagnostics v_done = row_count;
  return v_done;
end
$$;
comment on function queen.dlq_requeue(text, uuid[], uuid) is
  'Appends dead letters to their partitions again, made if missing, for every group. Arguments: queue; ids, null for all of the'
  ' queue; tenant. The message keeps its id, payload and producer; its txn says where it came from: dlq:ID:GROUP:OFFSET:TXN'
  ' (offset empty for a timer). Each letter is requeued once whatever runs beside it; those locked by somebody, and those whose'
  ' payload is damaged, stay. Returns how many. Errors: 22023, QN002.';

create function queen._requeued_txn(p_letter queen.log_dlq)
returns text
language sql
stable
return 'dlq:' || p_letter.id || ':' || p_letter.consumer_group || ':' || coalesce(p_letter."offset"::text, '') || ':' || p_letter.txn;
comment on function queen._requeued_txn(queen.log_dlq) is 'The txn of a requeued dead letter.';

create function queen.dlq_purge(queue text, ids uuid[] default null, tenant uuid default null)
returns bigint
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
declare
  v_tenant uuid := queen._check_tenant(dlq_purge.tenant);
  v_done bigint;
begin
  perform queen._check_name('queue', dlq_purge.queue);
  perform queen._check_ids(dlq_purge.ids);
  delete from queen.log_dlq d
   where d.ctid = any (array(
         select x.ctid from queen.log_dlq x
          where x.tenant_id = v_tenant and x.queue = dlq_purge.queue
            and (dlq_purge.ids is null or x.id = any (dlq_purge.ids))
            for update skip locked));
  get diagnostics v_done = row_count;
  return v_done;
end
$$;
comment on function queen.dlq_purge(text, uuid[], uuid) is
  'Deletes dead letters. Arguments: queue; ids, null for all of the queue; tenant. Returns how many; those locked by somebody'
  ' stay. Errors: 22023, QN002.';
