-- Dead letters by filter, where null leaves a field out; the error is looked for as a text, in any case.
create function dead_letters_where(p_queue text, p_partition text, p_group text, p_from timestamptz, p_to timestamptz,
                                   p_error text, p_ids uuid[]) returns setof dead_letter
language sql stable as $$
    select d.* from dead_letter d
     where (p_queue is null or d.queue = p_queue) and (p_partition is null or d.partition = p_partition)
       and (p_group is null or d.consumer_group = p_group)
       and (p_from is null or d.failed_at >= p_from) and (p_to is null or d.failed_at < p_to)
       and (p_error is null or position(lower(p_error) in lower(coalesce(d.error, ''))) > 0)
       and (p_ids is null or d.id = any (p_ids))
$$;
