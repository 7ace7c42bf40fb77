-- Create a queue, or change its configuration, and tell the other workers. p_options are the options to change; the others keep
-- their value, as namespace and task do where they are null. A new queue, and with p_replace a known one, begins with p_defaults.
create function configure(
    p_worker text, p_name text, p_namespace text, p_task text, p_defaults jsonb, p_options jsonb, p_replace boolean
) returns bigint
language plpgsql as $$
declare
    v_id bigint;
begin
    insert into queue as q (name, namespace, task, options)
    values (p_name, coalesce(p_namespace, ''), coalesce(p_task, ''), p_defaults || p_options)
        on conflict (name) do update
       set namespace = case when p_replace then excluded.namespace else coalesce(p_namespace, q.namespace) end,
           task = case when p_replace then excluded.task else coalesce(p_task, q.task) end,
           options = case when p_replace then excluded.options else p_defaults || q.options || p_options end,
           changed = pg_current_xact_id()
    returning id into v_id;
    insert into lane (queue_id, name) values (v_id, 'Default') on conflict (queue_id, name) do nothing;
    delete from room where queue_id = v_id;  -- without a limit nobody counted
    insert into activity (worker, kind, queues, lanes) values (p_worker, 'config', array[v_id], '{}');
    return v_id;
end
$$;

-- Delete a queue and all under it. Readers are locked before lanes and those before consumers, each in order, as everywhere.
create function delete_queue(p_worker text, p_name text) returns boolean
language plpgsql as $$
declare
    v_id bigint; v_lanes bigint[]; v_readers int[];
begin
    select id into v_id from queue where name = p_name for update;
    if not found then
        return false;
    end if;
    v_readers := array(select r.id from (select id from reader where queue_id = v_id order by id for update) r);
    v_lanes := array(select l.id from (select id from lane where queue_id = v_id order by id for update) l);
    perform from consumer where lane_id = any (v_lanes) order by lane_id, group_id for update;
    delete from segment where lane_id = any (v_lanes);
    delete from consumer where lane_id = any (v_lanes);
    delete from exception where lane_id = any (v_lanes);
    delete from lost_lease where lane_id = any (v_lanes);
    delete from hole where lane_id = any (v_lanes);
    delete from scheduled where lane_id = any (v_lanes);
    delete from trace where lane_id = any (v_lanes);
    delete from stream_state where lane_id = any (v_lanes);
    delete from dead_letter where queue_id = v_id;
    delete from redriven where queue = p_name;
    delete from subscription where queue_id = v_id;
    delete from staged_outcome where lane_id = any (v_lanes);
    delete from staged_segment where source_lane = any (v_lanes);
    delete from manifest_range where reader_id = any (v_readers);
    delete from manifest where reader_id = any (v_readers);
    delete from reader where id = any (v_readers);
    delete from lane where queue_id = v_id;
    delete from room where queue_id = v_id;
    delete from queue where id = v_id;
    insert into activity (worker, kind, queues, lanes) values (p_worker, 'config', array[v_id], '{}');
    return true;
end
$$;

-- Drop all messages of a queue, or of one of its lanes; groups go on with what comes next.
create function clear_queue(p_worker text, p_queue bigint, p_partition text) returns bigint
language plpgsql as $$
declare
    v_lanes bigint[]; v_count bigint;
begin
    select array_agg(l.id), coalesce(sum(l.next_seq - l.first_seq), 0) into v_lanes, v_count
      from (select id, next_seq, first_seq from lane
             where queue_id = p_queue and (p_partition is null or name = p_partition) order by id for no key update) l;
    perform from consumer where lane_id = any (v_lanes) order by lane_id, group_id for update;
    update consumer c set cursor = l.next_seq, base = l.next_seq, done = b'', answered = b'', parked_out = '{}', lease = null,
           lease_until = null, odd = false, next_due = null
      from lane l where l.id = c.lane_id and c.lane_id = any (v_lanes);
    delete from segment where lane_id = any (v_lanes);
    delete from exception where lane_id = any (v_lanes);
    delete from lost_lease where lane_id = any (v_lanes);
    delete from hole where lane_id = any (v_lanes);
    delete from scheduled where lane_id = any (v_lanes);
    update lane set first_seq = next_seq, has_holes = false where id = any (v_lanes);
    insert into activity (worker, kind, queues, lanes) values (p_worker, 'reset', array[p_queue], '{}');
    return v_count;
end
$$;

-- Move a group's cursors on a queue (or one lane): 'end', 'beginning', or the first message after p_at. Leases end,
-- failures are forgotten. Lanes the group has not touched follow through its subscription.
create function seek(p_worker text, p_group int, p_queue bigint, p_partition text, p_to text, p_at timestamptz) returns int
language plpgsql as $$
declare
    v_lanes bigint[]; v_count int; v_now timestamptz := clock_timestamp();
