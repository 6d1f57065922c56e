-- Maintenance of the log. The body below is a standard one, so its tables are resolved when the extension is created:
-- a leg on queen.log_timers, which is made in 025, fails CREATE EXTENSION instead of making maintenance quadratic.

create function queen.log_partition_dead(p_partition_id bigint)
returns boolean
language sql
stable
begin atomic
    select exists (select from queen.log_partitions p
                    where p.id = p_partition_id
                      and p.log_start > p.last_offset
                      and p.txns_start > p.last_offset)
       and not exists (select from queen.log_segments s where s.partition_id = p_partition_id)
       and not exists (select from queen.log_consumers c
                        where c.partition_id = p_partition_id and c.lease_expires_at > queen._now());
end;
comment on function queen.log_partition_dead(bigint) is
  'Whether nothing is left of a partition: no segment, no remembered txn, no live lease. Timers are no leg of it: they name'
  ' their destination and make it again at the fire.';
