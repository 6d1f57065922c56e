-- Into the dead letters, from the log. (Timers go there in 031_timer_failures.sql.) Reading the segment for one message
-- is the price of a rare event.

create function queen._bury(
    p_partition_id bigint,
    p_group text,
    p_offset bigint,
    p_attempts int,
    p_error text,
    p_now timestamptz)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  insert into queen.log_dlq (
    tenant_id, queue, "partition", consumer_group, "offset", message_id, txn, payload, encrypted, producer_sub,
    error, attempts, failed_at)
  select q.tenant_id, q.name, p.name, p_group, p_offset, r.message_id, r.txn, r.payload, r.encrypted, r.producer_sub,
         p_error, p_attempts, p_now
    from queen._read(array[p_partition_id], array[p_offset], array[p_offset]) r
    join queen.log_partitions p on p.id = r.partition_id
    join queen.queues q on q.id = p.queue_id;
  update queen.log_consumers c
     set committed = p_offset, attempts = 0, attempted_to = 0, retry_at = null, last_error = null, updated_at = p_now,
         behind = c.behind and p_offset < p.last_offset
    from queen.log_partitions p
   where p.id = p_partition_id
     and c.partition_id = p_partition_id
     and c.consumer_group = p_group;
end
$$;
comment on function queen._bury(bigint, text, bigint, int, text, timestamptz) is
  'Moves a group''s cursor over one message and keeps the message in queen.log_dlq. The caller holds the consumer row.';
