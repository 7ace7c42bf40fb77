delete from plain.message where id = any(array(
    select id from plain.message where leased_until is null order by id limit $1 for update skip locked
)) returning id, payload
