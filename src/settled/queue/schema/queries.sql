-- name: queue_by_name
select id, uid, name, namespace, task, options from queue where name = $1

-- name: queues_by_id
select id, uid, name, namespace, task, options from queue where id = any ($1::bigint[])

-- name: queues_of
select id, uid, name, namespace, task, options from queue
 where ($1::text is null or namespace = $1) and ($2::text is null or task = $2)

-- name: lane_by_name
select l.id as lane_id, l.uid as lane_uid, l.name as partition, l.queue_id
  from lane l join queue q on q.id = l.queue_id where q.name = $1 and l.name = $2

-- name: lane_by_uid
select id as lane_id, uid as lane_uid, name as partition, queue_id from lane where uid = $1

-- name: lanes_by_id
select id as lane_id, uid as lane_uid, name as partition, queue_id from lane where id = any ($1::bigint[])

-- name: lane_heads
select id, next_seq, first_seq, has_holes from lane where id = any ($1::bigint[])

-- name: lane_hashes
select s.lane_id, s.first_seq, s.hashes
  from unnest($1::bigint[], $2::float8[]) r (lane, seconds)
  join segment s on s.lane_id = r.lane
 where s.hashes is not null and s.created_at > clock_timestamp() - make_interval(secs => r.seconds)
 order by s.lane_id, s.first_seq

-- name: lane_hashes_page
select s.first_seq, s.hashes from segment s
 where s.lane_id = $1 and s.hashes is not null and s.created_at > clock_timestamp() - make_interval(secs => $2)
   and s.first_seq >= $3 and s.first_seq < $4
 order by s.first_seq limit $5

-- name: lane_starts
select l.id, greatest(l.first_seq, coalesce((select min(s.first_seq) from segment s
           where s.lane_id = l.id and s.created_at > clock_timestamp() - make_interval(secs => r.seconds)), l.next_seq)) as seq
  from unnest($1::bigint[], $2::float8[]) r (lane, seconds) join lane l on l.id = r.lane

-- name: group_by_name
select id from consumer_group where name = $1

-- name: group_make
insert into consumer_group (name) values ($1) on conflict (name) do nothing

-- name: segments
-- The segments of each range, the first and what fits into so many bytes with it, and, as long as they are small, some of
-- those that follow.
select s.lane_id, s.first_seq, s.n, s.created_at, s.body
  from unnest($1::bigint[], $2::bigint[], $3::bigint[]) r (lane, first, stop)
 cross join lateral (
     select g.*, octet_length(g.body) as own, sum(octet_length(g.body)) over (order by g.first_seq) as size from segment g
      where g.lane_id = r.lane and g.first_seq < r.stop + $4::int
        and g.first_seq >= coalesce((select max(p.first_seq) from segment p
                                      where p.lane_id = r.lane and p.first_seq <= r.first), r.first)
      order by g.first_seq) s
 where s.first_seq < r.stop and s.size - s.own < $5::bigint or s.size <= 131072

-- name: probe
-- Takes room on the disk as a push does, in a file of its own: free room inside of a file proves nothing. It is rolled back.
create table probe as select string_agg(md5(random()::text || n), '') from generate_series(1, 6000) n group by n % 100

-- name: shrink
select shrink($1, $2, $3, $4, $5, $6)

-- name: ready_lanes
select q.changed::text as changed, r.* from queue q left join lateral (
select l.id as lane_id,
       -- A parked message that is due, or was under a lease that is over, lies behind the cursor.
       greatest(l.next_seq - greatest(coalesce(c.cursor, 0), l.first_seq),
                case when least(c.next_due, c.lease_until) <= clock_timestamp() then 1 else 0 end)::int as count,
       extract(epoch from case when c.lease_until > clock_timestamp() then c.lease_until else c.next_due end)::float8 as until,
       coalesce(c.lease_until > clock_timestamp(), false) as blocks, l.newest_at
  from lane l
  left join consumer c on c.lane_id = l.id and c.group_id = $2
  left join subscription s on s.queue_id = l.queue_id and s.group_id = $2
 where l.queue_id = $1
   and case when c.lane_id is null
            then l.next_seq > l.first_seq and (s.starts_at is null or l.newest_at > s.starts_at)
            else l.next_seq > c.cursor or c.next_due is not null or c.lease is not null end
) r on true where q.id = $1 order by r.newest_at

