"""millrace demo: each demonstration in a file."""
