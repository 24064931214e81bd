"""A busy shop database to try Millrace on."""
