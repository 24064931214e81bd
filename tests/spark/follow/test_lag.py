"""How far a stream is behind: measured against the source, also when the stream is silent."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from tests.fixtures.stream.followed import Silent, open_followed, writing
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.cli.display import render_follow
from millrace.follow import progress as progress_module
from millrace.follow import source_watch
from millrace.follow.metrics import StreamMetrics
from millrace.follow.progress import FollowProgress
from millrace.postgres.program.embedded import Cluster
from millrace.spark.session import Engine

WRITTEN_BYTES = 20 << 20
_KEEP = "max_slot_wal_keep_size"


class Orderly(Silent):
    """Notes whatever is shown out of order."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong: list[FollowProgress] = []

    def update_follow(self, progress: FollowProgress) -> None:
        super().update_follow(progress)
        if not progress.applied_lsn <= progress.flushed_lsn <= progress.received_lsn:
            self.wrong.append(progress)


@pytest.fixture
def limited(source_cluster: Cluster) -> Iterator[None]:
    """The source keeps WAL for slots only up to a limit, which is far away."""
    source_cluster.execute(f"ALTER SYSTEM SET {_KEEP} = '4GB'")
    source_cluster.execute("SELECT pg_reload_conf()")
    yield
    source_cluster.execute(f"ALTER SYSTEM RESET {_KEEP}")
    source_cluster.execute("SELECT pg_reload_conf()")


@contextmanager
def _stopped_walsender(uri: str, slot: str) -> Iterator[None]:
    """As if it hung: the connection stays, and nothing comes."""
    with psycopg.connect(uri) as connection:
        row = connection.execute(
            "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        ).fetchone()
    assert row is not None
    os.kill(row[0], signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(row[0], signal.SIGCONT)


def _metric(metrics: StreamMetrics, stream: str, name: str) -> float:
    value = metrics.registry.get_sample_value(f"millrace_{name}", {"stream": stream})
    assert value is not None
    return value


def _shown(reporter: Silent, is_it: Callable[[FollowProgress], bool], why: str) -> FollowProgress:
    """The first progress like that; the next one may be another."""

    def look() -> FollowProgress | None:
        last = reporter.last
        return last if is_it(last) else None

    return wait_for(look, why)  # type: ignore[return-value]


def test_a_stalled_stream_is_behind_and_says_so(
    source_db: str,
    target_db: str,
    tmp_path: Path,
    engine: Engine,
    limited: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(progress_module, "SILENT_SECONDS", 4.0)
    monkeypatch.setattr(source_watch, "RATE_SECONDS", DEADLINE_SECONDS)
    with open_followed(source_db, target_db, tmp_path / "work", engine) as followed:
        reporter = followed.reporter = Orderly()
        with writing(followed.source, seed=11) as written:
            running = followed.start()
            wait_for(lambda: written() > 50)
        shown = _shown(reporter, lambda one: one.lag_bytes == 0, "it catches up")
        assert shown.lag_seconds == 0
        assert render_follow(shown).endswith("nothing to apply")
        with _stopped_walsender(followed.source, followed.slot):
            with psycopg.connect(followed.source, autocommit=True) as connection:
                connection.execute("SET synchronous_commit = on")
                connection.execute(
                    "INSERT INTO transfer (note) SELECT string_agg(md5(i::text), '') FROM"
                    " generate_series(1, 700000) i GROUP BY i / 60"
                )
            _shown(reporter, lambda one: (one.lag_bytes or 0) > WRITTEN_BYTES, "it is far ahead")
            # On a busy machine the source's own answer may be old, too, now and then.
            shown = _shown(
                reporter,
                lambda one: (
                    one.source.is_silent
                    and (one.lag_seconds or 0.0) > 4
                    and (one.source.age_seconds or 0.0) < 4
                ),
                "nothing comes, and lag grows with time",
            )
            assert "nothing received from the source for" in render_follow(shown)
            assert "MB ahead" in render_follow(shown)
            assert "nothing to apply" not in render_follow(shown)
            metrics = StreamMetrics()
            metrics.update(shown)
            metric = partial(_metric, metrics, followed.slot)
            assert metric("lag_bytes") > WRITTEN_BYTES
            assert metric("lag_seconds") > 4
            assert metric("source_silent") == 1
            assert metric("source_contact_age_seconds") > 4
            assert metric("source_age_seconds") < 4
            # The slot is held, and comes nearer to its end.
            assert metric("slot_retained_bytes") > WRITTEN_BYTES
            assert 0 < metric("slot_safe_wal_bytes") < 4 << 30
            assert metric("slot_seconds_until_lost") > 0
            labels = {"stream": followed.slot, "status": "reserved"}
            assert metrics.registry.get_sample_value("millrace_slot_wal_status", labels) == 1
            wait_for(lambda: "nothing received from the source for" in caplog.text, "it is logged")
        _shown(
            reporter,
            lambda one: one.lag_bytes == 0 and not one.source.is_silent,
            "it catches up again",
        )
        followed.set_endpos(followed.end())
        running.join(DEADLINE_SECONDS)
        assert not running.is_alive()
        assert not reporter.wrong
        followed.assert_equal()
