"""Are both sides equal? Data and schema."""
