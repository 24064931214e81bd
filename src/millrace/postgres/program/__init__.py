"""The programs of PostgreSQL: found, run, and servers of our own."""
