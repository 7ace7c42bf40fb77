drop schema if exists plain cascade;
create schema plain;
create table plain.message (
    id bigserial primary key, partition text not null, tx text not null, payload jsonb not null,
    leased_until timestamptz, unique (partition, tx)
) with (fillfactor = 80);
