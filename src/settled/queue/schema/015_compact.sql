alter table lane add column if not exists compacted bigint not null default 0;
alter table segment add column if not exists times timestamptz[];

-- Put one segment in the place of several small ones, and note how far the lane needs no more of that.
-- Whoever changes a lane's segments locks the lane; who has it now is not kept waiting: false, try again later.
create function compact(
    p_lane bigint, p_firsts bigint[], p_n int, p_created timestamptz, p_times timestamptz[], p_hashes bytea, p_body bytea,
    p_upto bigint
) returns boolean language plpgsql as $$
declare
    v_xid xid8;
begin
    perform from lane where id = p_lane for no key update skip locked;
    if not found then
        return false;
    end if;
    if cardinality(p_firsts) > 0 then
        if (select sum(n) from segment where lane_id = p_lane and first_seq = any (p_firsts)) is distinct from p_n then
            return false;
        end if;
        select s.xid into v_xid from segment s
         where s.lane_id = p_lane and s.first_seq = any (p_firsts) order by s.xid desc nulls last limit 1;
        delete from segment where lane_id = p_lane and first_seq = any (p_firsts);
        insert into segment (lane_id, first_seq, n, created_at, hashes, body, times, xid)  -- nothing new was appended
        values (p_lane, p_firsts[1], p_n, p_created, p_hashes, p_body, p_times, v_xid);
    end if;
    update lane set compacted = greatest(compacted, p_upto) where id = p_lane;
    return true;
end
$$;
