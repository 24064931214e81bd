"""From the spool into the target, exactly once."""
