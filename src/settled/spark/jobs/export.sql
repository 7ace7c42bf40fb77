-- name: horizon
select least(clock_timestamp(), coalesce(min(a.xact_start), clock_timestamp())) as at
  from pg_stat_activity a where a.pid <> pg_backend_pid() and a.backend_xid is not null

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

-- name: lag
select q.name as queue, g.name as consumer_group, count(*) as partitions,
       sum(greatest(l.next_seq - greatest(c.cursor, l.first_seq), 0))::bigint as waiting,
       (select count(*) from exception e join lane x on x.id = e.lane_id where x.queue_id = q.id and e.group_id = g.id) as failing
  from consumer c join lane l on l.id = c.lane_id join queue q on q.id = l.queue_id join consumer_group g on g.id = c.group_id
 where %(queue)s::text is null or q.name = %(queue)s
 group by q.id, q.name, g.id, g.name order by 1, 2

-- name: heads
select q.name as queue, l.id as lane_id, l.next_seq as head from lane l join queue q on q.id = l.queue_id
 where %(queue)s::text is null or q.name = %(queue)s

-- name: redrivable
select d.id, d.queue, d.partition, d.headers, d.payload, d.error from dead_letter d
 where not exists (select from redriven r where r.dead_letter = d.id)
   and (%(queue)s::text is null or d.queue = %(queue)s) and (%(group)s::text is null or d.consumer_group = %(group)s)
   and (%(since)s::timestamptz is null or d.failed_at >= %(since)s) and (%(until)s::timestamptz is null or d.failed_at < %(until)s)
   and (%(error)s::text is null or d.error ~ %(error)s) and (%(ids)s::uuid[] is null or d.id = any (%(ids)s))
 order by d.failed_at, d.id limit %(limit)s

-- name: mark_redriven
insert into redriven (dead_letter, queue) select u.id, u.queue from unnest(%(ids)s::uuid[], %(queues)s::text[]) u (id, queue)
