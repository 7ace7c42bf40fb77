-- Whether a lease is that of an open batch of a Spark query: nobody else settles what is under it.
create function in_batch(p_lane bigint, p_group int, p_lease uuid) returns boolean language sql stable as $$
select exists (select from lane l join reader r on r.queue_id = l.queue_id and r.group_id = p_group
                 join manifest m on m.reader_id = r.id
                where l.id = p_lane and m.lease = p_lease and not m.settled)
$$;
