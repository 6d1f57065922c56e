-- configure_queue and drop_queue.

create function queen.configure_queue(queue text, options jsonb, tenant uuid default null)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
#variable_conflict use_column
declare
  v_tenant uuid := queen._check_tenant(configure_queue.tenant);
  v_kept jsonb;
begin
  perform queen._check_name('queue', configure_queue.queue);
  perform queen._check_options(configure_queue.options, 'queue');
  if configure_queue.options ->> 'encrypt' = 'true' then
    perform queen._check_keys(queen._setting('key_file'));
  end if;
  insert into queen.queues as q (tenant_id, name, options, created_at)
  values (v_tenant, configure_queue.queue, jsonb_strip_nulls(configure_queue.options), queen._now())
  on conflict on constraint queues_name_key do update
     set options = jsonb_strip_nulls(q.options || configure_queue.options)
  returning q.options into v_kept;
  if configure_queue.options ? 'pending_max' then
    perform queen._count_pending(v_tenant, configure_queue.queue, queen._now());
  end if;
  return (select jsonb_object_agg(s.key, coalesce(v_kept ->> s.key, queen._setting(s.key)))
            from queen._setting_catalog() s where s.per_queue);
end
$$;
comment on function queen.configure_queue(text, jsonb, uuid) is
  'Sets options of a queue, made if missing. Arguments: queue; options, an object of settings that queen.settings marks'
  ' per_queue, null restores the setting''s value, {} only looks; tenant. Returns the options in force; maintenance heeds them'
  ' within the hour. Errors: 22023, QN002; QN011 when it is to encrypt and there are no keys.';

create function queen.drop_queue(queue text, tenant uuid default null)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_tenant uuid := queen._find_tenant(drop_queue.tenant);
  v_queue bigint;
  v_pids bigint[];
  v_timers bigint;
  v_letters bigint;
  v_messages bigint;
  v_groups bigint;
begin
  perform queen._check_name('queue', drop_queue.queue);
  delete from queen.log_timers t where t.tenant_id = v_tenant and t.queue = drop_queue.queue;
  get diagnostics v_timers = row_count;
  select q.id into v_queue from queen.queues q where q.tenant_id = v_tenant and q.name = drop_queue.queue for update;
  select array_agg(l.id), coalesce(sum(l.last_offset - l.log_start + 1), 0) into v_pids, v_messages
    from (select p.id, p.last_offset, p.log_start from queen.log_partitions p where p.queue_id = v_queue order by p.id for update) l;
  delete from queen.log_consumers c where c.partition_id = any (v_pids);
  delete from queen.log_segments s where s.partition_id = any (v_pids);
  delete from queen.log_txns t where t.partition_id = any (v_pids);
  delete from queen.log_dlq d where d.tenant_id = v_tenant and d.queue = drop_queue.queue;
  get diagnostics v_letters = row_count;
  delete from queen.hotlist_repairs r where r.tenant_id = v_tenant and r.queue = drop_queue.queue;
  update queen.queue_pauses p set resumed_at = queen._now() where p.tenant_id = v_tenant and p.queue = drop_queue.queue and p.resumed_at is null;
  delete from queen.pending_counts c where c.tenant_id = v_tenant and c.queue = drop_queue.queue;
  delete from queen.log_groups g where g.queue_id = v_queue;
  get diagnostics v_groups = row_count;
  delete from queen.log_partitions p where p.id = any (v_pids);
  delete from queen.queues q where q.id = v_queue;
  return jsonb_build_object('queue', drop_queue.queue, 'existed', v_queue is not null, 'timers', v_timers,
    'partitions', coalesce(cardinality(v_pids), 0), 'messages', v_messages, 'groups', v_groups, 'dead_letters', v_letters);
end
$$;
comment on function queen.drop_queue(text, uuid) is
  'Drops a queue whole: its pending timers, partitions, messages, groups, dead letters and options, in one transaction.'
  ' Arguments: queue, tenant. Returns what was dropped: {"queue", "existed", "timers", "partitions", "messages", "groups",'
  ' "dead_letters"}. A timer scheduled afterwards, or under way in another transaction, makes the queue again. Errors: 22023,'
  ' QN002.';
