-- Note which staged outcomes are of parked messages. Hashed, not looped over, whatever the planner makes of tables without
-- statistics: with many failures a loop takes minutes.
create function note_parked(p_reader int, p_number bigint, p_writes uuid[]) returns void
language plpgsql set enable_nestloop = off as $$
begin
    with p as materialized (
        select g.lane_id, u.seq from manifest_range g, unnest(g.parked) u (seq) where g.reader_id = p_reader and g.number = p_number
    )
    update staged_outcome s set parked = true from p
     where s.write = any (p_writes) and s.lane_id = p.lane_id and s.first_seq = p.seq;
end
$$;

-- The failures of earlier deliveries that are over: neither come their messages again, nor are they held back.
create function overcome(p_reader int, p_number bigint, p_writes uuid[], out lanes bigint[], out seqs bigint[])
language plpgsql set enable_nestloop = off as $$
begin
    with f as materialized (
        select g.lane_id, u.seq from manifest_range g, unnest(g.failed_seqs) u (seq)
         where g.reader_id = p_reader and g.number = p_number
    ), again as materialized (
        select s.lane_id, s.first_seq, s.end_seq from staged_outcome s
         where s.write = any (p_writes) and s.outcome in ('retry', 'release')
    ), held as materialized (
        select * from again where end_seq > first_seq + 1
    )
    select array_agg(f.lane_id), array_agg(f.seq) into lanes, seqs
      from f
      left join again a on a.lane_id = f.lane_id and a.first_seq = f.seq
     where a.lane_id is null
       and not exists (select from held h where h.lane_id = f.lane_id and h.first_seq <= f.seq and h.end_seq > f.seq);
end
$$;

-- Settle a manifest: cursors, retries, dead letters and pushes, all or nothing, and once.
--
-- p_writes are the tasks' runs that count, p_outcomes and p_segments how many rows they staged. Whatever is not among
-- the staged outcomes is acknowledged. A manifest that is settled already is answered as it is. p_parked says whether
-- a lane goes on without what failed; null: as the queue is configured.
create function settle_manifest(
    p_reader int, p_holder uuid, p_number bigint, p_worker text, p_writes uuid[], p_outcomes bigint, p_segments bigint,
    p_options jsonb, p_parked boolean
) returns manifest language plpgsql as $$
#variable_conflict use_column
declare
    r reader; m manifest; q record; g record; c consumer; v_now timestamptz; v_bits text; v_upto bigint; v_rest varbit;
    v_lost bigint; v_failed bigint; v_odd boolean; v_targets bigint[]; v_parked boolean; v_keep boolean;
    v_id text := left(gen_random_uuid()::text, 28);  -- one for all, and a number for each: quicker to make and to index
