-- Batches of a group as Spark reads them: a manifest names ranges of the log, is leased like any other batch, and is
-- settled in one transaction. Its number is Spark's offset, so a replay reads exactly the same messages.

-- holder: whoever opened the reader last; what a former holder still tries is refused.
-- serving: the manifest that was asked for last, and so the one a sink settles; 0 if a batch had nothing to read.
create table reader (
    id int generated always as identity primary key,
    group_id int not null,
    queue_id bigint not null,
    holder uuid not null default '00000000-0000-0000-0000-000000000000',
    epoch bigint not null default 0,
    kind text not null default '',
    held_until timestamptz not null default 'epoch',
    newest bigint not null default 0,
    serving bigint not null default 0,
    unique (group_id, queue_id)
);

create table manifest (
    reader_id int not null,
    number bigint not null,
    lease uuid not null,
    settled boolean not null default false,
    claimed_at timestamptz not null default clock_timestamp(),
    settled_at timestamptz,
    messages bigint not null,
    acked bigint not null default 0,
    retried bigint not null default 0,
    dead bigint not null default 0,
    released bigint not null default 0,
    pushed bigint not null default 0,
    writes uuid[] not null default '{}',
    primary key (reader_id, number)
);

-- skip: settled earlier, not to be read. failed_*: how often messages of the range failed before.
create table manifest_range (
    reader_id int not null,
    number bigint not null,
    lane_id bigint not null,
    first_seq bigint not null,
    end_seq bigint not null,
    n bigint not null,
    skip varbit not null default b'',
    parked bigint[] not null default '{}',
    failed_seqs bigint[] not null default '{}',
    failed_counts int[] not null default '{}',
    primary key (reader_id, number, lane_id)
);

-- What tasks hand over before the driver settles. A task may run twice: each run writes under an id of its own, and
-- only those the driver names count. Lost in a crash of the database, which the driver's counts then show.
create unlogged table staged_outcome (
    write uuid not null,
    lane_id bigint not null,
    first_seq bigint not null,
    end_seq bigint not null,
    outcome text not null,
    delay double precision,
    error text,
    message_id uuid,
    transaction_id text,
    created_at timestamptz,
    headers bytea,
    payload bytea,
    attempts int not null default 0,
    at timestamptz not null default clock_timestamp()
);
create index staged_outcome_by_write on staged_outcome (write, lane_id, first_seq);

create unlogged table staged_segment (
    write uuid not null,
    queue text not null,
    partition text not null,
    n int not null,
    body bytea not null,
    source_lane bigint not null,
    source_first bigint not null,
    source_last bigint not null,
    at timestamptz not null default clock_timestamp()
);
alter table staged_segment alter column body set storage external;
create index staged_segment_by_write on staged_segment (write);

create function fenced(p_reader int, p_holder uuid) returns reader
language plpgsql as $$
declare
    r reader;
begin
    select * into r from reader where id = p_reader for update;
    if not found then
        raise exception using errcode = 'SE003', message = 'the queue of this reader was deleted; nothing was applied';
    end if;
    if r.holder is distinct from p_holder then
        raise exception using errcode = 'SE001', message = format(
            'another Spark query took over this reader (epoch %s, until %s); nothing was applied',
            r.epoch, r.held_until);
    end if;
    return r;
end
$$;

-- Become the holder, if nobody else is; else the answer names none. p_locked: the caller has the reader's session lock,
-- so a streaming holder is gone even if its time is not up. Without it, one of the same name lives: a second query of
-- the same rows. A holder of one batch is done when that is settled.
create function take_reader(p_reader int, p_holder uuid, p_kind text, p_seconds double precision, p_locked boolean)
returns reader language plpgsql as $$
declare
    r reader; v_now timestamptz := clock_timestamp();
