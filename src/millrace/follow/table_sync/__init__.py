"""Tables copied again while their stream continues."""
