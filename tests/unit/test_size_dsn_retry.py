"""What people write, sizes and connection strings; and what is tried again."""

from __future__ import annotations

import pickle
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.conninfo import conninfo_to_dict

from millrace import retry
from millrace.config.dsn import Dsn, resolved
from millrace.config.size import parse_size, render_size
from millrace.errors import (
    ConfigError,
    ConnectionLost,
    FormatError,
    InvariantError,
    MillraceError,
    PreflightError,
    ServerError,
    SnapshotLost,
    WorkDirError,
)
from millrace.postgres.wire.connect import error_for
from millrace.retry import ATTEMPTS, is_transient, is_transient_code, iter_pauses, with_retries

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1048576", 1048576),
        ("1B", 1),
        ("1 kB", 1024),
        ("250 MB", 250 * 1024**2),
        ("250mb", 250 * 1024**2),
        ("  2GB  ", 2 * 1024**3),
        ("1.5 GB", 3 * 1024**3 // 2),
        ("1 TB", 1024**4),
        ("1 PB", 1024**5),
        ("1 EB", 1024**6),
    ],
)
def test_size_is_read_with_units_of_1024(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text", ["", "MB", "-1", "-1 MB", "1,5 GB", "1 XB", "1 MB 2", "nan", "1e9"]
)
def test_what_is_no_size_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid size") as caught:
        parse_size(text)
    assert "250 MB" in caught.value.hint


@given(st.integers(0, 2**62))
def test_whole_bytes_are_read_exactly(size: int) -> None:
    assert parse_size(str(size)) == size
    assert parse_size(f"{size} B") == size


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 kB"),
        (1024, "1 kB"),
        (1536, "1.5 kB"),
        (250 * 1024**2, "250 MB"),
        (999 * 1024**2, "999 MB"),
        (3 * 1024**4, "3 TB"),
    ],
)
def test_size_is_written_with_three_digits_at_most(size: int, text: str) -> None:
    assert render_size(size) == text


@given(st.integers(0, 2**62))
def test_written_size_can_be_read_and_is_about_the_same(size: int) -> None:
    assert parse_size(render_size(size)) == pytest.approx(size, rel=0.006, abs=1)


URIS = [
    f"postgresql://ann:{SECRET}@db.example.com:5433/shop",
    f"postgresql://ann:{SECRET}%2F%40@db.example.com:5433/shop",
    f"postgresql:///shop?host=db.example.com&port=5433&user=ann&password={SECRET}",
    f"host=db.example.com port=5433 user=ann dbname=shop password={SECRET}",
    f"host=db.example.com port=5433 user=ann dbname=shop password='{SECRET} it\\'s'",
]


@pytest.mark.parametrize("text", URIS)
def test_password_is_in_no_rendering_for_people(text: str) -> None:
    dsn = Dsn.parse(text)
    shown = [str(dsn), repr(dsn), f"{dsn}", dsn.identity(), dsn.public_conninfo(), f"{[dsn]}"]
    assert not [rendering for rendering in shown if SECRET in rendering]
    assert dsn.identity() == "postgresql://ann@db.example.com:5433/shop"


@pytest.mark.parametrize("text", URIS)
def test_libpq_and_programs_get_the_password(text: str) -> None:
    dsn = Dsn.parse(text)
    password = conninfo_to_dict(text)["password"]
    assert conninfo_to_dict(dsn.conninfo())["password"] == password
    assert dsn.program_environment() == {"PGPASSWORD": password}


def test_without_a_password_no_variable_is_set() -> None:
    assert Dsn.parse("host=db").program_environment() == {}


