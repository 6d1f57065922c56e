-- pause_queue and resume_queue: the fire into one queue stops; scheduling, moving, cancelling and consuming go on.
--
-- Due timers of a paused queue step out of the way of the sweeper (036_step_out.sql), so they cost a pass nothing however
-- many they are. resume_queue only marks the row: what touches queen.log_busy is the sweeper, because a lock on that table
-- which a user's open transaction held would stop it.

create table queen.queue_pauses (
    tenant_id  uuid not null,
    queue      text collate "C" not null,
    since      timestamptz not null,
    paused_by  text not null,
    resumed_at timestamptz,
    constraint queue_pauses_pkey primary key (tenant_id, queue)
);
comment on table queen.queue_pauses is 'Queues into which nothing is fired.';
comment on column queen.queue_pauses.tenant_id is 'tenant of the queue';
comment on column queen.queue_pauses.queue is 'queue, which need not exist';
comment on column queen.queue_pauses.since is 'when it was paused';
comment on column queen.queue_pauses.paused_by is 'session user who paused it';
comment on column queen.queue_pauses.resumed_at is 'when it was resumed; the sweeper then removes the row, within half a second';

create index queue_pauses_resumed on queen.queue_pauses (resumed_at) where resumed_at is not null;

create view queen.paused_queues as
select p.tenant_id, p.queue, p.since, p.paused_by
  from queen.queue_pauses p
 where p.resumed_at is null and queen._tenant_open(p.tenant_id);
comment on view queen.paused_queues is 'Queues that are paused, of the tenants open to you: since when, and by whom.';

create function queen._paused(p_tenant uuid, p_queue text)
returns boolean
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
as $$
begin
  return exists (select from queen.queue_pauses p where p.tenant_id = p_tenant and p.queue = p_queue and p.resumed_at is null);
end
$$;
comment on function queen._paused(uuid, text) is 'Whether the fire into a queue is paused.';

create function queen.pause_queue(queue text, tenant uuid default null)
returns boolean
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant uuid := queen._check_tenant(pause_queue.tenant);
begin
  perform queen._check_name('queue', pause_queue.queue);
  insert into queen.queue_pauses as p (tenant_id, queue, since, paused_by)
  values (v_tenant, pause_queue.queue, queen._now(), session_user)
  on conflict on constraint queue_pauses_pkey do update
     set since = excluded.since, paused_by = excluded.paused_by, resumed_at = null
   where p.resumed_at is not null;
  return found;
end
$$;
comment on function queen.pause_queue(text, uuid) is
  'Stops the fire into one queue: its timers wait when they come due, and everything else of it goes on. Arguments: queue, which'
  ' need not exist; tenant. In force for every pass that begins after your commit. Returns whether it was not paused before.'
  ' Errors: 22023, QN002.';

create function queen.resume_queue(queue text, tenant uuid default null)
returns boolean
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_name('queue', resume_queue.queue);
  update queen.queue_pauses p set resumed_at = queen._now()
   where p.tenant_id = queen._find_tenant(resume_queue.tenant) and p.queue = resume_queue.queue and p.resumed_at is null;
  return found;
end
$$;
comment on function queen.resume_queue(text, uuid) is
  'Lets a paused queue go on: what waits is fired in the order of its due times, within a second from your commit when it is'
  ' not much. Arguments: queue, tenant. Returns whether it was paused. Errors: 22023.';
