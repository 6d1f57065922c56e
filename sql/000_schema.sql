-- Schema and roles. The roles belong to the whole cluster and survive DROP EXTENSION; they are siblings but for
-- queen_admin, which holds the other three. PUBLIC gets nothing anywhere (090_grants.sql, tests/unit/test_catalog.py).
\echo Use "CREATE EXTENSION pg_queen CASCADE" to load this file. \quit

-- Names and operators of this script are ours or PostgreSQL's, whatever is in the schema that CREATE EXTENSION put first.
set local search_path = pg_catalog, pg_temp;

do $$
declare
  v_role text;
begin
  foreach v_role in array array['queen_producer', 'queen_consumer', 'queen_reader', 'queen_admin'] loop
    if not exists (select from pg_catalog.pg_roles where rolname = v_role) then
      execute pg_catalog.format('create role %I nologin', v_role);
    end if;
  end loop;
end
$$;

grant queen_producer, queen_consumer, queen_reader to queen_admin;

create schema queen;
comment on schema queen is
  'pg_queen: durable timers and a partitioned message log. Start with \df+ queen.* or docs/reference.md.';
grant usage on schema queen to queen_producer, queen_consumer, queen_reader, queen_admin;
