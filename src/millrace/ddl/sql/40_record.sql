-- Writes down one command. The caller catches what goes wrong.
CREATE OR REPLACE FUNCTION millrace.ddl_record(
    event text, tag text, context text, path text, objects jsonb, facts jsonb
) RETURNS void
LANGUAGE plpgsql
AS $millrace$
DECLARE
    number bigint;
BEGIN
    INSERT INTO millrace.sql_ddl_statements (
        event, command_tag, current_query, context, statement_at, role, xid, depth, search_path,
        settings, objects, facts)
    VALUES (
        event, tag, current_query(), context,
        extract(epoch FROM statement_timestamp())::text,
        CASE current_setting('role') WHEN 'none' THEN session_user::text
                                     ELSE current_setting('role') END,
        txid_current()::text,
        (length(context) - length(replace(context, E'\nPL/pgSQL function ', '')))
            / length(E'\nPL/pgSQL function '),
        path,
        jsonb_build_object(
            'TimeZone', current_setting('TimeZone'), 'DateStyle', current_setting('DateStyle'),
            'IntervalStyle', current_setting('IntervalStyle'),
            'standard_conforming_strings', current_setting('standard_conforming_strings'),
            'xmloption', current_setting('xmloption')),
        objects,
        coalesce(facts, '{}') || jsonb_strip_nulls(jsonb_build_object('extensions', (
            SELECT jsonb_object_agg(e.extname, n.nspname)
              FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace
             WHERE n.nspname <> 'pg_catalog'))))
    RETURNING id INTO number;
    -- Bounded, should nobody who follows remove what he has: others may be deleting, too.
    IF number % 1000 = 0 THEN
        DELETE FROM millrace.sql_ddl_statements WHERE id IN (
            SELECT id FROM millrace.sql_ddl_statements WHERE id < number - 10000
             FOR UPDATE SKIP LOCKED);
    END IF;
END
$millrace$;
