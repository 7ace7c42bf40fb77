-- name: horizon
select least(clock_timestamp(), coalesce(min(a.xact_start), clock_timestamp())) as at
  from pg_stat_activity a where a.pid <> pg_backend_pid() and a.backend_xid is not null

-- name: database
select min(at)::text as database from migration

-- name: settlements
select j.at, j.kind, j.worker, q.name as queue, l.name as partition, g.name as consumer_group, u.lane as lane_id, u.first as first_sequence,
       u.last as last_sequence, u.n as messages, u.took as seconds, j.attempts, j.error
  from journal j, unnest(j.lanes, j.groups, j.firsts, j.lasts, j.counts, j.took) u (lane, grp, first, last, n, took)
  left join lane l on l.id = u.lane
  left join queue q on q.id = l.queue_id
  left join consumer_group g on g.id = u.grp
 where j.at >= %(since)s and j.at < %(until)s and (%(queue)s::text is null or q.name = %(queue)s)

-- name: dead_letters
select d.failed_at as at, d.id::text as id, d.queue, d.partition, d.consumer_group, d.lane_id, d.seq as sequence,
       d.message_id::text as message_id, d.transaction_id, d.error, d.attempts, d.headers, d.payload, d.created_at
  from dead_letter d
 where d.failed_at >= %(since)s and d.failed_at < %(until)s and (%(queue)s::text is null or d.queue = %(queue)s)

-- name: waits
select date_trunc('second', j.at) as at, q.name as queue, g.name as consumer_group,
       exp(ceil(ln(greatest(extract(epoch from j.at - s.created_at), 0.001)) * 50) / 50)::double precision as seconds,
       sum((least(s.first_seq + s.n, u.last + 1) - greatest(s.first_seq, u.first)) * least(u.n::numeric / (u.last - u.first + 1), 1)
          )::double precision as messages
  from journal j, unnest(j.lanes, j.groups, j.firsts, j.lasts, j.counts) u (lane, grp, first, last, n)
  join lane l on l.id = u.lane
  join queue q on q.id = l.queue_id
  join consumer_group g on g.id = u.grp
  cross join lateral (
       select s.first_seq, s.n, s.created_at from segment s
        where s.lane_id = u.lane and s.first_seq <= u.last and s.first_seq + s.n > u.first
          and s.first_seq >= coalesce((select max(p.first_seq) from segment p
                                        where p.lane_id = u.lane and p.first_seq <= u.first), u.first)) s
 where j.kind in ('settled', 'auto_ack') and u.n > 0 and u.last >= u.first
   and j.at >= %(since)s and j.at < %(until)s and (%(queue)s::text is null or q.name = %(queue)s)
 group by 1, 2, 3, 4

-- name: pushed
-- What each group should have met since its queue was made; not `whole` where the journal cannot tell all of it.
select q.name as queue, g.name as consumer_group, coalesce(sum(l.next_seq), 0)::bigint as pushed,
       coalesce(sum(greatest(l.first_seq - coalesce(c.cursor, 0), 0)), 0)::bigint as removed,
       bool_and(s.starts_at is null) and not coalesce(bool_or(l.has_holes), false)
         and q.created_at > clock_timestamp() - make_interval(days => %(days)s) as whole
  from queue q cross join consumer_group g
  left join lane l on l.queue_id = q.id
  left join consumer c on c.lane_id = l.id and c.group_id = g.id
  left join subscription s on s.queue_id = q.id and s.group_id = g.id
 where (%(queue)s::text is null or q.name = %(queue)s)
   and (s.queue_id is not null or exists (select from reader r where r.queue_id = q.id and r.group_id = g.id)
        or exists (select from consumer o join lane x on x.id = o.lane_id where x.queue_id = q.id and o.group_id = g.id))
 group by q.id, g.id order by 1, 2

-- name: failing
select e.lane_id, g.name as consumer_group, e.seq as sequence, q.name as queue
  from exception e join lane l on l.id = e.lane_id join queue q on q.id = l.queue_id join consumer_group g on g.id = e.group_id
 where %(queue)s::text is null or q.name = %(queue)s

-- name: heads
select l.id as lane_id, l.next_seq as head from lane l join queue q on q.id = l.queue_id
 where %(queue)s::text is null or q.name = %(queue)s

-- name: queues
select q.name as queue, array_agg(l.id) as lanes from lane l join queue q on q.id = l.queue_id
 where l.id = any (%(lanes)s) group by q.name order by q.name

-- name: known_queue
select exists (select from queue where name = %(queue)s) as known, clock_timestamp() as now

-- name: known_group
select exists (select from consumer_group where name = %(group)s)
       or exists (select from dead_letter where consumer_group = %(group)s) as known

-- name: pattern
select '' ~ %(error)s as fits

-- name: redrivable
select d.id, d.queue, d.partition, d.headers, d.payload, d.failed_at from dead_letter d
 where not exists (select from redriven r where r.dead_letter = d.id)
   and (%(queue)s::text is null or d.queue = %(queue)s) and (%(group)s::text is null or d.consumer_group = %(group)s)
   and (%(since)s::timestamptz is null or d.failed_at >= %(since)s) and d.failed_at < %(until)s
   and (%(error)s::text is null or d.error ~ %(error)s) and (%(ids)s::uuid[] is null or d.id = any (%(ids)s))
   and (d.failed_at, d.id) > (%(after)s::timestamptz, %(after_id)s::uuid)
 order by d.failed_at, d.id limit %(limit)s

-- name: take_letters
select d.id from dead_letter d
 where d.id = any (%(ids)s) and not exists (select from redriven r where r.dead_letter = d.id) for update of d skip locked

-- name: targets
select q.id, q.name, (q.options ->> 'encryptionEnabled')::boolean as encrypted, (q.options ->> 'maxSize')::bigint as max_size
  from queue q where q.name = any (%(queues)s) order by q.id

-- name: hold_room
select pg_advisory_xact_lock(96631519, (%(queue)s %% 2147483647)::int)

-- name: backlog
select backlog(%(queue)s) as size

-- name: note_size
insert into room (queue_id, size, counted_at) values (%(queue)s, %(size)s, clock_timestamp())
    on conflict (queue_id) do update set size = excluded.size, counted_at = excluded.counted_at

-- name: mark_redriven
insert into redriven (dead_letter, queue) select u.id, u.queue from unnest(%(ids)s::uuid[], %(queues)s::text[]) u (id, queue)
