"""The version of a document rises when the source is another copy that may be behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest
from tests.fixtures.tube.tube_source import ENRICH, TubeSource, fill
from tests.fixtures.wait import wait_for

from millrace.errors import PreflightError
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.tube.delivery.epoch import draw_version, settle_epoch
from millrace.tube.install import install, uninstall

ATTACH = "SELECT tube_ensure_exists('t')", "SELECT tube_table_attach('t', 'article', 1)"


@pytest.fixture
def source(source_db: str) -> Iterator[TubeSource]:
    found = TubeSource(source_db)
    with closing(found.connection):
        yield found


def test_a_promoted_standby_that_was_behind_writes_newer_versions(target_db: str) -> None:
    """Its numbers were all drawn before: without a higher epoch the sink would drop everything."""
    with psycopg.connect(target_db, autocommit=True) as downstream:
        downstream.execute("CREATE TABLE docs (id bigint PRIMARY KEY, title text, stars int)")
        sink = f"{target_db}&table=docs"
        with open_cluster(16) as primary:
            source = TubeSource(primary.create_database("s"))
            source.run(*ATTACH)
            fill(source, 5)
            with open_cluster(16, base_backup_of=primary) as standby:
                wait_for(lambda: _has_rows(standby, 5))
                standby.stop()
                source.run("SELECT setval('tube.tube_seq', 1000)", "UPDATE article SET stars = 9")
                source.deliver(sink=sink)
                source.connection.close()
                primary.stop("immediate")
                standby.start()
                refused = psycopg.connect(standby.uri("s"), autocommit=True)
                with closing(refused), pytest.raises(PreflightError, match="standby"):
                    settle_epoch(refused, "tube")
                standby.execute("SELECT pg_promote()")
                promoted = TubeSource(standby.uri("s"), is_made=True)
                with closing(promoted.connection):
                    # What nobody will see again was delivered; the rows here are the truth now.
                    promoted.run("UPDATE article SET title = 'after', stars = 1")
                    promoted.deliver(sink=sink)
                found = downstream.execute("SELECT DISTINCT title, stars FROM docs").fetchall()
                assert found == [("after", 1)]


def _has_rows(standby: Cluster, count: int) -> bool:
    with psycopg.connect(standby.uri("s"), autocommit=True) as replica:
        return replica.execute("SELECT count(*) FROM article").fetchone() == (count,)


def test_a_copy_of_the_database_and_a_new_installation_have_higher_epochs(
    source: TubeSource, source_db: str
) -> None:
    source.run(*ATTACH)
    first = settle_epoch(source.connection, "tube")
    assert settle_epoch(source.connection, "tube") == first
    assert draw_version(source.connection, "tube")[0] == first
    # As a template, or a dump, would take it along.
    source.run("UPDATE tube._tube_epoch SET database = 1, epoch = epoch + 5")
    copied = settle_epoch(source.connection, "tube")
    assert copied > first + 5
    source.run("UPDATE tube._tube_epoch SET timeline = timeline + 1, epoch = 3")
    restored = settle_epoch(source.connection, "tube")
    # Also above epochs of which this copy never heard.
    assert restored > 1000
    uninstall(source.connection, "tube", drop_tubes=True)
    install(source.connection)
    assert settle_epoch(source.connection, "tube") >= restored


def test_an_ordinary_role_settles_the_epoch_and_can_not_raise_it(source: TubeSource) -> None:
    source.run(*ATTACH, "CREATE ROLE epoch_reader LOGIN", "GRANT USAGE ON SCHEMA tube TO PUBLIC")
    try:
        with psycopg.connect(source.uri, user="epoch_reader", autocommit=True) as reader:
            source.run("UPDATE tube._tube_epoch SET system_identifier = 5")
            before = source.rows("SELECT epoch FROM tube._tube_epoch")[0][0]
            assert settle_epoch(reader, "tube") > before
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                reader.execute("SELECT tube.tube_epoch(true)")
    finally:
        source.run("DROP OWNED BY epoch_reader", "DROP ROLE epoch_reader")


def test_a_delivery_settles_the_epoch_before_it_writes(source: TubeSource) -> None:
    source.run(*ATTACH)
    fill(source, 3)
    source.run("UPDATE tube._tube_epoch SET timeline = timeline - 1")
    (before,) = source.rows("SELECT epoch FROM tube._tube_epoch")
    source.deliver(enrich=ENRICH)
    assert all(row > before for row in source.rows("SELECT epoch FROM millrace_tube.version"))
