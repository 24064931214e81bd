"""Values in PostgreSQL's binary format, as the text PostgreSQL would print.

Invariant: the text is exactly the server's own under our session settings (ISO dates, UTC,
intervals in PostgreSQL's style, shortest floating-point numbers, bytea in hex); what can't be
printed so is refused.

Nothing here opens or waits for anything. The oracle of its tests is the server.
"""

from millrace.postgres.binary_text.column import RenderedColumn, render_column
from millrace.postgres.binary_text.types import BinaryType, find_type

__all__ = ["BinaryType", "RenderedColumn", "find_type", "render_column"]
