"""Millrace moves PostgreSQL data, consistently, on Apache Spark."""

__version__ = "0.1.0"
