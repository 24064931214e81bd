"""Tables copied again while the source is written to, with Spark, and by the command."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.stream.followed import Followed, open_followed, writing
from tests.fixtures.stream.syncing import request, run_sql, states_of, wait_until_done
from tests.fixtures.wait import DEADLINE_SECONDS, wait_for

from millrace.apply.table_state import SyncState
from millrace.spark.session import Engine


def resync(followed: Followed, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """(exit code, what it prints as JSON, what it says) of `millrace stream resync`."""
    command = [*MILLRACE, "stream", "resync", *arguments, "--json"]
    ends = ["--source", followed.source, "--target", followed.target]
    command += [*ends, "--dir", str(followed.directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    return done.returncode, json.loads(done.stdout or "{}"), done.stderr


def test_tables_are_copied_again_while_others_write_and_the_stream_continues(
    source_db: str, target_db: str, tmp_path: Path, engine: Engine
) -> None:
    with open_followed(source_db, target_db, tmp_path, engine) as followed:
        thread = followed.start(apply_jobs=2)
        with writing(source_db, 41, writers=1, pause_seconds=0.05) as count:
            wait_for(lambda: count() > 20)
            # Rows that the source does not have: only a new copy removes them.
            run_sql(
                target_db,
                "INSERT INTO account VALUES (-1, 5)",
                'INSERT INTO "Loose one" VALUES (-1)',
                "INSERT INTO transfer (id, note) OVERRIDING SYSTEM VALUE VALUES (-1, 'wrong')",
            )
            asked = request(followed, "account")
            code, told, words = resync(followed, 'public."Loose one"', "public.transfer")
            assert code == 0, words
            assert [one["name"] for one in told["tables"]] == ["Loose one", "transfer"]
            assert {one["state"] for one in told["tables"]} == {"done"}
            again = request(followed, "account")
            assert wait_until_done(followed, asked).copied_lsn
            assert wait_until_done(followed, again).rows
            before = count()
            wait_for(lambda: count() > before + 20)
        followed.set_endpos(followed.end())
        thread.join()
        followed.assert_equal()
        assert {state.state for state in states_of(followed).values()} == {SyncState.FOLLOWED}
        _resync_a_stream_that_has_stopped(followed)


def _resync_a_stream_that_has_stopped(followed: Followed) -> None:
    run_sql(followed.source, "UPDATE seat SET place = place + 100")
    # The change would stop the stream.
    run_sql(followed.target, "DELETE FROM seat WHERE id = 5")
    code, told, words = resync(followed, "public.seat")
    assert (code, "sentinel set endpos --none" in words) == (4, True), words
    followed.set_endpos(None)
    code, told, words = resync(followed, "public.seat")
    assert code == 0, words
    assert told["tables"][0]["rows"] == 20
    followed.follow(apply_jobs=2)
    followed.assert_equal()
