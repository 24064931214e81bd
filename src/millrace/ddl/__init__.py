"""Changes of structure: captured on the source, replayed at their place in the stream."""
