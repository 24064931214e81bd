-- Tables and their triggers. Everything that could fail at a write is looked at here first.

-- An expression over the row, compiled where it will be used: against a relation called "rows".
CREATE FUNCTION _tube_check_expression(tbl regclass, condition text, what text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    view_name text := format('%I.%I', current_schema(), '_tube_check_' || pg_backend_pid());
    tree text;
    bad text;
BEGIN
    BEGIN
        EXECUTE format(E'CREATE VIEW %s AS SELECT FROM %s AS rows WHERE (%s\n)',
                       view_name, _tube_qualified(tbl), condition);
    EXCEPTION WHEN OTHERS THEN
        RAISE EXCEPTION 'The % does not compile for table %: %', what, tbl, SQLERRM
            USING ERRCODE = SQLSTATE,
                  HINT = 'It is an SQL expression over the columns of each attached table.';
    END;
    SELECT r.ev_action INTO tree FROM pg_rewrite r WHERE r.ev_class = view_name::regclass;
    EXECUTE 'DROP VIEW ' || view_name;
    SELECT p.proname INTO bad
      FROM regexp_matches(tree, ':(?:funcid|opfuncid) (\d+)', 'g') m
      JOIN pg_proc p ON p.oid = m[1]::oid AND p.provolatile = 'v' LIMIT 1;
    IF bad IS NOT NULL THEN
        RAISE EXCEPTION 'The % is volatile: it calls %', what, bad
            USING ERRCODE = 'invalid_parameter_value',
                  HINT = 'The same row must always give the same result.';
    END IF;
    IF tree ~ ':varattno -' THEN
        RAISE EXCEPTION 'The % uses a system column, which triggers do not see', what
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- The key: as given, or "id", or the primary key.
CREATE FUNCTION _tube_find_key(tbl regclass, given text[]) RETURNS text[]
LANGUAGE plpgsql STABLE AS $$
DECLARE
    key text[] := given;
    missing text;
BEGIN
    IF key IS NULL THEN
        SELECT ARRAY[a.attname::text] INTO key FROM pg_attribute a
         WHERE a.attrelid = tbl AND a.attname = 'id' AND NOT a.attisdropped;
    END IF;
    IF key IS NULL THEN
        SELECT array_agg(a.attname::text ORDER BY k.n) INTO key
          FROM pg_index i, unnest(i.indkey::smallint[]) WITH ORDINALITY k (attnum, n), pg_attribute a
         WHERE i.indrelid = tbl AND i.indisprimary
           AND a.attrelid = tbl AND a.attnum = k.attnum;
    END IF;
    IF coalesce(cardinality(key), 0) = 0 THEN
        RAISE EXCEPTION 'Table % has no column "id" and no primary key', tbl
            USING ERRCODE = 'undefined_column',
                  HINT = 'Name its key: SELECT tube_table_attach(tube, table, shard, key => ''{...}'').';
    END IF;
    SELECT k INTO missing FROM unnest(key) k WHERE NOT EXISTS (
        SELECT FROM pg_attribute a WHERE a.attrelid = tbl AND a.attname = k
           AND a.attnum > 0 AND NOT a.attisdropped) LIMIT 1;
    IF missing IS NOT NULL THEN
        RAISE EXCEPTION 'Table % has no column "%"', tbl, missing
            USING ERRCODE = 'undefined_column';
    END IF;
    RETURN key;
END $$;

-- One key of relation "rows" as a value of a pod: a bigint, a text, or a JSON array of texts.
CREATE FUNCTION _tube_key_sql(t _tube_tables) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN t.is_bigint THEN format('rows.%I::bigint', t.key[1])
                WHEN cardinality(t.key) = 1 THEN format('rows.%I::pg_catalog.text', t.key[1])
                ELSE 'pg_catalog.json_build_array(' || string_agg(format('rows.%I::pg_catalog.text', k), ', ' ORDER BY n)
                     || ')::pg_catalog.text' END
      FROM unnest(t.key) WITH ORDINALITY u (k, n)
$$;

-- A row without a key can't be found again.
CREATE FUNCTION _tube_has_key_sql(t _tube_tables) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT string_agg(format('rows.%I IS NOT NULL', k), ' AND ' ORDER BY n)
      FROM unnest(t.key) WITH ORDINALITY u (k, n)
$$;

-- '' or the tube's and the table's.
CREATE FUNCTION _tube_predicate_sql(t _tube_tables) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce(string_agg(format(E'(%s\n)', p), ' AND '), '')
      FROM (SELECT u.predicate FROM _tube_tubes u WHERE u.id = t.tube
            UNION ALL SELECT t.predicate) x (p) WHERE p <> ''
$$;

CREATE FUNCTION _tube_shard_sql(t _tube_tables) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN t.routing IS NULL THEN t.shard::text
                ELSE format(E'coalesce((%s\n)::integer, %s)', t.routing, t.shard) END
$$;

-- SELECT k, s: the keys and shards of the rows of a relation that match.
CREATE FUNCTION _tube_rows_sql(t _tube_tables, source text, is_plain boolean) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('SELECT %s AS k, %s AS s FROM %s AS rows WHERE %s', _tube_key_sql(t),
                  CASE WHEN is_plain THEN t.shard::text ELSE _tube_shard_sql(t) END, source,
                  _tube_has_key_sql(t)
                  || CASE WHEN is_plain OR _tube_predicate_sql(t) = '' THEN ''
                          ELSE ' AND ' || _tube_predicate_sql(t) END)
$$;

-- The trigger functions of one attachment. They run as their owner, and never fail an application's
-- write: an expression that fails for a row counts as true, and if the key itself can't be read (its
-- column is gone), a control pod says that touches were lost.
CREATE FUNCTION _tube_generate_trigger(t _tube_tables) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    here text := quote_ident(current_schema());
    is_plain boolean := t.routing IS NULL AND _tube_predicate_sql(t) = '';
    r record;
    body text;
