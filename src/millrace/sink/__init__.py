"""What receives changes or documents: the protocol, and one file for each kind of sink."""
