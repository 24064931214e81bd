-- Tubes themselves.

-- Also makes a table of pg-tube's a tube of ours. Locks the tube alone.
CREATE OR REPLACE FUNCTION tube_ensure_exists(tube text, partitions integer = 1, predicate text = NULL)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes;
    t _tube_tables;
    before integer;
    wanted text := coalesce(tube_ensure_exists.predicate, '');
BEGIN
    IF coalesce(tube, '') = '' OR octet_length(tube) > 63 THEN
        RAISE EXCEPTION 'A tube''s name has 1 to 63 bytes' USING ERRCODE = 'invalid_name';
    END IF;
    IF coalesce(partitions, 0) < 1 THEN
        RAISE EXCEPTION 'A tube has at least one partition, not %', coalesce(partitions::text, '<NULL>')
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    PERFORM pg_advisory_xact_lock('_tube_tubes'::regclass::oid::integer, 0);
    -- What was dropped by DROP TABLE.
    PERFORM _tube_detach(x) FROM _tube_tables x WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = x.tbl);
    PERFORM tube_ensure_absent(x.name) FROM _tube_tubes x
      WHERE NOT EXISTS (SELECT FROM pg_class c WHERE c.oid = x.rel);
    SELECT * INTO u FROM _tube_tubes x WHERE x.name = tube_ensure_exists.tube;
    FOR t IN SELECT * FROM _tube_tables x WHERE x.tube = u.id LOOP
        IF wanted <> '' THEN
            PERFORM _tube_check_expression(t.tbl, wanted, 'predicate');
        END IF;
    END LOOP;
    IF u.id IS NULL THEN
        u := _tube_create(tube, partitions, wanted);
        RETURN;
    END IF;
    before := u.partitions;
    u.partitions := tube_ensure_exists.partitions;
    UPDATE _tube_tubes x SET partitions = u.partitions, predicate = wanted WHERE x.id = u.id;
    IF u.partitions <> before THEN
        PERFORM _tube_lock(u.rel);
        PERFORM _tube_ensure_index(u, s.rel) FROM _tube_slots s WHERE s.tube = u.id;
        PERFORM _tube_ensure_index(u, u.rel);
        PERFORM _tube_spread_control(u);
    END IF;
    IF u.predicate <> wanted THEN
        PERFORM _tube_generate_trigger(x) FROM _tube_tables x WHERE x.tube = u.id;
    END IF;
END $$;

-- Locks a tube with all its slots, between its writers. They queue behind a lock that is waited for,
-- and one that has written already would make it a deadlock: so it is tried for a moment, given up
-- and tried again.
CREATE FUNCTION _tube_lock(rel regclass, timeout interval = '60 seconds') RETURNS void
LANGUAGE plpgsql SET lock_timeout = '100ms' AS $$
DECLARE
    began timestamptz := clock_timestamp();
BEGIN
    LOOP
        BEGIN
            EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE', _tube_qualified(rel));
            RETURN;
        EXCEPTION WHEN lock_not_available THEN
            IF clock_timestamp() - began >= timeout THEN
                RAISE EXCEPTION 'The tube % is written to by a transaction that has not ended within %', rel, timeout
                    USING ERRCODE = 'lock_not_available', HINT = 'End it, or try again later.';
            END IF;
        END;
        PERFORM pg_sleep(0.1 + random() * 0.2);
    END LOOP;
END $$;

CREATE FUNCTION _tube_create(tube text, partitions integer, predicate text) RETURNS _tube_tubes
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes;
    rel text := format('%I.%I', current_schema(), tube);
