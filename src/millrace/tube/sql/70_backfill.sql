-- Backfills: in one transaction (steps 1 to 3), or page by page.

CREATE OR REPLACE FUNCTION tube_backfill_step1() RETURNS text
LANGUAGE sql AS $$ SELECT nextval('tube_seq')::text $$;

-- Wait for every transaction that may have drawn a number before step 1, prepared ones too. One
-- that commits later would not be seen by step 3, and its rows be collected as garbage.
CREATE OR REPLACE FUNCTION tube_backfill_step2(timeout interval = '60 seconds') RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    began timestamptz := clock_timestamp();
    noted timestamptz := began;
    awaited xid[] := (SELECT array_agg(x) FROM _tube_running() r (x));
    r record;
BEGIN
    LOOP
        PERFORM pg_stat_clear_snapshot();
        SELECT * INTO r FROM _tube_running() n (xid, since, what)
         WHERE n.xid = ANY (awaited) ORDER BY n.since LIMIT 1;
        EXIT WHEN NOT FOUND;
        IF clock_timestamp() - began >= tube_backfill_step2.timeout THEN
            RAISE EXCEPTION 'Transaction % has been open for % and did not end within %: %',
                r.xid, clock_timestamp() - r.since, tube_backfill_step2.timeout, r.what
                USING ERRCODE = 'lock_not_available',
                      HINT = 'End it, or begin the backfill again when it has ended.';
        END IF;
        IF clock_timestamp() - noted > interval '2 seconds' THEN
            noted := clock_timestamp();
            RAISE NOTICE 'tube_backfill: await_ms=% active_tx_xid=% active_tx_duration=% -- awaiting the end of a transaction: %',
                (extract(epoch FROM noted - began) * 1000)::bigint, r.xid, noted - r.since, r.what;
        END IF;
        PERFORM pg_sleep(least(0.5, extract(epoch FROM tube_backfill_step2.timeout) / 4));
    END LOOP;
END $$;

CREATE FUNCTION _tube_running(OUT xid xid, OUT since timestamptz, OUT what text) RETURNS SETOF record
LANGUAGE sql VOLATILE AS $$
    SELECT a.backend_xid, a.xact_start, left(a.query, 256) FROM pg_stat_activity a
     WHERE a.backend_xid IS NOT NULL AND a.pid <> pg_backend_pid()
       AND a.datid = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
    UNION ALL
    SELECT p.transaction, p.prepared, 'PREPARE TRANSACTION ' || quote_literal(p.gid)
      FROM pg_prepared_xacts p WHERE p.database = current_database()
$$;

-- A column, or what may stand after ORDER BY.
CREATE FUNCTION _tube_order_sql(tbl regclass, order_col text) RETURNS text
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    sql text := order_col;
BEGIN
    IF coalesce(order_col, '') = '' THEN
        RAISE EXCEPTION 'A backfill needs a column to order by' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = order_col
                  AND a.attnum > 0 AND NOT a.attisdropped) THEN
        sql := format('rows.%I', order_col);
    END IF;
    BEGIN
        EXECUTE format('EXPLAIN SELECT row_number() OVER (ORDER BY %s) FROM %s AS rows', sql, _tube_qualified(tbl));
    EXCEPTION WHEN OTHERS THEN
        RAISE EXCEPTION 'Table % cannot be ordered by "%": %', tbl, order_col, SQLERRM
            USING ERRCODE = SQLSTATE;
    END;
    RETURN sql;
END $$;

-- Is there a control pod about this table? One of pg-tube's names no table.
CREATE FUNCTION _tube_has_control(t _tube_tables, in_shard integer, kinds text[]) RETURNS boolean
LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
DECLARE
    is_there boolean;
BEGIN
    EXECUTE format('SELECT EXISTS (SELECT FROM %s p WHERE'
                   ' (shard = $1 OR (payload->>''all_shards'')::boolean)'
                   ' AND payload->>''type'' = ANY ($2) AND (tbl IS NULL OR tbl = $3))',
                   _tube_control_sql(t.tube)) INTO is_there
        USING in_shard, kinds, t.id;
    RETURN is_there;
