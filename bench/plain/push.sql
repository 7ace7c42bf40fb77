insert into plain.message (partition, tx, payload)
select * from unnest($1::text[], $2::text[], $3::text[]::jsonb[])
on conflict do nothing returning id
