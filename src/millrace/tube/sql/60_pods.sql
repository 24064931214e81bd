-- Reading, deleting and inserting pods.

CREATE FUNCTION _tube_check_partitions(u _tube_tubes, partitions integer, doing text) RETURNS void
LANGUAGE plpgsql AS $$
BEGIN
    IF partitions IS DISTINCT FROM u.partitions THEN
        RAISE EXCEPTION '%: the tube "%" has % partitions, not %', doing, u.name, u.partitions,
            coalesce(partitions::text, '<NULL>') USING ERRCODE = 'invalid_parameter_value',
            HINT = 'It was repartitioned: read its partitions again.';
    END IF;
END $$;

-- Both remainders of a partition, each in the order of the index, merged.
CREATE FUNCTION _tube_select_sql(u _tube_tubes, partition integer, columns text, exclude_backfill boolean)
RETURNS text LANGUAGE sql STABLE AS $$
    SELECT format(E'SELECT %s\nFROM (\n%s\n) AS pods\nORDER BY is_backfill, seq', columns,
        string_agg(format(
            '    (SELECT *, op = ''B'' AS is_backfill FROM %s WHERE shard %% %s = %s%s ORDER BY op = ''B'', seq)',
            _tube_qualified(u.rel), u.partitions, p,
            CASE WHEN exclude_backfill THEN ' AND (op = ''B'') IS FALSE' ELSE '' END),
            E'\n    UNION ALL\n' ORDER BY p DESC))
      FROM unnest(CASE WHEN partition = 0 THEN ARRAY[0]
                       ELSE ARRAY[partition, partition - u.partitions] END) p
$$;

CREATE OR REPLACE FUNCTION tube_pods_sql(tube text, partitions integer, partition integer,
    exclude_backfill boolean = false) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    u _tube_tubes := _tube_find(tube);
BEGIN
    PERFORM _tube_check_partitions(u, partitions, 'Cannot read pods');
    RETURN _tube_select_sql(u, partition, 'seq, op, shard, coalesce(keys::text, ids::text) AS ids, payload',
                            exclude_backfill);
END $$;

-- The same with all that a delivery wants to know.
CREATE FUNCTION tube_fetch_sql(tube text, partitions integer, partition integer,
    exclude_backfill boolean = false) RETURNS text
LANGUAGE plpgsql STABLE AS $$
DECLARE
    u _tube_tubes := _tube_find(tube);
BEGIN
    PERFORM _tube_check_partitions(u, partitions, 'Cannot read pods');
    RETURN _tube_select_sql(u, partition, 'seq, op, shard, ids, keys, tbl, payload, ts', exclude_backfill);
END $$;

CREATE OR REPLACE FUNCTION tube_pods_delete(tube text, partitions integer, partition integer,
    seqs bigint[]) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    u _tube_tubes := _tube_find(tube);
    deleted integer;
BEGIN
    PERFORM _tube_check_partitions(u, partitions, 'Cannot delete pods');
    -- Those of backfills come last.
    deleted := _tube_delete(u, partition, seqs, '(op = ''B'') IS FALSE');
    IF deleted < cardinality(seqs) THEN
        deleted := deleted + _tube_delete(u, partition, seqs, 'op = ''B''');
    END IF;
    IF deleted > 0 THEN
        PERFORM _tube_rotate_sometimes(u.id, deleted);
    END IF;
    RETURN deleted;
END $$;

-- By a range of the index, whatever else is in the slots. The array is joined: as a condition it would
-- be estimated, for each slot, one element after the other.
CREATE FUNCTION _tube_delete(u _tube_tubes, partition integer, seqs bigint[], kind text) RETURNS integer
LANGUAGE plpgsql AS $$
DECLARE
    deleted integer;
BEGIN
    EXECUTE format('DELETE FROM %s t USING unnest($1) s WHERE t.seq = s AND t.seq BETWEEN $2 AND $3 AND %s AND %s',
                   _tube_qualified(u.rel), _tube_partition_sql(u.partitions, partition), kind)
      USING seqs, (SELECT min(s) FROM unnest(seqs) s), (SELECT max(s) FROM unnest(seqs) s);
    GET DIAGNOSTICS deleted = ROW_COUNT;
    RETURN deleted;
END $$;

