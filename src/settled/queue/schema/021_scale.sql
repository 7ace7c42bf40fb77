-- Functions follow the program wherever a migration is missing: this one has them made anew.
select 1;
