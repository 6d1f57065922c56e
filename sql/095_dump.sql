-- Tables of an extension are dumped only when they are marked; all of ours hold user data, the sequences too.
do $$
declare
  v_rel regclass;
begin
  for v_rel in
    select c.oid::regclass
      from pg_catalog.pg_class c
     where c.relnamespace = 'queen'::regnamespace and c.relkind in ('r', 'S')
  loop
    perform pg_catalog.pg_extension_config_dump(v_rel, '');
  end loop;
end
$$;
