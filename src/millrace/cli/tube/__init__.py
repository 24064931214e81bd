"""`millrace tube ...`: one file for a command, or for some that do little more than call SQL."""
