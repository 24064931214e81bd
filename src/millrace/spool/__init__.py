"""Received transactions on disk or in tables, until they are applied."""
