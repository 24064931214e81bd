-- Remembers which tables a command writes anew, and why, until it ends.
CREATE OR REPLACE FUNCTION millrace.ddl_capture_rewrite() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '50ms' SET search_path = pg_catalog, pg_temp
AS $millrace$
BEGIN
    PERFORM set_config(
        'millrace.rewritten',
        (coalesce(nullif(current_setting('millrace.rewritten', true), '')::jsonb, '[]')
         || (SELECT jsonb_build_object('schema', n.nspname, 'name', c.relname,
                                       'reason', pg_event_trigger_table_rewrite_reason())
               FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
              WHERE c.oid = pg_event_trigger_table_rewrite_oid()))::text,
        true);
EXCEPTION WHEN OTHERS THEN
    PERFORM millrace.ddl_lose(tg_tag, SQLERRM);
END
$millrace$;