begin
    update queue set changed = pg_current_xact_id() where id = p_queue;
    v_lanes := array(select l.id from lane l where l.queue_id = p_queue and (p_partition is null or l.name = p_partition));
    if p_partition is null then
        insert into subscription (group_id, queue_id, mode, starts_at)
        values (p_group, p_queue, case p_to when 'beginning' then 'all' when 'end' then 'new' else 'timestamp' end,
                case p_to when 'beginning' then null when 'end' then v_now else p_at end)
            on conflict (group_id, queue_id) do update set mode = excluded.mode, starts_at = excluded.starts_at;
    else
        insert into consumer (lane_id, group_id, cursor, base)
        select l, p_group, s, s from unnest(v_lanes) l, start_of(p_group, l) s order by l on conflict do nothing;
    end if;
    perform from consumer where lane_id = any (v_lanes) and group_id = p_group order by lane_id for update;
    perform take_away(p_worker, p_group, v_lanes);
    with place as (
        select l.id, case p_to
                       when 'end' then l.next_seq
                       when 'beginning' then l.first_seq
                       else coalesce((select s.first_seq + passed(s.times, p_at) from segment s
                                       where s.lane_id = l.id and s.created_at > p_at
                                       order by s.first_seq limit 1), l.next_seq)
                     end as seq
          from lane l where l.id = any (v_lanes)
    ), moved as (
        update consumer c set cursor = p.seq, base = p.seq, done = b'', answered = b'', parked_out = '{}', lease = null,
               lease_until = null, odd = false, next_due = null
          from place p where p.id = c.lane_id and c.group_id = p_group
        returning c.lane_id, c.cursor
    )
    insert into journal (kind, worker, lanes, groups, firsts, lasts, counts)
    select 'seek', p_worker, array_agg(m.lane_id), array_agg(p_group), array_agg(m.cursor), array_agg(m.cursor), array_agg(0)
      from moved m having count(*) > 0;
    delete from exception where lane_id = any (v_lanes) and group_id = p_group;
    select count(*) into v_count from consumer where lane_id = any (v_lanes) and group_id = p_group;
    insert into activity (worker, kind, queues, lanes) values (p_worker, 'reset', array[p_queue], '{}');
    return v_count;
end
$$;

-- Note that a group begins anew on queues, for workers that remember otherwise. Queues are locked before all else, in order.
create function reopen(p_worker text, p_queues bigint[]) returns void
language plpgsql as $$
begin
    perform from queue where id = any (p_queues) order by id for no key update;
    update queue set changed = pg_current_xact_id() where id = any (p_queues);
    insert into activity (worker, kind, queues, lanes)
    select p_worker, 'reset', p_queues, '{}' where cardinality(p_queues) > 0;
end
$$;

-- Move where a group starts on lanes it has not touched yet, on one queue or all; returns the queues.
create function move_subscription(p_worker text, p_group int, p_queue bigint, p_at timestamptz) returns bigint[]
language plpgsql as $$
declare
    v_queues bigint[];
begin
    v_queues := array(select s.queue_id from subscription s
                       where s.group_id = p_group and (p_queue is null or s.queue_id = p_queue));
    perform reopen(p_worker, v_queues);
    update subscription set mode = 'timestamp', starts_at = p_at where group_id = p_group and queue_id = any (v_queues);
    return v_queues;
end
$$;

-- Forget a group's cursors on one queue or all; with p_metadata also where it wanted to start.
create function forget_group(p_worker text, p_group int, p_queue bigint, p_metadata boolean)
returns table (partitions int, subscriptions int)
language plpgsql as $$
declare
    v_lanes bigint[];
begin
    perform reopen(p_worker, array(
        select l.queue_id from consumer c join lane l on l.id = c.lane_id
         where c.group_id = p_group and (p_queue is null or l.queue_id = p_queue)
        union
        select s.queue_id from subscription s where s.group_id = p_group and (p_queue is null or s.queue_id = p_queue)));
    v_lanes := array(select l.lane_id from (
        select c.lane_id from consumer c join lane l on l.id = c.lane_id
         where c.group_id = p_group and (p_queue is null or l.queue_id = p_queue)
         order by c.lane_id for update of c) l);
    perform take_away(p_worker, p_group, v_lanes);
    delete from consumer where lane_id = any (v_lanes) and group_id = p_group;
    delete from exception where lane_id = any (v_lanes) and group_id = p_group;
    subscriptions := 0;
    if p_metadata then
        delete from subscription where group_id = p_group and (p_queue is null or queue_id = p_queue);
        get diagnostics subscriptions = row_count;
    end if;
    partitions := cardinality(v_lanes);
    return next;
end
$$;

-- Take one message out of the log for every group.
create function delete_message(p_worker text, p_lane bigint, p_seq bigint) returns void
language plpgsql as $$
begin
    update lane set has_holes = true where id = p_lane;
    insert into hole (lane_id, seq) values (p_lane, p_seq) on conflict do nothing;
    delete from exception where lane_id = p_lane and seq = p_seq;