begin
    select * into r from reader where id = p_reader for update;
    if not found then
        raise exception using errcode = 'SE003', message = 'the queue of this reader was deleted; nothing was applied';
    end if;
    if r.held_until > v_now and (r.kind = 'stream' and not p_locked
        or r.kind = 'batch' and r.holder <> p_holder
           and exists (select from manifest m where m.reader_id = r.id and not m.settled)) then
        r.holder := null;
        return r;
    end if;
    update reader set holder = p_holder, kind = p_kind, held_until = v_now + make_interval(secs => p_seconds),
           epoch = epoch + (holder <> p_holder)::int, serving = case when holder = p_holder then serving else 0 end
     where id = p_reader returning * into r;
    return r;
end
$$;

create function renew_reader(p_reader int, p_holder uuid, p_seconds double precision) returns boolean
language plpgsql as $$
declare
    r reader; v_until timestamptz;
begin
    r := fenced(p_reader, p_holder);
    v_until := clock_timestamp() + make_interval(secs => p_seconds);
    update reader set held_until = v_until where id = p_reader;
    perform extend_manifest(r, v_until);
    return true;
end
$$;

-- Renew the leases of the open manifest and answer how many of its lanes are still ours.
create function extend_manifest(r reader, p_until timestamptz) returns bigint
language sql as $$
    with ours as (
        select c.lane_id, c.group_id
          from manifest m
          join manifest_range g on g.reader_id = m.reader_id and g.number = m.number
          join consumer c on c.lane_id = g.lane_id and c.group_id = r.group_id and c.lease = m.lease
         where m.reader_id = r.id and not m.settled
         order by c.lane_id, c.group_id
           for update of c
    ), extended as (
        update consumer c set lease_until = greatest(c.lease_until, p_until)
          from ours o where c.lane_id = o.lane_id and c.group_id = o.group_id
        returning 1
    )
    select count(*) from extended
$$;

-- Lanes that may have something for the group now, and how many messages, those that waited longest first.
-- With p_as_of, a lane on which something was released since then is done: released messages are for a later run.
create function claimable(p_reader int, p_as_of timestamptz) returns table (lane_id bigint, available bigint)
language sql as $$
    select a.lane_id, a.ahead + a.due
      from (select l.id as lane_id, c.last_at,
                   l.next_seq - greatest(coalesce(c.cursor, start_of(r.group_id, l.id)), l.first_seq) as ahead,
                   case when c.next_due <= coalesce(p_as_of, clock_timestamp()) then (
                       select count(*) from exception e where e.lane_id = l.id and e.group_id = r.group_id and e.parked
                          and e.due <= coalesce(p_as_of, clock_timestamp())) else 0 end as due
              from reader r
              join lane l on l.queue_id = r.queue_id
              left join consumer c on c.lane_id = l.id and c.group_id = r.group_id
             where r.id = p_reader and (c.lease is null or c.lease_until <= clock_timestamp())
               and not coalesce(c.last_at >= p_as_of and c.cursor < c.batch_end, false)) a
     where a.ahead + a.due > 0
     order by a.last_at nulls first, a.lane_id
$$;

-- Write the next manifest: up to p_want messages of each lane, leased. p_lane is sorted, the one order in which
-- consumers are locked. p_as_of bounds what is read to what was there, and due, at that time.
create function claim_manifest(
    p_reader int, p_holder uuid, p_lease uuid, p_seconds double precision, p_lane bigint[], p_want int[],
    p_as_of timestamptz
) returns bigint language plpgsql as $$
#variable_conflict use_column
declare
    r reader; c consumer; l record; i int; k bigint; v_now timestamptz; v_due timestamptz; v_bound timestamptz;
    v_number bigint; v_total bigint := 0; v_cursor bigint; v_done varbit; v_end bigint; v_stop bigint; v_parked bigint[];
    v_taken bigint; v_want bigint; v_prefix int; v_size int; v_seqs bigint[]; v_counts int[];
    v_odd boolean;
