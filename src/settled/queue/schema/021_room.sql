-- About how many messages of a queue with a maxSize are pending: counted then, and what was let in since. Whoever pushes there
-- holds an advisory lock on the queue meanwhile.
create unlogged table if not exists room (
    queue_id bigint primary key,
    size bigint not null,
    counted_at timestamptz not null
);
