-- Whether a staged outcome is of a message that was parked and handed out again: noted once, and not looked up in the
-- manifest's array wherever it matters. Nearly all outcomes are of a first attempt, and need not be touched again then.
alter table staged_outcome add column parked boolean not null default false;
alter table staged_outcome alter column attempts set default 1;