-- name: appended_since
-- Lanes with segments that became visible after a snapshot, and the snapshot of now.
select pg_current_snapshot()::text as snapshot, array_agg(l.id) as lanes, array_agg(l.queue_id) as queues
  from (select distinct s.lane_id from segment s
         where s.xid >= pg_snapshot_xmin($1::text::pg_snapshot) and s.xid < pg_snapshot_xmax(pg_current_snapshot())
           and not pg_visible_in_snapshot(s.xid, $1::text::pg_snapshot)) n
  join lane l on l.id = n.lane_id

-- name: changed_since
-- Queues that changed, and became visible so, between two snapshots.
select q.id, q.name, q.changed::text as changed from queue q
 where q.changed >= pg_snapshot_xmin($1::text::pg_snapshot) and not pg_visible_in_snapshot(q.changed, $1::text::pg_snapshot)
   and pg_visible_in_snapshot(q.changed, $2::text::pg_snapshot)

-- name: unleased
-- Of (lane, group) pairs those that no valid lease is on, by their place from 1.
select array_agg(u.place::int) as places
  from unnest($1::text::bigint[], $2::text::int[]) with ordinality u (lane, grp, place)
  left join consumer c on c.lane_id = u.lane and c.group_id = u.grp
 where c.lease_until is null or c.lease_until <= clock_timestamp()

-- name: openings
-- Of (lane, group) pairs: whether a pop now may get something, whether the lane is leased, and when to look again, as claim()
-- would say; where it would have to look closer, `open` says that it should.
select u.place::int, coalesce(c.lease_until > n.now, false) as leased,
       coalesce(c.lease_until <= n.now, true) and coalesce(w.over <= n.now, true)
           and (coalesce(x.due, false)
                or l.next_seq > a.seq and not coalesce(x.blocked, false) and coalesce(d.over <= n.now, true)) as open,
       extract(epoch from case when c.lease_until > n.now then c.lease_until
                               when w.over > n.now then w.over else least(x.next, d.over) end)::float8 as until
  from (select clock_timestamp() as now) n
 cross join unnest($1::text::bigint[], $2::text::int[]) with ordinality u (lane, grp, place)
  join lane l on l.id = u.lane
  join queue q on q.id = l.queue_id
  left join consumer c on c.lane_id = u.lane and c.group_id = u.grp
  left join subscription s on c.lane_id is null and s.queue_id = l.queue_id and s.group_id = u.grp
 cross join lateral (
     select case when c.lane_id is not null then greatest(c.cursor, l.first_seq)
                 when s.starts_at is null or l.newest_at > s.starts_at then l.first_seq else l.next_seq end as seq) a
 cross join lateral (
     select case when q.buffered > 0 and l.next_seq > a.seq then l.newest_at + make_interval(secs => q.buffered) end as over) w
 cross join lateral (
     select case when q.delayed > 0 and l.next_seq > a.seq
                 then created_of(l.id, a.seq) + make_interval(secs => q.delayed) end as over) d
 cross join lateral (
     select bool_or(e.parked and e.due <= n.now) as due,
            bool_or(not e.parked and e.seq = a.seq and e.due > n.now) as blocked,
            min(e.due) filter (where e.due > n.now) as next
       from exception e where c.odd and e.lane_id = u.lane and e.group_id = u.grp) x

-- name: activity
select h.horizon, a.xid::text as xid, a.ctid::text as place, a.kind, a.queues, a.lanes, a.groups, a.until
  from (select pg_snapshot_xmin(pg_current_snapshot())::text as horizon) h
  left join activity a on a.xid >= $1::text::xid8 and a.worker <> $2

-- name: join_workers
select pg_advisory_lock_shared(96631518, 1)

-- name: other_workers
select exists (select from pg_locks where locktype = 'advisory' and classid = 96631518 and objid = 1
                  and database = (select oid from pg_database where datname = current_database())
                  and pid <> pg_backend_pid()) as others

-- name: subscription
select mode, starts_at from subscription where group_id = $1 and queue_id = $2

-- name: subscribe
insert into subscription (group_id, queue_id, mode, starts_at)
values ($1, $2, $3, case when $3 = 'new' then clock_timestamp() else $4::timestamptz end)
    on conflict (group_id, queue_id) do nothing

