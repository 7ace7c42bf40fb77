-- About how many messages of a queue with a maxSize are pending: counted then, and what was let in since. Whoever pushes there
-- holds an advisory lock on the queue meanwhile.
create unlogged table if not exists room (
    queue_id bigint primary key,
    size bigint not null,
    counted_at timestamptz not null
);

-- Nearly all statements find rows by key, whatever the statistics say: a small sample, taken seldom, is enough of them.
alter table lane set (autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 500);
alter table consumer set (autovacuum_analyze_scale_factor = 0.5, autovacuum_analyze_threshold = 500);
do $$
declare
    c record;
begin
    for c in select attrelid::regclass as tab, attname as col from pg_attribute
              where attrelid in ('lane'::regclass, 'consumer'::regclass) and attnum > 0 and not attisdropped loop
        execute format('alter table %s alter column %I set statistics 10', c.tab, c.col);
    end loop;
end
$$;
