-- drop_tenant: closed at once, removed in bounded steps, by the call and then by queen.maintain.

-- Some of what a tenant holds, at most p_limit rows. Timers first, so that nothing is fired into what is gone already; then
-- one queue at a time, whose row goes last.
create function queen._drop_tenant_step(p_tenant uuid, p_limit int)
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_queue bigint;
  v_pid bigint;
  v_n bigint;
begin
  delete from queen.log_timers t
   where t.ctid = any (array(select x.ctid from queen.log_timers x where x.tenant_id = p_tenant limit p_limit for update skip locked));
  if found then
    return true;
  elsif exists (select from queen.log_timers t where t.tenant_id = p_tenant) then
    return null;
  end if;
  delete from queen.log_dlq d
   where d.ctid = any (array(select x.ctid from queen.log_dlq x where x.tenant_id = p_tenant limit p_limit for update skip locked));
  if found then
    return true;
  end if;
  select q.id into v_queue from queen.queues q where q.tenant_id = p_tenant order by q.name limit 1 for update skip locked;
  if not found then
    if exists (select from queen.queues q where q.tenant_id = p_tenant) or exists (select from queen.log_dlq d where d.tenant_id = p_tenant) then
      return null;
    end if;
    delete from queen.queue_pauses p where p.tenant_id = p_tenant;
    delete from queen.pending_counts c where c.tenant_id = p_tenant;
    delete from queen.hotlist_repairs r where r.tenant_id = p_tenant;
    return false;
  end if;
  select p.id into v_pid from queen.log_partitions p where p.queue_id = v_queue order by p.id limit 1 for update skip locked;
  if not found then
    if exists (select from queen.log_partitions p where p.queue_id = v_queue) then
      return null;
    end if;
    delete from queen.log_groups g where g.queue_id = v_queue;
    delete from queen.queues q where q.id = v_queue;
    return true;
  end if;
  delete from queen.log_txns t
   where t.ctid = any (array(select x.ctid from queen.log_txns x where x.partition_id = v_pid limit p_limit));
  get diagnostics v_n = row_count;
  if v_n < p_limit then
    delete from queen.log_segments s
     where s.ctid = any (array(select x.ctid from queen.log_segments x where x.partition_id = v_pid limit p_limit));
    get diagnostics v_n = row_count;
    if v_n < p_limit then
      delete from queen.log_consumers c where c.partition_id = v_pid;
      delete from queen.log_partitions p where p.id = v_pid;
    end if;
  end if;
  return true;
end
$$;
comment on function queen._drop_tenant_step(uuid, int) is
  'One bounded step of dropping a tenant that is closed: true when something was done, false when nothing is left, null when'
  ' somebody holds the next.';

-- The row of a tenant outlives what it held until the transactions that may still send to it have ended: one that asked
-- before the tenant was closed could otherwise leave something behind that nobody removes.
create function queen._drop_tenants()
returns boolean
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_tenant queen.tenants;
  v_step boolean;
begin
  select t.* into v_tenant from queen.tenants t where t.dropped_at is not null order by t.emptied_at nulls first, t.dropped_at
   limit 1 for update skip locked;
  if not found then
    return false;
  end if;
  v_step := queen._drop_tenant_step(v_tenant.id, 1000);
  if v_step or v_step is null then
    return coalesce(v_step, false);
  elsif v_tenant.emptied_at is null then
    update queen.tenants t set emptied_at = clock_timestamp() where t.id = v_tenant.id;
    return true;
  end if;
  perform pg_stat_clear_snapshot();
  if exists (select from pg_stat_get_activity(null) a where a.xact_start <= v_tenant.emptied_at and a.pid <> pg_backend_pid()) then
    return false;
  end if;
  -- Here, in a transaction of our own, and not in a step that drop_tenant made: a lock on this table stops the sweeper.
  delete from queen.log_busy b where b.tenant_id = v_tenant.id;
  delete from queen.tenants t where t.id = v_tenant.id;
  return true;
end
$$;
comment on function queen._drop_tenants() is 'A step of removing tenants that were dropped; whether to go on at once.';

create function queen.drop_tenant(tenant uuid)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_more boolean := true;
begin
  perform queen._check_tenant_id(drop_tenant.tenant);
  update queen.tenants t set dropped_at = coalesce(t.dropped_at, queen._now()) where t.id = drop_tenant.tenant;
  if not found then
    perform queen._tenant_missing(drop_tenant.tenant);
  end if;
  delete from queen.tenant_grants g where g.tenant_id = drop_tenant.tenant;
  for i in 1..20 loop
    v_more := queen._drop_tenant_step(drop_tenant.tenant, 1000);
    exit when v_more is not true;
  end loop;
  return jsonb_build_object('tenant', drop_tenant.tenant, 'done', v_more is false);
end
$$;
comment on function queen.drop_tenant(uuid) is
  'Closes a tenant at once, to everybody, and removes everything of it: timers, queues, messages, groups, dead letters, grants. A'
  ' call removes up to 20,000 rows; queen.maintain goes on with the rest, or the next call. Argument: tenant. Returns {"tenant",'
  ' "done"}, done when nothing is left. Errors: 22023; QN004 when it was not created.';
