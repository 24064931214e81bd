-- What waits in each shard: of attached tables, and wherever there are pods. Reads all pods.
CREATE FUNCTION tube_shards(in_tube text = NULL)
RETURNS TABLE (tube text, partition integer, shard integer, pods bigint, ids bigint,
    lag_seconds double precision, backfill_pods bigint, backfill_ids bigint,
    backfill_lag_seconds double precision, control_pods bigint)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    u _tube_tubes;
BEGIN
    FOR u IN SELECT x.* FROM _tube_tubes x JOIN pg_class c ON c.oid = x.rel
              WHERE in_tube IS NULL OR x.name = in_tube ORDER BY x.name
    LOOP
        RETURN QUERY EXECUTE format($q$
SELECT $1, ((s.shard %% $2) + $2) %% $2, s.shard,
       count(*) FILTER (WHERE is_inc), coalesce(sum(n) FILTER (WHERE is_inc), 0)::bigint,
       coalesce(extract(epoch FROM clock_timestamp() - min(ts) FILTER (WHERE is_inc)), 0)::float8,
       count(*) FILTER (WHERE NOT is_inc), coalesce(sum(n) FILTER (WHERE NOT is_inc), 0)::bigint,
       coalesce(extract(epoch FROM clock_timestamp() - min(ts) FILTER (WHERE NOT is_inc)), 0)::float8,
       count(*) FILTER (WHERE n = 0)
  FROM (SELECT p.shard, p.ts, coalesce(cardinality(p.keys), cardinality(p.ids)) AS n,
               CASE WHEN p.ids <> '{}' OR p.keys IS NOT NULL THEN p.op <> 'B' END AS is_inc FROM %s p
        UNION ALL
        SELECT t.shard, NULL, NULL, NULL FROM _tube_tables t WHERE t.tube = $3 AND t.routing IS NULL) s
 GROUP BY s.shard ORDER BY 2, 3
$q$, _tube_qualified(u.rel)) USING u.name, u.partitions, u.id;
    END LOOP;
END $$;