@pytest.mark.parametrize("parameter", ["oauth_client_secret", "scram_client_key"])
def test_other_secrets_are_refused_and_not_shown(parameter: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Dsn.parse(f"host=db {parameter}={SECRET}")
    assert parameter in str(caught.value)
    assert SECRET not in f"{caught.value} {caught.value.hint}"


def test_keyword_string_and_uri_name_the_same_database() -> None:
    words = Dsn.parse("host=db port=5433 user=ann dbname='my shop'")
    uri = Dsn.parse("postgresql://ann@db:5433/my%20shop")
    assert words == uri
    assert hash(words) == hash(uri)
    assert words.identity() == "postgresql://ann@db:5433/my%20shop"


def test_given_parameters_win_over_our_defaults() -> None:
    dsn = Dsn.parse("host=db connect_timeout=3 sslmode=require")
    given = conninfo_to_dict(dsn.conninfo(application_name="x"))
    assert (given["connect_timeout"], given["sslmode"]) == ("3", "require")
    assert given["keepalives"] == "1"
    assert given["application_name"] == "x"


@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_any_password_reaches_libpq_as_it_is(password: str) -> None:
    dsn = resolved({"host": "db", "user": "ann"}, password)
    assert conninfo_to_dict(dsn.conninfo())["password"] == password
    assert conninfo_to_dict(dsn.public_conninfo()).get("password") is None


@pytest.mark.parametrize(
    "text",
    [
        f"postgresql://ann:{SECRET}@[::1/shop",
        f"postgresql://ann:{SECRET}@db/shop?nope=1",
        f"postgresql://ann@db/shop?password={SECRET}&x",
        f"postgresql://ann@db/shop?password={SECRET}&password",
        f"host=db password={SECRET} user",
        f"host=db password='{SECRET}",
        f"host=db pasword={SECRET}",
        f"postgresql://ann:{SECRET}@db:5432x/shop",
        # Forgotten encoding and quoting: libpq's own words quote these.
        f"postgresql://ann:{SECRET}%zz@db/shop",
        f"postgresql://ann@db/shop?password={SECRET}%",
        f"host=db password=two {SECRET}",
        f"postgresql://ann:two/{SECRET}@db/shop",
        f"postgresql://ann:{SECRET}/two@db/shop",
    ],
)
def test_bad_connection_string_is_refused_without_its_password(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Dsn.parse(text, what="--source")
    said = [str(caught.value), caught.value.hint, *traceback.format_exception_only(caught.value)]
    assert not [words for words in said if SECRET in words]
    assert "--source" in str(caught.value)
    assert caught.value.hint


def test_passphrase_of_a_client_key_is_refused_and_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        Dsn.parse(f"host=db sslpassword={SECRET}")
    assert SECRET not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("text", URIS)
def test_dsn_is_the_same_after_pickle(text: str) -> None:
    dsn = Dsn.parse(text)
    again = pickle.loads(pickle.dumps(dsn))
    assert again == dsn
    assert again.conninfo() == dsn.conninfo()


def test_other_parameters_leave_the_original_alone() -> None:
    dsn = Dsn.parse(URIS[0])
    other = dsn.with_(dbname="other")
    assert (dsn.parameters["dbname"], other.parameters["dbname"]) == ("shop", "other")
    assert other.password == SECRET


def test_resolved_dsn_keeps_neither_passfile_nor_service() -> None:
    dsn = resolved({"host": "db", "passfile": "/x", "service": "s", "password": "p"}, SECRET)
    assert dsn.parameters == {"host": "db"}
    assert dsn.password == SECRET


@pytest.mark.parametrize(
    "sqlstate",
    [
        None,
        "08000",
        "08003",
        "08006",
        "57P01",
        "57P02",
        "57P03",
        "53300",
        "40001",
        "40P01",
        "55P03",
    ],
)
def test_what_can_go_away_by_itself_is_transient(sqlstate: str | None) -> None:
    assert is_transient_code(sqlstate)
    assert is_transient(ServerError("x", sqlstate=sqlstate))
    assert is_transient(error_for(sqlstate, "the server's words", "copying"))


@pytest.mark.parametrize(
    "sqlstate",
    [
        "53100",  # disk full
        "53200",  # out of memory
        "23505",  # unique violation
        "23514",  # check violation
        "22021",  # encoding
        "22012",  # division by zero
        "28P01",  # wrong password
        "3D000",  # no such database
        "42P01",  # no such table
        "42501",  # no right
        "57014",  # cancelled by somebody
        "XX001",  # data corrupted
        "XX002",  # index corrupted
    ],
)
def test_what_will_be_the_same_next_time_is_final(sqlstate: str) -> None:
    assert not is_transient_code(sqlstate)
    assert not is_transient(error_for(sqlstate, "the server's words", "copying"))


@pytest.mark.parametrize(
    "error",
    [
        SnapshotLost("gone", sqlstate="22023"),
        WorkDirError("taken over"),
        InvariantError("rows differ"),
        FormatError("bad bytes"),
        PreflightError("not ready"),
        ValueError("a bug"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_without_a_transient_code_are_final(error: BaseException) -> None:
    assert not is_transient(error)


def test_lost_connection_is_transient_whatever_it_says() -> None:
    assert is_transient(ConnectionLost("no sqlstate at all"))
    assert is_transient(ConnectionLost("none came", sqlstate=None))


def test_wrong_password_said_while_connecting_is_final() -> None:
    message = 'FATAL:  password authentication failed for user "ann"'
    error = error_for(None, message, "can't connect")
    assert not is_transient(error)
    assert error.facts["sqlstate"] == "28P01"


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_SECONDS", 0.0)


class Work:
    """Fails with each of the errors in turn, then succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def __call__(self) -> str:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.mark.usefixtures("no_pause")
def test_transient_errors_are_tried_again_and_told() -> None:
    told: list[BaseException] = []
    lost = [ConnectionLost("one"), ServerError("two", sqlstate="40P01")]
    work = Work(*lost)
    assert with_retries(work, on_retry=lambda error, pause: told.append(error)) == "done"
    assert work.calls == 3
    assert told == lost


@pytest.mark.usefixtures("no_pause")
@pytest.mark.parametrize(
    "error",
    [error_for("53100", "disk full", "copying"), SnapshotLost("gone"), ValueError("a bug")],
    ids=["disk-full", "snapshot", "bug"],
)
def test_final_error_is_raised_at_once(error: BaseException) -> None:
    work = Work(error, error)
    with pytest.raises(type(error)) as caught:
        with_retries(work)
    assert caught.value is error
    assert work.calls == 1


@pytest.mark.usefixtures("no_pause")
def test_last_error_is_raised_when_the_attempts_are_used_up() -> None:
    errors = [ConnectionLost(str(n)) for n in range(ATTEMPTS)]
    work = Work(*errors, ConnectionLost("one too many"))
    with pytest.raises(MillraceError) as caught:
        with_retries(work)
    assert work.calls == ATTEMPTS
    assert caught.value is errors[-1]


def test_success_at_once_does_not_wait() -> None:
    work = Work()
    assert with_retries(work) == "done"
    assert work.calls == 1


def test_pauses_grow_and_have_a_limit() -> None:
    pauses = list(iter_pauses(20))
    assert len(pauses) == 19
    assert 0.5 * retry.FIRST_PAUSE_SECONDS <= pauses[0] <= retry.FIRST_PAUSE_SECONDS
    assert all(pause <= retry.LONGEST_PAUSE_SECONDS for pause in pauses)
    assert min(pauses[10:]) >= 0.5 * retry.LONGEST_PAUSE_SECONDS


@pytest.mark.parametrize(
    ("sqlstate", "message"),
    [
        ("22P02", 'invalid input syntax for type integer: "s3cret"'),
        ("22P02", 'invalid input value for enum mood: "s3cret"'),
        ("22P02", 'malformed array literal: "s3cret"'),
        ("22P02", 'malformed record literal: "s3cret"'),
        ("22P02", 'malformed range literal: "s3cret"'),
        ("22021", 'invalid byte sequence for encoding "UTF8": 0x73 0x33 s3cret'),
        ("22003", 'value "s3cret" is out of range for type integer'),
        ("22008", 'date/time field value out of range: "s3cret"'),
        ("22008", 'timestamp out of range: "s3cret"'),
        ("22007", 'invalid input syntax for type date: "s3cret\n: 2"'),
    ],
)
def test_no_row_value_is_in_the_message_of_a_refused_row(sqlstate: str, message: str) -> None:
    where = 'COPY t, line 7, column v: "s3cret"'
    error = error_for(sqlstate, message, "writing to the target", where=where)
    assert SECRET not in f"{error} {error.hint} {error.to_dict()}"
    assert "COPY t, line 7, column v" in str(error)
