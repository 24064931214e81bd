-- The epoch of versions. A copy of the database that may be behind (a promoted standby, a restored
-- backup, a clone) draws numbers that were drawn before; in a higher epoch they are new all the same.

-- Raised when asked, and when this is another server, timeline or database than the one it was noted on.
CREATE FUNCTION _tube_raise_epoch(is_asked boolean) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    now_timeline integer := ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::integer;
    now_system bigint := (SELECT system_identifier FROM pg_control_system());
    now_database oid := (SELECT d.oid FROM pg_database d WHERE d.datname = current_database());
BEGIN
    UPDATE _tube_epoch SET timeline = now_timeline, system_identifier = now_system, database = now_database,
           epoch = greatest(epoch + 1, extract(epoch FROM clock_timestamp())::integer - 1577836800)
     WHERE is_asked OR (timeline, system_identifier, database)
           IS DISTINCT FROM (now_timeline, now_system, now_database);
    RETURN (SELECT epoch FROM _tube_epoch);
END $$;

CREATE FUNCTION tube_epoch(is_raised boolean = false) RETURNS integer
LANGUAGE sql SECURITY DEFINER AS $$ SELECT _tube_raise_epoch(is_raised) $$;

-- For every delivery, whatever its rights: before it writes the first document of a session.
CREATE FUNCTION _tube_current_epoch() RETURNS integer
LANGUAGE sql SECURITY DEFINER AS $$ SELECT _tube_raise_epoch(false) $$;
