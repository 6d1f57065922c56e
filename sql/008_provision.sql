-- Queues and partitions are born when the first message arrives, here and nowhere else.

create function queen._partition_id(p_tenant uuid, p_queue text, p_partition text)
returns bigint
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  return (
    select p.id
      from queen.log_partitions p
     where p.queue_id = (select q.id from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue)
       and p.name = p_partition);
end
$$;
comment on function queen._partition_id(uuid, text, text) is 'The partition of these names, or null. Reads only.';

-- May wait for an uncommitted birth of the same names, so a sweeper calls it under a lock_timeout and in a transaction
-- that holds no timer.
create function queen._provision(p_tenant uuid, p_queue text, p_partition text)
returns bigint
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_id bigint := queen._partition_id(p_tenant, p_queue, p_partition);
  v_queue bigint;
begin
  if v_id is not null then
    return v_id;
  end if;
  loop
    insert into queen.queues as q (tenant_id, name, created_at)
    select p_tenant, p_queue, queen._now()
     where not exists (select from queen.queues x where x.tenant_id = p_tenant and x.name = p_queue)
    on conflict on constraint queues_name_key do nothing;
    -- Held to the end of the transaction, so that queen.drop_queue waits for the partition that is about to be there, or this
    -- for it. Appends to a partition that exists take no lock on the queue.
    select q.id into v_queue from queen.queues q where q.tenant_id = p_tenant and q.name = p_queue for key share;
    exit when found;
  end loop;
  insert into queen.log_partitions as p (queue_id, name, created_at, due_at)
  values (v_queue, p_partition, queen._now(), queen._now() + interval '1 minute')
  on conflict on constraint log_partitions_name_key do nothing
  returning p.id into v_id;
  if v_id is null then
    select p.id into strict v_id from queen.log_partitions p where p.queue_id = v_queue and p.name = p_partition;
  end if;
  return v_id;
end
$$;
comment on function queen._provision(uuid, text, text) is 'The partition of these names, made if missing, its queue too.';
