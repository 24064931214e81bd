"""WAL files to columns of records: pages, segments, timelines, checksums."""
