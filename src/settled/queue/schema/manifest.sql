-- name: make_group
insert into consumer_group (name) values (%(group)s) on conflict (name) do nothing

-- name: make_reader
insert into reader (group_id, queue_id)
select g.id, q.id from consumer_group g, queue q where g.name = %(group)s and q.name = %(queue)s
    on conflict (group_id, queue_id) do nothing

-- name: find_reader
select r.*, q.parked, (q.options ->> 'encryptionEnabled')::boolean as encrypted from reader r
  join consumer_group g on g.id = r.group_id join queue q on q.id = r.queue_id
 where g.name = %(group)s and q.name = %(queue)s

-- name: last_settled
select coalesce(max(number) filter (where settled), r.newest - count(*) filter (where not settled)) as number
  from reader r left join manifest m on m.reader_id = r.id where r.id = %(reader)s group by r.newest

-- name: open_manifest
select m.number, r.holder from reader r left join manifest m on m.reader_id = r.id and not m.settled where r.id = %(reader)s

-- name: ranges
select g.lane_id, l.name as partition, g.first_seq, g.end_seq, g.n, g.skip::text as skip, g.parked, g.failed_seqs, g.failed_counts
  from manifest_range g join lane l on l.id = g.lane_id
 where g.reader_id = %(reader)s and g.number = %(number)s order by g.lane_id

-- name: log_ranges
select l.id as lane_id, l.name as partition, l.first_seq, l.next_seq as end_seq, l.next_seq - l.first_seq as n, '' as skip,
       '{}'::bigint[] as parked, '{}'::bigint[] as failed_seqs, '{}'::int[] as failed_counts
  from lane l join queue q on q.id = l.queue_id where q.name = %(queue)s and l.next_seq > l.first_seq order by l.id

-- name: segments
select s.first_seq, s.n, (extract(epoch from s.created_at) * 1000000)::bigint as created, s.body
  from segment s
 where s.lane_id = %(lane)s and s.first_seq < %(stop)s
   and s.first_seq >= coalesce((select max(p.first_seq) from segment p
                                 where p.lane_id = %(lane)s and p.first_seq <= %(first)s), %(first)s)
 order by s.first_seq

-- name: copy_outcomes
copy staged_outcome (write, lane_id, first_seq, end_seq, outcome, delay, error, message_id, transaction_id, created_at, headers, payload)
from stdin (format binary)

-- name: copy_segments
copy staged_segment (write, queue, partition, n, body, source_lane, source_first, source_last) from stdin (format binary)

-- name: totals
select coalesce(sum(m.messages), 0)::bigint as messages, coalesce(sum(m.acked), 0)::bigint as acked,
       coalesce(sum(m.retried), 0)::bigint as retried, coalesce(sum(m.dead), 0)::bigint as dead,
       coalesce(sum(m.released), 0)::bigint as released, coalesce(sum(m.pushed), 0)::bigint as pushed, count(*) as batches
  from manifest m join reader r on r.id = m.reader_id
  join consumer_group g on g.id = r.group_id join queue q on q.id = r.queue_id
 where g.name = %(group)s and q.name = %(queue)s and m.settled and m.number > %(after)s

-- name: busy
select coalesce(extract(epoch from sum(m.settled_at - m.claimed_at)), 0)::double precision as seconds
  from manifest m join reader r on r.id = m.reader_id
  join consumer_group g on g.id = r.group_id join queue q on q.id = r.queue_id
 where g.name = %(group)s and q.name = %(queue)s and m.settled and m.number > %(after)s

-- name: lag
-- A message is counted once: some behind the cursor are done already, and on a queue in order what failed is behind it too.
select q.name as queue, g.name as consumer_group, count(*) filter (where l.next_seq > 0) as partitions,
       coalesce(sum(l.next_seq - p.at - coalesce(bit_count(substring(c.done from least(p.at - c.base, length(c.done))::int + 1)), 0)
                    - case when c.odd then (select count(*) from exception e
                                             where e.lane_id = l.id and e.group_id = g.id and not e.parked) else 0 end
                   ), 0)::bigint as waiting,
       (select count(*) from exception e join lane x on x.id = e.lane_id
         where x.queue_id = q.id and e.group_id = g.id) as failing,
       coalesce(sum(l.next_seq), 0)::bigint as head, statement_timestamp() as at
  from queue q cross join consumer_group g
  left join lane l on l.queue_id = q.id
  left join consumer c on c.lane_id = l.id and c.group_id = g.id
  cross join lateral (select greatest(coalesce(c.cursor, start_of(g.id, l.id)), l.first_seq) as at) p
 where (%(queue)s::text is null or q.name = %(queue)s) and (%(group)s::text is null or g.name = %(group)s)
   and (exists (select from reader r where r.queue_id = q.id and r.group_id = g.id)
        or exists (select from subscription s where s.queue_id = q.id and s.group_id = g.id)
        or exists (select from consumer o join lane x on x.id = o.lane_id where x.queue_id = q.id and o.group_id = g.id))
 group by q.id, g.id order by 1, 2

-- name: settled_since
select coalesce(sum(u.n), 0)::bigint as messages
  from journal j, unnest(j.lanes, j.groups, j.counts) u (lane, grp, n)
  join lane l on l.id = u.lane join queue q on q.id = l.queue_id join consumer_group g on g.id = u.grp
 where j.at >= %(at)s and j.kind in ('settled', 'auto_ack', 'dead', 'dropped') and q.name = %(queue)s and g.name = %(group)s

-- name: segments_of
select s.first_seq, s.n, (extract(epoch from s.created_at) * 1000000)::bigint as created, s.body
  from (select distinct (select max(p.first_seq) from segment p where p.lane_id = %(lane)s and p.first_seq <= u.seq) as first
          from unnest(%(seqs)s::bigint[]) u (seq)) f
  join segment s on s.lane_id = %(lane)s and s.first_seq = f.first
 order by s.first_seq

-- name: partitions
select id, name from lane where id = any (%(lanes)s)

-- name: subscribe
insert into subscription (group_id, queue_id, mode, starts_at)
select g.id, q.id, case %(at)s when 'earliest' then 'all' when 'latest' then 'new' else 'timestamp' end,
       case %(at)s when 'earliest' then null when 'latest' then clock_timestamp() else nullif(%(at)s, '')::timestamptz end
  from consumer_group g, queue q where g.name = %(group)s and q.name = %(queue)s
    on conflict (group_id, queue_id) do nothing

-- name: source
select q.uid::text || '-' || r.id as source from reader r
  join consumer_group g on g.id = r.group_id join queue q on q.id = r.queue_id
 where g.name = %(group)s and q.name = %(queue)s

-- name: room
select backlog(q.id) as size, (q.options ->> 'maxSize')::bigint as max_size
  from queue q where q.name = %(queue)s and (q.options ->> 'maxSize')::bigint > 0

-- name: encrypted
select name from queue where name = any (%(queues)s) and (options ->> 'encryptionEnabled')::boolean

-- name: known
select from queue where name = %(queue)s
