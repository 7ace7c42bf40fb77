-- Make a dead letter of a message that waits for its group, wherever in the lane it is: buried | leased | batch |
-- settled | far. A message under a valid lease is its holder's to settle, and in a batch of a Spark query nobody else's.
-- `done` reaches up to the message, hence the limit.
create function bury(
    p_worker text, p_lane bigint, p_group int, p_seq bigint, p_message uuid, p_transaction text, p_created timestamptz,
    p_headers bytea, p_payload bytea, p_error text
) returns text language plpgsql as $$
#variable_conflict use_column
declare
    c consumer; e exception; q record; v_at int; v_now timestamptz; v_parked boolean;
begin
    insert into consumer (lane_id, group_id, cursor, base)
    select l.id, p_group, s, s from lane l, start_of(p_group, l.id) s where l.id = p_lane on conflict do nothing;
    select * into c from consumer where lane_id = p_lane and group_id = p_group for update;
    select q.*, l.uid as lane_uid, l.name as partition, g.name as consumer_group into q
      from lane l join queue q on q.id = l.queue_id, consumer_group g where l.id = p_lane and g.id = p_group;
    if not found then
        return 'settled';
    end if;
    v_now := clock_timestamp();
    if p_seq - c.base > 4000000 then
        return 'far';
    end if;
    v_at := p_seq - c.base;
    if c.lease_until > v_now and (p_seq = any (c.parked_out)
            or v_at >= 0 and v_at < length(c.answered) and get_bit(c.answered, v_at) = 0) then
        return case when in_batch(p_lane, p_group, c.lease) then 'batch' else 'leased' end;
    end if;
    if c.lease_until <= v_now and in_batch(p_lane, p_group, c.lease) then
        -- Its query is gone. If it comes back, it finds this lane's part of its batch given up.
        c.lease := null;
        c.lease_until := null;
        c.answered := b'';
        c.parked_out := '{}';
    end if;
    select * into e from exception x where x.lane_id = p_lane and x.group_id = p_group and x.seq = p_seq;
    v_parked := found and e.parked;
    if not v_parked and (p_seq < c.cursor or v_at < length(c.done) and get_bit(c.done, v_at) = 1) then
        return 'settled';
    end if;
    delete from exception x where x.lane_id = p_lane and x.group_id = p_group and x.seq = p_seq;
    if not v_parked then
        if length(c.done) <= v_at then
            c.done := c.done || repeat('0', v_at + 1 - length(c.done))::varbit;
        end if;
        c.done := set_bit(c.done, v_at, 1);
    end if;
    if (q.options ->> 'deadLetterQueue')::boolean then
        insert into dead_letter (lane_id, lane_uid, queue_id, queue, partition, consumer_group, seq, message_id,
                                 transaction_id, error, attempts, headers, payload, created_at, unsettled)
        values (p_lane, q.lane_uid, q.id, q.name, q.partition, q.consumer_group, p_seq, p_message, p_transaction, p_error,
                coalesce(e.attempts, 0), p_headers, p_payload, p_created, unsettled_of(p_lane, p_group, p_seq));
    end if;
    update consumer c0 set done = c.done, odd = true, last_at = v_now, consumed = c0.consumed + 1,
           lease = c.lease, lease_until = c.lease_until, answered = c.answered, parked_out = c.parked_out,
           next_due = (select min(x.due) from exception x where x.lane_id = p_lane and x.group_id = p_group)
     where c0.lane_id = p_lane and c0.group_id = p_group;
    insert into journal (at, kind, worker, lanes, groups, firsts, lasts, counts, attempts, error)
    values (v_now, case when (q.options ->> 'deadLetterQueue')::boolean then 'dead' else 'dropped' end, p_worker,
            array[p_lane], array[p_group], array[p_seq], array[p_seq], array[1], coalesce(e.attempts, 0), p_error);
    insert into activity (worker, kind, queues, lanes, groups, until)
    values (p_worker, 'release', array[q.id], array[p_lane], array[p_group], array[null::timestamptz]);
    return 'buried';
end
$$;

-- Let a dead letter's group have its message again, and nobody else: back, with no attempt counted; null where the message,
-- or the group's place in its lane, is gone.
create function put_back(p_worker text, p_id uuid) returns text
language plpgsql as $$
#variable_conflict use_column
declare
    d dead_letter; v_group int;
begin
    -- The queue first, as everywhere: a worker that believes the lane empty must read it again.
    update queue set changed = pg_current_xact_id() where id = (select x.queue_id from dead_letter x where x.id = p_id);
    select * into d from dead_letter where id = p_id for update;
    select c.group_id into v_group from consumer c join consumer_group g on g.id = c.group_id
     where c.lane_id = d.lane_id and g.name = d.consumer_group for update of c;
    if not found or created_of(d.lane_id, d.seq) is null
       or exists (select from hole h where h.lane_id = d.lane_id and h.seq = d.seq)
       or exists (select from exception e where e.lane_id = d.lane_id and e.group_id = v_group and e.seq = d.seq) then
        return null;
    end if;
    insert into exception (lane_id, group_id, seq, attempts, due, parked)
    values (d.lane_id, v_group, d.seq, 0, clock_timestamp(), true);
    update consumer set odd = true, next_due = least(next_due, clock_timestamp())
     where lane_id = d.lane_id and group_id = v_group;
    delete from dead_letter where id = p_id;
    insert into activity (worker, kind, queues, lanes, groups, until)
    values (p_worker, 'release', array[d.queue_id], array[d.lane_id], array[v_group], array[null::timestamptz]);
    return 'back';
end
$$;
