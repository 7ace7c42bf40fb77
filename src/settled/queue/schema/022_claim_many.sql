-- claim() for requests of one lane each, where nothing is in the way, which is nearly always: one row, with what each lane
-- gave, by its `place` among the entries (from 1). Entries are sorted by (lane, group), and each pair comes once. Those that
-- are not answered, or with status `odd`, were not touched: claim() must look closer.
-- status: ok | empty | leased | odd; `until` says when to look again.
create function claim_many(p_worker text, p_lane bigint[], p_group int[], p_want int[], p_lease uuid[], p_seconds int[])
returns table (place int[], status text[], first_seq bigint[], end_seq bigint[], until timestamptz[], head bigint[])
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
    v_now timestamptz;
begin
    -- A lane may have grown while we waited for a consumer's lock. We take less then, and hear of the rest as news.
    select array_agg(c.place), array_agg(c.status), array_agg(c.start), array_agg(least(c.start + c.want, c.head)),
           array_agg(case when c.status = 'leased' then c.lease_until
                          when c.status = 'ok' and c.lease is not null then clock_timestamp() + make_interval(secs => c.seconds)
                     end),
           array_agg(c.head)
      into place, status, first_seq, end_seq, until, head
      from (select u.place::int, u.want, u.lease, greatest(o.cursor, l.first_seq) as start, l.next_seq as head, o.lease_until,
                   coalesce(u.seconds, q.lease_time) as seconds,
                   case when o.lease_until > clock_timestamp() then 'leased'
                        -- An expired lease leaves what was settled out of order in `done`.
                        when o.odd or l.has_holes or q.delayed > 0 or q.buffered > 0 or q.max_age > 0 or length(o.done) > 0 then 'odd'
                        when l.next_seq <= greatest(o.cursor, l.first_seq) then 'empty'
                        else 'ok' end as status
              from unnest(p_lane, p_group, p_want, p_lease, p_seconds)
                   with ordinality u (lane, grp, want, lease, seconds, place)
              join consumer o on o.lane_id = u.lane and o.group_id = u.grp
              join lane l on l.id = u.lane
              join queue q on q.id = l.queue_id
             order by o.lane_id, o.group_id
               for update of o) c;
    if 'ok' = any (status) then
        v_now := clock_timestamp();
        update consumer c set
               cursor = u.cursor, base = u.cursor, done = u.done, answered = u.done, batch_end = u.stop,
               lease = u.lease, lease_until = u.until,
               consumed = c.consumed + u.settled, last_at = case when u.lease is null then v_now else c.last_at end
          from (select p_lane[w.place] as lane, p_group[w.place] as grp, p_lease[w.place] as lease, w.stop,
                       case when p_lease[w.place] is null then w.stop else w.start end as cursor,
                       case when p_lease[w.place] is null then b'' else repeat('0', (w.stop - w.start)::int)::varbit end as done,
                       w.until,
                       case when p_lease[w.place] is null then w.stop - w.start else 0 end as settled
                  from unnest(place, status, first_seq, end_seq, until) w (place, status, start, stop, until)
                 where w.status = 'ok') u
         where c.lane_id = u.lane and c.group_id = u.grp;
        if array_position(p_lease, null) is not null then
            insert into journal (kind, worker, lanes, groups, firsts, lasts, counts)
            select 'auto_ack', p_worker, array_agg(p_lane[w.place]), array_agg(p_group[w.place]), array_agg(w.start),
                   array_agg(w.stop - 1), array_agg((w.stop - w.start)::int)
              from unnest(place, status, first_seq, end_seq) w (place, status, start, stop)
             where w.status = 'ok' and p_lease[w.place] is null
            having count(*) > 0;
        end if;
    end if;
    return next;
end
$$;
