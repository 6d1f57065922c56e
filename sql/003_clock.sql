-- The one source of time. Tests replace this function in their own database to move the clock.

create function queen._now()
returns timestamptz
language sql
volatile
parallel safe
return pg_catalog.clock_timestamp();
comment on function queen._now() is 'The clock of pg_queen: the server''s, at the statement, not at the start of the transaction.';
