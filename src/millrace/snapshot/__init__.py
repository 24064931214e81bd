"""One view of the source shared by many connections."""
