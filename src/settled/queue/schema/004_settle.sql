-- Drop what a settled message left behind and give the lease back if nothing of it is out any more.
create function close_lease(c consumer) returns consumer
language plpgsql as $$
declare
    v_prefix int;
begin
    v_prefix := position(b'0' in c.done) - 1;
    if v_prefix < 0 then
        v_prefix := length(c.done);
    end if;
    c.cursor := c.base + v_prefix;
    if position(b'0' in c.answered) = 0 and cardinality(c.parked_out) = 0 then
        c.lease := null;
        c.lease_until := null;
        c.base := c.cursor;
        c.done := case when length(c.done) > v_prefix then substring(c.done from v_prefix + 1) else b'' end;
        if position(b'1' in c.done) = 0 then
            c.done := b'';
        end if;
        c.answered := b'';
        select min(e.due) into c.next_due from exception e where e.lane_id = c.lane_id and e.group_id = c.group_id;
        c.odd := c.odd and tidy_lost(c.lane_id, c.group_id, c.cursor, c.done) or length(c.done) > 0 or c.next_due is not null;
    end if;
    return c;
end
$$;

-- Settle delivered messages: all of what is given, or nothing.
--
-- p_bits are acked messages of a lease's range (bit 0 is the lease's base). The p_s_* are single messages that need more:
-- failed, dlq, bury (dlq of what nobody took), retry (released), or an ack of a parked one. If something cannot be settled, only the problems come back
-- (`bad_lease`, `answered` with the bits or the single's number in `item`) and nothing changed.
create function settle(
    p_worker text, p_lane bigint[], p_group int[], p_lease uuid[], p_bits varbit[],
    p_first bigint[], p_last bigint[], p_count int[], p_took real[],
    p_s_lane bigint[], p_s_group int[], p_s_lease uuid[], p_s_seq bigint[], p_s_kind text[], p_s_error text[],
    p_s_delay double precision[], p_s_message uuid[], p_s_transaction text[], p_s_created timestamptz[],
    p_s_headers bytea[], p_s_payload bytea[]
) returns table (
    status text, item int, lane_id bigint, group_id int, bits varbit, outcome text, attempts int,
    pending boolean, due timestamptz
) language plpgsql as $$
#variable_conflict use_column
declare
    v_bad int := 0; v_found int; v_odd boolean; v_now timestamptz; c consumer; q record; i int; v_at int; v_attempts int;
    v_due timestamptz; v_error text; v_bits varbit; v_kind text; v_keep boolean;
begin
    select count(*), coalesce(bool_or(odd), false), count(*) filter (
             where lease is distinct from wanted or lease_until <= clock_timestamp() or length(answered) <> length(bits)
                   or position(b'1' in answered & bits) > 0)
      into v_found, v_odd, v_bad
      from (select c.odd, c.lease, c.lease_until, c.answered, u.lease as wanted, coalesce(u.bits, c.answered & ~c.answered) as bits
              from (select lane, grp, lease, bits from unnest(p_lane, p_group, p_lease, p_bits) a (lane, grp, lease, bits)
                    union all
                    select distinct lane, grp, lease, null::varbit
                      from unnest(p_s_lane, p_s_group, p_s_lease) b (lane, grp, lease)) u
              join consumer c on c.lane_id = u.lane and c.group_id = u.grp
             order by c.lane_id, c.group_id
               for update of c) locked;

    if v_bad = 0 and v_found = cardinality(p_lane) and cardinality(p_s_lane) = 0 and not v_odd then
        v_now := clock_timestamp();
        insert into journal (kind, worker, lanes, groups, leases, firsts, lasts, counts, took)
        values ('settled', p_worker, p_lane, p_group, p_lease, p_first, p_last, p_count, p_took);
        return query
            with changed as (
                update consumer c set
                       cursor = n.cursor, base = case when n.released then n.cursor else c.base end,
                       done = case when n.released then b'' else n.done end,
                       answered = case when n.released then b'' else n.done end,
                       lease = case when n.released then null else c.lease end,
                       lease_until = case when n.released then null else c.lease_until end,
                       consumed = c.consumed + n.count, last_at = v_now
                  from (select m.*, case when m.zero = 0 then m.base + length(m.done) else m.base + m.zero - 1 end as cursor,
                               m.zero = 0 as released
                          from (select o.lane_id, o.group_id, o.base, o.done | u.bits as done, u.count,
                                       position(b'0' in o.done | u.bits) as zero
                                  from unnest(p_lane, p_group, p_bits, p_count) u (lane, grp, bits, count)
                                  join consumer o on o.lane_id = u.lane and o.group_id = u.grp) m) n
                 where c.lane_id = n.lane_id and c.group_id = n.group_id
                returning c.lane_id, c.group_id, n.released, n.cursor
            ), seen as (
                select ch.lane_id, ch.group_id, ch.released, ch.released and l.next_seq > ch.cursor as pending, l.queue_id
                  from changed ch left join lane l on l.id = ch.lane_id
            ), told as (
                insert into activity (worker, kind, queues, lanes, groups, until)
                select p_worker, 'release', array_agg(s.queue_id), array_agg(s.lane_id), array_agg(s.group_id),
                       array_agg(null::timestamptz)
                  from seen s where s.pending having count(*) > 0
            ), freed as (
                insert into activity (worker, kind, queues, lanes, groups)
                select p_worker, 'free', array_agg(s.queue_id), array_agg(s.lane_id), array_agg(s.group_id)
                  from seen s where s.released and not s.pending having count(*) > 0
            )
            select case when s.released then 'released' else 'held' end, null::int, s.lane_id, s.group_id, null::varbit,
                   null::text, null::int, s.pending, null::timestamptz
              from seen s;
        return;
    end if;

    -- The careful path. First: can everything be settled?
    v_bad := 0;
    for i in 1 .. cardinality(p_lane) loop
        select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = p_group[i];
        if not found or c.lease is distinct from p_lease[i] or c.lease_until <= clock_timestamp()
           or length(c.answered) <> length(p_bits[i]) then
            v_bad := v_bad + 1;
            return query select 'bad_lease', i - 1, p_lane[i], p_group[i], null::varbit, null::text, null::int, null::boolean,
                                null::timestamptz;
        elsif position(b'1' in c.answered & p_bits[i]) > 0 then
            v_bad := v_bad + 1;
            return query select 'answered', i - 1, p_lane[i], p_group[i], (c.answered & p_bits[i])::varbit, null::text, null::int,
                                null::boolean, null::timestamptz;
        end if;
    end loop;
    for i in 1 .. cardinality(p_s_lane) loop
        select * into c from consumer c where c.lane_id = p_s_lane[i] and c.group_id = p_s_group[i];
        v_at := p_s_seq[i] - c.base;
        if not found or c.lease is distinct from p_s_lease[i] or c.lease_until <= clock_timestamp() then
            v_bad := v_bad + 1;
            return query select 'bad_lease_single', i - 1, p_s_lane[i], p_s_group[i], null::varbit, null::text, null::int,
                                null::boolean, null::timestamptz;
        elsif not p_s_seq[i] = any (c.parked_out)
              and (v_at < 0 or v_at >= length(c.answered) or get_bit(c.answered, v_at) = 1) then
            v_bad := v_bad + 1;
            return query select 'answered_single', i - 1, p_s_lane[i], p_s_group[i], null::varbit, null::text, null::int,
                                null::boolean, null::timestamptz;
        end if;
    end loop;
    if v_bad > 0 then
        return;
    end if;

    v_now := clock_timestamp();
    if cardinality(p_lane) > 0 then
        insert into journal (kind, worker, lanes, groups, leases, firsts, lasts, counts, took)
        values ('settled', p_worker, p_lane, p_group, p_lease, p_first, p_last, p_count, p_took);
    end if;
    for i in 1 .. cardinality(p_lane) loop
        select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = p_group[i];
        v_bits := p_bits[i];
        c.answered := c.answered | v_bits;
        if length(c.done) > length(v_bits) then
            v_bits := v_bits || repeat('0', length(c.done) - length(v_bits))::varbit;
        end if;
        if c.odd then
            delete from exception e where e.lane_id = c.lane_id and e.group_id = c.group_id and not e.parked
               and e.seq >= c.base and e.seq < c.base + length(v_bits) and get_bit(v_bits, (e.seq - c.base)::int) = 1;
        end if;
        update consumer c0 set done = c.done | v_bits, answered = c.answered, consumed = c0.consumed + p_count[i], last_at = v_now
         where c0.lane_id = c.lane_id and c0.group_id = c.group_id;
    end loop;

    for i in 1 .. cardinality(p_s_lane) loop
        select * into c from consumer c where c.lane_id = p_s_lane[i] and c.group_id = p_s_group[i];
        select q.*, l.uid as lane_uid, l.name as partition, g.name as consumer_group into q
          from lane l join queue q on q.id = l.queue_id, consumer_group g where l.id = c.lane_id and g.id = c.group_id;
        v_kind := p_s_kind[i];
        v_error := p_s_error[i];
        select e.attempts into v_attempts from exception e
         where e.lane_id = c.lane_id and e.group_id = c.group_id and e.seq = p_s_seq[i];
        v_attempts := coalesce(v_attempts, 0);
        if v_kind = 'failed' then
            v_attempts := v_attempts + 1;
            if v_attempts >= q.retry_limit and (q.options ->> 'dlqAfterMaxRetries')::boolean then
                v_kind := 'dead';
                v_error := coalesce(v_error, 'Retries exhausted');
            end if;
        elsif v_kind = 'dlq' then  -- the delivery that was refused counts; a burial is nobody's delivery
            v_attempts := v_attempts + 1;
            v_kind := 'dead';
        elsif v_kind = 'bury' then
            v_kind := 'dead';
        end if;

        v_keep := (q.options ->> 'deadLetterQueue')::boolean;
        if v_kind = 'dead' and v_keep then
            insert into dead_letter (lane_id, lane_uid, queue_id, queue, partition, consumer_group, seq, message_id,
                                     transaction_id, error, attempts, headers, payload, created_at, unsettled)
            values (c.lane_id, q.lane_uid, q.id, q.name, q.partition, q.consumer_group, p_s_seq[i], p_s_message[i],
                    p_s_transaction[i], v_error, v_attempts, p_s_headers[i], p_s_payload[i], p_s_created[i],
                    unsettled_of(c.lane_id, c.group_id, p_s_seq[i]));
        end if;
        v_due := v_now;
        if v_kind in ('dead', 'ack') then
            delete from exception e where e.lane_id = c.lane_id and e.group_id = c.group_id and e.seq = p_s_seq[i];
        elsif v_kind = 'failed' then
            -- Doubled for each attempt, up to an hour or the configured delay if that is longer.
            v_due := v_now + make_interval(secs => coalesce(p_s_delay[i],
                least(q.retry_delay / 1000.0 * 2 ^ least(v_attempts - 1, 30), greatest(3600, q.retry_delay / 1000.0))));
            insert into exception as e (lane_id, group_id, seq, attempts, due, parked, error)
            values (c.lane_id, c.group_id, p_s_seq[i], v_attempts, v_due,
                    q.parked or p_s_seq[i] = any (c.parked_out), v_error)
                on conflict (lane_id, group_id, seq) do update
               set attempts = v_attempts, due = v_due, error = v_error, parked = excluded.parked, failed_at = v_now;
        end if;
        if v_kind <> 'ack' then
            insert into journal (at, kind, worker, lanes, groups, leases, firsts, lasts, counts, attempts, error)
            values (v_now, case when v_kind = 'retry' then 'released' when v_kind = 'dead' and not v_keep then 'dropped' else v_kind end,
                    p_worker, array[c.lane_id],
                    array[c.group_id], array[p_s_lease[i]], array[p_s_seq[i]], array[p_s_seq[i]], array[1], v_attempts, v_error);
        end if;

        if p_s_seq[i] = any (c.parked_out) then
            c.parked_out := array_remove(c.parked_out, p_s_seq[i]);
        else
            v_at := p_s_seq[i] - c.base;
            c.answered := set_bit(c.answered, v_at, 1);
            if v_kind in ('dead', 'ack') or v_kind = 'failed' and q.parked then
                c.done := set_bit(c.done, v_at, 1);
            end if;
        end if;
        update consumer c0 set done = c.done, answered = c.answered, parked_out = c.parked_out, odd = true, last_at = v_now,
               consumed = c0.consumed + case when v_kind in ('dead', 'ack') then 1 else 0 end
         where c0.lane_id = c.lane_id and c0.group_id = c.group_id;
        return query select 'single', i - 1, c.lane_id, c.group_id, null::varbit,
                            case v_kind when 'dead' then case when v_keep then 'failed_dlq' else 'failed_dropped' end
                                        when 'failed' then 'failed_retry' when 'retry' then 'released' else 'acknowledged' end,
                            v_attempts, null::boolean, null::timestamptz;
    end loop;

    for c in select distinct on (c.lane_id, c.group_id) c.*
               from unnest(p_lane || p_s_lane, p_group || p_s_group) u (lane, grp)
               join consumer c on c.lane_id = u.lane and c.group_id = u.grp loop
        c := close_lease(c);
        update consumer c0 set cursor = c.cursor, base = c.base, done = c.done, answered = c.answered, lease = c.lease,
               lease_until = c.lease_until, next_due = c.next_due, odd = c.odd
         where c0.lane_id = c.lane_id and c0.group_id = c.group_id;
        if c.lease is null then
            insert into activity (worker, kind, queues, lanes, groups, until)
            select p_worker, 'release', array[l.queue_id], array[l.id], array[c.group_id], array[c.next_due]
              from lane l where l.id = c.lane_id;
        end if;
        return query select case when c.lease is null then 'released' else 'held' end, null::int, c.lane_id, c.group_id,
                            null::varbit, null::text, null::int, true, c.next_due;
    end loop;
end
$$;
