-- A queue is a set of lanes (partitions); a lane is an append-only log of segments; a group reads a lane with a
-- cursor. Only what goes wrong with a message gets a row of its own.

create table queue (
    id bigint generated always as identity primary key,
    uid uuid not null default gen_random_uuid() unique,
    name text not null unique,
    namespace text not null,
    task text not null,
    options jsonb not null,
    created_at timestamptz not null default clock_timestamp(),
    lease_time int not null generated always as ((options ->> 'leaseTime')::int) stored,
    retry_limit int not null generated always as ((options ->> 'retryLimit')::int) stored,
    retry_delay bigint not null generated always as ((options ->> 'retryDelay')::bigint) stored,
    parked boolean not null generated always as (options ->> 'retry' = 'parked') stored,
    delayed int not null generated always as ((options ->> 'delayedProcessing')::int) stored,
    buffered int not null generated always as ((options ->> 'windowBuffer')::int) stored
);

-- next_seq is handed out under the row's lock, which is held to commit: order of sequence is order of commit.
-- compacted: small segments before this were merged, or are not worth it.
create table lane (
    id bigint generated always as identity primary key,
    uid uuid not null default gen_random_uuid() unique,
    queue_id bigint not null,
    name text not null,
    created_at timestamptz not null default clock_timestamp(),
    next_seq bigint not null default 0,
    first_seq bigint not null default 0,
    compacted bigint not null default 0,
    newest_at timestamptz,
    has_holes boolean not null default false,
    unique (queue_id, name)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.1);

-- One row holds whatever arrived for a lane in the same few milliseconds; `body` is described in segment.py.
-- hashes: xxh3-64 of each client-supplied transaction id, 8 bytes each (0: none), null if no message has one.
-- times: of each message, where segments were merged; created_at is the last of them.
create table segment (
    lane_id bigint not null,
    first_seq bigint not null,
    n int not null,
    created_at timestamptz not null,
    hashes bytea,
    body bytea not null,
    times timestamptz[],
    primary key (lane_id, first_seq)
) with (autovacuum_vacuum_insert_scale_factor = 0.5);
alter table segment alter column body set storage external;
alter table segment alter column hashes set storage external;

create table consumer_group (
    id int generated always as identity primary key,
    name text not null unique
);

-- Where a group starts on lanes it has not touched yet; the first choice wins.
create table subscription (
    group_id int not null,
    queue_id bigint not null,
    mode text not null,
    starts_at timestamptz,
    created_at timestamptz not null default clock_timestamp(),
    primary key (group_id, queue_id)
);

-- Everything before cursor is settled; `done` are the settled ones from base on. The lease covers [base, batch_end)
-- and the parked messages in `parked_out`; `answered` are those of the range the holder needs no more.
-- odd: done has bits, or there are exceptions; a pop then takes the careful path.
create table consumer (
    lane_id bigint not null,
    group_id int not null,
    cursor bigint not null,
    base bigint not null,
    done varbit not null default b'',
    lease uuid,
    lease_until timestamptz,
    batch_end bigint not null default 0,
    answered varbit not null default b'',
    parked_out bigint[] not null default '{}',
    odd boolean not null default false,
    next_due timestamptz,
    consumed bigint not null default 0,
    last_at timestamptz,
    primary key (lane_id, group_id)
) with (fillfactor = 30, autovacuum_vacuum_scale_factor = 0.02, autovacuum_analyze_scale_factor = 0.1);

-- A lease id names its lane and group; only a lease over several lanes needs this.
create table wide_lease (
    lease uuid primary key,
    lanes bigint[] not null,
    at timestamptz not null default clock_timestamp()
);

-- A message that failed for a group and is not settled yet. parked: the cursor went on without it.
create table exception (
    lane_id bigint not null,
    group_id int not null,
    seq bigint not null,
    attempts int not null,
    due timestamptz not null,
    parked boolean not null,
    error text,
    failed_at timestamptz not null default clock_timestamp(),
    primary key (lane_id, group_id, seq)
);

-- Messages that were deleted out of the middle of a lane.
create table hole (
    lane_id bigint not null,
    seq bigint not null,
    primary key (lane_id, seq)
);

-- Own copies: a dead letter outlives its message.
create table dead_letter (
    id uuid primary key default gen_random_uuid(),
    lane_id bigint not null,
    lane_uid uuid not null,
    queue_id bigint not null,
    queue text not null,
    partition text not null,
    consumer_group text not null,
    seq bigint not null,
    message_id uuid not null,
    transaction_id text not null,
    error text,
    attempts int not null,
    headers bytea not null,
    payload bytea not null,
    created_at timestamptz not null,
    failed_at timestamptz not null default clock_timestamp()
);
create index dead_letter_by_time on dead_letter (failed_at desc, id);
create index dead_letter_by_queue on dead_letter (queue, failed_at desc, id);
create index dead_letter_by_message on dead_letter (lane_id, transaction_id);

-- Messages pushed with a delay; they are appended when due.
create table scheduled (
    id bigint generated always as identity primary key,
    due timestamptz not null,
    lane_id bigint not null,
    message_id uuid not null,
    transaction_id text,
    headers bytea not null,
    payload bytea not null
);
create index scheduled_by_due on scheduled (due);
create unique index scheduled_by_transaction on scheduled (lane_id, transaction_id) where transaction_id is not null;

-- One row a settle call, arrays over the lanes it touched; one row for each failure. Never a row for each ack.
create table journal (
    at timestamptz not null default clock_timestamp(),
    kind text not null,
    worker text not null,
    lanes bigint[] not null,
    groups int[] not null,
    leases uuid[],
    firsts bigint[] not null,
    lasts bigint[] not null,
    counts int[] not null,
    took real[],
    attempts int not null default 0,
    error text
);
create index journal_by_time on journal using brin (at) with (pages_per_range = 16);

-- What other workers should know: lanes that got messages, lanes that were given back or come due.
-- It only saves them from looking everywhere, so it need not survive a crash.
create unlogged table activity (
    xid xid8 not null default pg_current_xact_id(),
    at timestamptz not null default clock_timestamp(),
    worker text not null,
    kind text not null,
    queues bigint[] not null,
    lanes bigint[] not null,
    groups int[],
    until timestamptz[]
);
create index activity_by_xid on activity (xid);

create table trace (
    id uuid primary key default gen_random_uuid(),
    lane_id bigint not null,
    transaction_id text not null,
    consumer_group text,
    event_type text not null,
    names text[] not null,
    data bytea not null,
    worker text not null,
    created_at timestamptz not null default clock_timestamp()
);
create index trace_by_message on trace (lane_id, transaction_id);
create index trace_by_name on trace using gin (names);

create table stream_query (
    id uuid primary key default gen_random_uuid(),
    name text not null unique,
    source_queue text not null,
    sink_queue text,
    config_hash text not null,
    created_at timestamptz not null default clock_timestamp()
);

create table stream_state (
    query_id uuid not null references stream_query on delete cascade,
    lane_id bigint not null,
    key text collate "C" not null,
    value jsonb not null,
    updated_at timestamptz not null default clock_timestamp(),
    primary key (query_id, lane_id, key)
);

create table switch (
    name text primary key,
    enabled boolean not null
);
