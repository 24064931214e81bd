"""What the tests of several modules share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.catalog_reading import Connection
from tests.fixtures.filtering import SCHEMA as FILTERED_SCHEMA
from tests.fixtures.stream.receiving import BATCHES, NO_BATCHES, TABLE, Source
from tests.fixtures.stream.stream_pair import StreamPair
from tests.fixtures.tube.tubes import TubeDatabase, open_tubes

from millrace.config.dsn import Dsn
from millrace.postgres.wire.connect import connect


@pytest.fixture(params=[True, False], ids=["binary", "text"])
def pair(
    request: pytest.FixtureRequest, source_db: str, target_db: str, tmp_path: Path
) -> Iterator[StreamPair]:
    opened = StreamPair(source_db, target_db, tmp_path, binary=request.param)
    yield opened
    opened.close()


@pytest.fixture(params=["16", "18", "18 in batches"])
def source(request: pytest.FixtureRequest) -> Iterator[Source]:
    version, *in_batches = request.param.split(maxsplit=1)
    name = {"16": "source_db", "18": "target_db"}[version]
    batches = BATCHES if in_batches else NO_BATCHES
    source = Source(request.getfixturevalue(name), TABLE, batches=batches)
    yield source
    source.close()


@pytest.fixture
def source16(source_db: str) -> Iterator[Source]:
    source = Source(source_db, TABLE)
    yield source
    source.close()


@pytest.fixture(params=[NO_BATCHES, BATCHES], ids=["streamed", "in batches"])
def either16(request: pytest.FixtureRequest, source_db: str) -> Iterator[Source]:
    source = Source(source_db, TABLE, batches=request.param)
    yield source
    source.close()


@pytest.fixture
def source_session(source_db: str) -> Iterator[Connection]:
    with connect(Dsn.parse(source_db), "test") as connection:
        yield connection


@pytest.fixture
def target_session(target_db: str) -> Iterator[Connection]:
    with connect(Dsn.parse(target_db), "test") as connection:
        yield connection


@pytest.fixture
def filter_source(source_db: str) -> str:
    """A database with one of everything that filters leave out."""
    with psycopg.connect(source_db, autocommit=True) as connection:
        connection.execute(FILTERED_SCHEMA)
    return source_db


@pytest.fixture(
    params=["system_cluster", "source_cluster", "target_cluster"], ids=["15", "16", "18"]
)
def tubes(request: pytest.FixtureRequest) -> Iterator[TubeDatabase]:
    """A database with tubes, on each server."""
    with open_tubes(request.getfixturevalue(request.param)) as database:
        yield database


@pytest.fixture
def tubes_16(request: pytest.FixtureRequest) -> Iterator[TubeDatabase]:
    """For what depends on no version."""
    with open_tubes(request.getfixturevalue("source_cluster")) as database:
        yield database
