"""`clone --all-databases`: every database of a server, whatever its name and its locale."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fixtures.processes.program import MILLRACE
from tests.fixtures.sql import execute, rows

from millrace.clone.databases import create_sql, directory_of
from millrace.postgres.program.embedded import Cluster, open_cluster

ODD = "Odd näme/../.x"
PROPERTIES = (
    "SELECT datname, pg_encoding_to_char(encoding), datcollate, datctype, datlocprovider,"
    " datconnlimit, pg_get_userbyid(datdba) FROM pg_database"
    " WHERE NOT datistemplate AND datname <> 'postgres' ORDER BY 1"
)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[Cluster, Cluster]]:
    """Servers of their own: all that is on them is copied."""
    with open_cluster(16) as source, open_cluster(18) as target:
        source.execute("CREATE ROLE keeper")
        for name, options in {
            ODD: "ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C.UTF-8' CONNECTION LIMIT 50",
            "latin": "ENCODING 'LATIN1' LOCALE 'C' OWNER keeper",
            "closed": "LOCALE 'C'",
        }.items():
            source.execute(f'CREATE DATABASE "{name}" TEMPLATE template0 {options}')
        source.execute("ALTER DATABASE closed ALLOW_CONNECTIONS false")
        for name in (ODD, "latin", "postgres"):
            execute(
                source.uri(name),
                "CREATE TABLE t (id int PRIMARY KEY, word text)",
                f"INSERT INTO t SELECT i, 'é {len(name)} ' || i FROM generate_series(1, 5000) AS i",
            )
        yield source, target


def millrace(
    servers: tuple[Cluster, Cluster], directory: Path, *options: str
) -> subprocess.CompletedProcess[str]:
    source, target = servers
    command = [
        *MILLRACE, "clone", "--all-databases",
        "--source", source.uri(), "--target", target.uri(), "--dir", str(directory),
        "--table-jobs", "2", *options,
    ]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if not k.startswith("MILLRACE_S")}
    return subprocess.run(command, capture_output=True, text=True, env=env)


def test_every_database_arrives_and_a_second_run_finds_nothing_to_do(
    servers: tuple[Cluster, Cluster], tmp_path: Path
) -> None:
    source, target = servers
    planned = millrace(servers, tmp_path, "--dry-run", "--json")
    plan = json.loads(planned.stdout)
    assert sorted(plan["create"]) == sorted([ODD, "latin"])
    assert list(plan["databases"]) == ["postgres"]
    assert len(rows(target.uri(), PROPERTIES)) == 0

    # One fails: the table that is in its way is told, with the database.
    execute(target.uri(), "CREATE TABLE in_the_way ()")
    ended = millrace(servers, tmp_path, "--roles")
    assert ended.returncode == 3
    assert "database postgres: 1 problem" in ended.stderr
    assert "in_the_way" in ended.stderr
    execute(target.uri(), "DROP TABLE in_the_way")

    ended = millrace(servers, tmp_path, "--resume", "--roles", "--json")
    assert ended.returncode == 0, ended.stderr
    done = json.loads(ended.stdout)
    assert "postgres" in done
    assert "database closed is left out" in ended.stderr
    assert all(summary["rows"] == 5000 for summary in done.values())
    for name in (ODD, "latin", "postgres"):
        query = "SELECT count(*), sum(hashtext(word)::int8) FROM t"
        assert rows(target.uri(name), query) == rows(source.uri(name), query)
        assert (directory_of(tmp_path, name) / "summary.json").exists()
    open_ones = [row for row in rows(source.uri(), PROPERTIES) if row[0] != "closed"]
    assert rows(target.uri(), PROPERTIES) == open_ones

    again = millrace(servers, tmp_path, "--resume")
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("was done") == 3


@pytest.mark.parametrize("options", [["--follow"], ["--snapshot", "00000003-00000001-1"]])
def test_what_belongs_to_one_database_is_refused(
    servers: tuple[Cluster, Cluster], tmp_path: Path, options: list[str]
) -> None:
    ended = millrace(servers, tmp_path, *options)
    assert ended.returncode == 2
    assert f"--all-databases and {options[0]} cannot be used together" in ended.stderr


def test_work_directories_stay_inside_and_apart(tmp_path: Path) -> None:
    names = ["..", ".", "a/b", "a%2Fb", ODD, "a b"]
    folders = [directory_of(tmp_path, name) for name in names]
    assert len(set(folders)) == len(names)
    assert all(folder.resolve().parent == tmp_path.resolve() for folder in folders)


FACTS = {"datname": "d", "datcollate": "C", "datctype": "C", "datconnlimit": -1}


@pytest.mark.parametrize(
    ("facts", "major", "said"),
    [
        ({}, 14, "TEMPLATE template0 ENCODING 'UTF8' LC_COLLATE 'C' LC_CTYPE 'C'"),
        ({"datlocprovider": "c"}, 15, "LOCALE_PROVIDER libc"),
        ({"datlocprovider": "i", "daticulocale": "de"}, 15, "ICU_LOCALE 'de'"),
        ({"datlocprovider": "i", "datlocale": "de", "daticurules": "&a<b"}, 17, "ICU_RULES '&a<b'"),
        ({"datlocprovider": "b", "datlocale": "C.UTF-8"}, 17, "BUILTIN_LOCALE 'C.UTF-8'"),
        ({"datconnlimit": 7}, 14, "CONNECTION LIMIT 7"),
    ],
)
def test_database_is_made_with_its_locale(facts: dict[str, object], major: int, said: str) -> None:
    statement = create_sql(FACTS | facts, "UTF8", "o", target_major=major)
    assert said in statement
    assert 'OWNER "o"' in statement
    assert ("LOCALE_PROVIDER" in statement) == (major >= 15)
