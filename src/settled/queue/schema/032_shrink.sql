-- Take the end of a claim back before its caller hears of it, because the answer would be too large: from p_end on, and all
-- parked messages but p_parked. A lease of which nothing is left is over. What was settled at once can be taken back only
-- as long as nobody was given what follows: false says that it was not.
create or replace function shrink(p_lane bigint, p_group int, p_lease uuid, p_was bigint, p_end bigint, p_parked bigint[])
returns boolean language plpgsql as $$
begin
    if p_lease is null then
        update consumer c set cursor = p_end, base = p_end, batch_end = p_end, consumed = c.consumed - (p_was - p_end)
         where c.lane_id = p_lane and c.group_id = p_group and c.cursor = p_was and c.base = p_was
           and c.lease is null and not c.odd;
        return found;
    end if;
    update consumer c set
           batch_end = p_end, parked_out = p_parked,
           -- A bit that is set stays: that message is settled, in the batch or beyond.
           done = case when position(b'1' in c.done) > 0 then c.done
                       else substring(c.done from 1 for (p_end - c.base)::int) end,
           answered = substring(c.answered from 1 for (p_end - c.base)::int),
           lease = case when p_end > c.base or p_parked <> '{}' then c.lease end,
           lease_until = case when p_end > c.base or p_parked <> '{}' then c.lease_until end
     where c.lane_id = p_lane and c.group_id = p_group and c.lease = p_lease;
    return found;
end
$$;
