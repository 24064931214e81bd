"""The command line: what it offers, what it refuses, and how it says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import psycopg
import pytest
import typer.main
from tests.fixtures.wait import DEADLINE_SECONDS

from millrace import __version__
from millrace.cli.main import Program, app, main, read_settings_file
from millrace.clone.schema.entries import SchemaSettings
from millrace.postgres.program.embedded import Cluster, open_cluster

SECRET = "s3cret"
NOWHERE = "postgresql://ann@127.0.0.1:1/shop"

CLONE_OPTIONS = [
    "--source",
    "--target",
    "--dir",
    "--table-jobs",
    "--index-jobs",
    "--restore-jobs",
    "--large-objects-jobs",
    "--split-tables-larger-than",
    "--split-max-parts",
    "--drop-if-exists",
    "--roles",
    "--no-owner",
    "--no-acl",
    "--no-comments",
    "--no-tablespaces",
    "--skip-large-objects",
    "--skip-extensions",
    "--skip-vacuum",
    "--fail-fast",
    "--snapshot",
    "--restart",
    "--master",
    "--conf",
    "--dry-run",
    "--json",
    "--verbose",
    "--quiet",
]


@dataclass
class Ended:
    """How a run of the program ended."""

    code: int
    out: str
    err: str

    def told(self) -> str:
        return self.out + self.err


Run = Callable[..., Ended]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    in_this_process: None,
) -> Run:
    """Runs the program in this process, in an empty folder and without MILLRACE_ variables."""
    for name in [name for name in os.environ if name.startswith(("MILLRACE_", "PG"))]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["millrace", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Ended(code if isinstance(code, int) else 0, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    """A server that asks for passwords over TCP, with a role that has one."""
    hba = "host all all 127.0.0.1/32 scram-sha-256\n"
    with open_cluster(18, tcp=True, hba=hba) as cluster:
        cluster.execute(f"CREATE ROLE ann LOGIN PASSWORD '{SECRET}'")
        yield cluster


@pytest.fixture
def big_table(source_db: str) -> str:
    """A source with a table of about 4 MB in public.t."""
    with psycopg.connect(source_db) as connection:
        connection.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        connection.execute(
            "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 30000) g"
        )
    return source_db


def parts(ended: Ended) -> int:
    assert ended.code == 0, ended.err
    return len(json.loads(ended.out))


def test_program_can_be_started_both_ways() -> None:
    for command in (
        [Path(sys.executable).with_name("millrace")],
        [sys.executable, "-m", "millrace"],
    ):
        ended = subprocess.run([*command, "version"], capture_output=True, text=True)
        assert (ended.returncode, ended.stdout) == (0, f"millrace {__version__}\n")


def modules_of(*arguments: str) -> set[str]:
    """What a run of the program imports."""
    code = (
        "import atexit, sys; atexit.register(lambda: print(*sys.modules, file=sys.stderr));"
        "from millrace.cli.main import main; main(sys.argv[1:])"
    )
    ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return set(ended.stderr.split())


def test_program_starts_without_what_takes_long_to_load() -> None:
    """Numba takes half a second, and who asks for a list needs none of them."""
    shown = modules_of("--help")
    assert "typer" in shown
    slow = {"numba", "numpy", "pyarrow", "pyspark"}
    assert (slow | {"psycopg", "prometheus_client"}).isdisjoint(shown)
    commands = {place.module for place in Program.places.values()}
    assert commands.isdisjoint(shown)
    listing = modules_of("list", "tables", "--help")
    assert listing & commands == {"millrace.cli.list_"}
    assert slow.isdisjoint(listing)


@pytest.mark.parametrize("name", Program.places)
def test_summary_in_the_list_of_commands_is_the_first_line_of_the_help(name: str) -> None:
    command = ALL_COMMANDS[name,]
    assert (command.name, command.help.partition("\n")[0]) == (name, Program.places[name].summary)


def test_help_lists_the_commands(run: Run) -> None:
    for flag in ("--help", "-h"):
        ended = run(flag)
        assert ended.code == 0
        # Under the jobs that they are for.
        words = ("Move a database", "clone", "step by step", "restore", "decode", "Look", "list")
        places = [ended.out.index(word) for word in words]
        assert places == sorted(places)


def test_without_arguments_the_help_is_shown(run: Run) -> None:
    assert "Usage: millrace" in run().told()


@pytest.mark.parametrize("columns", ["80", "200"])
def test_help_of_clone_shows_every_option_in_full(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    ended = run("clone", "--help")
    assert ended.code == 0
    words = set(ended.out.replace(",", " ").split())
    assert [option for option in CLONE_OPTIONS if option not in words] == []
    assert "Exit codes" in ended.out


def _commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, child in getattr(command, "commands", {}).items():
        yield (*names, name), child
        yield from _commands(child, *names, name)


ALL_COMMANDS = dict(_commands(typer.main.get_command(app)))


@pytest.mark.parametrize("names", list(ALL_COMMANDS), ids=" ".join)
def test_every_command_and_option_has_help(run: Run, names: tuple[str, ...]) -> None:
    ended = run(*names, "-h")
    assert ended.code == 0
    assert "<bool>" not in ended.out  # a flag takes no value
    command = ALL_COMMANDS[names]
    assert command.help
    assert [p.name for p in command.params if not getattr(p, "help", None)] == []


STEPS = [names for names in ALL_COMMANDS if names[0] in ("copy", "dump", "restore") and names[1:]]


@pytest.mark.parametrize("names", STEPS, ids=" ".join)
def test_every_step_takes_what_its_run_is_pinned_to(names: tuple[str, ...]) -> None:
    taken = {option for parameter in ALL_COMMANDS[names].params for option in parameter.opts}
    pins = set(SchemaSettings(*[True] * len(fields(SchemaSettings))).options())
    pins |= {"--filters", "--source", "--target", "--dir", "--snapshot", "--not-consistent"}
    pins |= {"--split-tables-larger-than", "--split-max-parts", "--skip-split-by-ctid"}
    assert pins - taken == set()


def test_options_of_a_step_are_those_of_clone() -> None:
    whole = {p.name: p for p in ALL_COMMANDS["clone",].params}
    for names in STEPS:
        for parameter in ALL_COMMANDS[names].params:
            if parameter.name.startswith("habit_"):
                continue  # not ours
            same = whole[parameter.name]
            assert (parameter.opts, parameter.envvar, parameter.default, parameter.help) == (
                same.opts,
                same.envvar,
                same.default,
                same.help,
            )


@pytest.mark.parametrize(
    "arguments",
    [
        ["clone", "--nonsense"],
        ["clone", "--table-jobs", "0"],
        ["clone", "--table-jobs", "many"],
        ["clone", "--split-max-parts", "-1"],
        ["nonsense"],
        ["list", "nonsense"],
        ["clone", "surplus"],
    ],
    ids=" ".join,
)
def test_wrong_option_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    ended = run(*arguments)
    assert ended.code == 2
    assert ended.out == ""
    assert "Usage" in ended.err or "Error" in ended.err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--split-tables-larger-than", "many"], "invalid size: 'many'"),
        (["--split-tables-larger-than", "-1 MB"], "invalid size"),
        (["--maintenance-work-mem", "1 XB"], "invalid size"),
        (["--conf", "nonsense"], "--conf takes key=value"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_wrong_value_is_exit_code_2_with_what_was_wrong(
    run: Run, arguments: list[str], told: str
) -> None:
    ended = run("clone", "--source", NOWHERE, "--target", NOWHERE, *arguments)
    assert ended.code == 2
    assert told in ended.err
    assert "Traceback" not in ended.told()


@pytest.mark.parametrize("command", ["clone", "compare data", "list tables", "list table-parts"])
def test_missing_source_is_exit_code_2_with_a_hint(run: Run, command: str) -> None:
    ended = run(*command.split())
    assert ended.code == 2
    assert "--source is missing" in ended.err
    assert "hint: " in ended.err
    assert "MILLRACE_SOURCE" in ended.err


def test_missing_target_is_exit_code_2(run: Run) -> None:
    ended = run("clone", "--source", NOWHERE)
    assert ended.code == 2
    assert "--target is missing" in ended.err


@pytest.mark.parametrize(
    "uri",
    [
        f"postgresql://ann:{SECRET}@db/shop?nope=1",
        f"postgresql://ann:{SECRET}%zz@db/shop",
        f"host=db password=two {SECRET}",
        f"mysql://ann:{SECRET}@db/shop",
    ],
)
def test_wrong_uri_is_exit_code_2_without_its_password(run: Run, uri: str) -> None:
    for arguments in (
        ["--source", uri, "--target", NOWHERE],
        ["--source", NOWHERE, "--target", uri],
    ):
        ended = run("clone", "--json", *arguments)
        assert ended.code == 2
        assert "not a PostgreSQL connection string" in ended.err
        assert SECRET not in ended.told()


@pytest.mark.parametrize("command", ["clone", "clone --dry-run", "list tables"])
def test_unreachable_server_is_exit_code_5(run: Run, tmp_path: Path, command: str) -> None:
    more = ["--target", NOWHERE, "--dir", str(tmp_path / "work")] if "clone" in command else []
    ended = run(*command.split(), "--source", NOWHERE, *more)
    assert ended.code == 5
    assert "can't connect to postgresql://ann@127.0.0.1:1/shop" in ended.err
    assert "hint: " in ended.err
    assert "Traceback" not in ended.told()


def test_unknown_database_is_exit_code_5_and_says_how_to_make_it(
    run: Run, source_cluster: Cluster
) -> None:
    ended = run("list", "tables", "--source", source_cluster.uri("no_such_database"))
    assert ended.code == 5
    assert "no_such_database" in ended.err
    assert "create" in ended.err.lower()


@pytest.mark.parametrize("flags", [[], ["--json"], ["-v"], ["-v", "--log-json"]], ids=" ".join)
def test_wrong_password_is_exit_code_5_and_in_no_output(
    run: Run, guarded: Cluster, tmp_path: Path, flags: list[str]
) -> None:
    uri = guarded.uri("postgres", user="ann", password=f"{SECRET}-wrong", tcp=True)
    work = ["--dir", str(tmp_path / "work")]
    ended = run("clone", "--source", uri, "--target", uri, *work, *flags)
    assert ended.code == 5
    assert "password authentication failed" in ended.err
    assert ".pgpass" in ended.err
    assert SECRET not in ended.told()
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if SECRET.encode() in path.read_bytes()]


def test_no_password_at_all_is_told_as_such(run: Run, guarded: Cluster) -> None:
    ended = run("list", "tables", "--source", guarded.uri("postgres", user="ann", tcp=True))
    assert ended.code == 5
    assert "no password supplied" in ended.err
    assert ".pgpass" in ended.err


def test_password_of_libpq_itself_is_used(
    run: Run, guarded: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = guarded.uri("postgres", user="ann", tcp=True)
    passfile = tmp_path / "pgpass"
    passfile.write_text(f"127.0.0.1:*:*:ann:{SECRET}\n")
    passfile.chmod(0o600)
    monkeypatch.setenv("PGPASSFILE", str(passfile))
    assert run("list", "tables", "--source", uri, "--json").code == 0
    monkeypatch.delenv("PGPASSFILE")
    monkeypatch.setenv("PGPASSWORD", SECRET)
    assert run("list", "tables", "--source", uri, "--json").code == 0


def test_error_is_json_on_stdout_if_asked_for(run: Run) -> None:
    ended = run("list", "tables", "--source", NOWHERE, "--json")
    told = json.loads(ended.out)
    assert (told["error"], told["exit_code"]) == ("ConnectionLost", 5)
    assert told["hint"]
    assert ended.code == 5


def test_full_target_is_exit_code_3_and_nothing_is_touched(
    run: Run, source_db: str, target_db: str
) -> None:
    with psycopg.connect(target_db) as connection:
        connection.execute("CREATE TABLE t ()")
    ended = run("clone", "--dry-run", "--source", source_db, "--target", target_db)
    assert ended.code == 3
    assert "1 problem found before anything was touched" in ended.err
    assert "fix: " in ended.err


def test_snapshot_nobody_holds_is_exit_code_5(run: Run, source_db: str, target_db: str) -> None:
    ended = run(
        "clone", "--dry-run", "--source", source_db, "--target", target_db,
        "--snapshot", "00000003-0000001B-1",
    )  # fmt: skip
    assert ended.code == 5
    assert "snapshot" in ended.err


def test_dry_run_shows_the_plan_and_changes_nothing(
    run: Run, big_table: str, target_db: str, tmp_path: Path
) -> None:
    ended = run(
        "clone", "--dry-run", "--json", "--source", big_table, "--target", target_db,
        "--split-tables-larger-than", "1 MB", "--split-max-parts", "3",
        "--dir", str(tmp_path / "work"),
    )  # fmt: skip
    assert ended.code == 0
    (table,) = json.loads(ended.out)["tables"]
    assert (table["name"], len(table["parts"]), table["format"]) == ("t", 3, "binary")
    assert not (tmp_path / "work").exists()
    with psycopg.connect(target_db) as connection:
        schemas = connection.execute(
            "SELECT count(*) FROM pg_namespace WHERE nspname = 'millrace'"
        ).fetchone()
        assert schemas == (0,)


def test_result_goes_to_stdout_and_is_json_if_asked_for(run: Run, big_table: str) -> None:
    ended = run("list", "tables", "--source", big_table)
    assert (ended.code, ended.err) == (0, "")
    assert "public.t" in ended.out
    (table,) = json.loads(run("list", "tables", "--source", big_table, "--json").out)
    assert (table["schema"], table["name"]) == ("public", "t")


def test_unknown_table_is_exit_code_2(run: Run, big_table: str) -> None:
    ended = run("list", "table-parts", "--source", big_table, "--table-name", "nope")
    assert ended.code == 2
    assert "nope" in ended.err


def test_flag_wins_over_environment_and_environment_over_file(
    run: Run, big_table: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = ("list", "table-parts", "--source", big_table, "--json")
    assert parts(run(*command)) == 1
    (tmp_path / "millrace.toml").write_text(
        '[list.table-parts]\nsplit-tables-larger-than = "1 MB"\nsplit-max-parts = 2\n'
    )
    assert parts(run(*command)) == 2
    monkeypatch.setenv("MILLRACE_SPLIT_MAX_PARTS", "3")
    assert parts(run(*command)) == 3
    assert parts(run(*command, "--split-max-parts", "4")) == 4
    assert parts(run(*command, "--split-tables-larger-than", "0")) == 1


def test_source_is_taken_from_environment_and_file(
    run: Run, big_table: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "millrace.toml").write_text(f"[list.tables]\nsource = {json.dumps(big_table)}\n")
    assert run("list", "tables", "--json").code == 0
    monkeypatch.setenv("MILLRACE_SOURCE", NOWHERE)
    assert run("list", "tables", "--json").code == 5


def test_file_can_be_somewhere_else(
    run: Run, big_table: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere.toml"
    elsewhere.write_text(f"[list.tables]\nsource = {json.dumps(big_table)}\n")
    monkeypatch.setenv("MILLRACE_CONFIG", str(elsewhere))
    assert run("list", "tables", "--json").code == 0
    monkeypatch.setenv("MILLRACE_CONFIG", str(tmp_path / "missing.toml"))
    assert run("list", "tables", "--json").code == 2


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[clone\n", "not valid TOML"),
        ("[clone]\ntabel-jobs = 8\n", "tabel-jobs"),
        ("[colne]\ntable-jobs = 8\n", "colne"),
        ("clone = 8\n", "clone"),
        ("table-jobs = 8\n", "table-jobs"),
    ],
    ids=["broken", "unknown option", "unknown command", "no table", "outside a table"],
)
def test_wrong_settings_file_is_exit_code_2(run: Run, tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "millrace.toml").write_text(text)
    ended = run("version")
    assert ended.code == 2
    assert "millrace.toml" in ended.err
    assert told in ended.err


# Option, a value other than its default, what the command gets.
VALUES: list[tuple[str, Any, Any]] = [
    ("dir", "/elsewhere", Path("/elsewhere")),
    ("table-jobs", 7, 7),
    ("index-jobs", 7, 7),
    ("restore-jobs", 7, 7),
    ("large-objects-jobs", 7, 7),
    ("split-tables-larger-than", "1 GB", "1 GB"),
    ("split-max-parts", 7, 7),
    ("drop-if-exists", True, True),
    ("roles", True, True),
    ("no-owner", True, True),
    ("no-acl", True, True),
    ("no-comments", True, True),
    ("no-tablespaces", True, True),
    ("skip-large-objects", True, True),
    ("skip-extensions", True, True),
    ("skip-vacuum", True, True),
    ("fail-fast", True, True),
    ("maintenance-work-mem", "2 GB", "2 GB"),
    ("snapshot", "00000003-0000001B-1", "00000003-0000001B-1"),
    ("source", NOWHERE, NOWHERE),
    ("target", NOWHERE, NOWHERE),
    ("master", "local[2]", "local[2]"),
    ("conf", ["spark.x=1", "spark.y=2"], ["spark.x=1", "spark.y=2"]),
]


def parameter(option: str) -> Any:
    (found,) = (p for p in ALL_COMMANDS["clone",].params if f"--{option}" in p.opts)
    return found


def given(option: str, arguments: list[str], defaults: dict[str, Any] | None = None) -> Any:
    """What `clone` would be called with."""
    command = ALL_COMMANDS["clone",]
    context = command.make_context("clone", arguments, default_map=(defaults or {}).get("clone"))
    return context.params[parameter(option).name]


@pytest.mark.parametrize(("option", "value", "wanted"), VALUES, ids=[v[0] for v in VALUES])
def test_setting_of_clone_can_stand_in_the_file(
    run: Run, tmp_path: Path, option: str, value: Any, wanted: Any
) -> None:
    (tmp_path / "millrace.toml").write_text(f"[clone]\n{option} = {json.dumps(value)}\n")
    assert given(option, []) != wanted
    assert given(option, [], read_settings_file()) == wanted


@pytest.mark.parametrize(
    ("option", "value", "wanted"),
    [row for row in VALUES if row[0] != "conf"],
    ids=[row[0] for row in VALUES if row[0] != "conf"],
)
def test_setting_of_clone_can_stand_in_the_environment(
    run: Run, monkeypatch: pytest.MonkeyPatch, option: str, value: Any, wanted: Any
) -> None:
    name = f"MILLRACE_{option.upper().replace('-', '_')}"
    monkeypatch.setenv(name, str(value).lower() if value is True else str(value))
    assert given(option, []) == wanted
    if value is not True:
        flag = {"dir": "/flag"}.get(option, "9")
        assert str(given(option, [f"--{option}", flag])) == flag


def test_metrics_are_served_to_this_machine_unless_told_otherwise(run: Run) -> None:
    assert given("metrics-host", []) == "127.0.0.1"
    assert given("metrics-host", ["--metrics-host", "0.0.0.0"]) == "0.0.0.0"


def test_flag_that_is_off_in_the_environment_is_off(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLRACE_DROP_IF_EXISTS", "false")
    assert given("drop-if-exists", []) is False


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_interrupted_program_says_so_and_ends_as_shells_expect(
    source_db: str, number: int, code: int
) -> None:
    """It waits for a lock, to ask for a size, when the signal comes; no stack trace is shown."""
    with psycopg.connect(source_db) as holder:
        holder.execute("CREATE TABLE t (id int)")
        holder.commit()
        holder.execute("LOCK TABLE t IN ACCESS EXCLUSIVE MODE")
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace", "list", "tables", "--source", source_db],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        with process:
            _wait_until_somebody_waits(holder)
            process.send_signal(number)
            _, err = process.communicate(timeout=DEADLINE_SECONDS)
    assert (process.returncode, err) == (code, "millrace: stopped\n")


def _wait_until_somebody_waits(connection: psycopg.Connection[Any]) -> None:
    connection.execute(
        """DO $$ BEGIN
        FOR attempt IN 1..18000 LOOP
            PERFORM pg_stat_clear_snapshot();
            PERFORM FROM pg_stat_activity WHERE application_name = 'millrace list'
                AND datname = current_database() AND wait_event_type = 'Lock';
            EXIT WHEN FOUND;
            ASSERT attempt < 18000, 'nobody waits';
            PERFORM pg_sleep(0.01);
        END LOOP;
        END $$"""
    )
