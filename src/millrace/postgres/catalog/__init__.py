"""Catalog queries: what a database holds, and what its objects look like."""