CREATE OR REPLACE FUNCTION tube_pods_insert(tube_or_tubes text, query text, shard integer,
    op char = 'B', approx_size bigint = NULL, fetch_chunk_size integer = 20000,
    insert_chunk_size integer = 250) RETURNS void
LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    tubes integer[] := (SELECT array_agg((_tube_find(n)).id) FROM _tube_split(tube_or_tubes) n);
BEGIN
    IF tube_or_tubes IS NULL OR tubes IS NULL THEN
        RAISE EXCEPTION 'No such tube: %', coalesce(tube_or_tubes, '<NULL>')
            USING ERRCODE = 'undefined_object';
    END IF;
    IF shard IS NULL THEN
        RAISE EXCEPTION 'Pods need a shard' USING ERRCODE = 'null_value_not_allowed';
    END IF;
    PERFORM _tube_emit(tubes, format(E'SELECT q.id, q.rn, %s FROM (%s\n) q (id, rn)',
                                     tube_pods_insert.shard, query),
                       NULL, op, approx_size, fetch_chunk_size, insert_chunk_size);
END $$;

-- The query returns (key, number from 1 on, shard); its groups go to each tube.
CREATE FUNCTION _tube_emit(tubes integer[], query text, table_id integer, op char, approx_size bigint,
    fetch_chunk_size integer, insert_chunk_size integer, is_quiet boolean = false) RETURNS bigint
LANGUAGE plpgsql AS $$
DECLARE
    began timestamptz := clock_timestamp();
    noted timestamptz := began;
    fetched timestamptz;
    total bigint := 0;
    g record;
    tube_id integer;
BEGIN
    IF coalesce(fetch_chunk_size, 0) < 1 OR coalesce(insert_chunk_size, 0) < 1 THEN
        RAISE EXCEPTION 'Chunk sizes must be at least 1' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    FOR g IN EXECUTE format(
        'SELECT s, array_agg(id::text ORDER BY rn) AS keys,'
        ' bool_and(pg_typeof(id)::oid IN (20, 21, 23)) AS is_bigint FROM (%s) AS q (id, rn, s)'
        ' WHERE id IS NOT NULL GROUP BY (rn - 1) / $1, s ORDER BY (rn - 1) / $1, s', query) USING fetch_chunk_size
    LOOP
        fetched := coalesce(fetched, clock_timestamp());
        FOREACH tube_id IN ARRAY tubes LOOP
            EXECUTE format('SELECT %I._tube_%s_put($1, $2, $3, $4, NULL, $5, $6)', current_schema(), tube_id)
                USING g.s, CASE WHEN g.is_bigint THEN g.keys::bigint[] ELSE '{}' END,
                      CASE WHEN NOT g.is_bigint THEN g.keys END, op, table_id, insert_chunk_size;
        END LOOP;
        total := total + cardinality(g.keys);
        IF NOT is_quiet AND clock_timestamp() - noted > interval '2 seconds' THEN
            noted := clock_timestamp();
            PERFORM _tube_note_insert(approx_size, began, fetched, total, false);
        END IF;
    END LOOP;
    IF NOT is_quiet THEN
        PERFORM _tube_note_insert(approx_size, began, coalesce(fetched, clock_timestamp()), total, true);
    END IF;
    RETURN total;
END $$;

CREATE FUNCTION _tube_note_insert(approx_size bigint, began timestamptz, fetched timestamptz,
    total bigint, is_finished boolean) RETURNS void
LANGUAGE plpgsql AS $$
DECLARE
    fetch_ms bigint := extract(epoch FROM fetched - began) * 1000;
    insert_ms bigint := extract(epoch FROM clock_timestamp() - fetched) * 1000;
BEGIN
    RAISE NOTICE 'tube_pods_insert: approx_size=% fetch_ms=% insert_ids=% insert_finished=% insert_percent=% insert_ms=% insert_rps=% (inserting)',
        coalesce(approx_size::text, '<NULL>'), fetch_ms, total, left(is_finished::text, 1),
        coalesce(CASE WHEN is_finished THEN 100
                      ELSE least(round(100.0 * total / nullif(approx_size, 0)), 100) END::text, '<NULL>'),
        insert_ms, coalesce((total * 1000 / nullif(insert_ms, 0))::text, '<NULL>');
END $$;
