-- Seconds after which a message that a group has not settled is too old for it; null: it never is.
alter table queue add column max_age int generated always as (
    least(nullif((options ->> 'maxWaitTimeSeconds')::int, 0), nullif((options ->> 'ttl')::int, 0))) stored;
