"""Preflight: each problem is provoked, told, and gone after the fix it prints."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psycopg
import pytest
from tests.fixtures.stream.rerouted import rerouted

from millrace.clone.preflight import check, raise_problems
from millrace.clone.problem import Problem
from millrace.clone.schema.entries import SchemaSettings
from millrace.clone.settings import CloneSettings
from millrace.config.dsn import Dsn
from millrace.errors import PreflightError
from millrace.filter.rules import parse_filters
from millrace.name import Naming
from millrace.postgres import run_record as record
from millrace.postgres.own_schema import create_sql
from millrace.postgres.program.embedded import Cluster, open_cluster
from millrace.postgres.wire.connect import connect
from millrace.route import Route

Connection = psycopg.Connection[tuple[Any, ...]]

IMAGINARY_EXTENSION = """
INSERT INTO pg_extension (oid, extname, extowner, extnamespace, extrelocatable, extversion)
VALUES (99999, 'imaginary', 10, 'public'::regnamespace, false, '1')"""


class Servers:
    """Both databases, with a superuser's session on each and roles that go away."""

    def __init__(self, source_cluster: Cluster, target_cluster: Cluster, *uris: str) -> None:
        self.clusters = {"source": source_cluster, "target": target_cluster}
        self.dsns = {"source": Dsn.parse(uris[0]), "target": Dsn.parse(uris[1])}
        self.stack = ExitStack()

    def run(self, side: str, *statements: str) -> None:
        with psycopg.connect(self.dsns[side].conninfo(), autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def role(self, side: str, name: str, options: str = "LOGIN") -> None:
        """A role of the whole cluster, gone after the test."""
        cluster = self.clusters[side]
        cluster.execute(f'CREATE ROLE "{name}" {options}')
        self.stack.callback(cluster.execute, f'DROP ROLE "{name}"')
        database = self.dsns[side].parameters["dbname"]
        self.stack.callback(cluster.execute, f'DROP OWNED BY "{name}" CASCADE', database)

    def role_on_both(self, name: str) -> None:
        """A grantee of the source has to exist on the target, too."""
        for side in self.clusters:
            self.role(side, name)

    def check(self, settings: CloneSettings | None = None, **users: str) -> list[Problem]:
        with ExitStack() as stack:
            source, target = (
                stack.enter_context(
                    connect(dsn.with_(user=users.get(side, "postgres")), "preflight")
                )
                for side, dsn in self.dsns.items()
            )
            return check(source, target, settings or self.settings())

    def settings(self, **changes: Any) -> CloneSettings:
        route = Route(self.dsns["source"], self.dsns["target"], Path("unused"))
        return rerouted(CloneSettings(route), **changes)

    def problem(self, about: str, **users: str) -> Problem:
        found = [p for p in self.check(**users) if about in p.what]
        assert len(found) == 1, found
        return found[0]

    def only_problem(self, settings: CloneSettings | None = None, **users: str) -> Problem:
        (found,) = self.check(settings, **users)
        return found

    def fix(self, problem: Problem, wanted: str) -> None:
        """Run the statements of the printed fix that match, as a superuser."""
        statements = [s for s in re.split(r"; |, or ", problem.fix) if re.match(wanted, s)]
        assert statements, problem.fix
        self.run(problem.side, *statements)


@pytest.fixture
def servers(
    source_cluster: Cluster, target_cluster: Cluster, source_db: str, target_db: str
) -> Iterator[Servers]:
    servers = Servers(source_cluster, target_cluster, source_db, target_db)
    with servers.stack:
        yield servers


def test_two_empty_databases_are_ready(servers: Servers) -> None:
    assert servers.check() == []
    raise_problems([])


def test_tables_without_the_right_to_read_are_told_and_granted(servers: Servers) -> None:
    servers.role_on_both("reader one")
    servers.run(
        "source",
        'CREATE TABLE public.t (id int); CREATE TABLE public."Odd ""one" (id int)',
        "CREATE TABLE public.readable (id int); GRANT SELECT ON public.readable TO public",
    )
    problem = servers.problem("no right to read", source="reader one")
    assert (problem.side, problem.is_warning) == ("source", False)
    assert "public.t" in problem.what
    assert "readable" not in problem.what
    servers.fix(problem, r'GRANT SELECT ON "public"')
    assert servers.check(source="reader one") == []


def test_sequences_without_the_right_to_read_are_told_and_granted(servers: Servers) -> None:
    servers.role_on_both("sequence_reader")
    servers.run("source", 'CREATE SEQUENCE public."Odd ""sequence"')
    problem = servers.only_problem(source="sequence_reader")
    assert "sequence" in problem.what
    servers.fix(problem, "GRANT SELECT ON SEQUENCE")
    assert servers.check(source="sequence_reader") == []


def test_schema_without_usage_is_told_and_one_grant_reads_everything(servers: Servers) -> None:
    servers.role_on_both("outsider")
    servers.run("source", "CREATE SCHEMA s", "CREATE TABLE s.t (id serial)")
    servers.run("source", "GRANT SELECT ON ALL TABLES IN SCHEMA s TO outsider")
    problems = servers.check(source="outsider")
    assert {p.side for p in problems} == {"source"}
    statement = problems[0].fix.rpartition(": ")[2]
    assert statement == 'GRANT pg_read_all_data TO "outsider"'
    servers.run("source", statement)
    assert servers.check(source="outsider") == []


def test_many_tables_are_listed_in_part_and_counted(servers: Servers) -> None:
    servers.role("source", "nobody_yet")
    servers.run("source", "".join(f"CREATE TABLE public.t{n} ();" for n in range(8)))
    problem = servers.only_problem(source="nobody_yet")
    assert "8 tables: public.t0" in problem.what
    assert "and 3 more" in problem.what


def test_row_level_security_is_told_and_bypassed(servers: Servers) -> None:
    servers.role_on_both("filtered")
    servers.run(
        "source",
        "CREATE TABLE public.t (id int); GRANT SELECT ON public.t TO filtered",
        "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY",
    )
    problem = servers.problem("row-level security", source="filtered")
    assert "public.t" in problem.what
    servers.fix(problem, r"ALTER ROLE \S+ BYPASSRLS")
    assert servers.check(source="filtered") == []


def test_row_level_security_that_binds_the_owner_is_told(servers: Servers) -> None:
    servers.role_on_both("owner_of_t")
    servers.run(
        "source",
        "CREATE TABLE public.t (id int); ALTER TABLE public.t OWNER TO owner_of_t",
        "ALTER TABLE public.t ENABLE ROW LEVEL SECURITY",
    )
    assert servers.check(source="owner_of_t") == []
    servers.run("source", "ALTER TABLE public.t FORCE ROW LEVEL SECURITY")
    assert "row-level security" in servers.only_problem(source="owner_of_t").what


def test_target_with_relations_is_not_empty_unless_they_may_go(servers: Servers) -> None:
    servers.run("target", "CREATE TABLE public.t (id int)", "CREATE VIEW public.v AS SELECT 1 AS a")
    servers.run("target", "CREATE SCHEMA theirs CREATE TABLE t ()")
    problem = servers.only_problem()
    assert problem.side == "target"
    assert "2 relations: public.t, public.v" in problem.what
    assert "--drop-if-exists" in problem.fix
    assert servers.check(servers.settings(drop_if_exists=True)) == []
    # What it does not fill is none of its business.
    assert servers.check(servers.settings(naming=Naming({"public": "ours"}))) == []


def test_extensions_and_our_own_records_do_not_make_the_target_full(servers: Servers) -> None:
    servers.run("target", "CREATE EXTENSION vector", create_sql().decode(), record.INSTALL)
    assert servers.check() == []


def test_a_schema_that_has_the_name_of_our_records_is_told_and_never_dropped(
    servers: Servers,
) -> None:
    theirs = ("CREATE SCHEMA millrace", "CREATE TABLE millrace.wheel (id int)")
    servers.run("source", *theirs)
    problem = servers.only_problem()
    assert (problem.side, problem.is_warning) == ("source", False)
    filters = parse_filters("[exclude-schema]\nmillrace\n", name="f")
    assert servers.check(servers.settings(filters=filters)) == []
    servers.run("source", "ALTER SCHEMA millrace RENAME TO mill")
    servers.run("target", *theirs)
    with connect(servers.dsns["target"], "test") as target:
        assert record.read_runs(target) == []
        record.drop_records(target, "run1")
        with pytest.raises(PreflightError, match="millrace did not make"):
            record.open_run(target, record.RunRecord("run1", "source"))
        target.execute("TABLE millrace.wheel")
    found = servers.check(servers.settings(drop_if_exists=True))
    assert [(p.side, p.is_warning) for p in found] == [("target", False)]
    servers.run("target", "ALTER SCHEMA millrace RENAME TO mill")
    assert servers.check(servers.settings(drop_if_exists=True)) == []


def test_large_objects_that_both_sides_have_are_told_and_unlinked(servers: Servers) -> None:
    servers.run("target", "SELECT lo_create(4000000000 + i) FROM generate_series(1, 4) i")
    assert servers.check() == []
    servers.run("source", "SELECT lo_create(4000000002 + i) FROM generate_series(0, 5) i")
    problem = servers.only_problem()
    assert "3 large objects" in problem.what
    assert "4000000002" in problem.what
    replacing = servers.settings(drop_if_exists=True)
    assert servers.check(replacing) == []
    # Nobody can tell whose they are.
    servers.run("target", "CREATE SCHEMA theirs CREATE TABLE t ()")
    assert servers.only_problem(replacing).fix.count("--drop-if-exists") == 0
    servers.run("target", "DROP SCHEMA theirs CASCADE")
    assert servers.check(servers.settings(skip_large_objects=True)) == []
    servers.fix(problem, "SELECT lo_unlink")
    assert servers.check() == []


def test_large_object_without_the_right_to_read_is_told_and_granted(servers: Servers) -> None:
    servers.role_on_both("lo_reader")
    servers.run("source", "SELECT lo_create(4242)")
    problem = servers.only_problem(source="lo_reader")
    assert "4242" in problem.what
    assert servers.check(servers.settings(skip_large_objects=True), source="lo_reader") == []
    statement = problem.fix.partition(", or ")[0].replace(", ...", "")
    servers.run("source", statement)
    assert servers.check(source="lo_reader") == []


def test_missing_extension_is_told_unless_skipped(servers: Servers) -> None:
    servers.run(
        "source",
        IMAGINARY_EXTENSION,
    )
    problem = servers.only_problem()
    assert (problem.side, problem.what) == ("target", "extension imaginary is not available")
    skipped = servers.settings(schema=SchemaSettings(skip_extensions=True))
    assert servers.check(skipped) == []


@pytest.mark.parametrize(
    ("text", "is_told"),
    [
        ("[exclude-extension]\nimaginary\n", False),
        ("[exclude-extension]\n~/^imag/\n", False),
        ("[include-only-extension]\nvector\n", False),
        ("[exclude-extension]\nvector\n", True),
        ("[include-only-extension]\n~/^imag/\n", True),
        ("[exclude-table]\npublic.imaginary\n", True),
    ],
)
def test_extension_that_filters_leave_out_need_not_be_available(
    servers: Servers, text: str, is_told: bool
) -> None:
    servers.run("source", "CREATE EXTENSION vector", IMAGINARY_EXTENSION)
    settings = servers.settings(filters=parse_filters(text, name="f.ini"))
    told = [problem.what for problem in servers.check(settings)]
    assert told == (["extension imaginary is not available"] if is_told else [])


def test_version_that_the_target_does_not_offer_is_told(servers: Servers) -> None:
    servers.run("source", "CREATE EXTENSION vector")
    (problem,) = servers.check(servers.settings(requirements={"vector": "0.0.1"}))
    assert problem.side == "target"
    assert problem.what == "extension vector is not available in version 0.0.1"


def test_other_version_on_the_target_is_told(servers: Servers) -> None:
    servers.run("source", "CREATE EXTENSION vector")
    servers.run("target", "CREATE EXTENSION vector")
    (problem,) = servers.check(servers.settings(requirements={"vector": "0.0.1"}))
    assert "--requirements says 0.0.1" in problem.what
    assert problem.fix.startswith("ALTER EXTENSION \"vector\" UPDATE TO '0.0.1'")


def test_requirement_of_what_the_source_lacks_is_a_warning(servers: Servers) -> None:
    (problem,) = servers.check(servers.settings(requirements={"vectr": "1"}))
    assert problem.is_warning
    assert "vectr" in problem.what


def test_available_extension_is_no_problem(servers: Servers) -> None:
    servers.run("source", "CREATE EXTENSION vector")
    assert servers.check() == []


ROLE_USES = {
    "owner of a table": "CREATE TABLE public.t1 (); ALTER TABLE public.t1 OWNER TO {}",
    "owner of a view": "CREATE VIEW public.v AS SELECT 1 AS a; ALTER VIEW public.v OWNER TO {}",
    "owner of a function": "CREATE FUNCTION public.f() RETURNS int LANGUAGE sql AS 'SELECT 1';"
    " ALTER FUNCTION public.f() OWNER TO {}",
    "owner of a schema": "CREATE SCHEMA s AUTHORIZATION {}",
    "owner of a type": "CREATE TYPE public.e AS ENUM (); ALTER TYPE public.e OWNER TO {}",
    "owner of a large object": "SELECT lo_create(42); ALTER LARGE OBJECT 42 OWNER TO {}",
    "owner of a publication": "CREATE PUBLICATION p; ALTER PUBLICATION p OWNER TO {}",
    "grantee": "CREATE TABLE public.t2 (); GRANT SELECT ON public.t2 TO {}",
    "grantee of a column": "CREATE TABLE public.t3 (id int); GRANT SELECT (id) ON public.t3 TO {}",
    "grantee by default": "ALTER DEFAULT PRIVILEGES GRANT SELECT ON TABLES TO {}",
    "policy": "CREATE TABLE public.t4 (); CREATE POLICY p ON public.t4 TO {} USING (true)",
    "user mapping": "CREATE FOREIGN DATA WRAPPER w; CREATE SERVER s FOREIGN DATA WRAPPER w;"
    " CREATE USER MAPPING FOR {} SERVER s",
}


def test_roles_that_the_target_lacks_are_told_and_made(servers: Servers) -> None:
    """However a role is used, pg_restore will name it."""
    drop = servers.clusters["target"].execute
    for role, use in ROLE_USES.items():
        servers.role("source", role, "SUPERUSER")
        servers.run("source", use.format(f'"{role}"'))
        servers.stack.callback(drop, f'DROP ROLE IF EXISTS "{role}"')
    problem = servers.only_problem()
    assert problem.side == "target"
    assert [role for role in ROLE_USES if f'CREATE ROLE "{role}"' not in problem.fix] == []
    assert "--roles" in problem.fix
    assert servers.check(servers.settings(roles=True)) == []
    servers.fix(problem, "CREATE ROLE")
    assert servers.check() == []


def test_roles_do_not_matter_where_neither_owners_nor_grants_are_copied(servers: Servers) -> None:
    servers.role("source", "left_out")
    servers.run("source", "CREATE TABLE public.t (); ALTER TABLE public.t OWNER TO left_out")
    bare = servers.settings(schema=SchemaSettings(no_owner=True, no_acl=True))
    assert servers.check(bare) == []


def test_owner_the_user_is_no_member_of_is_told_and_granted(servers: Servers) -> None:
    servers.role_on_both("proud")
    servers.role("target", "writer")
    database = servers.dsns["target"].parameters["dbname"]
    servers.run("target", f"GRANT ALL ON DATABASE {database} TO writer; GRANT postgres TO writer")
    servers.run("source", "CREATE TABLE public.t (); ALTER TABLE public.t OWNER TO proud")
    problem = servers.only_problem(target="writer")
    assert "proud" in problem.what
    servers.fix(problem, "GRANT")
    assert servers.check(target="writer") == []


def test_missing_right_to_create_is_told_and_granted(servers: Servers) -> None:
    servers.role("target", "plain_user")
    database = servers.dsns["target"].parameters["dbname"]
    servers.run("target", f"REVOKE ALL ON DATABASE {database} FROM public")
    servers.run("target", f"GRANT CONNECT ON DATABASE {database} TO plain_user")
    problems = servers.check(target="plain_user")
    assert [p.what for p in problems] == [
        f"no right CREATE on database {database}",
        f"no right TEMP on database {database}",
    ]
    for problem in problems:
        servers.fix(problem, "GRANT")
    assert servers.check(target="plain_user") == []


def test_missing_tablespace_is_told_and_made(servers: Servers) -> None:
    for side, cluster in servers.clusters.items():
        servers.stack.callback(cluster.execute, 'DROP TABLESPACE IF EXISTS "fast disk"')
        database = servers.dsns[side].parameters["dbname"]
        servers.stack.callback(cluster.execute, "DROP TABLE IF EXISTS public.t", database)
    servers.run(
        "source",
        "SET allow_in_place_tablespaces = on",
        "CREATE TABLESPACE \"fast disk\" LOCATION ''",
        'CREATE TABLE public.t (id int) TABLESPACE "fast disk"',
    )
    problem = servers.only_problem()
    assert "fast disk" in problem.what
    without = servers.settings(schema=SchemaSettings(no_tablespaces=True))
    assert servers.check(without) == []
    statement = problem.fix.partition(", or ")[0].replace("'...'", "''")
    servers.run("target", "SET allow_in_place_tablespaces = on", statement)
    assert servers.check() == []


@pytest.mark.parametrize("tcp", [False, True], ids=["socket", "socket and tcp"])
def test_same_database_twice_is_told(servers: Servers, tcp: bool) -> None:
    name = servers.dsns["source"].parameters["dbname"]
    servers.dsns["target"] = Dsn.parse(servers.clusters["source"].uri(name, tcp=tcp))
    assert servers.only_problem().what == "source and target are the same database"


def test_two_databases_of_one_server_are_not_the_same(servers: Servers) -> None:
    cluster = servers.clusters["source"]
    servers.dsns["target"] = Dsn.parse(cluster.create_database("neighbour"))
    servers.stack.callback(cluster.drop_database, "neighbour")
    assert servers.check() == []


def test_older_target_is_a_warning(servers: Servers) -> None:
    servers.dsns = {"source": servers.dsns["target"], "target": servers.dsns["source"]}
    problem = servers.only_problem()
    assert problem.is_warning
    assert "PostgreSQL 16 is older than the source's 18" in problem.what
    raise_problems([problem])


def test_other_encoding_is_a_warning_and_the_fix_makes_a_database_without_it(
    servers: Servers,
) -> None:
    cluster = servers.clusters["target"]
    for name in ("latin", "same_encoding"):
        servers.stack.callback(cluster.drop_database, name)
    servers.dsns["target"] = Dsn.parse(cluster.create_database("latin", encoding="LATIN1"))
    problem = servers.only_problem()
    assert problem.is_warning
    assert "LATIN1" in problem.what
    assert "UTF8" in problem.what
    cluster.execute(problem.fix.replace("...", "same_encoding"))
    servers.dsns["target"] = Dsn.parse(cluster.uri("same_encoding"))
    assert servers.check() == []


def test_standby_as_target_is_told(target_cluster: Cluster, source_db: str) -> None:
    with (
        open_cluster(18, base_backup_of=target_cluster) as standby,
        connect(Dsn.parse(source_db), "preflight") as source,
        connect(Dsn.parse(standby.uri()), "preflight") as target,
    ):
        dsn = Dsn.parse(source_db)
        problems = check(source, target, CloneSettings(Route(dsn, dsn, Path("unused"))))
    assert [p.what for p in problems if not p.is_warning] == ["the server is a standby: read only"]
    assert "primary" in problems[0].fix


@pytest.fixture(scope="module")
def small_cluster() -> Iterator[Cluster]:
    """Few connections and few locks."""
    settings = {
        "max_connections": "10",
        "max_locks_per_transaction": "10",
        "max_wal_senders": "2",
        "max_prepared_transactions": "0",
    }
    with open_cluster(18, settings=settings) as cluster:
        yield cluster


def test_too_few_connections_are_told_and_enough_after_the_fix(
    small_cluster: Cluster, servers: Servers, restore_settings: Callable[[Cluster], None]
) -> None:
    restore_settings(small_cluster)
    for side in ("source", "target"):
        dsns = dict(servers.dsns) | {side: Dsn.parse(small_cluster.uri())}
        small = Servers(small_cluster, small_cluster, *(dsn.conninfo() for dsn in dsns.values()))
        problem = next(p for p in small.check() if "the jobs need" in p.what)
        assert problem.side == side
        assert "--table-jobs" in problem.fix
        few = small.settings(table_jobs=1, index_jobs=1, restore_jobs=1, skip_large_objects=True)
        assert [p for p in small.check(few) if not p.is_warning] == []
    small_cluster.execute(problem.fix.partition(" and ")[0])
    small_cluster.restart()
    assert [p for p in small.check() if not p.is_warning] == []


def test_too_few_locks_are_told_and_enough_after_the_fix(
    small_cluster: Cluster, servers: Servers, restore_settings: Callable[[Cluster], None]
) -> None:
    restore_settings(small_cluster)
    few = servers.settings(table_jobs=1, index_jobs=1, restore_jobs=1, skip_large_objects=True)
    servers.dsns["source"] = Dsn.parse(small_cluster.create_database("crowded"))
    servers.stack.callback(small_cluster.drop_database, "crowded")
    for n in range(60):
        small_cluster.execute(f"CREATE TABLE public.t{n} ()", "crowded")
    problem = next(p for p in servers.check(few) if "locked" in p.what)
    assert "60 tables" in problem.what
    small_cluster.execute(problem.fix.partition(" and ")[0])
    small_cluster.restart()
    assert [p for p in servers.check(few) if not p.is_warning] == []


@pytest.fixture
def restore_settings() -> Iterator[Callable[[Cluster], None]]:
    """Brings a cluster back to the settings it was made with."""
    changed: list[Cluster] = []
    yield changed.append
    for cluster in changed:
        cluster.execute("ALTER SYSTEM RESET ALL")
        cluster.restart()


def test_version_we_do_not_know_is_told(servers: Servers) -> None:
    """These servers can't be started here: only the number is not true."""
    cases = {
        "old source": (120004, 180000, [("source", False)]),
        "old target": (160000, 130000, [("target", False), ("target", True)]),
        "newer than us": (190000, 190000, [("source", True), ("target", True)]),
        "fine": (160000, 180000, []),
    }
    with (
        connect(servers.dsns["source"], "preflight") as one,
        connect(servers.dsns["target"], "preflight") as other,
    ):
        for name, (*versions, told) in cases.items():
            source, target = (
                cast(
                    "Connection",
                    SimpleNamespace(
                        execute=connection.execute,
                        info=SimpleNamespace(server_version=version, user="postgres"),
                    ),
                )
                for connection, version in zip((one, other), versions, strict=True)
            )
            problems = check(source, target, servers.settings())
            assert [(p.side, p.is_warning) for p in problems] == told, name


def test_all_problems_are_told_at_once(servers: Servers) -> None:
    servers.role("source", "the role")
    servers.role("source", "poor")
    servers.run(
        "source",
        'CREATE TABLE public.t (); ALTER TABLE public.t OWNER TO "the role"',
        IMAGINARY_EXTENSION,
    )
    servers.run("source", "SELECT lo_create(4000000009)")
    servers.run("target", "CREATE TABLE public.t ()", "SELECT lo_create(4000000009)")
    many = servers.settings(table_jobs=500)
    problems = servers.check(many, source="poor")
    with pytest.raises(PreflightError) as caught:
        raise_problems(problems)
    error = caught.value
    assert error.exit_code == 3
    for wanted in (
        "no right to read table public.t",
        "source: ",
        "the jobs need",
        "are not empty: they have relation public.t",
        "large objects",
        "extension imaginary",
        "the role",
    ):
        assert wanted in error.message
    assert error.message.startswith(f"{len(problems)} problems")
    assert error.message.count("fix: ") == len(problems)
    assert error.facts["problems"] == [dataclasses.asdict(problem) for problem in problems]


def test_warnings_alone_stop_nothing() -> None:
    raise_problems([Problem("target", "older", "upgrade", is_warning=True)])
    with pytest.raises(PreflightError, match="1 problem found") as caught:
        raise_problems(
            [Problem("target", "older", "x", is_warning=True), Problem("source", "no", "yes")]
        )
    assert "older" not in caught.value.message
