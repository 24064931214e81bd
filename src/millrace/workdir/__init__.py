"""The folder of one run: SQLite catalog, lock, status."""
