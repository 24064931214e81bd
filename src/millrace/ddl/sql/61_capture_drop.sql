-- One row for each command that drops; those that drop among other things, such as ALTER TABLE, are
-- written down when they end.
CREATE OR REPLACE FUNCTION millrace.ddl_capture_drop() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET lc_messages = 'C' SET lock_timeout = '50ms'
AS $millrace$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    resolved pg_catalog.text := pg_catalog.array_to_json(pg_catalog.current_schemas(false));
    context pg_catalog.text;
    objects pg_catalog.jsonb;
BEGIN
    GET DIAGNOSTICS context = PG_CONTEXT;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF tg_tag LIKE 'DROP %' AND tg_tag !~ ' (PUBLICATION|SUBSCRIPTION|EVENT TRIGGER|POLICY)$' THEN
        BEGIN
            SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                       'tag', tg_tag, 'type', d.object_type, 'schema', d.schema_name,
                       'identity', d.object_identity, 'names', d.address_names,
                       'args', nullif(d.address_args, '{}'), 'is_asked', d.original)))
              INTO objects
              FROM pg_event_trigger_dropped_objects() AS d
             WHERE NOT d.is_temporary AND d.schema_name IS DISTINCT FROM 'millrace'
               AND d.object_type IN (
                   'table', 'view', 'materialized view', 'foreign table', 'sequence', 'index',
                   'type', 'schema', 'function', 'procedure', 'aggregate', 'extension', 'trigger',
                   'rule', 'statistics object', 'collation', 'operator', 'cast', 'conversion',
                   'operator class', 'operator family', 'text search configuration',
                   'text search dictionary', 'text search parser', 'text search template',
                   'foreign-data wrapper', 'server', 'user mapping', 'language', 'transform',
                   'access method', 'domain', 'composite type')
               AND (d.original OR d.object_type IN ('table', 'view', 'materialized view', 'schema'));
            IF objects IS NOT NULL THEN
                PERFORM millrace.ddl_record(tg_event, tg_tag, context, resolved, objects, NULL);
            END IF;
        EXCEPTION WHEN OTHERS THEN
            PERFORM millrace.ddl_lose(tg_tag, SQLERRM);
        END;
    END IF;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$millrace$;
