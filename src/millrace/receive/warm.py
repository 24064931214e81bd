"""What every receiver needs, loaded once: imported by the process that receivers are forked from.

Invariant: nothing is opened and no thread is started by importing this. What is loaded here is
shared by all receivers as long as none writes to it; so the garbage collector leaves it alone.
"""

from __future__ import annotations

import gc

from millrace.postgres.wire.replication import FrameBuffer
from millrace.receive import process
from millrace.spool import table, writer

LOADED = (process, table, writer)

FrameBuffer().scan(any_kind=False)  # loads machine code
gc.collect()
gc.freeze()
