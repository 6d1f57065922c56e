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
  v_tenant uuid := queen._find_tenant(dlq_list.tenant);
  v_row queen.log_dlq;
  v_payload bytea;
  v_json jsonb;
  v_sealed boolean;
  v_may boolean := pg_has_role(session_user, 'queen_consumer', 'member') or pg_has_role(session_user, 'queen_admin', 'member');
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
    if v_row.payload_zstd and queen._payload_zstd_problem(v_payload, 67108865) is null then
      v_payload := queen._payload_expand(v_payload);
    end if;
    v_sealed := v_row.encrypted;
    if v_sealed and v_may then
      begin
        v_payload := queen._decrypt(v_row.tenant_id, v_row.queue, v_row."partition", v_row.message_id, v_payload);
        v_sealed := false;
      exception when sqlstate 'QN011' then
        null;
      end;
    end if;
    v_json := case when not v_sealed and octet_length(v_payload) > 0 then queen._payload_json_or_null(v_payload) end;
    -- What is damaged, or stays encrypted, is shown as it is stored.
    return next row(v_row.id, v_row.queue, v_row."partition", v_row.consumer_group, v_row."offset", v_row.message_id, v_row.txn, v_json,
      case when v_json is not null then null
           when v_sealed or octet_length(v_payload) = 0 then v_payload
           else coalesce(queen._payload_bytes(v_payload), v_payload) end,
      v_row.error, v_row.attempts, v_row.failed_at)::queen.dead_letter;
  end loop;
end
$$;
comment on function queen.dlq_list(text, uuid, int, uuid) is
  'Dead letters of a queue by id. Arguments: queue; after, the last id of the page before, null for the first; max_rows, 1 to'
  ' 100000; tenant. Returns a row a letter: consumer_group is the group that gave up, __timer__ for a timer that could not be'
  ' fired (its offset is null); a payload that cannot be read, or that is encrypted and you are no consumer, is shown as'
  ' stored in payload_bytes. Errors: 22023, QN002.';

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

create function queen._requeue(p_ids uuid[], p_partitions bigint[], p_tenant uuid, p_queue text)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_segments queen._segment[];
begin
  select array_agg(s.segment) into v_segments
    from (select row(l.pid, count(*)::int, string_agg(l.frame, ''::bytea order by l.ord), array_agg(queen._txn_hash(l.txn) order by l.ord),
                 array_agg(l.message_id order by l.ord), null)::queen._segment as segment
            from (select u.pid, u.ord, d.message_id, r.txn,
                         queen._frame(d.message_id, r.txn, d.producer_sub, d.deliver_at, d.encrypted,
                                      case when d.payload_zstd then queen._payload_expand(d.payload) else d.payload end) as frame
                    from unnest(p_ids, p_partitions) with ordinality as u (id, pid, ord)
                    join queen.log_dlq d on d.tenant_id = p_tenant and d.queue = p_queue and d.id = u.id
                   cross join lateral (select queen._requeued_txn(d) as txn) r) l
           group by l.pid) s;
  perform queen._append(v_segments, queen._now());
end
$$;
comment on function queen._requeue(uuid[], bigint[], uuid, text) is
  'Appends dead letters, one segment a partition. The caller holds the partitions and the letters.';

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
  v_tenant uuid := queen._find_tenant(dlq_requeue.tenant);
  v_max constant bigint := 67108865;
  v_most bigint := queen._setting('batch_max_bytes')::bigint;
  v_rows int := queen._setting('batch_max_ops')::int;
  v_pids bigint[];
  v_ids uuid[];
  v_homes bigint[];
  v_lows bigint[];
  v_highs bigint[];
