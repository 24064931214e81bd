"""What follows the rows of a table: indexes, constraints, sequences, vacuum."""
