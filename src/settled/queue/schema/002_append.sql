-- The hashes in a segment, one by one.
create function hash_list(p_hashes bytea) returns setof bytea
language sql immutable as $$
    select h from generate_series(1, length(p_hashes), 8) i, substring(p_hashes from i for 8) h
     where h <> '\x0000000000000000'
$$;

-- Append one segment to each of several lanes, in one transaction, and leave one row of activity.
--
-- p_lane is sorted. p_known is the next_seq the caller last saw of each lane (null: it pushes no ids of clients there,
-- so it does not care). Where another worker appended meanwhile, its segments come back as `missed`, and the lane is
-- refused as `clash` if one of their hashes is among the new ones: the caller then looks closer and tries again.
-- These are separate statements on purpose: each takes a fresh snapshot after the locks were got.
create function append(
    p_worker text, p_queue bigint[], p_lane bigint[], p_known bigint[], p_n int[], p_hashes bytea[], p_body bytea[]
) returns table (lane_id bigint, status text, first_seq bigint, n int, created_at timestamptz, hashes bytea)
language plpgsql as $$
#variable_conflict use_column
declare
    v_lane bigint[]; v_next bigint[]; v_newest timestamptz; v_now timestamptz;
    v_ok boolean[]; v_missed boolean := false; v_all boolean := true; i int; k int; v_from bigint[] := p_known;
begin
    select array_agg(l.id order by l.id), array_agg(l.next_seq order by l.id), max(l.newest_at)
      into v_lane, v_next, v_newest
      from (select id, next_seq, newest_at from lane where id = any (p_lane) order by id for no key update) l;

    if v_lane is distinct from p_lane then  -- some lane was deleted
        v_all := false;
        v_next := array(select (select v_next[j] from generate_subscripts(v_lane, 1) j where v_lane[j] = p_lane[t])
                          from generate_subscripts(p_lane, 1) t order by t);
    end if;
    v_ok := array_fill(true, array[cardinality(p_lane)]);
    for i in 1 .. cardinality(p_lane) loop
        if v_next[i] is null then
            v_ok[i] := false;
            return query select p_lane[i], 'gone', null::bigint, null::int, null::timestamptz, null::bytea;
        elsif p_known[i] <> v_next[i] then
            v_missed := true;
            -- Segments may have been merged across what the caller knows.
            v_from[i] := coalesce((select max(s.first_seq) from segment s
                                    where s.lane_id = p_lane[i] and s.first_seq <= p_known[i]), p_known[i]);
            if exists (select h from segment s, hash_list(s.hashes) h
                        where s.lane_id = p_lane[i] and s.first_seq >= v_from[i] and s.first_seq + s.n > p_known[i]
                       intersect select h from hash_list(p_hashes[i]) h) then
                v_ok[i] := false;
                v_all := false;
            end if;
        end if;
    end loop;

    if v_missed then
        return query
            select s.lane_id, 'missed', s.first_seq, s.n, s.created_at, s.hashes
              from unnest(p_lane, p_known, v_from, v_next) u (lane, known, since, next)
              join segment s on s.lane_id = u.lane and s.first_seq >= u.since and s.first_seq < u.next
             where u.known <> u.next and s.first_seq + s.n > u.known
             order by s.lane_id, s.first_seq;
    end if;

    v_now := greatest(clock_timestamp(), v_newest);
    insert into segment (lane_id, first_seq, n, created_at, hashes, body)
    select u.lane, u.next, u.n, v_now, u.hashes, u.body
      from unnest(p_lane, v_next, p_n, p_hashes, p_body, v_ok) u (lane, next, n, hashes, body, ok)
     where u.ok;
    update lane l set next_seq = u.next + u.n, newest_at = v_now
      from unnest(p_lane, v_next, p_n, v_ok) u (lane, next, n, ok)
     where l.id = u.lane and u.ok;
    if v_all then
        insert into activity (worker, kind, queues, lanes) values (p_worker, 'push', p_queue, p_lane);
    else
        insert into activity (worker, kind, queues, lanes)
        select p_worker, 'push', array_agg(u.queue), array_agg(u.lane)
          from unnest(p_queue, p_lane, v_ok) u (queue, lane, ok) where u.ok having count(*) > 0;
    end if;
    return query
        select u.lane, case when u.ok then 'ok' else 'clash' end, u.next, u.n, v_now, null::bytea
          from unnest(p_lane, v_next, p_n, v_ok) u (lane, next, n, ok)
         where u.next is not null;
end
$$;

-- Make queues and lanes that do not exist yet, in bulk, and answer all of them. Lanes are looked up one by one: joined, all
-- lanes of the queue are read for each as long as nobody has counted them.
create function resolve(p_queue text[], p_partition text[], p_namespace text[], p_task text[], p_options jsonb)
returns table (queue_id bigint, queue text, lane_id bigint, lane_uid uuid, partition text)
language plpgsql as $$
#variable_conflict use_column
begin
    insert into queue (name, namespace, task, options)
    select distinct on (u.queue) u.queue, u.namespace, u.task, p_options
      from unnest(p_queue, p_namespace, p_task) u (queue, namespace, task)
     where not exists (select from queue q where q.name = u.queue)
     order by u.queue
        on conflict (name) do nothing;
    insert into lane (queue_id, name)
    select distinct q.id, u.partition
      from unnest(p_queue, p_partition) u (queue, partition)
      join queue q on q.name = u.queue
     where (select l.id from lane l where l.queue_id = q.id and l.name = u.partition) is null
     order by q.id, u.partition
        on conflict (queue_id, name) do nothing;
    return query
        select q.id, q.name, l.id, l.uid, l.name
          from unnest(p_queue, p_partition) u (queue, partition)
          join queue q on q.name = u.queue
         cross join lateral (select * from lane l where l.queue_id = q.id and l.name = u.partition offset 0) l;
end
$$;
