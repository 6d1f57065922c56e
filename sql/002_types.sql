-- The row types that public functions return.

create type queen.timer_verdict as (
    ok         boolean,
    status     text,
    queue      text,
    timer_key  text,
    txn        text,
    message_id uuid,
    deliver_at timestamptz
);
comment on type queen.timer_verdict is
  'What became of a timer call. status: scheduled, rescheduled, cancelled, absent (no longer pending, perhaps delivered)'
  ' or too_late (leased by a firer now); ok is true for the first three.';

create type queen.timer as (
    tenant_id     uuid,
    queue         text,
    timer_key     text,
    "partition"   text,
    deliver_at    timestamptz,
    txn           text,
    message_id    uuid,
    payload       jsonb,
    payload_bytes bytea,
    encrypted     boolean,
    producer_sub  text,
    attempts      int,
    last_error    text,
    claimed       boolean,
    created_at    timestamptz,
    updated_at    timestamptz
);
comment on type queen.timer is
  'A pending timer. Of payload and payload_bytes the one it was scheduled with is set, both are null in a list or when'
  ' encrypted. claimed: a firer holds a live lease, so cancel and reschedule answer too_late.';

create type queen.message as (
    queue            text,
    "partition"      text,
    "offset"         bigint,
    message_id       uuid,
    txn              text,
    payload          jsonb,
    payload_bytes    bytea,
    created_at       timestamptz,
    producer_sub     text,
    delivery_attempt int,
    lease_id         uuid
);
comment on type queen.message is
  'A delivered message. Exactly one of payload and payload_bytes is set, by how it was sent. lease_id goes back with ack,'
  ' nack and extend; it is null under auto_ack.';

create type queen.push_result as (
    status      text,
    "partition" text,
    "offset"    bigint,
    message_id  uuid,
    txn         text
);
comment on type queen.push_result is
  'Where a pushed message is. status: queued, or duplicate with the place of the first message of this txn.';

create type queen.ack_result as (
    ok        boolean,
    status    text,
    acked     bigint,
    committed bigint
);
comment on type queen.ack_result is
  'What became of ack, nack or extend. status: acked, nacked or extended; lease_lost when the lease is not, or no longer,'
  ' the one in force; absent when the group has never been seen there. acked: messages newly acknowledged. committed: last'
  ' offset acknowledged by now.';

create type queen.dead_letter as (
    id             uuid,
    queue          text,
    "partition"    text,
    consumer_group text,
    "offset"       bigint,
    message_id     uuid,
    txn            text,
    payload        jsonb,
    payload_bytes  bytea,
    error          text,
    attempts       int,
    failed_at      timestamptz
);
comment on type queen.dead_letter is
  'A message that a group gave up on, or a timer that could not be fired: then consumer_group is __timer__ and offset null.';