-- name: lease_row
select c.lane_id, c.group_id, c.lease, c.base, c.batch_end, c.answered, c.parked_out,
       c.lease_until > clock_timestamp() and not in_batch(c.lane_id, c.group_id, c.lease) as valid
  from consumer c where c.lane_id = $1 and c.group_id = $2

-- name: take_back
select take_back($1, $2, $3, $4, $5)

-- name: wide_lease
insert into wide_lease (lease, lanes) values ($1, $2)

-- name: wide_lanes
select lanes from wide_lease where lease = $1

-- name: extend
update consumer set lease_until = greatest(lease_until, clock_timestamp() + make_interval(secs => $4))
 where lane_id = any ($1::bigint[]) and group_id = $2 and lease = $3 and lease_until > clock_timestamp()
returning lane_id, lease_until

-- name: lease_state
select bool_or(lease_until <= clock_timestamp()) as expired from consumer
 where lane_id = any ($1::bigint[]) and group_id = $2 and lease = $3

-- name: lease_valid
select count(*) from unnest($1::bigint[], $2::int[], $3::uuid[]) r (lane, grp, lease)
  join consumer c on c.lane_id = r.lane and c.group_id = r.grp and c.lease = r.lease and c.lease_until > clock_timestamp()

-- name: backlog
select backlog($1)

-- name: room_lock
select pg_advisory_lock(96631519, (u.id % 2147483647)::int) from unnest($1::bigint[]) with ordinality u (id, place)

-- name: room_unlock
select pg_advisory_unlock(96631519, (u.id % 2147483647)::int) from unnest($1::bigint[]) u (id)

-- name: room_sizes
select queue_id, size, extract(epoch from clock_timestamp() - counted_at)::float8 as age from room
 where queue_id = any ($1::bigint[])

-- name: room_note
insert into room (queue_id, size, counted_at)
select u.id, u.size, clock_timestamp() from unnest($1::bigint[], $2::bigint[], $3::boolean[]) u (id, size, counted)
    on conflict (queue_id) do update set size = excluded.size,
       counted_at = case when excluded.queue_id = any (array(
           select v.id from unnest($1::bigint[], $3::boolean[]) v (id, counted) where v.counted))
           then excluded.counted_at else room.counted_at end

-- name: schedule
insert into scheduled (due, lane_id, message_id, transaction_id, headers, payload)
select clock_timestamp() + make_interval(secs => u.delay), u.lane, u.message, u.tx, u.headers, u.payload
  from unnest($1::float8[], $2::bigint[], $3::uuid[], $4::text[], $5::bytea[], $6::bytea[])
       u (delay, lane, message, tx, headers, payload)
    on conflict (lane_id, transaction_id) where transaction_id is not null do nothing
returning lane_id, transaction_id, message_id

-- name: scheduled_first
select message_id from scheduled where lane_id = $1 and transaction_id = $2

-- name: scheduled_among
select s.transaction_id, s.message_id,
       exists (select from scheduled where lane_id = $1 and transaction_id is not null) as others
  from (select 1) one left join scheduled s on s.lane_id = $1 and s.transaction_id = any ($2::text[])

-- name: scheduled_due
select id, lane_id, message_id, transaction_id, headers, payload from scheduled
 where due <= clock_timestamp() order by due, id limit $1 for update skip locked

-- name: scheduled_next
select extract(epoch from min(due))::float8 from scheduled

-- name: scheduled_done
delete from scheduled where id = any ($1::bigint[])

-- name: overdue
select l.id as lane_id, coalesce(c.group_id, 0) as group_id, q.seconds::float8 as seconds, q.option
  from (select q.id, least(nullif(o.wait, 0), nullif(o.ttl, 0)) as seconds,
               case when o.wait > 0 and (o.ttl = 0 or o.wait <= o.ttl) then 'maxWaitTimeSeconds' else 'ttl' end as option
          from queue q cross join lateral (
              select (q.options ->> 'maxWaitTimeSeconds')::int as wait, (q.options ->> 'ttl')::int as ttl) o
         where o.wait > 0 or o.ttl > 0) q
  join lane l on l.queue_id = q.id
  left join consumer c on c.lane_id = l.id
 cross join lateral (select clock_timestamp() - make_interval(secs => q.seconds) as bound) b
 where (c.lease is null or c.lease_until <= clock_timestamp())
   and (l.next_seq > greatest(l.first_seq, coalesce(c.cursor, 0))
        and created_of(l.id, greatest(l.first_seq, coalesce(c.cursor, 0))) < b.bound
        or c.odd and exists (select from exception e where e.lane_id = l.id and e.group_id = c.group_id
                                and e.seq >= l.first_seq and created_of(l.id, e.seq) < b.bound))
 limit $1

