-- What workers check their memory against: which segments were appended, and which queues changed in a way that gives a group
-- something to read without a push (configured, moved, put back), since a snapshot. Rows from before this have nobody to tell.
alter table segment add column xid xid8;
alter table segment alter column xid set default pg_current_xact_id();
create index segment_by_xid on segment (xid) where xid is not null;
alter table queue add column changed xid8 not null default pg_current_xact_id();
create index queue_by_change on queue (changed);
