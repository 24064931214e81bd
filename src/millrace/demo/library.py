"""The data of `millrace demo tube`: articles that writers change while they are indexed.

Invariant: what an article says is made from its number and its revision, so that anybody can see
what a search must find.
"""

from __future__ import annotations

import random
import threading

import psycopg

from millrace.errors import ServerError

SCHEMA = """
CREATE TABLE article (
    id bigint PRIMARY KEY,
    title text NOT NULL,
    body text NOT NULL,
    revision int NOT NULL DEFAULT 0,
    is_public boolean NOT NULL DEFAULT true
)
"""
ENRICH = "SELECT id, title, body, revision FROM article WHERE id = ANY($1) AND is_public"
_WORDS = "water wheel stone flour river sluice gate race mill grain"


def create_articles(uri: str, count: int) -> None:
    with psycopg.connect(uri) as connection:
        connection.execute(SCHEMA)
        connection.execute(
            "INSERT INTO article (id, title, body) SELECT i, 'article ' || i,"
            " concat_ws(' ', w[1 + i %% 10], w[1 + i / 10 %% 10], 'and', w[1 + i / 100 %% 10])"
            " FROM generate_series(1, %s) i, string_to_array(%s, ' ') w",
            (count, _WORDS),
        )


class Authors:
    """Write, revise, hide and delete articles until the block ends."""

    def __init__(self, uri: str, count: int, *, pause_seconds: float = 0.005) -> None:
        self._uri, self._count, self._pause_seconds = uri, count, pause_seconds
        self._closing = threading.Event()
        self._error: Exception | None = None
        self.committed = 0
        self._thread = threading.Thread(target=self._work, name="authors", daemon=True)

    def __enter__(self) -> Authors:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the transaction in progress end."""
        self._closing.set()
        self._thread.join()
        if self._error is not None:
            raise ServerError(f"an author failed: {self._error}") from self._error

    def _work(self) -> None:
        try:
            with psycopg.connect(self._uri, autocommit=True) as connection:
                self._write(connection, random.Random(7))
        except Exception as error:
            self._error = error

    def _write(
        self, connection: psycopg.Connection[tuple[object, ...]], luck: random.Random
    ) -> None:
        while not self._closing.wait(self._pause_seconds):
            some = luck.randrange(self._count) + 1
            match luck.randrange(4):
                case 0:
                    connection.execute("DELETE FROM article WHERE id = %s", (some,))
                case 1:
                    connection.execute(
                        "UPDATE article SET is_public = NOT is_public WHERE id = %s", (some,)
                    )
                case _:
                    connection.execute(
                        "INSERT INTO article VALUES (%(id)s, 'article ' || %(id)s, 'a new story')"
                        " ON CONFLICT (id) DO UPDATE SET revision = article.revision + 1,"
                        " body = 'revised ' || article.body",
                        {"id": some},
                    )
            self.committed += 1
