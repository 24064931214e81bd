"""Messages of logical replication, and the text of other output plugins."""
