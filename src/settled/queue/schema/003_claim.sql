-- How many messages of a segment are not after a time, of a segment that is: only a merged one has several times.
create function passed(p_times timestamptz[], p_at timestamptz) returns int
language sql immutable as $$
    select case when p_times is null then 0 else (select count(*)::int from unnest(p_times) t where t <= p_at) end
$$;

-- When a message was appended.
create function created_of(p_lane bigint, p_seq bigint) returns timestamptz
language sql stable as $$
    select coalesce(s.times[p_seq - s.first_seq + 1], s.created_at) from segment s
     where s.lane_id = p_lane and s.first_seq <= p_seq order by s.first_seq desc limit 1
$$;

-- Where a group begins on a lane it has not touched: at the first message kept, or after its subscription's time.
create function start_of(p_group int, p_lane bigint) returns bigint
language sql stable as $$
    select case
             when s.starts_at is null then l.first_seq
             else coalesce((select g.first_seq + passed(g.times, s.starts_at) from segment g
                             where g.lane_id = l.id and g.created_at > s.starts_at
                             order by g.first_seq limit 1), l.next_seq)
           end
      from lane l
      left join subscription s on s.queue_id = l.queue_id and s.group_id = p_group
     where l.id = p_lane
$$;

-- Put a group at the beginning of a lane it has not touched, and lock it there.
create function begin_consumer(p_lane bigint, p_group int) returns void
language plpgsql as $$
begin
    insert into consumer (lane_id, group_id, cursor, base)
    select l.id, p_group, s, s from lane l, start_of(p_group, l.id) s where l.id = p_lane
        on conflict do nothing;
    perform from consumer c where c.lane_id = p_lane and c.group_id = p_group for update;
end
$$;

-- Undo a claim whose messages could not be read: its lease is over, or they come again as if they had been parked.
create function take_back(p_lane bigint, p_group int, p_lease uuid, p_seq bigint[], p_attempts int[]) returns void
language plpgsql as $$
begin
    if p_lease is null then
        update queue set changed = pg_current_xact_id() where id = (select l.queue_id from lane l where l.id = p_lane);
    end if;
    insert into activity (worker, kind, queues, lanes, groups, until)  -- of nobody: the one who claimed hears it, too
    select '', 'release', array[l.queue_id], array[l.id], array[p_group], array[null::timestamptz] from lane l where l.id = p_lane;
    if p_lease is not null then
        update consumer set lease = null, lease_until = null  -- nobody has seen them: no delivery is lost
         where lane_id = p_lane and group_id = p_group and lease = p_lease;
        return;
    end if;
    perform from consumer where lane_id = p_lane and group_id = p_group for update;
    insert into exception (lane_id, group_id, seq, attempts, due, parked)
    select p_lane, p_group, u.seq, u.attempts, clock_timestamp(), true from unnest(p_seq, p_attempts) u (seq, attempts)
        on conflict do nothing;
    update consumer set odd = true, next_due = least(next_due, clock_timestamp()), consumed = consumed - cardinality(p_seq)
     where lane_id = p_lane and group_id = p_group;
end
$$;

-- Hand out messages of several lanes to several requests. Entries are sorted by (lane, group), the one order in which
-- consumers are locked. All entries of a request share its lease and its p_want; no lease: settled at once.
-- p_older_than is for what is too old: it waits for no retry. p_turns says in which order the entries are served, where a request has several; null is their own.
-- status: ok | empty | leased | blocked | window | gone; `until` says when to look again. A lane is `blocked` by what waits at
-- its head; where nothing follows the cursor it is `empty`, though a parked message comes due. Or overdue | unsettled:
-- the message first_seq waited too long, or had too many deliveries without a verdict. Nothing is handed out until it is buried.
create function claim(
    p_worker text, p_request int[], p_lane bigint[], p_group int[], p_want int[], p_lease uuid[],
    p_seconds int[], p_older_than double precision, p_turns int[]
) returns table (
    request int, lane_id bigint, status text, first_seq bigint, end_seq bigint, skip varbit, parked bigint[],
    failed_seqs bigint[], failed_counts int[], until timestamptz, head bigint
) language plpgsql as $$
#variable_conflict use_column
declare
    c consumer; l record; i int; k bigint; v_now timestamptz; v_left int[] := '{}'; v_request int; v_want int;
    v_cursor bigint; v_done varbit; v_end bigint; v_stop bigint; v_parked bigint[]; v_due timestamptz;
    v_taken int; v_bound timestamptz; v_prefix int; v_odd boolean; v_size int; v_front bigint; v_trial text;
    v_piece int; v_fresh timestamptz;
    j_lane bigint[] := '{}'; j_group int[] := '{}'; j_first bigint[] := '{}'; j_last bigint[] := '{}';
    j_count int[] := '{}';