begin
    r := fenced(p_reader, p_holder);
    select m.number into v_number from manifest m where m.reader_id = r.id and not m.settled;
    if found then
        return v_number;
    end if;
    v_number := r.newest + 1;
    for i in 1 .. cardinality(p_lane) loop
        select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = r.group_id for update;
        if not found then
            insert into consumer (lane_id, group_id, cursor, base)
            select l.id, r.group_id, s, s from lane l, start_of(r.group_id, l.id) s where l.id = p_lane[i]
                on conflict do nothing;
            select * into c from consumer c where c.lane_id = p_lane[i] and c.group_id = r.group_id for update;
        end if;
        select l.next_seq, l.first_seq, l.newest_at, l.has_holes, q.delayed, q.buffered
          into l from lane l join queue q on q.id = l.queue_id where l.id = p_lane[i];
        v_now := clock_timestamp();
        v_due := least(p_as_of, v_now);
        if not found or c.lease is not null and c.lease_until > v_now
           or l.buffered > 0 and l.newest_at + make_interval(secs => l.buffered) > v_now then
            continue;
        end if;
        v_odd := c.odd or l.has_holes;
        if c.lease is not null then
            perform note_lost('spark', c, 1);
            v_odd := v_odd or exists (select from lost_lease o
                                       where o.lane_id = p_lane[i] and o.group_id = r.group_id and o.times > 0);
        end if;
        v_want := p_want[i];
        v_cursor := greatest(c.cursor, l.first_seq);
        v_done := case when length(c.done) > v_cursor - c.base
                       then substring(c.done from (v_cursor - c.base + 1)::int) else b'' end;
        v_stop := l.next_seq;
        v_bound := least(p_as_of, case when l.delayed > 0 then v_now - make_interval(secs => l.delayed) end);
        if v_bound is not null and l.newest_at > v_bound then
            select least(v_stop, min(s.first_seq + passed(s.times, v_bound))) into v_stop from segment s
             where s.lane_id = p_lane[i] and s.created_at > v_bound
               and s.first_seq >= coalesce((select max(t.first_seq) from segment t
                                             where t.lane_id = p_lane[i] and t.first_seq <= v_cursor), 0);
        end if;
        v_parked := '{}'; v_seqs := '{}'; v_counts := '{}';
        if c.odd or l.has_holes then
            delete from exception e where e.lane_id = p_lane[i] and e.group_id = r.group_id and e.seq < l.first_seq;
            v_parked := array(select e.seq from exception e
                             where e.lane_id = p_lane[i] and e.group_id = r.group_id and e.parked and e.due <= v_due
                             order by e.due, e.seq limit v_want);
            select least(v_stop, min(e.seq)) into v_stop from exception e
             where e.lane_id = p_lane[i] and e.group_id = r.group_id and not e.parked and e.due > v_due
               and e.seq >= v_cursor;
            v_want := v_want - cardinality(v_parked);
            if l.has_holes then
                v_size := greatest(least(v_stop - v_cursor, greatest(length(v_done), v_want) + 10000), 0)::int;
                if length(v_done) < v_size then
                    v_done := v_done || repeat('0', v_size - length(v_done))::varbit;
                end if;
                for k in select h.seq from hole h where h.lane_id = p_lane[i] and h.seq >= v_cursor
                                                    and h.seq < v_cursor + length(v_done) loop
                    v_done := set_bit(v_done, (k - v_cursor)::int, 1);
                end loop;
            end if;
            v_prefix := position(b'0' in v_done) - 1;
            if v_prefix < 0 then
                v_prefix := length(v_done);
            end if;
            v_cursor := v_cursor + v_prefix;
            v_done := case when length(v_done) > v_prefix then substring(v_done from v_prefix + 1) else b'' end;
        end if;
        v_end := v_cursor;
        v_taken := 0;
        if position(b'1' in v_done) = 0 then
            v_taken := greatest(least(v_want, v_stop - v_cursor), 0);
            v_end := v_cursor + v_taken;
        else
            while v_taken < v_want and v_end < v_stop loop
                if v_end - v_cursor >= length(v_done) then
                    k := least(v_want - v_taken, v_stop - v_end);
                    v_taken := v_taken + k; v_end := v_end + k;
                elsif get_bit(v_done, (v_end - v_cursor)::int) = 0 then
                    v_taken := v_taken + 1; v_end := v_end + 1;
                else
                    v_end := v_end + 1;
                end if;
            end loop;
        end if;
        v_taken := v_taken + cardinality(v_parked);
        if v_taken = 0 then
            continue;
        end if;
        if c.odd then
            select coalesce(array_agg(e.seq), '{}'), coalesce(array_agg(e.attempts), '{}') into v_seqs, v_counts
              from exception e where e.lane_id = p_lane[i] and e.group_id = r.group_id
               and (e.seq = any (v_parked) or e.seq >= v_cursor and e.seq < v_end and not e.parked);
        end if;
        v_size := (v_end - v_cursor)::int;
        if length(v_done) < v_size then
            v_done := v_done || repeat('0', v_size - length(v_done))::varbit;
        end if;
        insert into manifest_range (reader_id, number, lane_id, first_seq, end_seq, n, skip, parked, failed_seqs, failed_counts)
        values (r.id, v_number, p_lane[i], v_cursor, v_end, v_taken,
                case when position(b'1' in v_done) > 0 then substring(v_done from 1 for v_size) else b'' end,
                v_parked, v_seqs, v_counts);
        update consumer c set cursor = v_cursor, base = v_cursor, done = v_done, lease = p_lease, batch_end = v_end,
               answered = case when v_size > 0 then substring(v_done from 1 for v_size) else b'' end,
               parked_out = v_parked, odd = v_odd,
               lease_until = v_now + make_interval(secs => p_seconds)
         where c.lane_id = p_lane[i] and c.group_id = r.group_id;
        v_total := v_total + v_taken;
    end loop;
    if v_total = 0 then
        return null;
    end if;
    insert into manifest (reader_id, number, lease, messages) values (r.id, v_number, p_lease, v_total);
    update reader set newest = v_number, held_until = clock_timestamp() + make_interval(secs => p_seconds) where id = r.id;
    delete from manifest where reader_id = r.id and number < v_number - 1000 and settled;
    delete from manifest_range where reader_id = r.id and number < v_number - 2;
    return v_number;
