"""From the source's replication slot into the spool."""
