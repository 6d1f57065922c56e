-- Partitions cool: one that nothing was appended to for a moment leaves the hot set, and every group of its queue gets a
-- consumer row that says whether it is behind. From then on only those who have something to read there see it.
--
-- Never waits for a consumer: a partition with a locked row, or a queue that a group is joining (FOR SHARE against its
-- NO KEY UPDATE), stays hot for another round.

create function queen._cool(p_after bigint, p_limit int, p_now timestamptz, out last_id bigint, out cooled int)
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
set jit = off
as $$
declare
  v_pids bigint[];
begin
  select max(w.id), array_agg(w.id) filter (where w.last_created_at < p_now - interval '1 second') into last_id, v_pids
    from (select p.id, p.last_created_at
            from queen.log_partitions p
           where p.hot and p.id > p_after
           order by p.id
           limit p_limit) w;
  cooled := 0;
  if v_pids is null then
    return;
  end if;
  select array_agg(l.id) into v_pids
    from (select p.id
            from queen.log_partitions p
           where p.id = any (v_pids)
             and p.queue_id in (select s.id from (
                   select q.id from queen.queues q
                    where q.id in (select x.queue_id from queen.log_partitions x where x.id = any (v_pids))
                    order by q.id
                      for share skip locked) s)
           order by p.id
             for update of p skip locked) l;

  insert into queen.log_consumers (partition_id, queue_id, consumer_group, committed, behind, updated_at)
  select p.id, p.queue_id, g.consumer_group, p.log_start - 1, true, p_now
    from queen.log_partitions p
    join queen.log_groups g on g.queue_id = p.queue_id
   where p.id = any (v_pids)
     and not exists (select from queen.log_consumers c where c.partition_id = p.id and c.consumer_group = g.consumer_group)
   order by p.id, g.consumer_group
  on conflict on constraint log_consumers_pkey do nothing;

  with held as materialized (
    select c.partition_id, c.consumer_group, c.behind, c.committed
      from queen.log_consumers c
     where c.partition_id = any (v_pids)
     order by c.partition_id, c.consumer_group
       for update skip locked
  ), whole as materialized (
    select p.id, p.last_offset, p.log_start
      from queen.log_partitions p
     where p.id = any (v_pids)
       and (select count(*) from held h where h.partition_id = p.id)
         = (select count(*) from queen.log_consumers c where c.partition_id = p.id)
  ), marked as (
    update queen.log_consumers c
       set behind = greatest(h.committed, w.log_start - 1) < w.last_offset
      from held h
      join whole w on w.id = h.partition_id
     where c.partition_id = h.partition_id and c.consumer_group = h.consumer_group
       and h.behind <> (greatest(h.committed, w.log_start - 1) < w.last_offset)
  ), cold as (
    update queen.log_partitions p set hot = false from whole w where p.id = w.id returning 1
  )
  select count(*) into cooled from cold;
end
$$;
comment on function queen._cool(bigint, int, timestamptz) is
  'Takes hot partitions that rest, by id behind p_after, at most p_limit, out of the hot set. Returns the last id it looked at'
  ' (null: none left) and how many it cooled.';
