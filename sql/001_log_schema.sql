-- The log: what is stored once a message is deliverable.
--
-- Invariants
--   * Offsets of a partition are contiguous and start at 1. They are allocated by queen._append under the partition's
--     row lock, which is held to commit: a reader never sees n + 1 committed before n.
--   * created_at of a segment is stamped under the same lock and never goes back within a partition.
--   * A segment is never changed after its insert.
-- Lock order of the whole extension: timers, queues, partitions by ascending id, consumers by ascending partition id,
-- then leaves (segments, txns, dead letters). An acquisition that never waits (SKIP LOCKED) is no edge of that order.
-- There are no foreign keys: their FOR KEY SHARE locks would let whoever configures or drops a queue hold up the fire.

create table queen.queues (
    id         bigint generated always as identity,
    tenant_id  uuid not null default '00000000-0000-0000-0000-000000000001',
    name       text collate "C" not null,
    options    jsonb not null default '{}',
    created_at timestamptz not null default now(),
    constraint queues_pkey primary key (id),
    constraint queues_name_key unique (tenant_id, name)
);
comment on table queen.queues is 'Queues, born at the first push or fire, or by configuration.';
comment on column queen.queues.id is 'surrogate key; partitions point here';
comment on column queen.queues.tenant_id is 'owner of the name; the default tenant is 00000000-0000-0000-0000-000000000001';
comment on column queen.queues.name is 'name chosen by the user, 1 to 255 bytes';
comment on column queen.queues.options is 'options that differ from the settings';
comment on column queen.queues.created_at is 'when the queue was born';

-- fillfactor 50: every append updates one row here and no indexed column, so with room on the page it stays HOT.
create table queen.log_partitions (
    id              bigint generated always as identity,
    queue_id        bigint not null,
    name            text collate "C" not null,
    last_offset     bigint not null default 0,
    log_start       bigint not null default 1,
    txns_start      bigint not null default 1,
    last_created_at timestamptz not null default '-infinity',
    hot             boolean not null default false,
    due_at          timestamptz,
    created_at      timestamptz not null default now(),
    constraint log_partitions_pkey primary key (id),
    constraint log_partitions_name_key unique (queue_id, name)
) with (fillfactor = 50);
-- What a pop without a partition reads. An append sets hot once and the next ones leave it, so they stay HOT updates.
create index log_partitions_hot_idx on queen.log_partitions (queue_id, id) where hot;
create index log_partitions_hot_id_idx on queen.log_partitions (id) where hot;
-- What queen.maintain reads: an append sets due_at when it is null and leaves it otherwise.
create index log_partitions_due_idx on queen.log_partitions (due_at);
comment on table queen.log_partitions is 'Partitions of a queue and their allocator. The row lock is the right to append.';
comment on column queen.log_partitions.id is 'surrogate key; the order in which partitions are locked';
comment on column queen.log_partitions.queue_id is 'queen.queues.id';
comment on column queen.log_partitions.name is 'name chosen by the user, 1 to 255 bytes';
comment on column queen.log_partitions.last_offset is 'last offset allocated; 0 before the first message';
comment on column queen.log_partitions.log_start is 'first offset still stored';
comment on column queen.log_partitions.txns_start is 'first offset whose txn is still in queen.log_txns';
comment on column queen.log_partitions.last_created_at is 'created_at of the newest segment, so that a clock set back cannot break its order';
comment on column queen.log_partitions.hot is 'appended to since queen.maintain last looked; a pop looks at hot partitions and at log_consumers.behind';
comment on column queen.log_partitions.due_at is 'when queen.maintain looks at it next';
comment on column queen.log_partitions.created_at is 'when the partition was born';

-- Keyed by the end, so "the segment that holds offset n, and those behind it" is one range of the primary key.
-- The blob is compressed by us: EXTERNAL keeps the server from trying again and lets the header be read alone.
create table queen.log_segments (
    partition_id bigint not null,
    base_offset  bigint not null,
    end_offset   bigint not null,
    created_at   timestamptz not null,
    raw_bytes    int not null,
    blob         bytea not null,
    constraint log_segments_pkey primary key (partition_id, end_offset)
);
alter table queen.log_segments alter column blob set storage external;
comment on table queen.log_segments is 'Messages, many to a row. docs/format.md describes the blob byte by byte.';
comment on column queen.log_segments.partition_id is 'queen.log_partitions.id';
comment on column queen.log_segments.base_offset is 'offset of the first message';
comment on column queen.log_segments.end_offset is 'offset of the last message';
comment on column queen.log_segments.created_at is 'when the append took the partition, one instant for all messages of the segment';
comment on column queen.log_segments.raw_bytes is 'bytes of the frames before compression';
comment on column queen.log_segments.blob is 'header and one zstandard frame';

-- One row a message: 16 bytes of hash and where it is. Looked up by equality alone and inserted in no order, so the index
-- is of the kind "hash": a pass of the fire spends a tenth less than with a btree (three pairs of 200,000 timers, ratios
-- 0.83, 0.87 and 0.97, 2026-12-01). The key serves the purge, which goes by partition and offset.
create table queen.log_txns (
    partition_id bigint not null,
    "offset"     bigint not null,
    created_at   timestamptz not null,
    txn_hash     bytea not null,
    message_id   uuid,
    constraint log_txns_pkey primary key (partition_id, "offset")
);
create index log_txns_hash_idx on queen.log_txns using hash (txn_hash);
comment on table queen.log_txns is 'Transaction ids of the messages in the log: deduplication of pushes, and queen.sent.';
comment on column queen.log_txns.partition_id is 'queen.log_partitions.id';
comment on column queen.log_txns."offset" is 'offset of the message';
comment on column queen.log_txns.created_at is 'created_at of its segment';
comment on column queen.log_txns.txn_hash is 'first 16 bytes of sha256(txn)';
comment on column queen.log_txns.message_id is 'null when the txn is the message id itself, the default';