begin
  perform queen._check_name('queue', dlq_requeue.queue);
  perform queen._check_ids(dlq_requeue.ids);
  if v_tenant is null then
    return 0;
  end if;
  -- Partitions first, as the lock order has it; then the letters, some of which may be gone by now.
  perform queen._provision(v_tenant, dlq_requeue.queue, w.part)
     from (select distinct d."partition" as part from queen.log_dlq d
            where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue and (dlq_requeue.ids is null or d.id = any (dlq_requeue.ids))
            order by 1) w;
  v_pids := array(
    select l.id
      from (select p.id
              from queen.log_partitions p
              join queen.queues q on q.id = p.queue_id
             where q.tenant_id = v_tenant and q.name = dlq_requeue.queue
               and p.name in (select d."partition" from queen.log_dlq d
                               where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue
                                 and (dlq_requeue.ids is null or d.id = any (dlq_requeue.ids)))
             order by p.id
               for no key update of p) l);
  -- In segments of at most batch_max_bytes and batch_max_ops, numbered; the n-th of all partitions are one append.
  with taken as (
    select d.id, p.id as pid, d.payload, d.payload_zstd, d.failed_at, queen._payload_size(d.payload, d.payload_zstd) as bytes
      from queen.log_dlq d
      join queen.log_partitions p on p.name = d."partition" and p.id = any (v_pids)
     where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue
       and (dlq_requeue.ids is null or d.id = any (dlq_requeue.ids))
       for update of d skip locked
  ), placed as (
    select t.id, t.pid, row_number() over w as n, (sum(t.bytes) over w - t.bytes) / v_most as full_bytes,
           (row_number() over w - 1) / v_rows as full_rows
      from taken t
     where queen._timer_problem('-', null, t.payload, t.payload_zstd, v_max) is null
    window w as (partition by t.pid order by t.failed_at, t.id)
  ), cut as (
    select c.id, c.pid, c.n, c.slice, row_number() over (order by c.slice, c.pid, c.n) as ord
      from (select p.id, p.pid, p.n, dense_rank() over (partition by p.pid order by p.full_bytes::bigint, p.full_rows) as slice from placed p) c
  )
  select (select array_agg(c.id order by c.ord) from cut c), (select array_agg(c.pid order by c.ord) from cut c),
         array_agg(b.low order by b.low), array_agg(b.high order by b.low)
    into v_ids, v_homes, v_lows, v_highs
    from (select min(c.ord) as low, max(c.ord) as high from cut c group by c.slice) b;
  for i in 1..coalesce(cardinality(v_lows), 0) loop
    perform queen._requeue(v_ids[v_lows[i]:v_highs[i]], v_homes[v_lows[i]:v_highs[i]], v_tenant, dlq_requeue.queue);
  end loop;
  delete from queen.log_dlq d
   where d.tenant_id = v_tenant and d.queue = dlq_requeue.queue and d.id = any (v_ids);
  return coalesce(cardinality(v_ids), 0);
end
$$;
comment on function queen.dlq_requeue(text, uuid[], uuid) is
  'Appends dead letters to their partitions again, made if missing, for every group. Arguments: queue; ids, null for all of the'
  ' queue; tenant. The message keeps its id, payload and producer; its txn says where it came from: dlq:ID:GROUP:OFFSET:TXN'
  ' (offset empty for a timer, a colon in GROUP as %3A, TXN always the first one). Each letter is requeued once whatever runs beside it; those locked by somebody, and those whose'
  ' payload is damaged, stay. Returns how many. Errors: 22023, QN002.';

-- GROUP is percent-encoded as far as the colon asks for it, so that the place of TXN is certain. A letter that was requeued
-- before keeps its first TXN, or it would grow with each round.
create function queen._requeued_txn(p_letter queen.log_dlq)
returns text
language sql
stable
return 'dlq:' || p_letter.id || ':' || replace(replace(p_letter.consumer_group, '%', '%25'), ':', '%3A') || ':'
    || coalesce(p_letter."offset"::text, '') || ':'
    || regexp_replace(p_letter.txn, '^dlq:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}:[^:]*:[0-9]*:', '');
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
  v_tenant uuid := queen._find_tenant(dlq_purge.tenant);
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
