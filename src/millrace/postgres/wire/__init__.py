"""Connections, sessions and the replication protocol: bytes to and from a server."""
