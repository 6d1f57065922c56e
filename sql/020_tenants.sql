-- Tenants: who may use which. A tenant is a namespace of queues and timer keys; it is open to the roles it was granted to
-- and their members, and to queen_admin. The default tenant is open to every role of pg_queen.
--
-- Grants name roles, not their oids: a dump is restored into clusters where oids differ.

create table queen.tenants (
    id         uuid not null,
    name       text,
    options    jsonb not null default '{}',
    created_at timestamptz not null,
    dropped_at timestamptz,
    emptied_at timestamptz,
    constraint tenants_pkey primary key (id)
);
comment on table queen.tenants is 'Tenants that were created; the default one has a row only when it was given limits.';
comment on column queen.tenants.id is 'the tenant argument of every function';
comment on column queen.tenants.name is 'for people; no function asks for it';
comment on column queen.tenants.options is 'limits that differ from the settings';
comment on column queen.tenants.created_at is 'when it was created';
comment on column queen.tenants.dropped_at is 'since when it is closed, while maintenance removes what it held';
comment on column queen.tenants.emptied_at is 'when nothing was left of it; the row goes when no transaction is older';

create table queen.tenant_grants (
    tenant_id  uuid not null,
    role_name  text collate "C" not null,
    granted_at timestamptz not null,
    granted_by text not null,
    constraint tenant_grants_pkey primary key (tenant_id, role_name)
);
comment on table queen.tenant_grants is 'Roles that a tenant is open to.';
comment on column queen.tenant_grants.tenant_id is 'queen.tenants.id';
comment on column queen.tenant_grants.role_name is 'role; its members are meant too';
comment on column queen.tenant_grants.granted_at is 'when';
comment on column queen.tenant_grants.granted_by is 'session user who granted it';

create function queen._tenant_open(p_tenant uuid)
returns boolean
language plpgsql
stable
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_tenant = '00000000-0000-0000-0000-000000000001' or pg_has_role(session_user, 'queen_admin', 'member') then
    return true;
  end if;
  return exists (
    select from queen.tenant_grants g
      join pg_roles r on r.rolname = g.role_name
     where g.tenant_id = p_tenant and pg_has_role(session_user, r.oid, 'member'));
end
$$;
comment on function queen._tenant_open(uuid) is 'Whether the session user may use a tenant. The views ask it.';

create function queen._open_tenants()
returns uuid[]
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if pg_has_role(session_user, 'queen_admin', 'member') then
    return null;
  end if;
  return array['00000000-0000-0000-0000-000000000001'::uuid] || array(
    select g.tenant_id from queen.tenant_grants g
      join pg_roles r on r.rolname = g.role_name
     where pg_has_role(session_user, r.oid, 'member'));
end
$$;
comment on function queen._open_tenants() is 'The tenants the session user may use; null for all.';

-- What a role may not see does not exist for it: look-ups go on with null, which finds nothing.
create function queen._find_tenant(p_tenant uuid)
returns uuid
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_tenant is null then
    return '00000000-0000-0000-0000-000000000001'::uuid;
  end if;
  return case when queen._tenant_open(p_tenant) then p_tenant end;
end
$$;
comment on function queen._find_tenant(uuid) is
  'The tenant meant by an argument of a function that looks, moves or removes (null: the default one); null when it is not open.';

-- One answer for a tenant that is somebody else's and for one that does not exist.
create function queen._check_tenant(p_tenant uuid)
returns uuid
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_tenant is null or p_tenant = '00000000-0000-0000-0000-000000000001' then
    return '00000000-0000-0000-0000-000000000001'::uuid;
  end if;
  if not queen._tenant_open(p_tenant) then
    raise exception using
      errcode = 'QN002',
      message = format('tenant "%s" is not open to role "%s"', p_tenant, session_user),
      hint = 'Leave tenant out to use the default tenant, or ask an administrator: select queen.grant_tenant(tenant, role_name).';
  elsif exists (select from queen.tenants t where t.id = p_tenant and t.dropped_at is not null) then
    raise exception using
      errcode = 'QN002',
      message = format('tenant "%s" is being dropped', p_tenant),
      hint = 'queen.maintain removes what is left of it; afterwards it can be created again.';
  end if;
  return p_tenant;
end
$$;
comment on function queen._check_tenant(uuid) is
  'The tenant meant by an argument of a function that sends or configures (null: the default one), or QN002.';

