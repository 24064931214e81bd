-- Where pods are: a parent that carries the tube's name, and children ("slots") that are written
-- in turn and truncated once drained.

CREATE FUNCTION _tube_active_slot(tube_id integer) RETURNS integer
LANGUAGE sql VOLATILE AS $$
    SELECT (pg_sequence_last_value(format('%I._tube_%s_slot', current_schema(), tube_id)::regclass)
            % 1000)::integer
$$;

CREATE FUNCTION _tube_set_slot(tube_id integer, slot integer) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT setval(format('%I._tube_%s_slot', current_schema(), tube_id),
                  extract(epoch FROM clock_timestamp())::bigint * 1000 + slot)
$$;

-- The order in which a partition is read.
CREATE FUNCTION _tube_ensure_index(tube _tube_tubes, rel regclass) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    base text := (SELECT c.relname FROM pg_class c WHERE c.oid = rel);
    wanted text := _tube_name(base, '_seq_of_' || tube.partitions);
    stale text;
BEGIN
    IF to_regclass(format('%I', wanted)) IS NULL THEN
        EXECUTE format('CREATE INDEX %I ON %s ((shard %% %s), (op = ''B''), seq)',
                       wanted, _tube_qualified(rel), tube.partitions);
    END IF;
    FOR stale IN
        SELECT _tube_qualified(i.indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid
         WHERE i.indrelid = rel AND c.relname <> wanted AND pg_get_indexdef(i.indexrelid) ~ 'shard'
    LOOP
        EXECUTE 'DROP INDEX ' || stale;
    END LOOP;
END $$;

-- Takes a lock on the parent that neither its readers nor writers of slots conflict with.
CREATE FUNCTION _tube_add_slot(tube _tube_tubes) RETURNS integer
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    number integer := (SELECT min(n) FROM generate_series(0, 999) n WHERE NOT EXISTS (
                         SELECT FROM _tube_slots s WHERE s.tube = tube.id AND s.slot = n));
    child text := format('%I.%I', current_schema(), _tube_name(tube.name, '~' || number));
BEGIN
    EXECUTE format('CREATE TABLE %s () INHERITS (%s) WITH (vacuum_truncate = off)',
                   child, _tube_qualified(tube.rel));
    EXECUTE format('ALTER TABLE %s ALTER ids SET STORAGE PLAIN', child);
    INSERT INTO _tube_slots VALUES (tube.id, number, child::regclass);
    PERFORM _tube_ensure_index(tube, child::regclass);
    PERFORM _tube_generate_put(tube);
    RETURN number;
END $$;

-- Branches that put pods into the slot that a variable names; in the statement, {rel} stands for
-- its table.
CREATE FUNCTION _tube_branches_sql(tube_id integer, slots integer[], variable text, statement text)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT string_agg(format('%s %s OPERATOR(pg_catalog.=) %s THEN %s', CASE WHEN n = 1 THEN 'IF' ELSE 'ELSIF' END,
               variable, slot, replace(statement, '{rel}', rel)), E'\n        ' ORDER BY n)
           || E'\n        END IF;'
      FROM (SELECT s.slot, _tube_qualified(s.rel) AS rel, row_number() OVER (ORDER BY s.slot) AS n
              FROM _tube_slots s WHERE s.tube = tube_id AND s.slot = ANY (slots)) x
$$;

-- Where pods of this size begin in an array. The subqueries hide the numbers from the planner: with
-- them it would think a custom plan better than the generic one, and plan each statement anew.
CREATE FUNCTION _tube_starts_sql(total text, size text) RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT format('pg_catalog.generate_series(1, (SELECT %s), (SELECT %s))', total, size)
$$;

-- The slot that is written to, as an expression of generated functions.
CREATE FUNCTION _tube_slot_sql(tube_id integer) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT format('pg_catalog.pg_sequence_last_value(%L::pg_catalog.regclass) OPERATOR(pg_catalog.%%) 1000::bigint',
                  format('%I._tube_%s_slot', current_schema(), tube_id))
$$;

-- Whether all pods of this session are those of a backfill.
CREATE FUNCTION _tube_is_backfill_sql() RETURNS text
LANGUAGE sql IMMUTABLE AS $$
    SELECT 'pg_catalog.strpos(pg_catalog.current_setting(''application_name''), ''backfill'') OPERATOR(pg_catalog.>) 0'
$$;

-- The functions through which pods enter: static statements, a branch for each slot, which a
-- sequence chooses. Slot 0 has control pods. They run as their owner, so nobody needs rights on the
-- tube to touch a row or to backfill; who must not do that can be denied the schema. The op is
-- checked here: the server would parse a constraint again for each statement.
CREATE FUNCTION _tube_generate_put(tube _tube_tubes) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    here text := quote_ident(current_schema());
    slots integer[] := (SELECT array_agg(s.slot) FROM _tube_slots s WHERE s.tube = tube.id);
BEGIN
    -- A slot that this version of the function does not know yet: slot 1.
    -- Operators are qualified: it runs with the rights of its owner and the search path of anybody.
    EXECUTE format($f$
CREATE OR REPLACE FUNCTION %1$s._tube_%2$s_put(shard integer, ids bigint[], keys text[], op char,
    payload jsonb, tbl integer, size integer) RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $put$
#variable_conflict use_variable
DECLARE
    slot integer := %6$s;
    total integer := coalesce(pg_catalog.array_length(keys, 1), pg_catalog.array_length(ids, 1), 0);
BEGIN
    IF %7$s THEN
        op := 'B';
    ELSIF op OPERATOR(pg_catalog.<>) ALL ('{I,U,D,T,B}'::pg_catalog.bpchar[]) THEN
        RAISE EXCEPTION 'new row for relation "%%" violates check constraint "op"', %8$L
            USING ERRCODE = 'check_violation';
    END IF;
    IF total OPERATOR(pg_catalog.=) 0 THEN
        slot := 0;
    ELSIF slot OPERATOR(pg_catalog.>) %5$s THEN
        slot := 1;
    END IF;
    IF total OPERATOR(pg_catalog.<=) size THEN
        %3$s
    ELSE
        %4$s
    END IF;
END $put$ $f$, here, tube.id,
        _tube_branches_sql(tube.id, slots, 'slot', 'INSERT INTO {rel} (op, shard, ids, payload, keys, tbl)'
            ' VALUES (op, shard, ids, payload, keys, tbl);'),
        _tube_branches_sql(tube.id, slots, 'slot', 'INSERT INTO {rel} (op, shard, ids, payload, keys, tbl)'
            ' SELECT op, shard, CASE WHEN keys IS NULL THEN ids[i : i OPERATOR(pg_catalog.+) size OPERATOR(pg_catalog.-) 1]'
            ' ELSE ''{}'' END, payload, keys[i : i OPERATOR(pg_catalog.+) size OPERATOR(pg_catalog.-) 1], tbl'
            ' FROM ' || _tube_starts_sql('total', 'size') || ' i;'),
        (SELECT max(s) FROM unnest(slots) s), _tube_slot_sql(tube.id), _tube_is_backfill_sql(), tube.name);
    -- Elements side by side: the shard of each id or key, sorted by shard.
    EXECUTE format($f$
CREATE OR REPLACE FUNCTION %1$s._tube_%2$s_put_routed(shards integer[], ids bigint[], keys text[],
    op char, tbl integer, size integer) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $put$
DECLARE
    r record;
BEGIN
    FOR r IN SELECT u.s, pg_catalog.min(u.n)::integer AS first, pg_catalog.max(u.n)::integer AS last
               FROM pg_catalog.unnest(shards) WITH ORDINALITY u (s, n) GROUP BY u.s ORDER BY 2
    LOOP
        PERFORM %1$s._tube_%2$s_put(r.s, coalesce(ids[r.first : r.last], '{}'),
            keys[r.first : r.last], op, NULL, tbl, size);
    END LOOP;
END $put$ $f$, here, tube.id);
    EXECUTE format($f$
CREATE OR REPLACE FUNCTION %1$s.%3$I(shard integer, ids bigint[], op char, payload jsonb = NULL,
    chunk_size integer = 250) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $put$
#variable_conflict use_variable
BEGIN
    IF chunk_size < 1 THEN
        RAISE EXCEPTION 'chunk_size must be at least 1';
    END IF;
    ids := coalesce(pg_catalog.array_remove(ids, NULL), '{}');
    IF ids <> '{}' THEN
        PERFORM %1$s._tube_%2$s_put(shard, ids, NULL, op, NULL, NULL, chunk_size);
    ELSIF payload IS NOT NULL THEN
        PERFORM %1$s._tube_%2$s_put(shard, '{}', NULL, op, payload, NULL, 1);
    END IF;
END $put$ $f$, here, tube.id, _tube_name(tube.name, '_touch'));
END $$;

-- Switch writers to an empty slot when the active one is large or old, and truncate what is
-- drained. The number of slots that were truncated.
--
-- Nobody waits for it: a slot is truncated only if ACCESS EXCLUSIVE can be had at once, and nothing
-- writes to it any more. A writer that chose it just before the switch holds a lock on it or comes
-- later, and then its pod is simply in a slot that is not active. Emptiness is looked at under the
-- lock with a new snapshot, which is why READ COMMITTED is needed. If locks are refused, slots
-- are added.
CREATE FUNCTION tube_rotate(tube text = NULL, max_pods integer = 30000,
    max_bytes bigint = 67108864, max_age interval = '1 minute') RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
    done integer := 0;
    t _tube_tubes;
BEGIN
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RETURN 0;
    END IF;
    FOR t IN SELECT * FROM _tube_tubes x WHERE tube_rotate.tube IS NULL
              OR x.id = (_tube_find(tube_rotate.tube)).id ORDER BY x.id
    LOOP
        IF pg_try_advisory_xact_lock('_tube_tubes'::regclass::oid::integer, t.id) THEN
            done := done + _tube_rotate(t, max_pods, max_bytes, max_age);
        END IF;
    END LOOP;
    RETURN done;
END $$;

CREATE FUNCTION _tube_rotate(t _tube_tubes, max_pods integer, max_bytes bigint, max_age interval)
RETURNS integer LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    -- A shard that is stuck keeps that many pods at most from being moved to the active slot.
    few CONSTANT integer := 1000;
    most_slots CONSTANT integer := 100;
    active integer := _tube_active_slot(t.id);
    active_rel regclass;
    since timestamptz;
    used bigint;
    free integer;
    done integer := 0;
    r record;
BEGIN
    SELECT s.rel, s.active_since INTO active_rel, since
      FROM _tube_slots s WHERE s.tube = t.id AND s.slot = active;
    FOR r IN SELECT s.rel FROM _tube_slots s WHERE s.tube = t.id AND s.slot NOT IN (0, active)
             UNION ALL SELECT t.rel
    LOOP
        IF coalesce(pg_relation_size(r.rel), 0) > 0 AND _tube_count(r.rel, few) <= few THEN
            done := done + _tube_truncate(r.rel, active_rel, few);
        END IF;
    END LOOP;
    used := pg_relation_size(active_rel);
    IF used >= max_bytes OR (used > 0 AND clock_timestamp() - since >= max_age)
       OR _tube_entries(active_rel) >= max_pods THEN
        SELECT s.slot INTO free FROM _tube_slots s
         WHERE s.tube = t.id AND s.slot NOT IN (0, active) AND pg_relation_size(s.rel) = 0
         ORDER BY s.slot LIMIT 1;
        IF free IS NOT NULL THEN
            PERFORM _tube_set_slot(t.id, free);
            UPDATE _tube_slots SET active_since = clock_timestamp()
             WHERE tube = t.id AND slot = free;
            RETURN done;
        ELSIF (SELECT count(*) FROM _tube_slots s WHERE s.tube = t.id) < most_slots THEN
            -- For the next call: the sequence must not name what a rollback would take away.
            PERFORM _tube_add_slot(t);
        END IF;
    END IF;
    PERFORM _tube_set_slot(t.id, active);
    RETURN done;
END $$;

-- Pods of a slot, alive or not: a page of its index has about 200.
CREATE FUNCTION _tube_entries(rel regclass) RETURNS bigint
LANGUAGE sql VOLATILE AS $$
    SELECT coalesce(max(pg_relation_size(i.indexrelid)) / 8192 - 2, 0) * 200
      FROM pg_index i WHERE i.indrelid = rel
$$;

CREATE FUNCTION _tube_count(rel regclass, most integer) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    n integer;
BEGIN
    EXECUTE format('SELECT count(*) FROM (SELECT FROM ONLY %s LIMIT %s) x',
                   _tube_qualified(rel), most + 1) INTO n;
    RETURN n;
END $$;

-- 1 if it is empty now; its last few pods go to another slot, with their seq.
CREATE FUNCTION _tube_truncate(rel regclass, active_rel regclass, few integer) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    n integer;
BEGIN
    EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE NOWAIT', _tube_qualified(rel));
    n := _tube_count(rel, few);
    IF n > few THEN
        RETURN 0;
    ELSIF n > 0 THEN
        EXECUTE format('INSERT INTO %s (seq, op, shard, ids, payload, ts, keys, tbl)'
                       ' SELECT seq, op, shard, ids, payload, ts, keys, tbl FROM ONLY %s ORDER BY seq',
                       _tube_qualified(active_rel), _tube_qualified(rel));
    END IF;
    EXECUTE format('TRUNCATE ONLY %s', _tube_qualified(rel));
    RETURN 1;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END $$;

-- After pods were deleted: once in a few seconds, or if they were many.
CREATE FUNCTION _tube_rotate_sometimes(tube_id integer, deleted integer) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
    IF deleted >= 5000 OR extract(epoch FROM clock_timestamp()) - 5
       > pg_sequence_last_value(format('%I._tube_%s_slot', current_schema(), tube_id)::regclass) / 1000
    THEN
        PERFORM _tube_rotate_now(tube_id);
    END IF;
END $$;

-- For whoever drains a tube: tube_rotate itself, with limits to choose, is not for everybody.
CREATE FUNCTION _tube_rotate_now(tube_id integer) RETURNS void
LANGUAGE sql SECURITY DEFINER AS $$
    SELECT tube_rotate(t.name) FROM _tube_tubes t WHERE t.id = tube_id
$$;
