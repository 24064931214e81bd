"""Delivery: pods out of a tube, enriched, into a sink."""
