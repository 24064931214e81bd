"""Connections, quoting, catalog queries, the COPY relay, pg_dump, embedded servers."""
