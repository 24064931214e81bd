"""Tubes: touch events of tables, kept in queue tables of the database."""
