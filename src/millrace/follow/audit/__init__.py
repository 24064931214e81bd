"""What is checked when a stream ends, and what the checks rest on."""
