-- Where a timer waits. A timer is a message that is not in the log yet; one transaction appends its frame and deletes
-- this row.
--
-- Keyed by names: the destination may not exist at schedule time, a schedule never writes queen.queues, and no column
-- here names a partition, so queen.log_partition_dead (006) gets no leg on this table.
--
-- claim_token is not null and claimed_until > now: the only definition of "in somebody's hands". A row in backoff has a
-- claimed_until in the future and no token: it is not due yet, and can be cancelled.
--
-- The fire never waits here. It takes its rows FOR UPDATE SKIP LOCKED and deletes rows it already holds as its last
-- step. Two forms that look right and are not: "FOR UPDATE ... WHERE id IN" names a column that does not exist, and a
-- FOR UPDATE without SKIP LOCKED lets one slow cancel in a long transaction stop the whole fire.
--
-- One secondary index. visible_at is indexed although each claim then writes an indexed column and cannot be HOT: with
-- (shard, deliver_at) a poisoned timer in backoff would sit at the head of the index and be read by every pass. Not
-- there on purpose: deliver_at (no reader), (tenant_id, queue) (the key serves), claim_token (rows go by key).
--
-- Storage settings: fillfactor 70 by analogy, to be measured in the first soak. Autovacuum: the table empties and
-- refills, so a share of its size says nothing; a fixed number of dead rows does.

create table queen.log_timers (
    tenant_id     uuid not null default '00000000-0000-0000-0000-000000000001',
    queue         text collate "C" not null,
    timer_key     text collate "C" not null,
    "partition"   text not null default 'Default',
    deliver_at    timestamptz not null,
    txn           text not null,
    message_id    uuid not null,
    payload       bytea not null,
    payload_zstd  boolean not null default false,
    encrypted     boolean not null default false,
    producer_sub  text,
    attempts      int not null default 0,
    last_error    text,
    claimed_until timestamptz,
    claim_token   uuid,
    shard         smallint not null
                  generated always as ((hashtextextended(timer_key, 0) & 63)::smallint) stored,
    visible_at    timestamptz not null
                  generated always as (
                      case when claimed_until is null or claimed_until < deliver_at
                           then deliver_at else claimed_until end) stored,
    created_at    timestamptz not null default now(),
    updated_at    timestamptz not null default now(),
    primary key (tenant_id, queue, timer_key)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.0, autovacuum_vacuum_threshold = 20000);

create index idx_log_timers_visible on queen.log_timers (shard, visible_at);

comment on table queen.log_timers is 'Timers that wait. docs/concepts.md says why they are not in the log.';
comment on column queen.log_timers.tenant_id is 'tenant of the key';
comment on column queen.log_timers.queue is 'destination queue, which need not exist yet';
comment on column queen.log_timers.timer_key is 'the user''s own key, 1 to 512 bytes';
comment on column queen.log_timers."partition" is 'destination partition, which need not exist yet';
comment on column queen.log_timers.deliver_at is 'due time; the message is never in the log before it';
comment on column queen.log_timers.txn is 'txn the message will carry; what queen.sent looks for';
comment on column queen.log_timers.message_id is 'id the message will carry, fixed at schedule';
comment on column queen.log_timers.payload is 'JSON text in UTF-8, or a zero byte and the bytes';
comment on column queen.log_timers.payload_zstd is 'the payload waits zstandard-compressed';
comment on column queen.log_timers.encrypted is 'the payload is encrypted';
comment on column queen.log_timers.producer_sub is 'session user who scheduled it';
comment on column queen.log_timers.attempts is 'failed attempts to fire';
comment on column queen.log_timers.last_error is 'why the last one failed';
comment on column queen.log_timers.claimed_until is 'with a token: end of the lease; without: not before this instant';
comment on column queen.log_timers.claim_token is 'set while a firer outside a single transaction holds the row';
comment on column queen.log_timers.shard is 'one of 64, spreads contention; owns nothing';
comment on column queen.log_timers.visible_at is 'not visible to the sweeper before this instant';
comment on column queen.log_timers.created_at is 'when the key was first scheduled';
comment on column queen.log_timers.updated_at is 'last schedule, reschedule or failure';
