-- The resident sweeper in the mode "lease": claim in one transaction, fire in the next, as a firer outside would. A
-- setting, for comparison and for those who want no long row locks; the default is row locks in one transaction.

create function queen._sweep_claim(p_state queen._sweep_state)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
as $$
begin
  with claimed as materialized (
    select c.tenant_id, c.queue, c.timer_key, c."partition", c.claim_token
      from queen.log_timers_claim(null, interval '30 seconds', p_state.max_rows) c
  )
  select array_agg(c.tenant_id), array_agg(c.queue), array_agg(c.timer_key), array_agg(c.claim_token),
         (select array_agg(row(g.tenant_id, g.queue, g.part, null, 'missing', null, null, null, null)::queen._group)
            from (select distinct m.tenant_id, m.queue, m."partition" as part from claimed m offset 0) g
           where queen._name_problem(g.queue, 255) is null and queen._name_problem(g.part, 255) is null
             and queen._partition_id(g.tenant_id, g.queue, g.part) is null)
    into p_state.tenants, p_state.queues, p_state.keys, p_state.tokens, p_state.stuck
    from claimed c;
  if exists (select from queen.queue_pauses) or exists (select from queen.log_busy) then
    -- A claim leaves them out; they are not to be read each time.
    p_state.stuck := p_state.stuck || array(
      select row(g.tenant_id, g.queue, g.part, null, 'paused', array_agg(g.tid order by g.deliver_at, g.timer_key collate "C"), null, null, null)::queen._group
        from (select v.* from queen._timers_by_time v where v.visible_at <= queen._now() order by v.visible_at limit p_state.max_rows) g
       where queen._waits(g.tenant_id, g.queue, g.part, queen._now())
       group by g.tenant_id, g.queue, g.part);
    p_state.stuck := nullif(p_state.stuck, '{}');
  end if;
  p_state.passes := p_state.passes + 1;
  p_state.wait := case when p_state.tokens is null then 0.005 else 0 end;
  return p_state;
end
$$;
comment on function queen._sweep_claim(queen._sweep_state) is 'Leases due timers; the next step fires them.';

create function queen._sweep_fire_leased(p_state queen._sweep_state)
returns queen._sweep_state
language plpgsql
volatile
set search_path = pg_catalog, queen, pg_temp
set enable_seqscan = off
set jit = off
as $$
declare
  v_fire record;
  v_state text;
  v_message text;
  v_all boolean := false;
  v_half int := cardinality(p_state.tokens) / 2;
begin
  begin
    v_fire := queen._fire_claims(p_state.tenants, p_state.queues, p_state.keys, p_state.tokens, false);
    p_state.fired := p_state.fired + (select count(*) from unnest(v_fire.statuses) as s (status) where s.status = 'fired');
    p_state.late := queen._add(p_state.late, v_fire.late);
    p_state.failed := p_state.failed + (select count(*) from unnest(v_fire.statuses) as s (status) where s.status = 'failed');
    v_all := 'fired' = all (v_fire.statuses);
  exception when others then
    get stacked diagnostics v_state = returned_sqlstate, v_message = message_text;
    if queen._transient(v_state) then
      p_state.errors := p_state.errors + 1;
      p_state.error := format('%s (%s)', v_message, v_state);
      perform queen.log_timers_fail(p_state.tenants, p_state.queues, p_state.keys, p_state.tokens, null, interval '100 milliseconds', false);
    elsif v_half = 0 then
      perform queen.log_timers_fail(p_state.tenants, p_state.queues, p_state.keys, p_state.tokens, format('%s (%s)', v_message, v_state));
      p_state.failed := p_state.failed + 1;
    else
      -- One row spoils the batch: the first half is tried in the next step, the rest is due again at once.
      perform queen.log_timers_fail(p_state.tenants[v_half + 1:], p_state.queues[v_half + 1:], p_state.keys[v_half + 1:],
        p_state.tokens[v_half + 1:], null, interval '0', false);
      p_state.tenants := p_state.tenants[:v_half];
      p_state.queues := p_state.queues[:v_half];
      p_state.keys := p_state.keys[:v_half];
      p_state.tokens := p_state.tokens[:v_half];
      return p_state;
    end if;
  end;
  -- A claim of a colleague locks rows in passing that it then does not take: ours, and to be tried again.
  select array_agg(t.tenant_id), array_agg(t.queue), array_agg(t.timer_key), array_agg(t.claim_token)
    into p_state.tenants, p_state.queues, p_state.keys, p_state.tokens
    from unnest(p_state.tenants, p_state.queues, p_state.keys, p_state.tokens) as u (tenant_id, queue, timer_key, token)
    join queen.log_timers t on t.tenant_id = u.tenant_id and t.queue = u.queue and t.timer_key = u.timer_key
   where t.claim_token = u.token and t.claimed_until > queen._now()
     and not v_all;
  p_state.wait := case when p_state.tokens is null then 0 else 0.005 end;
  return p_state;
end
$$;
comment on function queen._sweep_fire_leased(queen._sweep_state) is 'Fires what the step before leased, halving the batch around a bad row.';
