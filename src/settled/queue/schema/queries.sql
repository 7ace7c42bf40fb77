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
select id, next_seq from lane where id = any ($1::bigint[])

-- name: lane_hashes
select s.lane_id, s.first_seq, array_send(s.hashes) as hashes
  from unnest($1::bigint[], $2::float8[]) r (lane, seconds)
  join segment s on s.lane_id = r.lane
 where s.hashes is not null and s.created_at > clock_timestamp() - make_interval(secs => r.seconds)
 order by s.lane_id, s.first_seq

-- name: group_by_name
select id from consumer_group where name = $1

-- name: group_make
insert into consumer_group (name) values ($1) on conflict (name) do nothing

-- name: segments
select s.lane_id, s.first_seq, s.n, s.created_at, s.body
  from unnest($1::bigint[], $2::bigint[], $3::bigint[]) r (lane, first, stop)
 cross join lateral (
     select g.* from segment g
      where g.lane_id = r.lane and g.first_seq < r.stop
        and g.first_seq >= coalesce((select max(p.first_seq) from segment p
                                      where p.lane_id = r.lane and p.first_seq <= r.first), r.first)
      order by g.first_seq) s

-- name: ready_lanes
select l.id as lane_id, (l.next_seq - greatest(coalesce(c.cursor, 0), l.first_seq))::int as count,
       extract(epoch from case when c.lease_until > clock_timestamp() then c.lease_until else c.next_due end)::float8 as until,
       coalesce(c.lease_until > clock_timestamp(), false) as blocks
  from lane l
  left join consumer c on c.lane_id = l.id and c.group_id = $2
  left join subscription s on s.queue_id = l.queue_id and s.group_id = $2
 where l.queue_id = $1
   and case when c.lane_id is null
            then l.next_seq > l.first_seq and (s.starts_at is null or l.newest_at > s.starts_at)
            else l.next_seq > c.cursor or c.next_due is not null or c.lease is not null end
 order by l.newest_at

-- name: activity
select h.horizon, a.xid::text as xid, a.ctid::text as place, a.kind, a.queues, a.lanes, a.groups, a.until
  from (select pg_snapshot_xmin(pg_current_snapshot())::text as horizon) h
  left join activity a on a.xid >= $1::text::xid8 and a.worker <> $2

-- name: subscription
select mode, starts_at from subscription where group_id = $1 and queue_id = $2

-- name: subscribe
insert into subscription (group_id, queue_id, mode, starts_at)
values ($1, $2, $3, case when $3 = 'new' then clock_timestamp() else $4::timestamptz end)
    on conflict (group_id, queue_id) do nothing

-- name: lease_row
select c.lane_id, c.group_id, c.lease, c.base, c.batch_end, c.answered, c.parked_out, c.lease_until > clock_timestamp() as valid
  from consumer c where c.lane_id = $1 and c.group_id = $2

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
