"""Where a table is cut into parts: planned from samples."""