END $$;

CREATE FUNCTION _tube_size(tbl regclass) RETURNS bigint
LANGUAGE sql STABLE AS $$
    SELECT sum(greatest(c.reltuples, 0))::bigint
      FROM (SELECT relid FROM pg_partition_tree(tbl) WHERE isleaf UNION SELECT tbl) p (relid)
      JOIN pg_class c ON c.oid = p.relid AND c.relkind <> 'p'
$$;

CREATE OR REPLACE FUNCTION tube_backfill_step3(step1 text, tube text, tbl regclass, order_col text,
    shard integer = NULL, fetch_chunk_size integer = 20000, insert_chunk_size integer = 250)
RETURNS void LANGUAGE plpgsql SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes := _tube_find(tube_backfill_step3.tube);
    t _tube_tables;
    orders text := _tube_order_sql(tube_backfill_step3.tbl, order_col);
BEGIN
    SELECT * INTO t FROM _tube_tables x WHERE x.tube = u.id AND x.tbl = tube_backfill_step3.tbl;
    IF t.id IS NULL THEN
        -- As in pg-tube: a table that is not attached can be filled in, too.
        t.tube := u.id;
        t.tbl := tube_backfill_step3.tbl;
        t.key := _tube_find_key(t.tbl, NULL);
        t.is_bigint := cardinality(t.key) = 1 AND (SELECT a.atttypid IN (20, 21, 23) FROM pg_attribute a
            WHERE a.attrelid = t.tbl AND a.attname = t.key[1]);
        t.predicate := '';
    END IF;
    IF tube_backfill_step3.shard IS NOT NULL THEN
        t.shard := tube_backfill_step3.shard;
    ELSIF t.routing IS NULL THEN
        t.shard := coalesce(t.shard, _tube_infer_shard(t.tbl));
    END IF;
    IF NOT pg_try_advisory_xact_lock(t.tbl::oid::integer, t.shard) THEN
        RAISE EXCEPTION 'Another transaction is backfilling % in shard %', t.tbl, t.shard
            USING ERRCODE = 'lock_not_available';
    END IF;
    IF _tube_has_control(t, t.shard, '{backfill_end}') THEN
        RAISE NOTICE 'tube_backfill: skipped: shard % of % has a backfill that was not delivered yet', t.shard, t.tbl;
        RETURN;
    END IF;
    PERFORM _tube_backfill_control(t, 'T', 'backfill_start', step1);
    PERFORM _tube_emit(ARRAY[u.id], format('SELECT k, row_number() OVER (ORDER BY o), s FROM ('
            'SELECT %s AS k, %s AS s, row_number() OVER (ORDER BY %s) AS o FROM %s AS rows WHERE %s%s) x',
            _tube_key_sql(t), _tube_shard_sql(t), orders, _tube_qualified(t.tbl), _tube_has_key_sql(t),
            CASE WHEN _tube_predicate_sql(t) <> '' THEN ' AND ' || _tube_predicate_sql(t) ELSE '' END),
        t.id, 'B', _tube_size(t.tbl), fetch_chunk_size, insert_chunk_size);
    PERFORM _tube_backfill_control(t, 'B', 'backfill_end', step1);
END $$;

