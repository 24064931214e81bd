"""What decoding needs from servers and files around `wal`."""
