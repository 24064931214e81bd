"""What the tests of several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.stream_pair import StreamPair


@pytest.fixture(params=[True, False], ids=["binary", "text"])
def pair(
    request: pytest.FixtureRequest, source_db: str, target_db: str, tmp_path: Path
) -> Iterator[StreamPair]:
    opened = StreamPair(source_db, target_db, tmp_path, binary=request.param)
    yield opened
    opened.close()
