-- Short ways through the two calls that are made most often. Their statements are planned once: planning them anew for each
-- length of the arrays costs more than running them.

-- append() where nothing is in the way, which is nearly always: one row, status `all`, with the first sequence number of
-- each lane in `firsts`. Otherwise what append() answers; or, and nothing is appended, the lanes in which ids wait for their
-- time, as `later`, but for those in p_looked, where the caller has looked for its own among them (null: it need not).
create function append_many(
    p_worker text, p_queue bigint[], p_lane bigint[], p_known bigint[], p_n int[], p_hashes bytea[], p_body bytea[],
    p_looked bigint[]
) returns table (
    lane_id bigint, status text, first_seq bigint, n int, created_at timestamptz, hashes bytea, firsts bigint[]
) language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
    v_lane bigint[]; v_next bigint[]; v_newest timestamptz; v_now timestamptz;
begin
    select array_agg(l.id), array_agg(l.next_seq), max(l.newest_at) into v_lane, v_next, v_newest
      from (select id, next_seq, newest_at from lane where id = any (p_lane) order by id for no key update) l;
    if exists (select from scheduled s
                where s.lane_id = any (p_lane) and s.lane_id <> all (p_looked) and s.transaction_id is not null) then
        return query
            select distinct s.lane_id, 'later', null::bigint, null::int, null::timestamptz, null::bytea, null::bigint[]
              from scheduled s
             where s.lane_id = any (p_lane) and s.lane_id <> all (p_looked) and s.transaction_id is not null;
        return;
    end if;
    if v_lane is distinct from p_lane
       or (p_known <> v_next and exists (select from unnest(p_known, v_next) u (known, next) where u.known <> u.next)) then
        return query select a.*, null::bigint[] from append(p_worker, p_queue, p_lane, p_known, p_n, p_hashes, p_body) a;
        return;
    end if;

    v_now := greatest(clock_timestamp(), v_newest);
    with u as materialized (
        select * from unnest(p_lane, v_next, p_n, p_hashes, p_body) u (lane, next, n, hashes, body)
    ), s as (
        insert into segment (lane_id, first_seq, n, created_at, hashes, body)
        select u.lane, u.next, u.n, v_now, u.hashes, u.body from u
    ), l as (
        update lane l set next_seq = u.next + u.n, newest_at = v_now from u where l.id = u.lane
    )
    insert into activity (worker, kind, queues, lanes) values (p_worker, 'push', p_queue, p_lane);
    status := 'all'; created_at := v_now; firsts := v_next;
    return next;
end
$$;

-- settle() of acks alone where nothing is in the way, which is nearly always: one row, status `all`, with the lanes whose
-- lease is over: `released` in the order of p_lane, and `pending` for those that have more to read. Other workers are told of
-- both: who saw the lease waits for its end otherwise. Otherwise one row, status `odd`, and nothing changed: settle() must
-- look closer.
create function settle_acks(
    p_worker text, p_lane bigint[], p_group int[], p_lease uuid[], p_bits varbit[],
    p_first bigint[], p_last bigint[], p_count int[], p_took real[]
) returns table (status text, released boolean[], pending boolean[])
language plpgsql set plan_cache_mode = force_generic_plan as $$
#variable_conflict use_column
declare
    v_fine int; v_now timestamptz; v_cursor bigint[]; v_done varbit[]; v_queue bigint[];
begin
    -- A settled prefix is looked for only where it may have grown: behind the cursor everything is settled.
    select count(*) filter (where c.fine), array_agg(c.done), array_agg(bit_count(c.done) = length(c.done)),
           array_agg(case when bit_count(c.done) = length(c.done) then c.base + length(c.done)
                     else c.cursor + position(b'0' in substring(c.done from (c.cursor - c.base)::int + 1)) - 1 end)
      into v_fine, v_done, released, v_cursor
      from (select o.cursor, o.base,
                   case when length(o.done) = length(u.bits) then o.done | u.bits else o.done end as done,
                   not o.odd and o.lease = u.lease and o.lease_until > clock_timestamp()
                   and length(o.answered) = length(u.bits) and bit_count(o.answered & u.bits) = 0 as fine
              from unnest(p_lane, p_group, p_lease, p_bits) u (lane, grp, lease, bits)
              join consumer o on o.lane_id = u.lane and o.group_id = u.grp
             order by o.lane_id, o.group_id
               for update of o) c;
    if v_fine is distinct from cardinality(p_lane) then
        status := 'odd'; released := null;
        return next;
        return;
    end if;

    v_now := clock_timestamp();
    update consumer c set
           cursor = u.cursor,
           base = case when u.released then u.cursor else c.base end,
           done = case when u.released then b'' else u.done end,
           answered = case when u.released then b'' else u.done end,
           lease = case when u.released then null else c.lease end,
           lease_until = case when u.released then null else c.lease_until end,
           consumed = c.consumed + u.count, last_at = v_now
      from unnest(p_lane, p_group, v_cursor, v_done, released, p_count) u (lane, grp, cursor, done, released, count)
     where c.lane_id = u.lane and c.group_id = u.grp;
    insert into journal (kind, worker, lanes, groups, leases, firsts, lasts, counts, took)
    values ('settled', p_worker, p_lane, p_group, p_lease, p_first, p_last, p_count, p_took);
    if true = any (released) then
        select array_agg(u.released and l.next_seq > u.cursor order by u.place),
               array_agg(l.queue_id order by u.place) into pending, v_queue
          from unnest(p_lane, v_cursor, released) with ordinality u (lane, cursor, released, place)
          left join lane l on l.id = u.lane;
        if true = any (pending) then
            insert into activity (worker, kind, queues, lanes, groups, until)
            select p_worker, 'release', array_agg(u.queue), array_agg(u.lane), array_agg(u.grp), array_agg(null::timestamptz)
              from unnest(v_queue, p_lane, p_group, pending) u (queue, lane, grp, pending) where u.pending;
        end if;
        if pending is distinct from released then
            insert into activity (worker, kind, queues, lanes, groups)
            select p_worker, 'free', array_agg(u.queue), array_agg(u.lane), array_agg(u.grp)
              from unnest(v_queue, p_lane, p_group, released, pending) u (queue, lane, grp, released, pending)
             where u.released and u.pending is false having count(*) > 0;
        end if;
    end if;
    status := 'all';
    return next;
end
$$;