begin
    r := fenced(p_reader, p_holder);
    if p_number is null and r.serving = 0 then
        return null;
    end if;
    select * into m from manifest where reader_id = r.id and number = coalesce(p_number, r.serving);
    if not found then
        raise exception using errcode = 'SE003', message = format('batch %s is not known to the queue', p_number);
    elsif m.settled then
        return m;
    elsif p_number is not null and p_number <> r.serving then
        raise exception using errcode = 'SE004', message = format(
            'rows of batch %s came to be settled while batch %s is being read', p_number, r.serving);
    end if;
    if (select count(*) from staged_outcome where write = any (p_writes)) <> p_outcomes
       or (select count(*) from staged_segment where write = any (p_writes)) <> p_segments then
        raise exception using errcode = 'SE002', message =
            'what the tasks handed over was lost when the database crashed; run the query again';
    end if;
    select q.*, n.name as consumer_group into q from queue q, consumer_group n where q.id = r.queue_id and n.id = r.group_id;

    v_parked := coalesce(p_parked, q.parked);
    v_keep := (q.options ->> 'deadLetterQueue')::boolean;

    -- Lanes before consumers, each in order: the engine's own transactions lock them so too.
    if p_segments > 0 then
        v_targets := array(
            select distinct t.lane_id
              from (select array_agg(s.queue) as queues, array_agg(s.partition) as partitions
                      from (select distinct queue, partition from staged_segment where write = any (p_writes)) s) d,
                   resolve(d.queues, d.partitions,
                           array(select case when u like '%.%' then split_part(u, '.', 1) else '' end from unnest(d.queues) u),
                           array(select split_part(u, '.', 2) from unnest(d.queues) u), p_options) t);
        perform from lane where id = any (v_targets) order by id for no key update;
        if in_clear(p_writes) is not null then
            raise exception using errcode = 'SE005', message = format(
                'queue %L has become encrypted while results for it were staged: start the query again', in_clear(p_writes));
        end if;
    end if;
    perform from consumer c join manifest_range g on c.lane_id = g.lane_id and c.group_id = r.group_id
      where g.reader_id = r.id and g.number = m.number order by c.lane_id, c.group_id for update of c;
    select count(*) filter (where c.lease is distinct from m.lease), bool_or(c.odd) into v_lost, v_odd
      from manifest_range g left join consumer c on c.lane_id = g.lane_id and c.group_id = r.group_id
     where g.reader_id = r.id and g.number = m.number;
    if v_lost > 0 then
        raise exception using errcode = 'SE001', message = format(
            'batch %s lost the lease of %s partitions to another consumer of the group; nothing was applied',
            m.number, v_lost);
    end if;
    v_now := clock_timestamp();

    if p_outcomes > 0 then
        if exists (select from manifest_range g where g.reader_id = r.id and g.number = m.number and cardinality(g.parked) > 0) then
            perform note_parked(r.id, m.number, p_writes);
        end if;
        select count(*) into v_failed from staged_outcome s
          join manifest_range g on g.reader_id = r.id and g.number = m.number and g.lane_id = s.lane_id
         where s.write = any (p_writes) and (s.parked or s.first_seq >= g.first_seq and s.end_seq <= g.end_seq);
        if v_failed <> p_outcomes then
            raise exception using errcode = 'SE004', message = format(
                '%s rows do not belong to batch %s of queue %L: settle rows of one queue, with their own lane and sequence',
                p_outcomes - v_failed, m.number, q.name);
        elsif exists (select from staged_outcome where write = any (p_writes)
                       group by lane_id, first_seq having count(*) > 1) then
            raise exception using errcode = 'SE004', message = format(
                'a message of batch %s has two outcomes: settle each row once', m.number);
        end if;
        update staged_outcome s set (attempts, outcome) = (
               select b.attempts + (s.outcome <> 'release')::int,
                      case when s.outcome = 'invalid' or s.outcome = 'retry' and b.attempts + 1 >= q.retry_limit
                                and (q.options ->> 'dlqAfterMaxRetries')::boolean
                           then 'dead' else s.outcome end
                 from (select coalesce((select e.attempts from exception e where e.lane_id = s.lane_id
                                           and e.group_id = r.group_id and e.seq = s.first_seq), 0) as attempts) b)
         where s.write = any (p_writes)
           and (s.outcome in ('invalid', 'release') or q.retry_limit <= 1
                or exists (select from exception e
                            where e.lane_id = s.lane_id and e.group_id = r.group_id and e.seq = s.first_seq));
        if not v_parked then
            -- In order: behind a message that comes again, everything else of its lane comes again too.
            with hold as (
                select s.lane_id, min(s.first_seq) as seq, g.end_seq from staged_outcome s
                  join manifest_range g on g.reader_id = r.id and g.number = m.number and g.lane_id = s.lane_id
                 where s.write = any (p_writes) and s.outcome in ('retry', 'release') and not s.parked
                 group by s.lane_id, g.end_seq
            ), gone as (
                delete from staged_outcome s using hold h
                 where s.write = any (p_writes) and s.lane_id = h.lane_id and s.first_seq > h.seq
            ), cut as (
                update staged_outcome s set end_seq = h.seq + 1 from hold h
                 where s.write = any (p_writes) and s.lane_id = h.lane_id and s.first_seq = h.seq
            )
            insert into staged_outcome (write, lane_id, first_seq, end_seq, outcome, attempts)
            select p_writes[1], h.lane_id, h.seq + 1, h.end_seq, 'release', 0 from hold h where h.seq + 1 < h.end_seq;
            if exists (select from staged_segment t join staged_outcome s on s.lane_id = t.source_lane
                        where t.write = any (p_writes) and s.write = any (p_writes) and s.outcome in ('retry', 'release')
                          and t.source_last >= s.first_seq) then
                raise exception using errcode = 'SE005', message = format(
                    'queue %L is in order, but results behind a failed message were to be pushed: keep the rows of a '
                    'partition in one task and in order, or read with ordering=parked', q.name);
            end if;
        end if;

        insert into dead_letter (id, lane_id, lane_uid, queue_id, queue, partition, consumer_group, seq, message_id,
                                 transaction_id, error, attempts, headers, payload, created_at, failed_at, unsettled)
        select (v_id || lpad(to_hex(row_number() over ()), 8, '0'))::uuid,
               s.lane_id, l.uid, q.id, q.name, l.name, q.consumer_group, s.first_seq, s.message_id, s.transaction_id,
               coalesce(s.error, 'Retries exhausted'), s.attempts, coalesce(s.headers, ''::bytea), s.payload, s.created_at, v_now,
               case when v_odd then unsettled_of(s.lane_id, r.group_id, s.first_seq) else 0 end
          from staged_outcome s join lane l on l.id = s.lane_id
         where s.write = any (p_writes) and s.outcome = 'dead' and v_keep;
    end if;

    if v_odd then
        delete from exception e using overcome(r.id, m.number, p_writes) o, unnest(o.lanes, o.seqs) f (lane, seq)
         where e.lane_id = f.lane and e.group_id = r.group_id and e.seq = f.seq;
    end if;
    if p_outcomes > 0 then
        -- Doubled for each attempt, up to an hour or the configured delay if that is longer. What is released for a
        -- while stays away like what failed, but no attempt is counted.
        insert into exception as e (lane_id, group_id, seq, attempts, due, parked, error, failed_at)
        select s.lane_id, r.group_id, s.first_seq, s.attempts, v_now + make_interval(secs => coalesce(s.delay,
                 least(q.retry_delay / 1000.0 * 2 ^ least(s.attempts - 1, 30), greatest(3600, q.retry_delay / 1000.0)))),
               v_parked or s.parked, s.error, v_now
          from staged_outcome s
         where s.write = any (p_writes) and (s.outcome = 'retry' or s.outcome = 'release' and s.delay > 0)
            on conflict (lane_id, group_id, seq) do update
           set attempts = excluded.attempts, due = excluded.due, error = excluded.error, parked = excluded.parked, failed_at = v_now;
        insert into journal (at, kind, worker, lanes, groups, leases, firsts, lasts, counts, attempts, error)
        select v_now, case when s.outcome = 'retry' then 'failed' when s.outcome = 'release' then 'released'
                           when s.outcome = 'dead' and not v_keep then 'dropped' else s.outcome end, p_worker,
               array[s.lane_id], array[r.group_id], array[m.lease], array[s.first_seq], array[s.end_seq - 1],
               array[(s.end_seq - s.first_seq)::int], s.attempts, s.error
          from staged_outcome s where s.write = any (p_writes);
    end if;

    for g in select g.*, coalesce(f.failed, 0) as failed, coalesce(f.dead, 0) as dead from manifest_range g
               left join (select s.lane_id, sum(s.end_seq - s.first_seq) as failed, count(*) filter (where s.outcome = 'dead') as dead
                            from staged_outcome s where s.write = any (p_writes) group by s.lane_id) f on f.lane_id = g.lane_id
              where g.reader_id = r.id and g.number = m.number order by g.lane_id loop
        select * into c from consumer c where c.lane_id = g.lane_id and c.group_id = r.group_id;
        v_rest := case when length(c.done) > g.end_seq - g.first_seq
                       then substring(c.done from (g.end_seq - g.first_seq + 1)::int) else b'' end;
        v_bits := null;
        if g.failed > g.dead then
            -- Ones, but for what comes again in its place.
            select string_agg(repeat('1', (p.first_seq - p.after)::int) || repeat('0', (p.end_seq - p.first_seq)::int), ''
                              order by p.first_seq), max(p.end_seq)
              into v_bits, v_upto
              from (select s.first_seq, s.end_seq, lag(s.end_seq, 1, g.first_seq) over (order by s.first_seq) as after
                      from staged_outcome s
                     where s.write = any (p_writes) and s.lane_id = g.lane_id and not s.parked
                       and (s.outcome in ('retry', 'release') and not v_parked
                            or s.outcome = 'release' and coalesce(s.delay, 0) <= 0)) p;
        end if;
        if v_bits is null then
            c.base := g.end_seq;
            c.done := v_rest;
        else
            c.base := g.first_seq;
            c.done := (v_bits || repeat('1', (g.end_seq - v_upto)::int))::varbit || v_rest;
            if length(g.skip) > 0 then
                c.done := c.done | (g.skip || repeat('0', length(c.done) - length(g.skip))::varbit);
            end if;
        end if;
        c.answered := b'';
        c.parked_out := '{}';
        c := close_lease(c);
        update consumer c0 set cursor = c.cursor, base = c.base, done = c.done, answered = c.answered, lease = c.lease,
               lease_until = c.lease_until, parked_out = c.parked_out, next_due = c.next_due, odd = c.odd, last_at = v_now,
               consumed = c0.consumed + g.n - g.failed + g.dead
         where c0.lane_id = c.lane_id and c0.group_id = c.group_id;
    end loop;
    insert into journal (at, kind, worker, lanes, groups, leases, firsts, lasts, counts, took)
    select v_now, 'settled', p_worker, array_agg(a.lane_id), array_agg(r.group_id), array_agg(m.lease), array_agg(a.first_seq),
           array_agg(a.end_seq - 1), array_agg(a.acked::int), array_agg(extract(epoch from v_now - m.claimed_at)::real)
      from (select g.lane_id, g.first_seq, g.end_seq, g.n - coalesce((
                     select sum(s.end_seq - s.first_seq) from staged_outcome s
                      where s.write = any (p_writes) and s.lane_id = g.lane_id), 0) as acked
              from manifest_range g where g.reader_id = r.id and g.number = m.number) a
     where a.acked > 0 having count(*) > 0;
    insert into activity (worker, kind, queues, lanes, groups, until)
    select p_worker, 'release', array_agg(r.queue_id), array_agg(c.lane_id), array_agg(c.group_id), array_agg(c.next_due)
      from manifest_range g join consumer c on c.lane_id = g.lane_id and c.group_id = r.group_id
     where g.reader_id = r.id and g.number = m.number having count(*) > 0;

    if p_segments > 0 then
        insert into segment (lane_id, first_seq, n, created_at, body)
        select l.id, l.next_seq + sum(s.n) over w - s.n, s.n, greatest(v_now, l.newest_at), s.body
          from staged_segment s join queue t on t.name = s.queue join lane l on l.queue_id = t.id and l.name = s.partition
         where s.write = any (p_writes)
        window w as (partition by l.id order by s.source_lane, s.source_first);
        update lane l set next_seq = l.next_seq + u.n, newest_at = greatest(v_now, l.newest_at)
          from (select l.id, sum(s.n) as n
                  from staged_segment s join queue t on t.name = s.queue join lane l on l.queue_id = t.id and l.name = s.partition
                 where s.write = any (p_writes) group by l.id) u
         where l.id = u.id;
        insert into activity (worker, kind, queues, lanes)
        select p_worker, 'push', array_agg(l.queue_id), array_agg(l.id) from lane l where l.id = any (v_targets);
        select sum(s.n) into m.pushed from staged_segment s where s.write = any (p_writes);
    end if;

    select count(*) filter (where s.outcome = 'retry'), count(*) filter (where s.outcome = 'dead'),
           coalesce(sum(s.end_seq - s.first_seq) filter (where s.outcome = 'release'), 0)
      into m.retried, m.dead, m.released from staged_outcome s where s.write = any (p_writes);
    update manifest set settled = true, settled_at = v_now, acked = greatest(m.messages - m.retried - m.dead - m.released, 0),
           retried = m.retried, dead = m.dead, released = m.released, pushed = m.pushed, writes = p_writes
     where reader_id = r.id and number = m.number returning * into m;
    return m;
end
$$;

-- Sweep up after the tasks: what settled manifests used, and what nobody will ever use.
create function tidy_staging(p_reader int) returns void
language sql as $$
    with used as (
        update manifest set writes = '{}' where reader_id = p_reader and settled and writes <> '{}'
    ), done as (
        select unnest(o.writes) as write from manifest o where o.reader_id = p_reader and o.settled and o.writes <> '{}'
    ), outcomes as (
        delete from staged_outcome s using done d where s.write = d.write
    ), segments as (
        delete from staged_segment s using done d where s.write = d.write
    )
    select;
    delete from staged_outcome where at < clock_timestamp() - interval '1 day';
    delete from staged_segment where at < clock_timestamp() - interval '1 day';
$$;