BEGIN
    FOR r IN SELECT * FROM (VALUES
            ('insert', 'I', NULL, 'rows'), ('delete', 'D', NULL, 'rows'), ('update', 'U', 'old_rows', 'rows'),
            ('row_insert', 'I', NULL, '(SELECT NEW.*)'), ('row_delete', 'D', NULL, '(SELECT OLD.*)'),
            ('row_update', 'U', '(SELECT OLD.*)', '(SELECT NEW.*)')) v (name, op, old_rows, new_rows)
    LOOP
        body := _tube_collect_sql(t, r.old_rows, r.new_rows, false);
        IF NOT is_plain THEN
            body := format(E'BEGIN\n%s\nEXCEPTION WHEN OTHERS THEN\n%s\nEND;', body,
                           _tube_collect_sql(t, r.old_rows, r.new_rows, true));
        END IF;
        EXECUTE format($f$
CREATE OR REPLACE FUNCTION %1$s._tube_%2$s_%3$s() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER %4$s%5$s AS $trigger$
#variable_conflict use_column
DECLARE
    _tube_found %6$s[];
    _tube_old %6$s[];
    _tube_shards integer[];
    _tube_done pg_catalog.text;
    _tube_total integer;
    _tube_slot integer;
    _tube_op char := %10$L;
BEGIN
    BEGIN
        %7$s
    EXCEPTION WHEN OTHERS THEN
        PERFORM %1$s._tube_%8$s_put(%9$s, '{}', NULL, 'T',
            pg_catalog.jsonb_build_object('type', 'lost', 'error', SQLERRM), %2$s, 1);
        RETURN NULL;
    END;
    _tube_total := pg_catalog.array_length(_tube_found, 1);
    IF _tube_total IS NULL THEN
        RETURN NULL;
    END IF;
    %11$s
    _tube_done := %12$s;
    RETURN NULL;
END $trigger$ $f$, here, t.id, r.name, CASE WHEN is_plain THEN '' ELSE 'SET search_path = ' || _tube_path() END,
            _tube_text_settings(t.key_types), CASE WHEN t.is_bigint THEN 'bigint' ELSE 'pg_catalog.text' END, body,
            t.tube, t.shard, r.op, _tube_direct_sql(t, r.name), format(
                CASE WHEN t.routing IS NULL THEN '%1$s._tube_%2$s_put(%3$s, %4$s, _tube_op, NULL, %5$s, 250)'
                     ELSE '%1$s._tube_%2$s_put_routed(_tube_shards, %4$s, _tube_op, %5$s, 250)' END,
                here, t.tube, t.shard,
                CASE WHEN t.is_bigint THEN '_tube_found, NULL' ELSE '''{}'', _tube_found' END, t.id));
        PERFORM _tube_mark(format('%s._tube_%s_%s()', here, t.id, r.name));
    END LOOP;
    EXECUTE format($f$
CREATE OR REPLACE FUNCTION %1$s._tube_%2$s_truncate() RETURNS trigger
LANGUAGE plpgsql SECURITY DEFINER SET search_path = %1$s, pg_temp AS $trigger$
BEGIN
    PERFORM _tube_control(%2$s, 'T', 'truncate', pg_catalog.nextval('tube_seq')::text);
    RETURN NULL;
END $trigger$ $f$, here, t.id);
    PERFORM _tube_mark(format('%s._tube_%s_truncate()', here, t.id));
END $$;

-- Statements of a trigger that insert its pods at once if the slot is one of the first two, as it is
-- most of the time: a call of the tube's function would cost a tenth of a single-row write. That
-- function is for any other slot, for routing, and for a trigger that has not the tube's owner.
CREATE FUNCTION _tube_direct_sql(t _tube_tables, event text) RETURNS text
LANGUAGE plpgsql STABLE AS $$
#variable_conflict use_column
DECLARE
    own oid := (SELECT p.proowner FROM pg_proc p
                 WHERE p.oid = to_regprocedure(format('%I._tube_%s_%s()', current_schema(), t.id, event)));
    keys text := CASE WHEN t.is_bigint THEN 'ids' ELSE 'ids, keys' END;
    found_keys text := CASE WHEN t.is_bigint THEN '' ELSE '''{}'', ' END || '_tube_found';
BEGIN
    IF t.routing IS NOT NULL OR EXISTS (
        SELECT FROM _tube_slots s JOIN pg_class c ON c.oid = s.rel
         WHERE s.tube = t.tube AND c.relowner <> coalesce(own, current_user::regrole::oid)) THEN
        RETURN '';
    END IF;
    RETURN format($f$IF %1$s THEN
        _tube_op := 'B';
    END IF;
    _tube_slot := %2$s;
    IF _tube_total OPERATOR(pg_catalog.<=) 250 THEN
        %3$s
    ELSE
        %4$s
    END IF;$f$, _tube_is_backfill_sql(), _tube_slot_sql(t.tube),
        _tube_branches_sql(t.tube, '{1,2}', '_tube_slot', format(
            'INSERT INTO {rel} (op, shard, %s, tbl) VALUES (_tube_op, %s, %s, %s); RETURN NULL;',
            keys, t.shard, found_keys, t.id)),
        _tube_branches_sql(t.tube, '{1,2}', '_tube_slot', format(
            'INSERT INTO {rel} (op, shard, %s, tbl)'
            ' SELECT _tube_op, %s, %s[_tube_i : _tube_i OPERATOR(pg_catalog.+) 249], %s FROM %s _tube_i; RETURN NULL;',
            keys, t.shard, found_keys, t.id, _tube_starts_sql('_tube_total', '250'))));
END $$;

-- Millrace's own apply leaves triggers alone whose function has this comment.
CREATE FUNCTION _tube_mark(function text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    EXECUTE format('COMMENT ON FUNCTION %s IS %L', function,
                   'millrace: fires for applied changes (tube)');
    EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', function);
END $$;

-- Statements that fill _tube_found, and _tube_shards beside it if there is routing.
-- An UPDATE touches what a row was and what it is: it may have left the predicate, or have another
-- key or another shard. Most often it has not, and both lists are equal.
CREATE FUNCTION _tube_collect_sql(t _tube_tables, old_rows text, new_rows text, is_plain boolean)
RETURNS text LANGUAGE plpgsql STABLE AS $$
DECLARE
    new_sql text := _tube_rows_sql(t, new_rows, is_plain);
    old_sql text := CASE WHEN old_rows IS NOT NULL THEN _tube_rows_sql(t, old_rows, is_plain) END;
    keys text := CASE WHEN t.is_unique THEN 'q.k' ELSE 'DISTINCT q.k' END;
BEGIN
    IF t.routing IS NOT NULL THEN
        RETURN format(
            'SELECT pg_catalog.array_agg(q.k ORDER BY q.s, q.k), pg_catalog.array_agg(q.s ORDER BY q.s, q.k)'
            ' INTO _tube_found, _tube_shards FROM (SELECT DISTINCT u.k, u.s FROM (%s) u) q;',
            concat_ws(E'\nUNION ALL ', old_sql, new_sql));
    ELSIF old_rows IS NULL THEN
        RETURN format('_tube_found := ARRAY(SELECT %s FROM (%s) q);', keys, new_sql);
    END IF;
    RETURN format($f$SELECT ARRAY(SELECT %1$s FROM (%2$s) q), ARRAY(SELECT %1$s FROM (%3$s) q)
            INTO _tube_old, _tube_found;
        IF _tube_old OPERATOR(pg_catalog.<>) _tube_found THEN
            _tube_found := ARRAY(SELECT DISTINCT pg_catalog.unnest(_tube_old OPERATOR(pg_catalog.||) _tube_found));
        END IF;$f$, keys, old_sql, new_sql);
END $$;

-- A control pod about a table. With routing its rows may be in any shard, so that each partition
-- gets one, for all of its shards.
CREATE FUNCTION _tube_control(table_id integer, op char, kind text, start_seq text) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    t _tube_tables := (SELECT x FROM _tube_tables x WHERE x.id = table_id);
    payload jsonb := jsonb_build_object('type', kind, 'start_seq', start_seq);
    put text := format('SELECT %I._tube_%s_put($1, ''{}'', NULL, $2, $3, $4, 1)',
                       current_schema(), t.tube);
    n integer;
    total integer;
BEGIN
    IF t.routing IS NULL THEN
        EXECUTE put USING t.shard, op, payload, t.id;
        RETURN;
    END IF;
    -- A repartition has to end first, and then its number is read. Under REPEATABLE READ it may be an
    -- old one all the same: each pod says it, and whoever finds another one looks everywhere.
    EXECUTE (SELECT format('LOCK TABLE ONLY %s IN ROW EXCLUSIVE MODE', _tube_qualified(s.rel))
               FROM _tube_slots s WHERE s.tube = t.tube AND s.slot = 0);
    SELECT u.partitions INTO total FROM _tube_tubes u WHERE u.id = t.tube;
    FOR n IN 0 .. total - 1 LOOP
        EXECUTE put USING n, op, payload || jsonb_build_object('all_shards', true, 'partitions', total), t.id;
    END LOOP;
END $$;

-- The three statement triggers, under these names, and one for TRUNCATE.
CREATE FUNCTION _tube_create_triggers(t _tube_tables, rel regclass, names text[]) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    r record;
    own text := format('_tube_%s_truncate', t.id);
BEGIN
    FOR r IN SELECT * FROM (VALUES (1, 'INSERT', 'NEW TABLE AS rows'),
            (2, 'UPDATE', 'OLD TABLE AS old_rows NEW TABLE AS rows'),
            (3, 'DELETE', 'OLD TABLE AS rows')) v (n, event, tables)
    LOOP
        EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER %s ON %s REFERENCING %s FOR EACH STATEMENT'
                       ' EXECUTE FUNCTION %I._tube_%s_%s(%L)', names[r.n], r.event,
                       _tube_qualified(rel), r.tables, current_schema(), t.id, lower(r.event), t.shard);
        EXECUTE format('ALTER TABLE ONLY %s ENABLE ALWAYS TRIGGER %I', _tube_qualified(rel), names[r.n]);
    END LOOP;
    EXECUTE format('CREATE OR REPLACE TRIGGER %I AFTER TRUNCATE ON %s FOR EACH STATEMENT'
                   ' EXECUTE FUNCTION %I.%I()', own, _tube_qualified(rel), current_schema(), own);
    EXECUTE format('ALTER TABLE ONLY %s ENABLE ALWAYS TRIGGER %I', _tube_qualified(rel), own);
END $$;

-- A statement on a partition does not fire the triggers of the root. Partitions that are there get
-- statement triggers of their own. For those to come there is a row trigger on the root, which the
-- server clones; it is disabled where it is not needed.
CREATE FUNCTION _tube_cover_partition(t _tube_tables, rel regclass) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    PERFORM _tube_create_triggers(t, rel, ARRAY[format('_tube_%s_insert', t.id),
        format('_tube_%s_update', t.id), format('_tube_%s_delete', t.id)]);
    EXECUTE format('ALTER TABLE ONLY %1$s DISABLE TRIGGER _tube_%2$s_row_insert,'
                   ' DISABLE TRIGGER _tube_%2$s_row_update, DISABLE TRIGGER _tube_%2$s_row_delete',
                   _tube_qualified(rel), t.id);
END $$;

CREATE FUNCTION _tube_create_row_trigger(t _tube_tables, event text) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    own text := format('_tube_%s_row_%s', t.id, event);
BEGIN
    EXECUTE format('CREATE OR REPLACE TRIGGER %1$I AFTER %2$s ON %3$s FOR EACH ROW EXECUTE FUNCTION %4$I.%1$I()',
                   own, event, _tube_qualified(t.tbl), current_schema());
    EXECUTE format('ALTER TABLE %s ENABLE ALWAYS TRIGGER %I', _tube_qualified(t.tbl), own);
END $$;

-- Partitions of an attached table whose row trigger is still awake.
CREATE FUNCTION _tube_uncovered(t _tube_tables) RETURNS SETOF regclass
LANGUAGE sql STABLE AS $$
    SELECT p.relid FROM pg_partition_tree(t.tbl) p
      JOIN pg_class c ON c.oid = p.relid AND c.relkind IN ('r', 'p')
      JOIN pg_trigger g ON g.tgrelid = p.relid AND g.tgname = format('_tube_%s_row_insert', t.id)
     WHERE p.relid <> t.tbl AND g.tgenabled <> 'D' ORDER BY p.level, p.relid
$$;

-- Give partitions that were created since cheaper triggers; the number of them. A partition that
-- somebody uses at this moment is left for the next call: nobody waits.
CREATE FUNCTION tube_partitions_refresh(tube text = NULL) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    t _tube_tables;
    rel regclass;
    done integer := 0;
BEGIN
    FOR t IN SELECT x.* FROM _tube_tables x JOIN _tube_tubes u ON u.id = x.tube
              WHERE tube_partitions_refresh.tube IS NULL OR u.name = tube_partitions_refresh.tube
    LOOP
        FOR rel IN SELECT _tube_uncovered(t) LOOP
            BEGIN
                EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE NOWAIT',
                               _tube_qualified(rel));
                PERFORM _tube_cover_partition(t, rel);
                done := done + 1;
            EXCEPTION WHEN lock_not_available THEN
                NULL;
            END;
        END LOOP;
    END LOOP;
    RETURN done;
END $$;

-- Attach a table with all there is to choose; again, to change it. Locks the table SHARE ROW
-- EXCLUSIVE. A key or predicate that is not given stays as it was.
CREATE FUNCTION tube_table_attach(tube text, tbl regclass, shard integer = NULL,
    key text[] = NULL, routing text = NULL, predicate text = NULL) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes := _tube_find(tube_table_attach.tube);
    t _tube_tables;
    kind "char" := (SELECT c.relkind FROM pg_class c WHERE c.oid = tube_table_attach.tbl);
    is_leaf boolean := (SELECT c.relispartition FROM pg_class c WHERE c.oid = tube_table_attach.tbl);
    rel regclass;
BEGIN
    IF kind IS NULL OR kind NOT IN ('r', 'p') THEN
        RAISE EXCEPTION '% is not a table', coalesce(tbl::text, '<NULL>')
            USING ERRCODE = 'wrong_object_type';
    END IF;
    IF EXISTS (SELECT FROM _tube_tubes x WHERE x.rel = tube_table_attach.tbl)
       OR EXISTS (SELECT FROM _tube_slots s WHERE s.rel = tube_table_attach.tbl) THEN
        RAISE EXCEPTION '% is a tube', tbl USING ERRCODE = 'wrong_object_type';
    END IF;
    SELECT * INTO t FROM _tube_tables x WHERE x.tube = u.id AND x.tbl = tube_table_attach.tbl;
    t.tube := u.id;
    t.tbl := tube_table_attach.tbl;
    t.key := _tube_find_key(t.tbl, coalesce(tube_table_attach.key, t.key));
    t.routing := nullif(tube_table_attach.routing, '');
    t.predicate := coalesce(tube_table_attach.predicate, t.predicate, '');
    IF t.routing IS NULL THEN
        t.shard := coalesce(tube_table_attach.shard, _tube_infer_shard(t.tbl));
    ELSE
        t.shard := coalesce(tube_table_attach.shard, 0);
        PERFORM _tube_check_expression(t.tbl, format(E'((%s\n)::integer) IS NOT NULL', t.routing), 'routing');
    END IF;
    -- regtype prints char(n) as "character", which is char(1) to a cast; format_type says bpchar.
    SELECT array_agg(format_type(coalesce(b.oid, y.oid), -1) ORDER BY k.n) INTO t.key_types
      FROM unnest(t.key) WITH ORDINALITY k (name, n)
      JOIN pg_attribute a ON a.attrelid = t.tbl AND a.attname = k.name
      JOIN pg_type y ON y.oid = a.atttypid LEFT JOIN pg_type b ON b.oid = nullif(y.typbasetype, 0);
    t.is_bigint := cardinality(t.key) = 1 AND t.key_types[1] IN ('smallint', 'integer', 'bigint');
    t.is_unique := EXISTS (SELECT FROM pg_index i WHERE i.indrelid = t.tbl AND i.indisunique AND i.indisvalid
        AND i.indpred IS NULL AND i.indimmediate AND i.indnkeyatts <= cardinality(t.key) AND NOT EXISTS (
            SELECT FROM unnest((i.indkey::smallint[])[0:i.indnkeyatts - 1]) k LEFT JOIN pg_attribute a
                ON a.attrelid = t.tbl AND a.attnum = k AND a.attname = ANY (t.key) WHERE a.attname IS NULL));
    IF _tube_predicate_sql(t) <> '' THEN
        PERFORM _tube_check_expression(t.tbl, _tube_predicate_sql(t), 'predicate');
    END IF;
    INSERT INTO _tube_tables (tube, tbl, shard, key, key_types, is_bigint, is_unique, routing, predicate)
    VALUES (t.tube, t.tbl, t.shard, t.key, t.key_types, t.is_bigint, t.is_unique, t.routing, t.predicate)
    ON CONFLICT (tube, tbl) DO UPDATE SET (shard, key, key_types, is_bigint, is_unique, routing, predicate)
        = (EXCLUDED.shard, EXCLUDED.key, EXCLUDED.key_types, EXCLUDED.is_bigint, EXCLUDED.is_unique,
           EXCLUDED.routing, EXCLUDED.predicate)
    RETURNING id INTO t.id;
    EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', _tube_qualified(t.tbl));
    PERFORM _tube_generate_trigger(t);
    PERFORM _tube_create_triggers(t, t.tbl, ARRAY[_tube_trigger_name(t.tbl, u.name, 'insert'),
        _tube_trigger_name(t.tbl, u.name, 'update'), _tube_trigger_name(t.tbl, u.name, 'delete')]);
    IF kind = 'p' OR is_leaf THEN
        PERFORM _tube_create_row_trigger(t, event) FROM unnest('{insert,update,delete}'::text[]) event;
        FOR rel IN SELECT _tube_uncovered(t) LOOP
            PERFORM _tube_cover_partition(t, rel);
        END LOOP;
    END IF;
    PERFORM _tube_generate_table_touch(t.tbl);
END $$;

CREATE OR REPLACE FUNCTION tube_table_ensure_attached(tube text, tbl regclass, shard integer = NULL)
RETURNS void LANGUAGE sql AS $$ SELECT tube_table_attach(tube, tbl, shard) $$;

CREATE OR REPLACE FUNCTION tube_table_ensure_detached(in_tube text, in_tbl regclass) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    t _tube_tables;
BEGIN
    FOR t IN SELECT x.* FROM _tube_tables x JOIN _tube_tubes u ON u.id = x.tube
              WHERE x.tbl = in_tbl AND (in_tube IS NULL OR u.name = in_tube) ORDER BY x.id
    LOOP
        PERFORM _tube_detach(t);
    END LOOP;
    IF EXISTS (SELECT FROM pg_class c WHERE c.oid = in_tbl) THEN
        PERFORM _tube_generate_table_touch(in_tbl);
    END IF;
END $$;

-- Every trigger of an attachment, on partitions and former partitions too, and its functions.
CREATE FUNCTION _tube_detach(t _tube_tables) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    g record;
    f regprocedure;
BEGIN
    FOR g IN
        SELECT g.tgrelid::regclass AS rel, g.tgname AS name FROM pg_trigger g
          JOIN pg_proc p ON p.oid = g.tgfoid
          JOIN pg_namespace n ON n.oid = p.pronamespace AND n.nspname = current_schema()
         WHERE p.proname ~ format('^_tube_%s_[a-z]', t.id)
           AND g.tgparentid = 0 ORDER BY g.tgrelid, g.tgname
    LOOP
        EXECUTE format('DROP TRIGGER IF EXISTS %I ON %s', g.name, _tube_qualified(g.rel));
    END LOOP;
    FOR f IN SELECT p.oid FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
              WHERE n.nspname = current_schema() AND p.prorettype = 'trigger'::regtype
                AND p.proname ~ format('^_tube_%s_[a-z]', t.id)
    LOOP
        EXECUTE 'DROP FUNCTION ' || f;
    END LOOP;
    DELETE FROM _tube_tables WHERE id = t.id;
END $$;

-- {table}_touch, in the table's schema: to every tube that the table is attached to. If all keys
-- are bigint it takes bigint[], otherwise text[]: one of them, so that no call is ambiguous.
CREATE FUNCTION _tube_generate_table_touch(in_tbl regclass) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    place text := (SELECT format('%I.%I', n.nspname, _tube_name(c.relname, '_touch')) FROM pg_class c
                     JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = in_tbl);
    kind text;
    calls text;
    old regprocedure;
BEGIN
    SELECT CASE WHEN bool_or(t.is_bigint) THEN 'bigint' ELSE 'text' END,
           string_agg(format('    PERFORM _tube_touch_table(%s, ids::text[], op, payload, chunk_size);',
                             t.id), E'\n' ORDER BY t.id) INTO kind, calls
      FROM _tube_tables t WHERE t.tbl = in_tbl
       AND (t.is_bigint OR NOT EXISTS (
               SELECT FROM _tube_tables o WHERE o.tbl = in_tbl AND o.is_bigint));
    FOR old IN SELECT to_regprocedure(format('%s(%s[], char, jsonb, integer)', place, k))
                 FROM unnest('{bigint,text}'::text[]) k WHERE calls IS NULL OR k <> kind
    LOOP
        IF old IS NOT NULL AND (SELECT p.prosrc ~ '_tube_touch_table|_touch\(' FROM pg_proc p WHERE p.oid = old) THEN
            EXECUTE 'DROP FUNCTION ' || old;
        END IF;
    END LOOP;
    IF calls IS NULL THEN
        RETURN;
    END IF;
    EXECUTE format($f$
CREATE OR REPLACE FUNCTION %s(ids %s[], op char = 'T', payload jsonb = NULL,
    chunk_size integer = 250) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = %s AS $touch$
BEGIN
%s
END $touch$ $f$, place, kind, _tube_path(), calls);
END $$;

-- Keys as text. With routing the shard is read from the row; a row that is not there, or does not
-- match any more, goes to the fallback.
CREATE FUNCTION _tube_touch_table(table_id integer, keys text[], op char, payload jsonb,
    chunk_size integer) RETURNS void
LANGUAGE plpgsql SET row_security = off AS $$
#variable_conflict use_column
DECLARE
    t _tube_tables := (SELECT x FROM _tube_tables x WHERE x.id = table_id);
    given text[] := coalesce(array_remove(keys, NULL), '{}');
    put text := format('%I._tube_%s_put', current_schema(), t.tube);
    found_keys text[];
    found_shards integer[];
BEGIN
    IF chunk_size < 1 THEN
        RAISE EXCEPTION 'chunk_size must be at least 1';
    END IF;
    IF given = '{}' THEN
        IF payload IS NOT NULL THEN
            EXECUTE format('SELECT %s($1, ''{}'', NULL, $2, $3, $4, 1)', put) USING t.shard, op, payload, t.id;
        END IF;
        RETURN;
    END IF;
    IF t.routing IS NOT NULL THEN
        EXECUTE format('SELECT array_agg(g ORDER BY s, n), array_agg(s ORDER BY s, n) FROM ('
            'SELECT g, n, coalesce(f.s, %s) AS s FROM unnest($1) WITH ORDINALITY u (g, n) LEFT JOIN '
            '(SELECT k::text, s FROM (%s) q WHERE %s) f (k, s) ON f.k = g) x',
            t.shard, _tube_rows_sql(t, _tube_qualified(t.tbl), false),
            CASE WHEN t.is_bigint THEN 'k = ANY ($1::bigint[])' ELSE 'k = ANY ($1)' END)
            INTO found_keys, found_shards USING given;
        EXECUTE format('SELECT %s_routed($1, $2, $3, $4, $5, $6)', put)
            USING found_shards, CASE WHEN t.is_bigint THEN found_keys::bigint[] ELSE '{}' END,
                  CASE WHEN NOT t.is_bigint THEN found_keys END, op, t.id, chunk_size;
    ELSE
        EXECUTE format('SELECT %s($1, $2, $3, $4, NULL, $5, $6)', put)
            USING t.shard, CASE WHEN t.is_bigint THEN given::bigint[] ELSE '{}' END,
                  CASE WHEN NOT t.is_bigint THEN given END, op, t.id, chunk_size;
    END IF;
END $$;

-- Touch keys of a table for one tube; keys as they are in pods, in text.
CREATE FUNCTION tube_touch(tube text, tbl regclass, keys text[], op char = 'T',
    chunk_size integer = 250) RETURNS void
LANGUAGE sql AS $$
    SELECT _tube_touch_table((_tube_find_table(tube, tbl)).id, keys, op, NULL, chunk_size)
$$;
