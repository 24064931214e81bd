"""The catalog with a time axis: from a base image, carried forward by WAL."""