create function queen._check_tenant_id(p_tenant uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  if p_tenant is null then
    perform queen._refuse('tenant', 'must not be null', 'Accepted is the id of a tenant, for example gen_random_uuid() for a new one.');
  elsif p_tenant = '00000000-0000-0000-0000-000000000001' then
    perform queen._refuse('tenant', 'is the default tenant', 'It is always there, and open to every role of pg_queen.');
  end if;
end
$$;
comment on function queen._check_tenant_id(uuid) is 'Refuses no tenant, and the default one.';

create function queen._tenant_missing(p_tenant uuid)
returns void
language plpgsql
stable
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  raise exception using
    errcode = 'QN004',
    message = format('tenant "%s" does not exist', p_tenant),
    hint = 'Create it: select queen.create_tenant(tenant, name).';
end
$$;
comment on function queen._tenant_missing(uuid) is 'Raises QN004.';

create function queen.create_tenant(tenant uuid, name text default null)
returns uuid
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
declare
  v_dropped timestamptz;
begin
  perform queen._check_tenant_id(create_tenant.tenant);
  if create_tenant.name is not null then
    perform queen._check_name('name', create_tenant.name);
  end if;
  insert into queen.tenants as t (id, name, created_at)
  values (create_tenant.tenant, create_tenant.name, queen._now())
  on conflict on constraint tenants_pkey do update set name = coalesce(excluded.name, t.name)
  returning t.dropped_at into v_dropped;
  if v_dropped is not null then
    perform queen._check_tenant(create_tenant.tenant);
  end if;
  return create_tenant.tenant;
end
$$;
comment on function queen.create_tenant(uuid, text) is
  'Creates a tenant, open to nobody but queen_admin yet. Arguments: tenant, its id; name, for people, 1 to 255 bytes, null for'
  ' none. Of one that exists it sets the name. Returns the id. Errors: 22023; QN002 while it is being dropped.';

create function queen.grant_tenant(tenant uuid, role_name text)
returns boolean
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_tenant_id(grant_tenant.tenant);
  if not exists (select from pg_roles r where r.rolname = grant_tenant.role_name) then
    perform queen._refuse('role_name', case when grant_tenant.role_name is null then 'must not be null' else format('"%s" is no role', grant_tenant.role_name) end,
      'Accepted is the name of a role as in pg_roles, without quotes.');
  end if;
  perform queen._check_tenant(grant_tenant.tenant);
  perform from queen.tenants t where t.id = grant_tenant.tenant for key share;
  if not found then
    perform queen._tenant_missing(grant_tenant.tenant);
  end if;
  insert into queen.tenant_grants (tenant_id, role_name, granted_at, granted_by)
  values (grant_tenant.tenant, grant_tenant.role_name, queen._now(), session_user)
  on conflict on constraint tenant_grants_pkey do nothing;
  return found;
end
$$;
comment on function queen.grant_tenant(uuid, text) is
  'Opens a tenant to a role and its members, who then may do there what their roles of pg_queen allow. Arguments: tenant;'
  ' role_name, as in pg_roles. Returns whether that is new. Errors: 22023; QN004 when the tenant was not created; QN002 while it'
  ' is being dropped.';

create function queen.revoke_tenant(tenant uuid, role_name text)
returns boolean
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  perform queen._check_tenant_id(revoke_tenant.tenant);
  if revoke_tenant.role_name is null then
    perform queen._refuse('role_name', 'must not be null', 'Accepted is the name of a role, also of one that is gone.');
  end if;
  delete from queen.tenant_grants g where g.tenant_id = revoke_tenant.tenant and g.role_name = revoke_tenant.role_name;
  return found;
end
$$;
comment on function queen.revoke_tenant(uuid, text) is
  'Closes a tenant to a role; what was scheduled and sent stays. Arguments: tenant; role_name, also of a role that is gone.'
  ' Returns whether it was open to it. Errors: 22023.';

create function queen.configure_tenant(tenant uuid, options jsonb)
returns jsonb
language plpgsql
volatile
security definer
set search_path = pg_catalog, queen, pg_temp
as $$
#variable_conflict use_column
declare
  v_id uuid := queen._check_tenant(configure_tenant.tenant);
  v_kept jsonb;
begin
  perform queen._check_options(configure_tenant.options, 'tenant');
  if v_id = '00000000-0000-0000-0000-000000000001' then
    insert into queen.tenants (id, created_at) values (v_id, queen._now()) on conflict on constraint tenants_pkey do nothing;
  end if;
  update queen.tenants t set options = jsonb_strip_nulls(t.options || configure_tenant.options) where t.id = v_id returning t.options into v_kept;
  if not found then
    perform queen._tenant_missing(v_id);
  end if;
  if configure_tenant.options ? 'pending_max' then
    perform queen._count_pending(v_id, null, queen._now());
  end if;
  return (select jsonb_object_agg(s.key, coalesce(v_kept ->> s.key, case when s.kind = 'limit' then 'none' else queen._setting(s.key) end))
            from queen._setting_catalog() s where s.per_tenant);
end
$$;
comment on function queen.configure_tenant(uuid, jsonb) is
  'Sets limits of a tenant. Arguments: tenant, null for the default one; options, an object of settings that queen.settings'
  ' marks per_tenant, null restores the setting''s value, {} only looks. Of a limit of the tenant and one of a queue the smaller'
  ' counts. Returns the options in force. Errors: 22023; QN004 when the tenant was not created; QN002 while it is being dropped.';
