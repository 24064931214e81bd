"""The schema on its way to the target: dumped, sorted, restored."""
