"""Changes that do not fit the target's rows: refused by name, skipped, or overwritten."""

from __future__ import annotations

import pytest
from tests.fixtures.stream.stream_pair import ACCOUNT, StreamPair

from millrace.apply.conflict import OnConflict
from millrace.errors import ApplyError


def test_update_that_finds_no_row_stops_and_names_table_key_and_lsn(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account SELECT i, 'o', 0 FROM generate_series(1, 10) i")
    pair.follow()
    pair.target.execute("DELETE FROM account WHERE id = 4")
    pair.run("UPDATE account SET balance = 1 WHERE id IN (3, 4, 5)")
    with pytest.raises(ApplyError, match=r"public\.account.*matched \d+ \(key: id;") as caught:
        pair.follow()
    assert caught.value.facts["lsn"]
    assert caught.value.exit_code == 7
    # Nothing of the batch is there.
    assert pair.target.execute("SELECT sum(balance) FROM account").fetchone() == (0,)


def test_insert_whose_key_is_taken_stops(pair: StreamPair) -> None:
    pair.begin(ACCOUNT)
    pair.target.execute("INSERT INTO account VALUES (2, 'mine', 0)")
    pair.run("INSERT INTO account SELECT i, 'o', 0 FROM generate_series(1, 3) i")
    with pytest.raises(ApplyError, match=r"public\.account") as caught:
        pair.follow()
    assert caught.value.facts["sqlstate"] == "23505"
    assert pair.target.execute("SELECT count(*) FROM account").fetchone() == (1,)


def test_an_update_that_a_check_refuses_says_so(pair: StreamPair) -> None:
    pair.begin(ACCOUNT, on_target="ALTER TABLE account ADD CHECK (balance < 9)")
    pair.run("INSERT INTO account VALUES (1, 'a', 1)")
    pair.follow()
    pair.run("UPDATE account SET balance = 9")
    with pytest.raises(ApplyError, match=r"^public\.account: .* UPDATE: .*account_balance_check"):
        pair.follow()


def test_skipping_conflicts_says_so(pair: StreamPair, caplog: pytest.LogCaptureFixture) -> None:
    pair.begin(ACCOUNT)
    pair.run("INSERT INTO account SELECT i, 'o', 0 FROM generate_series(1, 10) i")
    pair.follow()
    pair.target.execute("DELETE FROM account WHERE id IN (4, 5)")
    pair.target.execute("INSERT INTO account VALUES (11, 'mine', 0)")
    pair.run(
        "UPDATE account SET balance = 1 WHERE id IN (3, 4)",
        "DELETE FROM account WHERE id = 5",
        "INSERT INTO account VALUES (11, 'theirs', 0), (12, 'new', 0)",
    )
    outcome = pair.follow(on_conflict=OnConflict.SKIP)
    assert outcome.applied.skipped == 3
    assert "skipped" in caplog.text
    assert "not on the target" in caplog.text
    rows = pair.target.execute("SELECT id, owner FROM account WHERE id > 10 ORDER BY 1").fetchall()
    assert rows == [(11, "mine"), (12, "new")]


def test_overwriting_conflicts_ends_equal(pair: StreamPair) -> None:
    pair.begin(
        "CREATE TABLE seat (id int PRIMARY KEY, place int UNIQUE, guest text)",
    )
    pair.run("INSERT INTO seat SELECT i, i, 'g' FROM generate_series(1, 10) i")
    pair.follow()
    pair.target.execute("DELETE FROM seat WHERE id IN (4, 5)")
    pair.target.execute("INSERT INTO seat VALUES (11, 111, 'mine'), (99, 12, 'other')")
    pair.run(
        "UPDATE seat SET guest = 'h' WHERE id IN (3, 4)",
        "DELETE FROM seat WHERE id = 5",
        "INSERT INTO seat VALUES (11, 11, 'theirs'), (12, 12, 'new')",
    )
    pair.follow(on_conflict=OnConflict.OVERWRITE)
    pair.assert_equal()


def test_a_missing_row_among_keys_that_lie_close_stops(pair: StreamPair) -> None:
    pair.begin("CREATE TABLE t (id int PRIMARY KEY, v text)")
    pair.run("INSERT INTO t SELECT i, i FROM generate_series(1, 2000) AS i")
    pair.follow()
    pair.target.execute("DELETE FROM t WHERE id = 1000")
    pair.run("UPDATE t SET v = 'x'")
    with pytest.raises(ApplyError, match="expected to update 2000 rows, matched 1999"):
        pair.follow()
