-- Brings tables into the publications of all slots, or out of them, as their identity asks for, and
-- says what was done; tables of which that was not possible are copied by those who follow. Whoever creates
-- a table elsewhere may hold the lock of a publication until he commits; nobody waits for that.
CREATE OR REPLACE FUNCTION millrace.ddl_publish(tables oid[]) RETURNS jsonb
LANGUAGE plpgsql
AS $millrace$
DECLARE
    one record;
    done jsonb := '[]';
    why text;
BEGIN
    FOR one IN
        WITH changed AS (
            -- The identity that counts for UPDATE and DELETE is the table's own.
            SELECT c.oid, c.relkind, c.relispartition, n.nspname, c.relname,
                   c.relkind = 'p' AS is_partitioned,
                   CASE c.relreplident WHEN 'f' THEN c.relkind = 'r' AND NOT EXISTS (
                            SELECT FROM pg_attribute a
                             WHERE a.attrelid = c.oid AND a.attgenerated::text = ANY (
                                   CASE WHEN current_setting('server_version_num')::int >= 180000
                                        THEN ARRAY['v'] ELSE ARRAY[]::text[] END))
                   WHEN 'n' THEN false
                   ELSE EXISTS (
                            SELECT FROM pg_index i
                             WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
                               AND CASE c.relreplident WHEN 'i' THEN i.indisreplident
                                                       ELSE i.indisprimary END
                               AND NOT EXISTS (
                                    SELECT FROM pg_attribute a
                                     WHERE a.attrelid = c.oid
                                       AND a.attnum = ANY (i.indkey[0:i.indnkeyatts - 1])
                                       AND (a.attgenerated = 'v' OR a.attgenerated = 's' AND
                                            current_setting('server_version_num')::int < 180000)))
                   END AS has_identity
              FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
             WHERE c.oid = ANY (tables) AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p'
        ), wanted AS (
            SELECT p.slot, p.is_extended, w.oid AS whole, i.oid AS inserts, p.with_identity,
                   p.insert_only, i.puballtables, c.*,
                   EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = w.oid
                              AND (r.prrelid = c.oid OR c.relispartition AND r.prrelid IN (
                                   SELECT relid FROM pg_partition_ancestors(c.oid)))) AS is_whole,
                   EXISTS (SELECT FROM pg_publication_rel r
                            WHERE r.prpubid = w.oid AND r.prrelid = c.oid) AS is_listed,
                   i.puballtables OR EXISTS (
                        SELECT FROM pg_publication_rel r WHERE r.prpubid = i.oid
                           AND (r.prrelid = c.oid OR c.relispartition AND r.prrelid IN (
                                SELECT relid FROM pg_partition_ancestors(c.oid)))) AS is_inserted
              FROM millrace.ddl_publication p
              JOIN pg_publication w ON w.pubname = p.with_identity
              JOIN pg_publication i ON i.pubname = p.insert_only
              CROSS JOIN changed c
             WHERE NOT c.nspname = ANY (p.left_out_schemas)
               AND NOT format('%s.%s', c.nspname, c.relname) = ANY (p.left_out_tables)
        )
        SELECT w.slot, w.is_extended, w.nspname, w.relname, t.publication, t.how,
               t.publication = w.with_identity AS is_whole
          FROM wanted w CROSS JOIN LATERAL (
               SELECT w.with_identity AS publication, 'ADD' AS how
                WHERE w.has_identity AND NOT w.is_whole
               UNION ALL
               SELECT w.with_identity, 'DROP' WHERE NOT w.has_identity AND w.is_listed
               UNION ALL
               SELECT w.insert_only, 'ADD'
                WHERE NOT w.is_inserted AND (NOT w.has_identity OR w.is_partitioned)) t
    LOOP
        why := NULL;
        BEGIN
            IF NOT one.is_extended THEN
                RAISE EXCEPTION 'filters decide about it';
            END IF;
            EXECUTE format('ALTER PUBLICATION %I %s TABLE ONLY %I.%I',
                           one.publication, one.how, one.nspname, one.relname);
        EXCEPTION WHEN OTHERS THEN
            why := SQLERRM;
        END;
        done := done || jsonb_strip_nulls(jsonb_build_object(
            'slot', one.slot, 'schema', one.nspname, 'name', one.relname, 'how', one.how,
            'is_whole', one.is_whole, 'error', why));
    END LOOP;
    RETURN nullif(done, '[]');
END
$millrace$;