BEGIN
    IF to_regclass(rel) IS NULL THEN
        EXECUTE format('CREATE TABLE %s (seq bigint NOT NULL DEFAULT nextval(''%I.tube_seq''::regclass),'
            ' op char NOT NULL, shard integer NOT NULL, ids bigint[] NOT NULL, payload jsonb,'
            ' ts timestamptz NOT NULL DEFAULT clock_timestamp())', rel, current_schema());
    ELSIF (SELECT count(*) FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'
            WHERE a.attrelid = rel::regclass AND NOT a.attisdropped
              AND a.attname IN ('seq', 'op', 'shard', 'ids', 'payload', 'ts')) < 6 THEN
        RAISE EXCEPTION '% exists and is not a tube', rel USING ERRCODE = 'duplicate_table';
    END IF;
    -- Pods of a table: of which; and its keys, if they are no integers.
    EXECUTE format('ALTER TABLE %s ADD COLUMN IF NOT EXISTS keys text[],'
                   ' ADD COLUMN IF NOT EXISTS tbl integer, ALTER ids SET STORAGE PLAIN', rel);
    IF EXISTS (SELECT FROM pg_constraint c WHERE c.conrelid = rel::regclass AND c.conname = 'op') THEN
        EXECUTE format('ALTER TABLE %s DROP CONSTRAINT op', rel);
    END IF;
    -- An end of a backfill as pg-tube wrote it once. Nothing is older than 0: what it would have
    -- collected is left to verify.
    EXECUTE format('UPDATE %s SET op = ''B'', payload = jsonb_build_object(''type'', ''backfill_end'','
                   ' ''start_seq'', coalesce(payload->>''start_seq'', ''0'')), ids = ''{}'''
                   ' WHERE op = ''}''', rel);
    -- Not for slots: our functions check it themselves, at less cost.
    EXECUTE format('ALTER TABLE %s ADD CONSTRAINT op CHECK (op IN (''I'', ''U'', ''D'', ''T'', ''B'')) NO INHERIT', rel);
    INSERT INTO _tube_tubes (name, rel, partitions, predicate)
    VALUES (tube, rel::regclass, _tube_create.partitions, _tube_create.predicate)
    RETURNING * INTO u;
    EXECUTE format('CREATE SEQUENCE %I._tube_%s_slot', current_schema(), u.id);
    PERFORM _tube_set_slot(u.id, 1);
    PERFORM _tube_ensure_index(u, u.rel);
    PERFORM _tube_add_slot(u) FROM generate_series(0, 2);
    UPDATE _tube_slots SET active_since = clock_timestamp() WHERE tube = u.id AND slot = 1;
    RETURN u;
END $$;

-- Control pods that stand for all shards of a partition: one for each partition that there is now.
CREATE FUNCTION _tube_spread_control(u _tube_tubes) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format($f$
INSERT INTO %1$s (op, shard, ids, payload, tbl)
SELECT DISTINCT p.op, n, '{}'::bigint[], p.payload, p.tbl
  FROM %2$s p, generate_series(0, $1 - 1) n
 WHERE (p.payload->>'all_shards')::boolean
   AND NOT EXISTS (SELECT FROM %2$s o WHERE o.shard = n AND o.payload = p.payload AND o.tbl = p.tbl)
$f$, (SELECT _tube_qualified(s.rel) FROM _tube_slots s WHERE s.tube = u.id AND s.slot = 0),
        _tube_control_sql(u.id)) USING u.partitions;
END $$;

CREATE OR REPLACE FUNCTION tube_ensure_absent(in_tube text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes;
    tbl regclass;
BEGIN
    SELECT * INTO u FROM _tube_tubes x WHERE x.name = in_tube;
    IF u.id IS NULL THEN
        RETURN;
    END IF;
    FOR tbl IN SELECT x.tbl FROM _tube_tables x WHERE x.tube = u.id ORDER BY x.tbl LOOP
        PERFORM tube_table_ensure_detached(in_tube, tbl);
    END LOOP;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = u.rel) THEN
        EXECUTE format('DROP TABLE %s CASCADE', _tube_qualified(u.rel));
    END IF;
    EXECUTE format('DROP FUNCTION IF EXISTS %1$I._tube_%2$s_put, %1$I._tube_%2$s_put_routed,'
                   ' %1$I.%3$I(integer, bigint[], char, jsonb, integer)',
                   current_schema(), u.id, _tube_name(u.name, '_touch'));
    EXECUTE format('DROP SEQUENCE IF EXISTS %I._tube_%s_slot', current_schema(), u.id);
    DELETE FROM _tube_tubes WHERE id = u.id;
END $$;

CREATE OR REPLACE FUNCTION tube_list(in_tbl regclass = NULL)
RETURNS TABLE (tube text, predicate text, partitions integer, tbl regclass, shard integer)
LANGUAGE sql STABLE AS $$
    SELECT u.name, u.predicate, u.partitions, t.tbl, t.shard
      FROM _tube_tubes u JOIN pg_class c ON c.oid = u.rel
      LEFT JOIN (_tube_tables t JOIN pg_class a ON a.oid = t.tbl) ON t.tube = u.id
     WHERE in_tbl IS NULL OR t.tbl = in_tbl
     ORDER BY u.name, t.shard, t.tbl::text
$$;

-- What a delivery has to know of the tables of a tube.
CREATE FUNCTION tube_tables(in_tube text = NULL)
RETURNS TABLE (tube text, table_id integer, tbl regclass, shard integer, key text[], key_types text[],
    is_bigint boolean, routing text, predicate text, uncovered_partitions integer)
