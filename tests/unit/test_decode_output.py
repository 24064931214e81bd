"""What a checkpoint knows of an output stays, or is refused."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from millrace.decode.formats import _open_stream
from millrace.errors import WorkDirError


def test_output_that_is_shorter_than_its_checkpoint_says_is_refused_and_left(
    tmp_path: Path,
) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"0123456789")
    with pytest.raises(WorkDirError, match="shorter"), _open_stream(path, io.BytesIO(), 11):
        pass
    assert path.read_bytes() == b"0123456789"
    with _open_stream(path, io.BytesIO(), 4) as stream:
        stream.write(b"x")
    assert path.read_bytes() == b"0123x"