-- name: compactable
select l.id, greatest(l.compacted, l.first_seq) as since,
       case when (q.options ->> 'retentionEnabled')::boolean
            then least(nullif((q.options ->> 'retentionSeconds')::int, 0), nullif((q.options ->> 'completedRetentionSeconds')::int, 0))
       end as keep
  from lane l join queue q on q.id = l.queue_id
 where l.id > $1 and l.next_seq - greatest(l.compacted, l.first_seq) >= $2
 order by l.id limit $3

-- name: segment_sizes
select s.first_seq, s.n, extract(epoch from coalesce(s.times[1], s.created_at))::float8 as first_at,
       extract(epoch from s.created_at)::float8 as last_at, octet_length(s.body) as size,
       extract(epoch from clock_timestamp() - s.created_at)::float8 as age
  from segment s
 where s.lane_id = $1 and s.first_seq >= $2 and s.created_at < clock_timestamp() - make_interval(secs => $3)
 order by s.first_seq limit $4

-- name: whole_segments
select s.first_seq, s.n, s.created_at, s.hashes, s.body from segment s
 where s.lane_id = $1 and s.first_seq >= $2 and s.first_seq < $3 order by s.first_seq

-- name: tidy_activity
with removed as (delete from activity where at < clock_timestamp() - interval '1 minute' returning 1)
select count(*) from removed

-- name: tidy_journal
with removed as (
    delete from journal where ctid = any (array(
        select ctid from journal where at < clock_timestamp() - make_interval(secs => $1) limit $2)) returning 1
)
select count(*) from removed

-- name: tidy_wide_leases
with removed as (delete from wide_lease where at < clock_timestamp() - interval '2 days' returning 1)
select count(*) from removed

-- name: tidy_lost_leases
with removed as (
    delete from lost_lease where times = 0 and at < clock_timestamp() - interval '1 day' returning 1
)
select count(*) from removed

-- name: tidy_consumers
with looked as (
    select lane_id from consumer where lane_id > $1 order by lane_id limit $2
), removed as (
    delete from consumer c using (select distinct lane_id from looked) o
     where c.lane_id = o.lane_id and not exists (select from lane l where l.id = o.lane_id) returning 1
)
select (select max(lane_id) from looked) as last, (select count(*) from removed) as removed

-- name: dead_letters
select d.*, count(*) over () as total
  from dead_letters_where($1, $2, $3, $4, $5, $6, $7) d
 order by d.failed_at desc, d.id
 limit $8 offset $9

-- name: dead_letters_total
select count(*) from dead_letters_where($1, $2, $3, $4, $5, $6, $7)

-- name: dead_letters_next
select d.id, d.failed_at, d.queue_id, d.lane_id, d.consumer_group
  from dead_letters_where($1, $2, $3, $4, $5, $6, $7) d
 where $8::timestamptz is null or (d.failed_at, d.id) > ($8, $9::uuid)
 order by d.failed_at, d.id
 limit $10

-- name: dead_letters_put_back
select d.id, put_back($1, d.id) as state
  from (select id from dead_letter where id = any ($2::uuid[]) order by lane_id, consumer_group, seq) d

-- name: dead_letter_take
delete from dead_letter where id = $1 returning *

-- name: dead_letters_of
select id from dead_letter
 where lane_id = $1 and transaction_id = $2 and ($3::text is null or consumer_group = $3) order by failed_at

-- name: dead_letters_delete
delete from dead_letter where id = any ($1::uuid[]) returning id

-- name: queue_stats
select q.id, q.uid, q.name, q.namespace, q.task, q.options, q.created_at,
       count(l.id)::int as partitions,
       coalesce(sum(messages_from(l, l.first_seq)), 0)::bigint as total,
       coalesce(sum(messages_from(l, coalesce(c.cursor, l.first_seq))), 0)::bigint as pending,
       coalesce(sum(c.processing), 0)::bigint as processing,
       (select count(*) from dead_letter d where d.queue_id = q.id) as dead
  from queue q
  left join lane l on l.queue_id = q.id
  left join lateral (
      select min(c.cursor) as cursor,
             sum(length(c.answered) - bit_count(c.answered) + cardinality(c.parked_out))
                 filter (where c.lease_until > clock_timestamp()) as processing
        from consumer c where c.lane_id = l.id) c on true
 where ($1::text is null or q.name = $1) and ($2::text is null or q.namespace = $2) and ($3::text is null or q.task = $3)
 group by q.id order by q.name

