-- A lease that ended before its holder had given a verdict on all of it. `held` has a bit for each message from base on, 1 where
-- there was no verdict; `parked` are those that had been parked. times: how often a lease of just these expired; 0: it was taken
-- from its holder, by a seek or with its group, and charges nobody. last_out: the lease under which one of them is out alone, for
-- the last time. Rows with a count go when all of their messages are settled, the others after a day.
create table lost_lease (
    lane_id bigint not null,
    group_id int not null,
    base bigint not null,
    held varbit not null,
    parked bigint[] not null default '{}',
    times int not null,
    last_out uuid,
    at timestamptz not null default clock_timestamp()
);
create index lost_lease_by_lane on lost_lease (lane_id, group_id);
create index lost_lease_by_group on lost_lease (group_id) where last_out is not null;

alter table queue add column unsettled_limit int not null generated always as (
    coalesce((options ->> 'unsettledLimit')::int, 10)) stored;
alter table dead_letter add column unsettled int not null default 0;

-- Whether a message was under a lost lease without a verdict.
create function had_lost(o lost_lease, p_seq bigint) returns boolean
language sql immutable as $$
    select p_seq = any (o.parked)
           or case when p_seq >= o.base and p_seq < o.base + length(o.held)
                   then get_bit(o.held, (p_seq - o.base)::int) = 1 else false end
$$;

-- How many deliveries of a message to a group ended without a verdict.
create function unsettled_of(p_lane bigint, p_group int, p_seq bigint) returns int
language sql stable as $$
    select coalesce(sum(o.times), 0)::int from lost_lease o
     where o.lane_id = p_lane and o.group_id = p_group and had_lost(o, p_seq)
$$;

-- The messages of a lost lease that are still to be settled, as bits from the group's cursor on.
create function still_held(o lost_lease, p_cursor bigint, p_done varbit) returns varbit
language sql immutable as $$
    select h.bits & ~(case when length(p_done) >= length(h.bits) then substring(p_done from 1 for length(h.bits))
                           else p_done || repeat('0', length(h.bits) - length(p_done))::varbit end)
      from (select case when p_cursor > o.base then substring(o.held from (p_cursor - o.base + 1)::int)
                        else repeat('0', (o.base - p_cursor)::int)::varbit || o.held end as bits) h
$$;

-- Note that a lease is over although its holder has not answered for all of it. A batch of a Spark query is not counted: its
-- query comes back to it, or gives it up as a whole.
create function note_lost(p_worker text, c consumer, p_times int) returns void
language plpgsql as $$
declare
    v_held varbit := ~c.answered; v_first int := position(b'1' in ~c.answered);
begin
    if v_first = 0 and cardinality(c.parked_out) = 0 or in_batch(c.lane_id, c.group_id, c.lease) then
        return;
    end if;
    update lost_lease set times = times + p_times
     where lane_id = c.lane_id and group_id = c.group_id and base = c.base and held = v_held and parked = c.parked_out
       and (times > 0) = (p_times > 0);
    if not found then
        insert into lost_lease (lane_id, group_id, base, held, parked, times)
        values (c.lane_id, c.group_id, c.base, v_held, c.parked_out, p_times);
    end if;
    if p_times > 0 then
        insert into journal (kind, worker, lanes, groups, leases, firsts, lasts, counts)
        select 'expired', p_worker, array[c.lane_id], array[c.group_id], array[c.lease],
               array[least(v_parked.first, c.base + nullif(v_first, 0) - 1)],
               array[greatest(v_parked.last, c.base + nullif(length(rtrim(v_held::text, '0')), 0) - 1)],
               array[(bit_count(v_held) + cardinality(c.parked_out))::int]
          from (select min(p) as first, max(p) as last from unnest(c.parked_out) p) v_parked;
    end if;
end
$$;

-- Forget lost leases whose messages are all settled; answers whether others are left.
create function tidy_lost(p_lane bigint, p_group int, p_cursor bigint, p_done varbit) returns boolean
language plpgsql as $$
begin
    delete from lost_lease o
     where o.lane_id = p_lane and o.group_id = p_group and o.times > 0
       and bit_count(still_held(o, p_cursor, p_done)) = 0
       and not exists (select from exception e where e.lane_id = p_lane and e.group_id = p_group and had_lost(o, e.seq));
    return exists (select from lost_lease o where o.lane_id = p_lane and o.group_id = p_group and o.times > 0);
end
$$;

-- How many of the next p_want messages to hand out; null: none of them was under a lost lease. All; after two leases without a verdict a quarter of what was out then, so
-- that the message that ends its consumers is soon alone; and one, where the next loss is the last.
create function piece_of(p_lane bigint, p_group int, p_cursor bigint, p_done varbit, p_want int, p_limit int) returns int
language plpgsql as $$
declare
    v_times bigint; v_size bigint;
begin
    select sum(o.times), min(bit_count(o.held) + cardinality(o.parked)) into v_times, v_size
      from lost_lease o
     where o.lane_id = p_lane and o.group_id = p_group and o.times > 0
       and (bit_count(substring(still_held(o, p_cursor, p_done) from 1 for p_want)) > 0
            or exists (select from exception e where e.lane_id = p_lane and e.group_id = p_group and e.parked
                          and e.due <= clock_timestamp() and had_lost(o, e.seq)));
    return case when v_times is null then null
                when v_times + 1 >= p_limit then 1
                when v_times < 2 then p_want
                else least(p_want, (v_size + 3) / 4) end;
end
$$;

-- Whether a message may be handed out: not if it had so many deliveries without a verdict, and was alone in one (unsettled); and
-- not yet (blocked), if this is its last one and another one of the queue is out to the group for its last time. So what ends
-- a consumer that holds many leases is found out alone, and the others go free.
create function trial_of(p_lane bigint, p_group int, p_seq bigint, p_lease uuid, p_limit int) returns text
language plpgsql as $$
declare
    v_count int := unsettled_of(p_lane, p_group, p_seq);
begin
    if v_count + 1 < p_limit or v_count = 0 then
        return null;
    elsif v_count >= p_limit
          and exists (select from lost_lease o where o.lane_id = p_lane and o.group_id = p_group and o.times > 0
                         and had_lost(o, p_seq) and bit_count(o.held) + cardinality(o.parked) = 1) then
        return 'unsettled';
    elsif not pg_try_advisory_xact_lock(96631520, p_group)
          or exists (select from lost_lease o
                       join consumer c on c.lane_id = o.lane_id and c.group_id = o.group_id and c.lease = o.last_out
                       join lane l on l.id = o.lane_id
                      where o.group_id = p_group and o.last_out is not null and c.lease_until > clock_timestamp()
                        and l.queue_id = (select queue_id from lane where id = p_lane)) then
        return 'blocked';
    end if;
    update lost_lease o set last_out = p_lease
     where o.lane_id = p_lane and o.group_id = p_group and o.times > 0 and had_lost(o, p_seq);
    return null;
end
$$;

-- A group is moved, or forgotten, while its leases are out: what their holders did not settle is charged to nobody, but they may
-- still come and try.
create function take_away(p_worker text, p_group int, p_lanes bigint[]) returns void
language plpgsql as $$
begin
    update lost_lease set times = 0, last_out = null, at = clock_timestamp()
     where group_id = p_group and lane_id = any (p_lanes) and times > 0;
    perform note_lost(p_worker, c, 0) from consumer c
      where c.group_id = p_group and c.lane_id = any (p_lanes) and c.lease is not null;
end
$$;
