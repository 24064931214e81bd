"""tube.toml, looked at again while its tubes are delivered.

Invariant: a file that can't be used changes nothing: that is said once, and what was planned before
goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Final

from millrace.config.dsn import Dsn
from millrace.config.file import read_given
from millrace.errors import MillraceError
from millrace.tube.config import TubeFile, plan_deliveries, read_tube_file
from millrace.tube.delivery.runs import TubeRun

log = logging.getLogger(__name__)

WATCH_SECONDS: Final = 2.0


class ConfigWatch:
    """What a file plans for a source, and what it plans after it was changed."""

    def __init__(self, file: TubeFile, source: Dsn, schema: str, *, until_empty: bool) -> None:
        self._file = file
        self._source = source
        self._schema = schema
        self._until_empty = until_empty
        self._text = read_given(file.path, "config")
        self._looked_at = time.monotonic()

    def runs(self) -> list[TubeRun]:
        """The tubes, in the order of the file."""
        schema = self._schema or self._file.schema
        planned = plan_deliveries(self._file, self._source, schema, until_empty=self._until_empty)
        return [TubeRun(delivery, workers) for delivery, workers in planned]

    def changed(self, require: Callable[[Sequence[TubeRun]], None]) -> list[TubeRun] | None:
        """The tubes, if the file was changed since the last look and `require` raises nothing. What
        is delivered until it is empty stays as it was planned."""
        if self._until_empty or time.monotonic() - self._looked_at < WATCH_SECONDS:
            return None
        self._looked_at = time.monotonic()
        before = self._file
        try:
            text = read_given(before.path, "config")
            if text == self._text:
                return None
            self._text = text
            self._file = read_tube_file(before.path)
            runs = self.runs()
            require(runs)
        except MillraceError as error:
            self._file = before
            log.error("%s; what was planned before goes on", error)
            return None
        if self._file.source != before.source:
            log.warning("%s names another source: start again to use it", before.path)
        log.info("%s was changed", before.path)
        return runs