end
$$;

-- A manifest is about to be read, perhaps again: lanes that were lost to others meanwhile leave it, the rest are
-- leased anew. False if it is settled already, and so there is nothing to read.
create function serve_manifest(p_reader int, p_holder uuid, p_number bigint, p_seconds double precision) returns boolean
language plpgsql as $$
declare
    r reader; m manifest;
begin
    r := fenced(p_reader, p_holder);
    if p_number = 0 then
        update reader set serving = 0 where id = r.id;
        return false;
    end if;
    select * into m from manifest where reader_id = r.id and number = p_number;
    if not found then
        raise exception using errcode = 'SE003', message = format(
            'batch %s is not known to the queue (the newest is %s): the checkpoint belongs to another database or is '
            'older than 1000 batches; start with a new checkpoint location', p_number, r.newest);
    end if;
    update reader set serving = p_number where id = r.id;
    if m.settled then
        return false;
    end if;
    perform extend_manifest(r, clock_timestamp() + make_interval(secs => p_seconds));
    delete from manifest_range g where g.reader_id = r.id and g.number = p_number and not exists (
        select from consumer c where c.lane_id = g.lane_id and c.group_id = r.group_id and c.lease = m.lease);
    if found then
        update manifest set messages = (select coalesce(sum(g.n), 0) from manifest_range g
                                         where g.reader_id = r.id and g.number = p_number)
         where reader_id = r.id and number = p_number;
    end if;
    return true;
end
$$;
