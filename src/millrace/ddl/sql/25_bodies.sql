-- The bodies of a SQL function that a command was called from: its context has the function's name
-- without schema and arguments, and which of its statements it was. NULL for any other context.
CREATE OR REPLACE FUNCTION millrace.ddl_bodies(context text) RETURNS jsonb
LANGUAGE sql STABLE
AS $millrace$
SELECT jsonb_build_object('bodies', jsonb_agg(p.prosrc))
  FROM substring(context FROM E'^[^\\n]*\\nSQL function "([^"]*)" statement') AS called (name)
  JOIN pg_proc p ON p.proname = called.name
  JOIN pg_language l ON l.oid = p.prolang AND l.lanname = 'sql'
HAVING count(*) > 0
$millrace$;
