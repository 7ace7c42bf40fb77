-- How many messages of a queue wait, which its maxSize bounds: those that the slowest group has not passed, and delayed ones.
create function backlog(p_queue bigint) returns bigint language sql stable as $$
select coalesce(sum(l.next_seq - greatest(l.first_seq, coalesce(
           (select min(c.cursor) from consumer c where c.lane_id = l.id), l.first_seq))
           + (select count(*) from scheduled s where s.lane_id = l.id)), 0)::bigint
  from lane l where l.queue_id = p_queue
$$;
