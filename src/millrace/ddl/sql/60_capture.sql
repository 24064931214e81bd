-- One row for each command that has come to its end. Until search_path is safe, everything is
-- named with its schema: whoever runs the command has chosen the path. An error in here is caught:
-- the command is the application's, and goes on.
CREATE OR REPLACE FUNCTION millrace.ddl_capture() RETURNS event_trigger
LANGUAGE plpgsql SECURITY DEFINER SET lc_messages = 'C' SET lock_timeout = '50ms'
AS $millrace$
DECLARE
    path pg_catalog.text := pg_catalog.current_setting('search_path');
    resolved pg_catalog.text := pg_catalog.array_to_json(pg_catalog.current_schemas(false));
    context pg_catalog.text;
    objects pg_catalog.jsonb;
    tables pg_catalog.oid[];
    facts pg_catalog.jsonb;
BEGIN
    GET DIAGNOSTICS context = PG_CONTEXT;
    PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
    IF tg_tag NOT IN ('GRANT', 'REVOKE', 'REFRESH MATERIALIZED VIEW', 'REINDEX', 'SECURITY LABEL',
                      'ALTER DEFAULT PRIVILEGES')
       AND tg_tag !~ ' (PUBLICATION|SUBSCRIPTION|EVENT TRIGGER|POLICY)$' THEN
        BEGIN
            SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                       'tag', d.command_tag, 'type', d.object_type, 'schema', d.schema_name,
                       'identity', d.object_identity, 'names', a.object_names,
                       'args', nullif(a.object_args, '{}'),
                       'description', millrace.ddl_describe(d.classid, d.objid)))
                       ORDER BY d.number),
                   array_agg(d.objid) FILTER (WHERE d.object_type IN ('table', 'table column'))
              INTO objects, tables
              FROM pg_event_trigger_ddl_commands() WITH ORDINALITY AS d (
                       classid, objid, objsubid, command_tag, object_type, schema_name,
                       object_identity, in_extension, command, number)
              CROSS JOIN LATERAL pg_identify_object_as_address(d.classid, d.objid, d.objsubid) AS a
             WHERE NOT d.in_extension AND d.schema_name IS DISTINCT FROM 'pg_temp'
               AND d.schema_name IS DISTINCT FROM 'millrace'
               AND NOT (d.object_type = 'schema' AND d.object_identity = 'millrace');
            IF objects IS NOT NULL THEN
                facts := millrace.ddl_bodies(context);
                IF tables IS NOT NULL THEN
                    SELECT coalesce(facts, '{}') || jsonb_build_object('tables', jsonb_agg(jsonb_build_object(
                               'schema', n.nspname, 'name', c.relname, 'oid', c.oid::bigint,
                               'is_empty', c.relkind = 'r' AND pg_relation_size(c.oid) = 0)))
                      INTO facts
                      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                     WHERE c.oid = ANY (tables);
                    facts := facts || jsonb_strip_nulls(jsonb_build_object(
                        'published', millrace.ddl_publish(tables),
                        -- Rows that were written before the table could be published.
                        'late', CASE WHEN tg_tag IN ('CREATE TABLE AS', 'SELECT INTO') THEN (
                            SELECT jsonb_agg(p.slot) FROM millrace.ddl_publication p
                              JOIN pg_publication i ON i.pubname = p.insert_only
                             WHERE NOT i.puballtables) END,
                        'rewritten', nullif(current_setting('millrace.rewritten', true),
                                            '')::jsonb));
                    PERFORM set_config('millrace.rewritten', '', true);
                END IF;
                PERFORM millrace.ddl_record(tg_event, tg_tag, context, resolved, objects, facts);
            END IF;
        EXCEPTION WHEN OTHERS THEN
            PERFORM millrace.ddl_lose(tg_tag, SQLERRM);
        END;
    END IF;
    PERFORM pg_catalog.set_config('search_path', path, true);
END
$millrace$;