create table queen.log_groups (
    queue_id       bigint not null,
    consumer_group text collate "C" not null,
    created_at     timestamptz not null,
    constraint log_groups_pkey primary key (queue_id, consumer_group)
);
comment on table queen.log_groups is 'Consumer groups of a queue, entered at their first pop.';
comment on column queen.log_groups.queue_id is 'queen.queues.id';
comment on column queen.log_groups.consumer_group is 'name of the group, 1 to 255 bytes';
comment on column queen.log_groups.created_at is 'first contact; under start_at = new, messages appended before it are not delivered';

create table queen.log_consumers (
    partition_id     bigint not null,
    queue_id         bigint not null,
    consumer_group   text collate "C" not null,
    committed        bigint not null default 0,
    leased_to        bigint,
    lease_id         uuid,
    lease_expires_at timestamptz,
    behind           boolean not null default false,
    attempts         int not null default 0,
    attempted_to     bigint not null default 0,
    retry_at         timestamptz,
    last_error       text,
    updated_at       timestamptz not null default now(),
    constraint log_consumers_pkey primary key (partition_id, consumer_group)
) with (fillfactor = 50);
create index log_consumers_behind_idx on queen.log_consumers (queue_id, consumer_group, partition_id) where behind;
comment on table queen.log_consumers is 'Where a consumer group stands in a partition, and its lease.';
comment on column queen.log_consumers.partition_id is 'queen.log_partitions.id';
comment on column queen.log_consumers.queue_id is 'queen.queues.id of the partition';
comment on column queen.log_consumers.consumer_group is 'name of the group, 1 to 255 bytes';
comment on column queen.log_consumers.committed is 'last offset acknowledged; the next pop starts behind it';
comment on column queen.log_consumers.leased_to is 'last offset of the batch that is out';
comment on column queen.log_consumers.lease_id is 'token of the batch that is out; a later pop replaces it';
comment on column queen.log_consumers.lease_expires_at is 'the batch is redelivered after this';
comment on column queen.log_consumers.behind is 'has messages to read in a partition that is no longer hot';
comment on column queen.log_consumers.attempts is 'deliveries of the head message so far, counted at the pop';
comment on column queen.log_consumers.attempted_to is 'last offset that was part of those deliveries';
comment on column queen.log_consumers.retry_at is 'after a nack with a delay: not delivered before';
comment on column queen.log_consumers.last_error is 'what the last nack said';
comment on column queen.log_consumers.updated_at is 'last pop, ack, nack or extend';

create table queen.log_dlq (
    id             uuid not null default gen_random_uuid(),
    tenant_id      uuid not null,
    queue          text collate "C" not null,
    "partition"    text collate "C" not null,
    consumer_group text collate "C" not null,
    "offset"       bigint,
    message_id     uuid not null,
    txn            text not null,
    payload        bytea not null,
    payload_zstd   boolean not null default false,
    encrypted      boolean not null default false,
    producer_sub   text,
    error          text,
    attempts       int not null,
    deliver_at     timestamptz,
    failed_at      timestamptz not null,
    constraint log_dlq_pkey primary key (tenant_id, queue, id)
);
create index log_dlq_failed_at_idx on queen.log_dlq (failed_at);
comment on table queen.log_dlq is 'Dead letters: messages a group gave up on, and timers that could not be fired.';
comment on column queen.log_dlq.id is 'id of the dead letter';
comment on column queen.log_dlq.tenant_id is 'tenant of the queue';
comment on column queen.log_dlq.queue is 'queue it came from or was meant for';
comment on column queen.log_dlq."partition" is 'partition it came from or was meant for';
comment on column queen.log_dlq.consumer_group is 'the group that gave up; __timer__ for a timer';
comment on column queen.log_dlq."offset" is 'offset in the log; null for a timer';
comment on column queen.log_dlq.message_id is 'id of the message';
comment on column queen.log_dlq.txn is 'txn of the message';
comment on column queen.log_dlq.payload is 'payload as it was stored: JSON text, or a zero byte and the bytes';
comment on column queen.log_dlq.payload_zstd is 'the payload is zstandard-compressed (it waited so in queen.log_timers)';
comment on column queen.log_dlq.encrypted is 'the payload is encrypted';
comment on column queen.log_dlq.producer_sub is 'session user who sent it';
comment on column queen.log_dlq.error is 'last error';
comment on column queen.log_dlq.attempts is 'deliveries, or attempts to fire';
comment on column queen.log_dlq.deliver_at is 'due time of a timer; null for a message';
comment on column queen.log_dlq.failed_at is 'when it was given up';

create table queen.hotlist_repairs (
    tenant_id      uuid not null,
    queue          text collate "C" not null,
    consumer_group text collate "C" not null,
    "partition"    text collate "C",
    requested_at   timestamptz not null default now(),
    constraint hotlist_repairs_pkey primary key (tenant_id, queue, consumer_group)
);
comment on table queen.hotlist_repairs is 'Cursors moved back on purpose, published for the next pop. Keyed by names.';
comment on column queen.hotlist_repairs.tenant_id is 'tenant of the queue';
comment on column queen.hotlist_repairs.queue is 'queue';
comment on column queen.hotlist_repairs.consumer_group is 'group whose cursor moved';
comment on column queen.hotlist_repairs."partition" is 'partition; null for the whole queue';
comment on column queen.hotlist_repairs.requested_at is 'when the cursor moved';
