"""Settings and how they are found; secrets that print as ***."""