begin
    if p_turns is not null then
        for i in 1 .. cardinality(p_lane) loop
            perform from consumer c where c.lane_id = p_lane[i] and c.group_id = p_group[i] for update;
            if not found then
                perform begin_consumer(p_lane[i], p_group[i]);
            end if;
        end loop;
    end if;
    for v_turn in 1 .. cardinality(p_lane) loop
        i := coalesce(p_turns[v_turn], v_turn);
        v_request := p_request[i];
        v_want := coalesce(v_left[v_request + 1], p_want[i]);
        lane_id := p_lane[i];
        request := v_request;
        skip := null; parked := null; failed_seqs := null; failed_counts := null; until := null;
        first_seq := null; end_seq := null;
        if v_want <= 0 then
            continue;
        end if;
        head := null;
        select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = p_group[i] for update;
        if not found then
            perform begin_consumer(p_lane[i], p_group[i]);
            select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = p_group[i] for update;
        end if;
        -- Read the lane only now: it may have grown while we waited for the consumer's lock.
        select l.next_seq, l.first_seq, l.newest_at, l.has_holes, q.lease_time, q.delayed, q.buffered, q.max_age,
               q.unsettled_limit
          into l from lane l join queue q on q.id = l.queue_id where l.id = p_lane[i];
        if not found then
            status := 'gone';
            return next;
            continue;
        end if;
        head := l.next_seq;
        v_now := clock_timestamp();
        v_fresh := case when p_older_than is null then v_now - make_interval(secs => l.max_age) end;
        if c.lease is not null and c.lease_until > v_now then
            status := 'leased'; until := c.lease_until;
            return next;
            continue;
        end if;
        v_cursor := greatest(c.cursor, l.first_seq);
        v_done := case when length(c.done) > v_cursor - c.base
                       then substring(c.done from (v_cursor - c.base + 1)::int) else b'' end;
        if l.buffered > 0 and head > v_cursor and l.newest_at + make_interval(secs => l.buffered) > v_now
           and p_older_than is null then
            status := 'window'; until := l.newest_at + make_interval(secs => l.buffered);
            return next;
            continue;
        end if;
        v_end := least(v_cursor + v_want, head);
        v_stop := null; v_due := null;
        -- An expired lease leaves what was settled out of order in `done`: it must not come again.
        v_odd := c.odd or position(b'1' in v_done) > 0 or c.lease is not null;
        if c.lease is not null then
            perform note_lost(p_worker, c, 1);
        end if;
        if l.delayed > 0 or p_older_than is not null then
            v_bound := v_now - make_interval(secs => coalesce(p_older_than, l.delayed));
            select s.first_seq + passed(s.times, v_bound), make_interval(secs => coalesce(p_older_than, l.delayed))
                   + coalesce(s.times[passed(s.times, v_bound) + 1], s.created_at) into v_stop, v_due
              from segment s
             where s.lane_id = p_lane[i] and s.first_seq < head and s.created_at > v_bound and s.first_seq + s.n > v_cursor
               and s.first_seq >= coalesce((select max(t.first_seq) from segment t
                                             where t.lane_id = p_lane[i] and t.first_seq <= v_cursor), 0)
             order by s.first_seq limit 1;
            v_end := least(v_end, v_stop);
        end if;

        if not v_odd and not l.has_holes then
            if v_end <= v_cursor then
                status := case when v_due is null then 'empty' else 'blocked' end; until := v_due;
                return next;
                continue;
            end if;
            if v_fresh is not null then
                if created_of(p_lane[i], v_cursor) < v_fresh then
                    status := 'overdue'; first_seq := v_cursor;
                    return next;
                    continue;
                end if;
            end if;
            v_taken := v_end - v_cursor;
            if p_lease[i] is null then
                update consumer c set cursor = v_end, base = v_end, done = b'', lease = null, lease_until = null,
                       answered = b'', batch_end = v_end, consumed = c.consumed + v_taken, last_at = v_now
                 where c.lane_id = p_lane[i] and c.group_id = p_group[i];
            else
                until := v_now + make_interval(secs => coalesce(p_seconds[i], l.lease_time));
                v_done := repeat('0', v_taken)::varbit;
                update consumer c set cursor = v_cursor, base = v_cursor, done = v_done, answered = v_done,
                       lease = p_lease[i], lease_until = until, batch_end = v_end
                 where c.lane_id = p_lane[i] and c.group_id = p_group[i];
            end if;
        else
            -- The careful path: skip what is settled or deleted, stop before what must wait, add parked ones that are due.
            delete from exception e where e.lane_id = p_lane[i] and e.group_id = p_group[i] and e.seq < l.first_seq;
            v_piece := case when p_lease[i] is not null and p_older_than is null and l.unsettled_limit > 0
                            then piece_of(p_lane[i], p_group[i], v_cursor, v_done, v_want, l.unsettled_limit) end;
            v_want := coalesce(v_piece, v_want);
            v_parked := array(select e.seq from exception e
                             where e.lane_id = p_lane[i] and e.group_id = p_group[i] and e.parked
                               and case when p_older_than is null then e.due <= v_now
                                        else created_of(p_lane[i], e.seq) <= v_bound end
                             order by e.due, e.seq limit v_want);
            select least(v_stop, min(e.seq)), least(v_due, min(e.due)) into v_stop, v_due from exception e
             where e.lane_id = p_lane[i] and e.group_id = p_group[i] and not e.parked and e.due > v_now and e.seq >= v_cursor
               and p_older_than is null;
            v_stop := least(v_stop, head);
            v_want := v_want - cardinality(v_parked);
            if l.has_holes then
                v_size := least(v_stop - v_cursor, greatest(length(v_done), v_want) + 10000)::int;
                if length(v_done) < v_size then
                    v_done := v_done || repeat('0', v_size - length(v_done))::varbit;
                end if;
                for k in select h.seq from hole h
                          where h.lane_id = p_lane[i] and h.seq >= v_cursor and h.seq < v_cursor + length(v_done) loop
                    v_done := set_bit(v_done, (k - v_cursor)::int, 1);
                end loop;
            end if;
            v_prefix := position(b'0' in v_done) - 1;
            if v_prefix < 0 then
                v_prefix := length(v_done);
            end if;
            v_cursor := v_cursor + v_prefix;
            v_done := case when length(v_done) > v_prefix then substring(v_done from v_prefix + 1) else b'' end;
            v_trial := null;
            if v_fresh is not null then
                select 'overdue', s into v_trial, v_front
                  from unnest(v_parked || case when v_cursor < v_stop then v_cursor end) s
                 where created_of(p_lane[i], s) < v_fresh limit 1;
            end if;
            if v_trial is null and v_piece = 1 then
                v_front := coalesce(v_parked[1], case when v_cursor < v_stop then v_cursor end);
                v_trial := trial_of(p_lane[i], p_group[i], v_front, p_lease[i], l.unsettled_limit);
            end if;
            if v_trial is not null then
                v_want := 0; v_parked := '{}'; first_seq := v_front;
                v_due := case when v_trial = 'blocked' then v_now + interval '250 milliseconds' end;
            end if;
            v_end := v_cursor;
            v_taken := 0;
            while v_taken < v_want and v_end < v_stop loop
                if v_end - v_cursor >= length(v_done) then
                    k := least(v_want - v_taken, v_stop - v_end);
                    v_taken := v_taken + k::int; v_end := v_end + k;
                elsif get_bit(v_done, (v_end - v_cursor)::int) = 0 then
                    v_taken := v_taken + 1; v_end := v_end + 1;
                else
                    v_end := v_end + 1;
                end if;
            end loop;
            v_size := (v_end - v_cursor)::int;
            if length(v_done) < v_size then
                v_done := v_done || repeat('0', v_size - length(v_done))::varbit;
            end if;
            v_taken := v_taken + cardinality(v_parked);
            select array_agg(e.seq), array_agg(e.attempts) into failed_seqs, failed_counts from exception e
             where e.lane_id = p_lane[i] and e.group_id = p_group[i]
               and (e.seq = any (v_parked) or e.seq >= v_cursor and e.seq < v_end and not e.parked);
            if v_taken = 0 then
                v_due := least(v_due, (select min(e.due) from exception e
                                        where e.lane_id = p_lane[i] and e.group_id = p_group[i] and e.due > v_now));
                v_odd := tidy_lost(p_lane[i], p_group[i], v_cursor, v_done) or position(b'1' in v_done) > 0 or exists (
                    select from exception e where e.lane_id = p_lane[i] and e.group_id = p_group[i]);
                update consumer c set cursor = v_cursor, base = v_cursor, odd = v_odd, lease = null, lease_until = null,
                       done = case when position(b'1' in v_done) > 0 then v_done else b'' end, answered = b'',
                       parked_out = '{}'
                 where c.lane_id = p_lane[i] and c.group_id = p_group[i];
                status := coalesce(v_trial, case when v_due is null or v_cursor >= head then 'empty' else 'blocked' end); until := v_due;
                return next;
                continue;
            end if;
            parked := v_parked;
            skip := case when v_size > 0 then substring(v_done from 1 for v_size) else b'' end;
            if p_lease[i] is null then
                delete from exception e where e.lane_id = p_lane[i] and e.group_id = p_group[i]
                   and (e.seq = any (v_parked) or e.seq >= v_cursor and e.seq < v_end and not e.parked);
                first_seq := v_cursor;
                end_seq := v_end;
                v_done := case when length(v_done) > v_size then substring(v_done from v_size + 1) else b'' end;
                v_prefix := position(b'0' in v_done) - 1;
                if v_prefix < 0 then
                    v_prefix := length(v_done);
                end if;
                v_done := case when length(v_done) > v_prefix then substring(v_done from v_prefix + 1) else b'' end;
                if position(b'1' in v_done) = 0 then
                    v_done := b'';
                end if;
                update consumer c set cursor = v_end + v_prefix, base = v_end + v_prefix, done = v_done, lease = null,
                       lease_until = null, answered = b'', parked_out = '{}', batch_end = v_end, last_at = v_now,
                       consumed = c.consumed + v_taken,
                       odd = tidy_lost(p_lane[i], p_group[i], v_end + v_prefix, v_done) or length(v_done) > 0 or exists (
                           select from exception e where e.lane_id = p_lane[i] and e.group_id = p_group[i]),
                       next_due = (select min(e.due) from exception e
                                    where e.lane_id = p_lane[i] and e.group_id = p_group[i])
                 where c.lane_id = p_lane[i] and c.group_id = p_group[i];
            else
                until := v_now + make_interval(secs => coalesce(p_seconds[i], l.lease_time));
                update consumer c set cursor = v_cursor, base = v_cursor, done = v_done, answered = skip, parked_out = v_parked,
                       lease = p_lease[i], lease_until = until, batch_end = v_end, odd = true
                 where c.lane_id = p_lane[i] and c.group_id = p_group[i];
            end if;
        end if;
        status := 'ok';
        first_seq := v_cursor;
        end_seq := v_end;
        v_left[v_request + 1] := coalesce(v_left[v_request + 1], p_want[i]) - v_taken;
        if p_lease[i] is null then
            j_lane := j_lane || p_lane[i]; j_group := j_group || p_group[i]; j_first := j_first || v_cursor;
            j_last := j_last || (v_end - 1); j_count := j_count || v_taken;
        end if;
        return next;
    end loop;
    if cardinality(j_lane) > 0 then
        insert into journal (kind, worker, lanes, groups, firsts, lasts, counts)
        values ('auto_ack', p_worker, j_lane, j_group, j_first, j_last, j_count);
    end if;
end
$$;
