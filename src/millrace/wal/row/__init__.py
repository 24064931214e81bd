"""Stored rows taken apart: tuples, TOAST, compressed values, page images."""