LANGUAGE sql STABLE AS $$
    SELECT u.name, t.id, t.tbl, t.shard, t.key, t.key_types, t.is_bigint, t.routing,
           _tube_predicate_sql(t), (SELECT count(*)::integer FROM _tube_uncovered(t))
      FROM _tube_tubes u JOIN _tube_tables t ON t.tube = u.id JOIN pg_class a ON a.oid = t.tbl
     WHERE in_tube IS NULL OR u.name = in_tube ORDER BY u.name, t.id
$$;

CREATE OR REPLACE FUNCTION tube_stats()
RETURNS TABLE (tube text, predicate text, partition integer, shards integer, inc_count text,
    inc_min_seq bigint, inc_max_seq bigint, inc_min_ts timestamptz, inc_max_ts timestamptz,
    backfill_count text, backfill_min_seq bigint, backfill_max_seq bigint,
    backfill_min_ts timestamptz, backfill_max_ts timestamptz, control_count text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes;
    place text;
    inc record;
    back record;
BEGIN
    FOR u IN SELECT x.* FROM _tube_tubes x JOIN pg_class c ON c.oid = x.rel ORDER BY x.name LOOP
        FOR number IN 0 .. u.partitions - 1 LOOP
            partition := number;
            place := _tube_partition_sql(u.partitions, number);
            inc := _tube_stat(u.rel, place || ' AND (op = ''B'') IS FALSE');
            back := _tube_stat(u.rel, place || ' AND op = ''B''');
            tube := u.name;
            predicate := u.predicate;
            SELECT count(*) INTO shards FROM _tube_tables t
             WHERE t.tube = u.id AND t.shard % u.partitions IN (number, number - u.partitions);
            inc_count := inc.n; inc_min_seq := inc.min_seq; inc_max_seq := inc.max_seq;
            inc_min_ts := inc.min_ts; inc_max_ts := inc.max_ts;
            backfill_count := back.n; backfill_min_seq := back.min_seq;
            backfill_max_seq := back.max_seq; backfill_min_ts := back.min_ts;
            backfill_max_ts := back.max_ts;
            control_count := _tube_control_count(u.id, number);
            RETURN NEXT;
        END LOOP;
    END LOOP;
END $$;

-- Control pods are in slot 0; those of pg-tube, or inserted by hand, in the parent.
CREATE FUNCTION _tube_control_sql(tube_id integer) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('(SELECT * FROM ONLY %s WHERE ids = ''{}'' AND keys IS NULL'
                  ' UNION ALL SELECT * FROM ONLY %s WHERE ids = ''{}'' AND keys IS NULL)',
                  _tube_qualified(s.rel), _tube_qualified(u.rel))
      FROM _tube_tubes u JOIN _tube_slots s ON s.tube = u.id AND s.slot = 0 WHERE u.id = tube_id
$$;

-- For everybody who may read the tube, so it runs as its owner.
CREATE FUNCTION _tube_control_count(tube_id integer, partition integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
    counts text;
BEGIN
    EXECUTE format('SELECT coalesce(string_agg(kind || '':'' || n, '' '' ORDER BY kind), ''0'') FROM ('
        'SELECT coalesce(payload->>''type'', ''?'') AS kind, count(*) AS n FROM %s p'
        ' WHERE %s GROUP BY 1) x', _tube_control_sql(tube_id),
        (SELECT _tube_partition_sql(u.partitions, partition) FROM _tube_tubes u WHERE u.id = tube_id)) INTO counts;
    RETURN counts;
END $$;

-- A negative shard belongs to the partition that its positive remainder names.
CREATE FUNCTION _tube_partition_sql(partitions integer, partition integer) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('shard %% %s IN (%s, %s)', partitions, partition, partition - partitions)
$$;

CREATE FUNCTION _tube_stat(rel regclass, condition text, OUT n text, OUT min_seq bigint,
    OUT max_seq bigint, OUT min_ts timestamptz, OUT max_ts timestamptz)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    source text := format('FROM %s WHERE (ids <> ''{}'' OR keys IS NOT NULL) AND %s',
                          _tube_qualified(rel), condition);
    plan json;
    exact integer;
    guess bigint;
BEGIN
    EXECUTE format('SELECT count(*) FROM (SELECT %s LIMIT 1000) x', source) INTO exact;
    n := exact::text;
    IF exact = 1000 THEN
        EXECUTE 'EXPLAIN (FORMAT JSON) SELECT ' || source INTO plan;
        guess := (plan->0->'Plan'->>'Plan Rows')::numeric;
        n := CASE WHEN guess > 1000 THEN '~' || guess ELSE '1000+' END;
    END IF;
    EXECUTE format('SELECT seq, ts %s ORDER BY seq LIMIT 1', source) INTO min_seq, min_ts;
    EXECUTE format('SELECT seq, ts %s ORDER BY seq DESC LIMIT 1', source) INTO max_seq, max_ts;
END $$;
