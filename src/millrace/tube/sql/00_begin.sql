-- Tubes: touch events of tables, kept in queue tables. Part of Millrace.
--
-- Installs into the first schema of the search path, or upgrades what is there (also pg-tube's),
-- in one transaction: psql --single-transaction -v ON_ERROR_STOP=1 -f tube.sql, or \i inside a
-- transaction of your own. Names in predicates are resolved by the search path of the installation.

DO $$
DECLARE
    here oid := (SELECT oid FROM pg_namespace WHERE nspname = current_schema());
    old regprocedure;
BEGIN
    IF here IS NULL THEN
        RAISE EXCEPTION 'no schema to install tubes into'
            USING HINT = 'Create a schema and put it first into search_path.';
    END IF;
    IF current_setting('server_version_num')::int < 150000 THEN
        RAISE EXCEPTION 'tubes need PostgreSQL 15 or later';
    END IF;
    -- Before its functions go, pg-tube tells what it has.
    IF to_regclass(format('%I._tube_tubes', current_schema())) IS NULL
       AND to_regprocedure(format('%I.tube_list(regclass)', current_schema())) IS NOT NULL THEN
        CREATE TABLE _tube_legacy AS SELECT * FROM tube_list();
    END IF;
    -- Private functions are made anew. Public ones are replaced, and keep their grants; one with
    -- another signature would stay beside ours and make calls ambiguous. Generated ones have a digit.
    FOR old IN
        SELECT p.oid FROM pg_proc p
         WHERE p.pronamespace = here AND p.prokind = 'f'
           AND (p.proname ~ '^_tube_[a-z]'
                OR (p.proname, pg_get_function_identity_arguments(p.oid),
                    pg_get_function_result(p.oid)) NOT IN (VALUES
    ('tube_ensure_exists', 'tube text, partitions integer, predicate text', 'void'),
    ('tube_ensure_absent', 'in_tube text', 'void'),
    ('tube_table_ensure_attached', 'tube text, tbl regclass, shard integer', 'void'),
    ('tube_table_ensure_detached', 'in_tube text, in_tbl regclass', 'void'),
    ('tube_list', 'in_tbl regclass',
     'TABLE(tube text, predicate text, partitions integer, tbl regclass, shard integer)'),
    ('tube_stats', '', 'TABLE(tube text, predicate text, partition integer, shards integer, '
     'inc_count text, inc_min_seq bigint, inc_max_seq bigint, '
     'inc_min_ts timestamp with time zone, inc_max_ts timestamp with time zone, '
     'backfill_count text, backfill_min_seq bigint, backfill_max_seq bigint, '
     'backfill_min_ts timestamp with time zone, backfill_max_ts timestamp with time zone, '
     'control_count text)'),
    ('tube_pods_sql', 'tube text, partitions integer, partition integer, exclude_backfill boolean',
     'text'),
    ('tube_pods_delete', 'tube text, partitions integer, partition integer, seqs bigint[]',
     'integer'),
    ('tube_pods_insert', 'tube_or_tubes text, query text, shard integer, op character, '
     'approx_size bigint, fetch_chunk_size integer, insert_chunk_size integer', 'void'),
    ('tube_backfill_step1', '', 'text'),
    ('tube_backfill_step2', 'timeout interval', 'void'),
    ('tube_backfill_step3', 'step1 text, tube text, tbl regclass, order_col text, shard integer, '
     'fetch_chunk_size integer, insert_chunk_size integer', 'void'),
    ('tube_backfill_schedule', 'in_tube text, order_col text, shard_from integer, '
     'shard_to integer', 'integer'))
                AND p.proname IN ('tube_ensure_exists', 'tube_ensure_absent',
    'tube_table_ensure_attached', 'tube_table_ensure_detached', 'tube_list', 'tube_stats',
    'tube_pods_sql', 'tube_pods_delete', 'tube_pods_insert', 'tube_backfill_step1',
    'tube_backfill_step2', 'tube_backfill_step3', 'tube_backfill_schedule',
    -- Ours alone: made anew, so that a later version may change them.
    'tube_table_attach', 'tube_tables', 'tube_touch', 'tube_fetch_sql', 'tube_rotate',
    'tube_partitions_refresh', 'tube_backfill_begin', 'tube_backfill_page',
    'tube_backfill_cancel', 'tube_backfill_progress', 'tube_epoch', 'tube_shards'))
    LOOP
        EXECUTE 'DROP FUNCTION ' || old;
    END LOOP;
END $$;
