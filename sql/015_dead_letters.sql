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
declare
  v_error text := p_error;
  v_message record;
begin
  begin
    select r.message_id, r.txn, r.payload, r.encrypted, r.producer_sub into strict v_message
      from queen._read(array[p_partition_id], array[p_offset], array[p_offset]) r;
  exception when sqlstate 'QN010' then
    -- The segment is damaged: what the index still knows, so that the group can go on.
    v_error := regexp_replace(sqlerrm, '^plpy[.]Error: ', '');
    select coalesce(t.message_id, '00000000-0000-0000-0000-000000000000') as message_id, coalesce(t.message_id::text, 'unknown') as txn,
           ''::bytea as payload, false as encrypted, null::text as producer_sub
      into v_message
      from (values (true)) as one (row)
      left join queen.log_txns t on t.partition_id = p_partition_id and t."offset" = p_offset;
  end;
  insert into queen.log_dlq (
    tenant_id, queue, "partition", consumer_group, "offset", message_id, txn, payload, encrypted, producer_sub,
    error, attempts, failed_at)
  select q.tenant_id, q.name, p.name, p_group, p_offset, v_message.message_id, v_message.txn, v_message.payload, v_message.encrypted,
         v_message.producer_sub, v_error, p_attempts, p_now
    from queen.log_partitions p
    join queen.queues q on q.id = p.queue_id
   where p.id = p_partition_id;
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
  'Moves a group''s cursor over one message and keeps the message in queen.log_dlq; of a damaged segment, an'
  ' empty payload and the error. The caller holds the consumer row.';
