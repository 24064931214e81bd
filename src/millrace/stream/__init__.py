"""Changes of the source after the snapshot: received, spooled, transformed, applied."""
