-- Always: also in sessions that replay changes of somebody else.
DO $millrace$
DECLARE
    one record;
BEGIN
    FOR one IN SELECT * FROM (VALUES
                   ('millrace_ddl', 'ddl_command_end', 'ddl_capture'),
                   ('millrace_ddl_drop', 'sql_drop', 'ddl_capture_drop'),
                   ('millrace_ddl_rewrite', 'table_rewrite', 'ddl_capture_rewrite')
               ) AS t (name, event, function)
                WHERE NOT EXISTS (SELECT FROM pg_event_trigger e WHERE e.evtname = t.name) LOOP
        EXECUTE format('CREATE EVENT TRIGGER %I ON %s EXECUTE FUNCTION millrace.%I()',
                       one.name, one.event, one.function);
        EXECUTE format('ALTER EVENT TRIGGER %I ENABLE ALWAYS', one.name);
    END LOOP;
END
$millrace$;
