"""Measures Millrace side by side with its peers and prints ratios; never part of the tests."""
