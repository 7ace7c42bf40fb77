-- Dead letters that were sent round again; a dead letter is sent once.
create table redriven (
    dead_letter uuid primary key,
    queue text not null,
    at timestamptz not null default clock_timestamp()
);
