-- An encrypted queue that a pipeline's results would go into in clear; null if there is none. A sealed body begins with 4.
create function in_clear(p_writes uuid[]) returns text language sql stable as $$
select q.name from staged_segment s join queue q on q.name = s.queue
 where s.write = any (p_writes) and (q.options ->> 'encryptionEnabled')::boolean and get_byte(s.body, 0) <> 4 limit 1
$$;
