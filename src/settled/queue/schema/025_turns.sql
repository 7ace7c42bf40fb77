-- Functions with more parameters than they had: lanes of one request are served in turn, and a push looks for its ids among
-- those that wait for their time.
drop function if exists claim(text, int[], bigint[], int[], int[], uuid[], int[], double precision);
drop function if exists append_many(text, bigint[], bigint[], bigint[], int[], bytea[], bytea[]);
