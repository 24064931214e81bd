"""Many databases into one: a schema of the target for each schema of each source."""
