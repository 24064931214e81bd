"""A fault campaign: clones that are interrupted, again and again, and must end equal.

`make torture MINUTES=30 SEED=1` runs it for as long as wanted; tests/spark/test_torture.py is the
short version.
"""
