-- Leaves a mark of a command that could not be written down: those who follow halt there. Nothing
-- that goes wrong here, either, is the application's concern.
CREATE OR REPLACE FUNCTION millrace.ddl_lose(tag text, why text) RETURNS void
LANGUAGE plpgsql
AS $millrace$
BEGIN
    BEGIN
        INSERT INTO millrace.sql_ddl_statements (event, command_tag, current_query, error)
        VALUES ('lost', tag, current_query(), why);
    EXCEPTION WHEN OTHERS THEN
        PERFORM pg_logical_emit_message(true, 'millrace.ddl', format('%s: %s', tag, why));
    END;
EXCEPTION WHEN OTHERS THEN
    RAISE WARNING 'millrace could not record a %: %', tag, SQLERRM;
END
$millrace$;