-- name: lane_stats
select l.uid, l.name, l.created_at, l.newest_at, messages_from(l, l.first_seq) as total,
       (select coalesce(s.times[1], s.created_at) from segment s where s.lane_id = l.id order by s.first_seq limit 1) as oldest_at,
       messages_from(l, coalesce(c.cursor, l.first_seq)) as pending,
       coalesce(c.processing, 0)::bigint as processing,
       (select count(*) from dead_letter d where d.lane_id = l.id) as dead
  from lane l
  left join lateral (
      select min(c.cursor) as cursor,
             sum(length(c.answered) - bit_count(c.answered) + cardinality(c.parked_out))
                 filter (where c.lease_until > clock_timestamp()) as processing
        from consumer c where c.lane_id = l.id) c on true
 where l.queue_id = $1 order by l.name limit $2 offset $3

-- name: lane_lags
select * from lane_lags($1, $2) order by grp, queue, partition

-- name: group_lags
select grp, queue, count(*)::int as partitions, sum(greatest(lag, 0))::bigint as lag, count(*) filter (where lag > 0)::int as lagging,
       min(oldest_at) filter (where lag > 0) as oldest_at, count(lease)::int as leases, max(last_at) as last_at,
       mode, starts_at, subscribed_at
  from lane_lags($1, $2) group by grp, queue, mode, starts_at, subscribed_at order by grp, queue

-- name: lane_consumers
select c.*, g.name, c.lease_until > clock_timestamp() as leased
  from consumer c join consumer_group g on g.id = c.group_id where c.lane_id = any ($1::bigint[]) order by g.name

-- name: lane_failures
select e.lane_id, g.name, e.seq, false as dead, e.attempts, e.error, e.failed_at as at, 0 as unsettled
  from unnest($1::bigint[], $2::bigint[], $3::bigint[]) r (lane, first, last)
  join exception e on e.lane_id = r.lane and e.seq between r.first and r.last
  join consumer_group g on g.id = e.group_id
union all
select d.lane_id, d.consumer_group, d.seq, true, d.attempts, d.error, d.failed_at, d.unsettled
  from unnest($1::bigint[], $2::bigint[], $3::bigint[]) r (lane, first, last)
  join dead_letter d on d.lane_id = r.lane and d.seq between r.first and r.last
 order by at

-- name: lane_lost
select o.lane_id, g.name, o.base, o.held, o.parked, o.times
  from lost_lease o join consumer_group g on g.id = o.group_id where o.lane_id = any ($1::bigint[])

-- name: lost_leases
select base, held, parked, times from lost_lease where lane_id = $1 and group_id = $2

-- name: is_hole
select from hole where lane_id = $1 and seq = $2

-- name: lane_holes
select h.lane_id, h.seq from unnest($1::bigint[], $2::bigint[], $3::bigint[]) r (lane, first, last)
  join hole h on h.lane_id = r.lane and h.seq between r.first and r.last

-- name: lane_segments
select s.first_seq, s.n, s.created_at, s.body from segment s
 where s.lane_id = $1 and s.first_seq < $2 order by s.first_seq desc limit $3

-- name: newest_of_lane
select n.first_seq, n.created_at, n.body
  from (select s.first_seq, s.created_at, s.body, sum(pg_column_size(s.body)) over (order by s.first_seq desc) as size
          from (select first_seq, created_at, body from segment where lane_id = $1 order by first_seq desc limit 64) s) n
 where n.size <= 4194304 order by n.first_seq desc

-- name: segment_by_hash
select s.first_seq, s.created_at, s.body from segment s
 where s.lane_id = $1 and s.hashes is not null and position($2::bytea in s.hashes) > 0 order by s.first_seq desc

