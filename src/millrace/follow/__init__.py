"""A stream from its set-up to its end: slot, publications, receiver and apply together."""
