"""Stored values as the text the server prints."""
