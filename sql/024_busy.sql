-- Partitions that somebody's open transaction holds, or whose queue is paused. Their due timers step out of the head of
-- the index (backoff without an attempt) instead of being read again by each pass, keep their order among themselves, and come back in one
-- step when the partition is free: 036_step_out.sql.
--
-- The table lock is the gate between passes and moves: a pass takes ROW EXCLUSIVE, a move EXCLUSIVE, so no pass is under
-- way while rows of a partition move. Only sweepers and the operator take either.

create table queen.log_busy (
    tenant_id   uuid not null,
    queue       text collate "C" not null,
    "partition" text collate "C" not null,
    since       timestamptz not null,
    away_from   timestamptz not null,
    away_to     timestamptz not null,
    tried_at    timestamptz not null,
    paused      boolean not null default false,
    constraint log_busy_pkey primary key (tenant_id, queue, "partition")
);
comment on table queen.log_busy is 'Partitions held by an open transaction, or of a paused queue, whose due timers have stepped out.';
comment on column queen.log_busy.tenant_id is 'tenant of the queue';
comment on column queen.log_busy.queue is 'queue';
comment on column queen.log_busy."partition" is 'partition';
comment on column queen.log_busy.since is 'when its timers stepped out first';
comment on column queen.log_busy.away_from is 'visible_at of the first that stepped out; when it is past, they are simply due again';
comment on column queen.log_busy.away_to is 'visible_at of the last; the next to step out goes behind it';
comment on column queen.log_busy.tried_at is 'when the partition was last tried';
comment on column queen.log_busy.paused is 'the queue is paused: nothing is tried';

-- Workers look for partitions to try twenty times a second, whatever number is paused.
create index log_busy_tried on queen.log_busy (tried_at) where not paused;

-- Asked by whoever does not lock partitions himself.
create function queen._waits(p_tenant uuid, p_queue text, p_partition text, p_now timestamptz)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
begin
  return queen._paused(p_tenant, p_queue)
      or exists (select from queen.log_busy b
                  where b.tenant_id = p_tenant and b.queue = p_queue and b."partition" = p_partition and b.away_from > p_now);
end
$$;
comment on function queen._waits(uuid, text, text, timestamptz) is
  'Whether timers of a destination are not to be fired now: its queue is paused, or others of it wait in a line.';

create function queen._gate(p_alone boolean)
returns void
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set lock_timeout = '2s'
as $$
begin
  -- Held by sweepers alone, for one pass or one move: waiting for it is waiting for a colleague.
  if p_alone then
    lock table queen.log_busy in exclusive mode;
  else
    lock table queen.log_busy in row exclusive mode;
  end if;
end
$$;
comment on function queen._gate(boolean) is 'Passes go through side by side; p_alone: nobody else while rows move. To the end of the transaction.';
