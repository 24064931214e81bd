"""WAL files into changes, with no server and no connection."""
