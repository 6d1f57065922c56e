-- Who may do what. PUBLIC nothing; internal functions nobody but the owner; tables nobody but queen_admin, who reads.
-- What queen.sweep and queen.maintain call is executable by queen_admin, because procedures that commit can only run as
-- their caller.

revoke all on all functions in schema queen from public;
revoke all on all procedures in schema queen from public;
do $$
declare
  v_type regtype;
begin
  for v_type in
    select t.oid::regtype from pg_catalog.pg_type t
     where t.typnamespace = 'queen'::regnamespace and t.typtype = 'c'
       and (select c.relkind from pg_catalog.pg_class c where c.oid = t.typrelid) = 'c'
  loop
    execute pg_catalog.format('revoke all on type %s from public', v_type);
  end loop;
end
$$;

grant usage on type queen.timer_verdict, queen.timer, queen.dead_letter to queen_producer, queen_reader, queen_admin;
grant usage on type queen.push_result to queen_producer, queen_admin;
grant usage on type queen.message, queen.segment_slice, queen.ack_result, queen.dead_letter to queen_consumer, queen_admin;
grant usage on type queen._sweep_state to queen_admin;

grant execute on function
  queen.schedule(text, text, jsonb, interval, timestamptz, text, text, uuid),
  queen.schedule_bytes(text, text, bytea, interval, timestamptz, text, text, uuid),
  queen.schedule_many(text, text[], jsonb[], interval[], timestamptz[], text[], text[], uuid),
  queen.reschedule(text, text, interval, timestamptz, uuid),
  queen.cancel(text, text, uuid),
  queen.apply(jsonb, uuid),
  queen.push(text, jsonb, text, text, uuid),
  queen.push_bytes(text, bytea, text, text, uuid),
  queen.push_many(text, jsonb[], text, text[], uuid)
to queen_producer;

-- It acknowledges and sends; queen._transaction_allowed asks for the role of each.
grant execute on function queen.transaction(jsonb, uuid) to queen_producer, queen_consumer;

-- A producer looks at what it scheduled and asks what was sent; a reader looks at everything.
grant execute on function
  queen.peek(text, text, uuid),
  queen.list_timers(text, text, int, uuid),
  queen.sent(text, text, uuid)
to queen_producer, queen_reader;

grant execute on function
  queen.pop(text, text, int, interval, text, boolean, uuid),
  queen.ack(text, text, text, uuid, bigint, uuid),
  queen.nack(text, text, text, uuid, text, interval, uuid),
  queen.extend(text, text, text, uuid, interval, uuid),
  queen.pop_segments(text, text, int, interval, text, boolean, uuid),
  queen.seek(text, text, bigint, timestamptz, text, uuid)
to queen_consumer;

grant execute on function queen.dlq_list(text, uuid, int, uuid) to queen_consumer, queen_reader;
grant execute on function queen.dlq_requeue(text, uuid[], uuid), queen.dlq_purge(text, uuid[], uuid) to queen_consumer;

grant execute on function queen.status() to queen_reader, queen_producer, queen_consumer;
grant select on queen.settings, queen.lagging_groups, queen.expired_leases, queen.paused_queues to queen_reader, queen_admin;
-- The views tell ages.
grant execute on function queen._setting_catalog(), queen._now(), queen._tenant_open(uuid) to queen_reader, queen_admin;

grant execute on function
  queen.configure(text, text),
  queen.configure_queue(text, jsonb, uuid),
  queen.drop_queue(text, uuid),
  queen.pause_queue(text, uuid),
  queen.resume_queue(text, uuid),
  queen.drop_group(text, text, uuid),
  queen.create_tenant(uuid, text),
  queen.configure_tenant(uuid, jsonb),
  queen.grant_tenant(uuid, text),
  queen.revoke_tenant(uuid, text),
  queen.drop_tenant(uuid),
  queen.fire_due(int),
  queen.log_timers_due(smallint[]),
  queen.log_timers_claim(smallint[], interval, int, int),
  queen.log_timers_fire(uuid[], text[], text[], uuid[]),
  queen.log_timers_fail(uuid[], text[], text[], uuid[], text, interval, boolean),
  queen.start(int),
  queen.doctor(),
  queen.stop(),
  queen._sweep_begin(interval, int, int),
  queen._sweep_step(queen._sweep_state),
  queen._sweep_wait(queen._sweep_state, interval),
  queen._sweep_finish(queen._sweep_state),
  queen._maintain_end(interval),
  queen._maintain_step(text, bigint),
  queen._is_past(timestamptz)
to queen_admin;
grant execute on procedure queen.sweep(interval, int, int), queen.maintain(interval) to queen_admin;

grant select on all tables in schema queen to queen_admin;
revoke all on queen._timers_by_time from queen_admin;