end
$$;

-- Retention, a few lanes at a time: whole segments that are too old, or old enough and settled by every group.
-- Answers the last lane looked at (null: the end) and how many messages went.
create function trim_lanes(p_after bigint, p_lanes int, p_segments int)
returns table (last_lane bigint, removed bigint)
language plpgsql as $$
#variable_conflict use_column
declare
    l record; v_bound bigint; v_first bigint; v_now timestamptz := clock_timestamp(); v_queues bigint[];
begin
    removed := 0;
    last_lane := null;
    v_queues := array(select q.id from queue q where (q.options ->> 'retentionEnabled')::boolean);
    if cardinality(v_queues) = 0 then
        return next;
        return;
    end if;
    for l in select l.id, l.first_seq, l.next_seq, (q.options ->> 'retentionSeconds')::int as keep,
                    (q.options ->> 'completedRetentionSeconds')::int as keep_done
               from lane l join queue q on q.id = l.queue_id
              where l.id > p_after and l.queue_id = any (v_queues) and l.next_seq > l.first_seq
              order by l.id limit p_lanes loop
        last_lane := l.id;
        v_bound := null;
        if l.keep > 0 then
            select max(s.first_seq + s.n) into v_bound from (
                select first_seq, n, created_at from segment where lane_id = l.id order by first_seq limit p_segments) s
             where s.created_at < v_now - make_interval(secs => l.keep);
        end if;
        if l.keep_done > 0 then
            select greatest(v_bound, max(s.first_seq + s.n)) into v_bound from (
                select first_seq, n, created_at from segment where lane_id = l.id order by first_seq limit p_segments) s
             where s.created_at < v_now - make_interval(secs => l.keep_done)
               and s.first_seq + s.n <= (
                   select min(least(c.cursor, (select min(e.seq) from exception e
                                                where e.lane_id = c.lane_id and e.group_id = c.group_id)))
                     from consumer c where c.lane_id = l.id);
        end if;
        if v_bound > l.first_seq then
            update lane set first_seq = greatest(first_seq, v_bound) where id = l.id;
            delete from segment where lane_id = l.id and first_seq < v_bound;
            delete from hole where lane_id = l.id and seq < v_bound;
            delete from exception where lane_id = l.id and seq < v_bound;
            removed := removed + v_bound - l.first_seq;
        end if;
    end loop;
    return next;
end
$$;

-- How many messages a lane has from a sequence number on, without those that were deleted by hand.
create function messages_from(l lane, p_seq bigint) returns bigint
language sql stable as $$
    select l.next_seq - greatest(l.first_seq, p_seq) - case when l.has_holes then
        (select count(*) from hole h where h.lane_id = l.id and h.seq >= greatest(l.first_seq, p_seq)) else 0 end
$$;

-- How far groups are behind on each lane.
create function lane_lags(p_queue text, p_group text)
returns table (
    grp text, queue text, partition text, uid uuid, lag bigint, consumed bigint, lease uuid, lease_until timestamptz,
    last_at timestamptz, oldest_at timestamptz, mode text, starts_at timestamptz, subscribed_at timestamptz
) language sql stable as $$
    select g.name as grp, q.name as queue, l.name as partition, l.uid,
           l.next_seq - greatest(l.first_seq, coalesce(c.base, start.seq)) - bit_count(coalesce(c.done, b''))
               + (select count(*) from exception e where e.lane_id = l.id and e.group_id = g.id and e.parked) as lag,
           coalesce(c.consumed, 0) as consumed,
           case when c.lease_until > clock_timestamp() then c.lease end as lease,
           case when c.lease_until > clock_timestamp() then c.lease_until end as lease_until,
           c.last_at,
           case when l.next_seq > greatest(l.first_seq, coalesce(c.cursor, start.seq)) then
               (select coalesce(s.times[greatest(l.first_seq, coalesce(c.cursor, start.seq)) - s.first_seq + 1], s.created_at)
                  from segment s
                 where s.lane_id = l.id and s.first_seq <= greatest(l.first_seq, coalesce(c.cursor, start.seq))
                 order by s.first_seq desc limit 1) end as oldest_at,
           u.mode, u.starts_at, u.created_at as subscribed_at
      from (select distinct c.group_id, l.queue_id from consumer c join lane l on l.id = c.lane_id
            union select s.group_id, s.queue_id from subscription s) pair
      join consumer_group g on g.id = pair.group_id
      join queue q on q.id = pair.queue_id
      join lane l on l.queue_id = pair.queue_id
      left join consumer c on c.lane_id = l.id and c.group_id = pair.group_id
      left join subscription u on u.group_id = pair.group_id and u.queue_id = pair.queue_id
      cross join lateral (select case when u.starts_at is null or l.newest_at > u.starts_at then l.first_seq
                                      else l.next_seq end as seq) start
     where (p_queue is null or q.name = p_queue) and (p_group is null or g.name = p_group)
$$;