-- name: newest_segments
select s.lane_id, s.first_seq, s.n, s.created_at, s.body, q.name as queue, q.namespace, q.task,
       (q.options ->> 'priority')::int as priority, l.name as partition, l.uid
  from queue q join lane l on l.queue_id = q.id
  cross join lateral (
      select g.* from segment g
       where g.lane_id = l.id and g.created_at >= $5 and coalesce(g.times[1], g.created_at) < $6
         and ($8::timestamptz is null or g.created_at < $8
              or g.created_at = $8 and (g.lane_id > $9 or g.lane_id = $9 and g.first_seq < $10))
       order by g.first_seq desc limit $7) s
 where ($1::text is null or q.name = $1) and ($2::text is null or l.name = $2)
   and ($3::text is null or q.namespace = $3) and ($4::text is null or q.task = $4)
 order by s.created_at desc, s.lane_id, s.first_seq desc
 limit $7

-- name: journal
select j.*, t.at_index as place
  from journal j cross join lateral (
      select i as at_index from generate_subscripts(j.lanes, 1) i
       where ($1::bigint[] is null or j.lanes[i] = any ($1)) and ($2::bigint is null or $2 between j.firsts[i] and j.lasts[i])) t
 order by j.at desc limit $3

-- name: trace_add
insert into trace (lane_id, transaction_id, consumer_group, event_type, names, data, worker)
values ($1, $2, $3, $4, $5, $6, $7) returning id

-- name: traces
select t.*, l.uid, l.name as partition, q.name as queue, count(*) over () as total
  from trace t join lane l on l.id = t.lane_id join queue q on q.id = l.queue_id
 where t.lane_id = $1 and t.transaction_id = $2 order by t.created_at, t.id

-- name: traces_by_name
select t.*, l.uid, l.name as partition, q.name as queue, count(*) over () as total
  from trace t join lane l on l.id = t.lane_id join queue q on q.id = l.queue_id
 where t.names @> array[$1::text] order by t.created_at desc, t.id limit $2 offset $3

-- name: trace_names
select n as name, count(*) as traces, count(distinct (t.lane_id, t.transaction_id)) as messages, max(t.created_at) as last_seen,
       count(*) over () as total
  from trace t cross join unnest(t.names) n group by n order by max(t.created_at) desc limit $1 offset $2

-- name: stream_make
insert into stream_query (name, source_queue, sink_queue, config_hash) values ($1, $2, $3, $4)
    on conflict (name) do nothing returning id

-- name: stream_get
select id, config_hash from stream_query where name = $1 for update

-- name: stream_reset
update stream_query set source_queue = $2, sink_queue = $3, config_hash = $4 where id = $1

-- name: state_get
select key, value::text as value, updated_at from stream_state
 where query_id = $1 and lane_id = $2 and (cardinality($3::text[]) = 0 or key = any ($3))
   and ($4::text is null or starts_with(key, $4))
   and ($5::bigint is null or case when jsonb_typeof(value -> 'windowEnd') = 'number'
                                   then (value ->> 'windowEnd')::numeric <= $5 else false end)
 order by key

-- name: state_put
insert into stream_state (query_id, lane_id, key, value)
select $1, $2, u.key, u.value::jsonb from unnest($3::text[], $4::text[]) u (key, value)
    on conflict (query_id, lane_id, key) do update set value = excluded.value, updated_at = clock_timestamp()

-- name: state_drop
delete from stream_state where query_id = $1 and lane_id = $2 and key = any ($3::text[])

-- name: release_lease
update consumer set answered = ~(answered & ~answered), parked_out = '{}'
 where lane_id = $1 and group_id = $2 and lease = $3
returning lane_id

-- name: close_lease
update consumer c0 set cursor = x.cursor, base = x.base, done = x.done, answered = x.answered, lease = x.lease,
       lease_until = x.lease_until, next_due = x.next_due, odd = x.odd
  from consumer c, close_lease(c) x
 where c.lane_id = $1 and c.group_id = $2 and c0.lane_id = c.lane_id and c0.group_id = c.group_id

-- name: tell_release
insert into activity (worker, kind, queues, lanes, groups, until)
values ($1, 'release', array[$2::bigint], array[$3::bigint], array[$4::int], array[null::timestamptz])

-- name: switches
select name, enabled from switch

-- name: switch_set
insert into switch (name, enabled) values ($1, $2) on conflict (name) do update set enabled = excluded.enabled

-- name: migrations
create table if not exists migration (
    id int primary key,
    name text not null,
    at timestamptz not null default clock_timestamp()
)
