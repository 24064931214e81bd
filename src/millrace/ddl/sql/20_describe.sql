-- What an object is, without OIDs, and the same on every major version. The caller has an empty
-- search_path, so that names are printed with their schemas. NULL for kinds that have no more to
-- them than their existence.
CREATE OR REPLACE FUNCTION millrace.ddl_describe(class oid, object oid) RETURNS jsonb
LANGUAGE sql STABLE PARALLEL UNSAFE
AS $millrace$
SELECT CASE class
WHEN 'pg_class'::regclass THEN (
    SELECT CASE
        WHEN c.relkind IN ('r', 'p', 'f', 'v', 'm', 'c') THEN jsonb_build_object(
            'kind', c.relkind,
            'persistence', c.relpersistence,
            'columns', (
                SELECT jsonb_agg(jsonb_strip_nulls(jsonb_build_object(
                    'name', a.attname,
                    'type', format_type(a.atttypid, a.atttypmod),
                    'not_null', CASE WHEN c.relkind IN ('r', 'p') AND a.attnotnull THEN true END,
                    'default', CASE WHEN a.atthasdef THEN (
                        SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d
                         WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum) END,
                    'identity', nullif(a.attidentity, ''),
                    'generated', nullif(a.attgenerated, ''),
                    'collation', CASE WHEN a.attcollation <> 0 AND a.attcollation <> 100 THEN (
                        SELECT co.collname FROM pg_collation co, pg_type t
                         WHERE co.oid = a.attcollation AND t.oid = a.atttypid
                           AND t.typcollation <> a.attcollation) END,
                    'missing', CASE WHEN a.atthasmissing THEN a.attmissingval::text END))
                    ORDER BY a.attnum)
                  FROM pg_attribute a
                 WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
            'constraints', CASE WHEN c.relkind IN ('r', 'p') THEN (
                SELECT jsonb_object_agg(k.conname, pg_get_constraintdef(k.oid))
                  FROM pg_constraint k
                 WHERE k.conrelid = c.oid AND k.contype IN ('p', 'u', 'f', 'c', 'x')
                   AND k.conparentid = 0) END,
            'parents', (
                SELECT jsonb_agg(format('%I.%I', n.nspname, p.relname) ORDER BY i.inhseqno)
                  FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
                  JOIN pg_namespace n ON n.oid = p.relnamespace WHERE i.inhrelid = c.oid),
            'partition_key', CASE WHEN c.relkind = 'p' THEN pg_get_partkeydef(c.oid) END,
            'bound', CASE WHEN c.relispartition THEN pg_get_expr(c.relpartbound, c.oid) END)
        WHEN c.relkind IN ('i', 'I') THEN (
            SELECT jsonb_build_object('kind', 'i', 'definition', pg_get_indexdef(c.oid),
                                      'is_unique', i.indisunique OR i.indisexclusion,
                                      'table', jsonb_build_array(n.nspname, t.relname))
              FROM pg_index i JOIN pg_class t ON t.oid = i.indrelid
              JOIN pg_namespace n ON n.oid = t.relnamespace WHERE i.indexrelid = c.oid)
        WHEN c.relkind = 'S' THEN (
            SELECT jsonb_build_object(
                'kind', 'S', 'type', format_type(s.seqtypid, NULL), 'increment', s.seqincrement,
                'min', s.seqmin, 'max', s.seqmax, 'start', s.seqstart, 'cycle', s.seqcycle)
              FROM pg_sequence s WHERE s.seqrelid = c.oid)
        END
      FROM pg_class c WHERE c.oid = object)
WHEN 'pg_type'::regclass THEN (
    SELECT CASE t.typtype
        WHEN 'e' THEN jsonb_build_object('kind', 'enum', 'labels', (
            SELECT jsonb_agg(e.enumlabel ORDER BY e.enumsortorder)
              FROM pg_enum e WHERE e.enumtypid = t.oid))
        WHEN 'd' THEN jsonb_build_object(
            'kind', 'domain', 'type', format_type(t.typbasetype, t.typtypmod),
            'not_null', t.typnotnull, 'default', t.typdefault,
            'constraints', (SELECT jsonb_object_agg(k.conname, pg_get_constraintdef(k.oid))
                              FROM pg_constraint k
                             WHERE k.contypid = t.oid AND k.contype = 'c'))
        WHEN 'c' THEN jsonb_build_object('kind', 'composite', 'columns', (
            SELECT jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod))
                             ORDER BY a.attnum)
              FROM pg_attribute a
             WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped))
        WHEN 'r' THEN (SELECT jsonb_build_object('kind', 'range', 'type',
                                                 format_type(r.rngsubtype, NULL))
                         FROM pg_range r WHERE r.rngtypid = t.oid)
        END
      FROM pg_type t WHERE t.oid = object)
WHEN 'pg_proc'::regclass THEN (
    SELECT jsonb_build_object(
        'kind', p.prokind, 'result', pg_get_function_result(p.oid), 'language', l.lanname,
        'volatility', p.provolatile)
      FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang WHERE p.oid = object)
END
$millrace$;