CREATE FUNCTION _tube_backfill_control(t _tube_tables, op char, kind text, start_seq text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF t.routing IS NOT NULL THEN
        PERFORM _tube_control(t.id, op, kind, start_seq);
    ELSE
        EXECUTE format('SELECT %I._tube_%s_put($1, ''{}'', NULL, $2, $3, $4, 1)', current_schema(), t.tube)
            USING t.shard, op, jsonb_build_object('type', kind, 'start_seq', start_seq), t.id;
    END IF;
END $$;

CREATE OR REPLACE FUNCTION tube_backfill_schedule(in_tube text, order_col text, shard_from integer,
    shard_to integer) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes := _tube_find(in_tube);
    t _tube_tables;
    added integer := 0;
BEGIN
    FOR t IN SELECT x.* FROM _tube_tables x JOIN pg_class c ON c.oid = x.tbl
              WHERE x.tube = u.id AND x.shard BETWEEN shard_from AND shard_to ORDER BY x.shard, x.id
    LOOP
        PERFORM _tube_order_sql(t.tbl, order_col);
        CONTINUE WHEN _tube_has_control(t, t.shard, '{backfill_schedule,backfill_end}');
        EXECUTE format('SELECT %I._tube_%s_put($1, ''{}'', NULL, ''B'', $2, $3, 1)', current_schema(), u.id)
            USING t.shard, jsonb_build_object('type', 'backfill_schedule', 'tbl', _tube_qualified(t.tbl),
                                              'order_col', order_col), t.id;
        added := added + 1;
    END LOOP;
    RETURN added;
END $$;

-- Page by page. Begin draws the number; then comes tube_backfill_step2 in a transaction of its own;
-- then pages, each in a transaction of its own, until one returns true. A page may be asked for
-- again after a crash: its position commits with its pods.
CREATE FUNCTION tube_backfill_begin(tube text, tbl regclass, order_col text = NULL) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    t _tube_tables := _tube_find_table(tube_backfill_begin.tube, tube_backfill_begin.tbl);
    b integer;
BEGIN
    IF tube_backfill_begin.order_col IS NOT NULL AND NOT EXISTS (SELECT FROM pg_attribute a
            WHERE a.attrelid = t.tbl AND a.attname = tube_backfill_begin.order_col
              AND a.attnum > 0 AND NOT a.attisdropped) THEN
        RAISE EXCEPTION 'Table % has no column "%"', t.tbl, order_col USING ERRCODE = 'undefined_column';
    END IF;
    SELECT x.id INTO b FROM _tube_backfills x WHERE x.tbl = t.id AND x.state IN ('begun', 'running');
    IF b IS NOT NULL THEN
        RETURN b;
    END IF;
    IF _tube_has_control(t, t.shard, '{backfill_end}') THEN
        RAISE EXCEPTION 'Table % has a backfill in tube % that was not delivered yet', t.tbl, tube
            USING ERRCODE = 'object_in_use', HINT = 'Deliver it first.';
    END IF;
    INSERT INTO _tube_backfills (tbl, order_col, start_seq, approx_size)
    VALUES (t.id, tube_backfill_begin.order_col, nextval('tube_seq'), _tube_size(t.tbl))
    RETURNING id INTO b;
    RETURN b;
END $$;

CREATE FUNCTION tube_backfill_page(backfill integer, page_rows integer = 20000,
    chunk_size integer = 250) RETURNS boolean
LANGUAGE plpgsql SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    b _tube_backfills;
    t _tube_tables;
    order_names text[];
    after text := '';
    matches text;
    emitted bigint;
    last text[];
    page text;
BEGIN
    SELECT * INTO b FROM _tube_backfills x WHERE x.id = backfill FOR UPDATE;
    IF b.id IS NULL OR b.state = 'cancelled' THEN
        RAISE EXCEPTION 'Backfill % %', backfill,
            CASE WHEN b.id IS NULL THEN 'does not exist' ELSE 'was cancelled' END
            USING ERRCODE = 'undefined_object';
    ELSIF b.state = 'done' THEN
        RETURN true;
    ELSIF page_rows < 1 OR chunk_size < 1 THEN
        RAISE EXCEPTION 'Chunk sizes must be at least 1' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    SELECT * INTO t FROM _tube_tables x WHERE x.id = b.tbl;
    IF b.state = 'begun' THEN
        PERFORM _tube_backfill_control(t, 'T', 'backfill_start', b.start_seq::text);
    END IF;
    -- Rows with a value in order_col by (order_col, key), then those without by key.
    order_names := CASE WHEN b.order_col IS NULL OR b.is_null_part THEN t.key ELSE b.order_col || t.key END;
    IF b.position IS NOT NULL THEN
        SELECT format(' AND (%s) > (%s)', string_agg(format('rows.%I', n), ', ' ORDER BY i),
                      string_agg(format('%L::%s', b.position[i], (SELECT format_type(a.atttypid, a.atttypmod)
                          FROM pg_attribute a WHERE a.attrelid = t.tbl AND a.attname = n)), ', ' ORDER BY i))
          INTO after FROM unnest(order_names) WITH ORDINALITY o (n, i);
    END IF;
    matches := _tube_has_key_sql(t) || CASE WHEN b.order_col IS NULL THEN ''
        ELSE format(CASE WHEN b.is_null_part THEN ' AND rows.%I IS NULL' ELSE ' AND rows.%I IS NOT NULL' END,
                    b.order_col) END;
    -- The predicate is applied behind the limit, so that a page reads no more than its rows.
    page := format('SELECT * FROM %s AS rows WHERE %s%s ORDER BY %s LIMIT %s', _tube_qualified(t.tbl), matches,
                   after, (SELECT string_agg(format('rows.%I', n), ', ' ORDER BY i)
                             FROM unnest(order_names) WITH ORDINALITY o (n, i)), page_rows);
    EXECUTE format('SELECT ARRAY[%s] FROM (%s) AS rows ORDER BY %s LIMIT 1',
        (SELECT string_agg(format('rows.%I::text', n), ', ' ORDER BY i) FROM unnest(order_names) WITH ORDINALITY o (n, i)),
        page, (SELECT string_agg(format('rows.%I DESC', n), ', ' ORDER BY i)
                 FROM unnest(order_names) WITH ORDINALITY o (n, i))) INTO last;
    IF last IS NOT NULL THEN
        emitted := _tube_emit(ARRAY[t.tube], format('SELECT %s, row_number() OVER (ORDER BY %s), %s FROM (%s) AS rows%s',
            _tube_key_sql(t), (SELECT string_agg(format('rows.%I', n), ', ' ORDER BY i)
                                 FROM unnest(order_names) WITH ORDINALITY o (n, i)),
            _tube_shard_sql(t), page,
            CASE WHEN _tube_predicate_sql(t) <> '' THEN ' WHERE ' || _tube_predicate_sql(t) ELSE '' END),
            t.id, 'B', b.approx_size, page_rows, chunk_size, true);
        UPDATE _tube_backfills SET state = 'running', position = last, ids = ids + emitted, pages = pages + 1,
               page_at = clock_timestamp() WHERE id = b.id;
        RETURN false;
    ELSIF b.order_col IS NOT NULL AND NOT b.is_null_part THEN
        UPDATE _tube_backfills SET state = 'running', is_null_part = true, position = NULL WHERE id = b.id;
        RETURN false;
    END IF;
    PERFORM _tube_backfill_control(t, 'B', 'backfill_end', b.start_seq::text);
    UPDATE _tube_backfills SET state = 'done', page_at = clock_timestamp() WHERE id = b.id;
    RETURN true;
END $$;

-- No page comes after this. Pods that are there are delivered; without an end nothing is collected.
CREATE FUNCTION tube_backfill_cancel(backfill integer) RETURNS boolean
LANGUAGE sql AS $$
    WITH done AS (UPDATE _tube_backfills SET state = 'cancelled'
                   WHERE id = backfill AND state IN ('begun', 'running') RETURNING 1)
    SELECT EXISTS (SELECT FROM done)
$$;

CREATE FUNCTION tube_backfill_progress(in_tube text = NULL)
RETURNS TABLE (backfill integer, tube text, tbl regclass, order_col text, start_seq bigint, state text,
    ids bigint, approx_size bigint, pages integer, begun_at timestamptz, page_at timestamptz)
LANGUAGE sql STABLE AS $$
    SELECT b.id, u.name, t.tbl, b.order_col, b.start_seq, b.state, b.ids, b.approx_size, b.pages,
           b.begun_at, b.page_at
      FROM _tube_backfills b JOIN _tube_tables t ON t.id = b.tbl JOIN _tube_tubes u ON u.id = t.tube
     WHERE in_tube IS NULL OR u.name = in_tube ORDER BY b.id
$$;
