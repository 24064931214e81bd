"""Whether a stream that somebody runs has come to a position.

Invariant: true only if everything up to there was received and applied, and no table waits to be
copied again.
"""

from __future__ import annotations

from contextlib import closing

from millrace.spool.place import SpoolPlace
from millrace.workdir.sentinel import Sentinel, StreamSetup
from millrace.workdir.sync_request import read_requests


def has_applied(sentinel: Sentinel, setup: StreamSetup, place: SpoolPlace, lsn: int) -> bool:
    # In this order: what was complete then is in the spool that is looked at afterwards.
    complete = sentinel.read_source().complete_lsn or 0
    state = sentinel.read()
    if read_requests(sentinel, unfinished=True):
        return False
    if max(complete, state.flushed_lsn or 0) < lsn:
        return False
    with closing(place.open_reader()) as spool:
        return spool.plan(max(state.applied_lsn or 0, setup.start_lsn), 1, lsn) is None
