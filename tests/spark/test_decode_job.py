"""Decoding by tasks gives the bytes that decoding in one process gives."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fixtures.decode.decode_cases import CASES
from tests.fixtures.decode.decode_workload import run_cases
from tests.fixtures.decode.decoding import DecodedSource, take_base
from tests.fixtures.engines.direct_engine import DirectEngine

from millrace.decode.outputs import TextOutput
from millrace.decode.parallel import ParallelDecoding
from millrace.decode.run import DecodeSettings, Decoding
from millrace.decode.selection import Selection
from millrace.engine import Engine
from millrace.postgres.program.embedded import open_cluster

_SETTINGS = {"autovacuum": "off", "max_prepared_transactions": "10", "wal_keep_size": "1GB"}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DecodeSettings]:
    """WAL of all tricky cases, in many small segments' worth of switches."""
    folder = tmp_path_factory.mktemp("decode")
    with open_cluster(18, settings={**_SETTINGS, "allow_in_place_tablespaces": "on"}) as cluster:
        cluster.create_database("d")
        source = DecodedSource(cluster, "d", take_base(cluster, folder / "base"), {})
        for name, steps in CASES.items():
            run_cases(source, {name: steps})
            if len(name) % 4 == 0:  # so that transactions and pieces end in different places
                source.execute("SELECT pg_switch_wal()")
        source.execute(
            "CREATE TABLE many AS SELECT g, md5(g::text) AS t FROM generate_series(1, 30000) g",
            "CREATE TABLE named (c regclass)",
            "INSERT INTO named VALUES ('many'), ('named')",
        )
        cluster.stop()
        yield DecodeSettings(wal=[source.wal], base=source.base, database="d")


def in_one_process(settings: DecodeSettings) -> tuple[bytes, dict[str, object]]:
    decoding = Decoding(settings)
    stream = io.BytesIO()
    drops_empty = settings.selection.drops_empty
    report = decoding.run([TextOutput(stream, decoding.renderers, drops_empty=drops_empty)])
    return stream.getvalue(), report.to_dict()


def by_tasks(
    settings: DecodeSettings, engine: Engine, folder: Path, jobs: int
) -> tuple[bytes, dict[str, object]]:
    folder.mkdir(parents=True)
    stream = io.BytesIO()
    report = ParallelDecoding(settings, engine, folder, jobs).write_text(stream)
    assert not list(folder.glob("*.lines*"))
    return stream.getvalue(), report.to_dict()


def test_decoding_by_tasks_gives_the_bytes_of_one_process(
    settings: DecodeSettings, engine: Engine, tmp_path: Path
) -> None:
    expected, report = in_one_process(settings)
    assert expected.count(b"\n") > 30_000
    assert b"regclass" in expected
    for number, (runner, jobs) in enumerate(
        ((DirectEngine(), 1), (DirectEngine(), 3), (engine, 2))
    ):
        found, own = by_tasks(settings, runner, tmp_path / str(number), jobs)
        assert found == expected
        assert own == report


def test_a_selection_is_the_same_by_tasks(settings: DecodeSettings, tmp_path: Path) -> None:
    chosen = replace(settings, selection=Selection(tables=frozenset({"public.many"})))
    expected = in_one_process(chosen)
    assert by_tasks(chosen, DirectEngine(), tmp_path / "tasks", 2) == expected
    assert expected[0].count(b"\n") == 30_002
