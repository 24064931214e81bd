-- Names and lookups.

-- base || suffix; what is longer than a name may be is cut and gets a hash of the whole.
CREATE FUNCTION _tube_name(base text, suffix text) RETURNS text
LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    whole text := base || suffix;
    digest text := '~' || left(md5(whole), 8);
    kept text := base;
BEGIN
    IF octet_length(whole) <= 63 THEN
        RETURN whole;
    END IF;
    WHILE octet_length(kept) > 63 - octet_length(digest) - octet_length(suffix) LOOP
        kept := left(kept, -1);
    END LOOP;
    RETURN kept || digest || suffix;
END $$;

CREATE FUNCTION _tube_trigger_name(tbl regclass, tube text, event text) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT _tube_name(c.relname || '_' || tube, '_after_' || lower(event) || '_trigger')
      FROM pg_class c WHERE c.oid = tbl
$$;

-- Always with the schema, which regclass leaves out where it is in the path.
CREATE FUNCTION _tube_qualified(rel regclass) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('%I.%I', n.nspname, c.relname)
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = rel
$$;

CREATE FUNCTION _tube_find(tube text) RETURNS _tube_tubes
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    found_tube _tube_tubes;
BEGIN
    SELECT * INTO found_tube FROM _tube_tubes t
     WHERE t.name = _tube_find.tube AND EXISTS (SELECT FROM pg_class c WHERE c.oid = t.rel);
    IF found_tube.id IS NULL THEN
        RAISE EXCEPTION 'No such tube: %', coalesce(tube, '<NULL>')
            USING ERRCODE = 'undefined_object', HINT = 'tube_list() shows the tubes there are.';
    END IF;
    RETURN found_tube;
END $$;

CREATE FUNCTION _tube_find_table(tube text, tbl regclass) RETURNS _tube_tables
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    found_table _tube_tables;
BEGIN
    SELECT * INTO found_table FROM _tube_tables t
     WHERE t.tube = (_tube_find(_tube_find_table.tube)).id AND t.tbl = _tube_find_table.tbl;
    IF found_table.id IS NULL THEN
        RAISE EXCEPTION 'Table % is not attached to tube %', tbl, tube
            USING ERRCODE = 'undefined_object',
                  HINT = 'Attach it first: SELECT tube_table_ensure_attached(tube, table, shard).';
    END IF;
    RETURN found_table;
END $$;

-- Tubes separated by commas; a name with a comma in double quotes, or alone.
CREATE FUNCTION _tube_split(tubes text) RETURNS SETOF text
LANGUAGE sql STABLE AS $$
    SELECT tubes WHERE EXISTS (SELECT FROM _tube_tubes t WHERE t.name = tubes)
    UNION ALL
    SELECT coalesce(replace(m[1], '""', '"'), btrim(m[2]))
      FROM regexp_matches(tubes, '\s*"((?:[^"]|"")*)"\s*(?:,|$)|([^,"][^,]*)', 'g') m
     WHERE NOT EXISTS (SELECT FROM _tube_tubes t WHERE t.name = tubes)
$$;

-- "sh0042" -> 42
CREATE FUNCTION _tube_infer_shard(tbl regclass) RETURNS integer
LANGUAGE plpgsql STABLE AS $$
DECLARE
    schema_name text;
    digits text;
BEGIN
    SELECT n.nspname INTO schema_name FROM pg_class c
      JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = tbl;
    digits := substring(schema_name FROM '^[^0-9]+([0-9]+)$');
    IF digits IS NULL OR digits::numeric > 2147483647 THEN
        RAISE EXCEPTION 'Cannot infer a shard for table %: its schema has no number at its end',
            _tube_qualified(tbl)
            USING ERRCODE = 'invalid_parameter_value', HINT = 'Pass the shard as an argument.';
    END IF;
    RETURN digits::integer;
END $$;

-- What generated functions that hold an expression of a user are pinned to.
CREATE FUNCTION _tube_path() RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT string_agg(quote_ident(s), ', ') || ', pg_temp'
      FROM unnest(current_schemas(false)) s WHERE NOT starts_with(s, 'pg_temp')
$$;

-- A key that reads the same in every session of every user.
CREATE FUNCTION _tube_text_settings(types text[]) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT CASE WHEN EXISTS (
        SELECT FROM unnest(types) t JOIN pg_type y ON y.oid = t::regtype
         WHERE y.typtype <> 'e' AND y.oid NOT IN ('bool'::regtype, 'int2'::regtype, 'int4'::regtype,
               'int8'::regtype, 'text'::regtype, 'varchar'::regtype, 'bpchar'::regtype,
               'uuid'::regtype, 'numeric'::regtype, 'name'::regtype, 'oid'::regtype))
    THEN ' SET datestyle = ''ISO, YMD'' SET intervalstyle = postgres SET timezone = ''UTC'''
         ' SET extra_float_digits = 3 SET bytea_output = hex SET lc_monetary = ''C''' ELSE '' END
$$;
