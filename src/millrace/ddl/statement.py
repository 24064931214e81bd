"""The text of a captured command: found in what was recorded, and made fit for the target.

Invariant: a text is the source's own, cut out of what was recorded and never printed anew; from it
only whole clauses are taken away that mean nothing on the target. Whether it is the right one is
for those to say who compare its result with the description.

Facts: plpgsql and SPI add a line `SQL statement "..."` to the context, `LANGUAGE sql` only the name
of the function and the number of the statement. The innermost is first, behind the line of the
event trigger itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from millrace.ddl.entry import Entry
from millrace.errors import ApplyError

_OWN_LINE: Final = re.compile(r"PL/pgSQL function [^\n]*(?:\n|$)")
_INNER: Final = re.compile(
    r'SQL statement "(.*?)"(?=\n(?:PL/pgSQL function |SQL statement "|SQL function )|\n?\Z)', re.S
)
_SQL_FUNCTION: Final = re.compile(r'SQL function "([^\n]*)" statement (\d+)')
# Words of a tag that are not in the text: ALTER TABLE ... is also written for views and indexes.
_COLUMNLESS: Final = ("CREATE", "ALTER", "DROP", "COMMENT")
# The keyword behind which ALTER TABLE has its actions is the table's name; an action that begins so
# means nothing on the target.
_LEFT_OUT_ACTIONS: Final = (
    ("OWNER", "TO"),
    ("CLUSTER", "ON"),
    ("SET", "WITHOUT", "CLUSTER"),
    ("SET", "TABLESPACE"),
    ("SET", "LOGGED"),
    ("SET", "UNLOGGED"),
    ("SET", "ACCESS", "METHOD"),
    ("REPLICA", "IDENTITY"),
    ("ENABLE", "TRIGGER"),
    ("ENABLE", "ALWAYS"),
    ("ENABLE", "REPLICA"),
    ("ENABLE", "ROW"),
    ("ENABLE", "RULE"),
    ("DISABLE", "TRIGGER"),
    ("DISABLE", "ROW"),
    ("DISABLE", "RULE"),
    ("FORCE", "ROW"),
    ("NO", "FORCE"),
)


@dataclass(frozen=True)
class Token:
    """A word, name, literal or sign of a text."""

    start: int
    end: int
    text: str

    @property
    def word(self) -> str:
        """As keywords are compared."""
        return self.text.upper()

    @property
    def name(self) -> str:
        """As the catalog has it."""
        if self.text.startswith('"'):
            return self.text[1:-1].replace('""', '"')
        return self.text.lower()


@dataclass(frozen=True)
class Statement:
    """One statement of a text."""

    text: str

    @property
    def tokens(self) -> list[Token]:
        return list(scan_tokens(self.text))


def scan_tokens(text: str) -> Iterator[Token]:
    """Its tokens, without comments."""
    import postgast

    data = text.encode()
    for token in postgast.scan(text).tokens:
        found = data[token.start : token.end].decode()
        if not found.startswith(("--", "/*")):
            start = len(data[: token.start].decode())
            yield Token(start, start + len(found), found)


def split(text: str) -> list[str]:
    """Its statements; raises if the grammar does not know it."""
    import postgast

    try:
        found = postgast.split(text)
    except postgast.PgQueryError as error:
        raise ApplyError(f"the text of a statement can't be cut: {error}") from error
    return [one for one in found if one.strip()]


def find_candidates(entry: Entry) -> list[str]:
    """The texts that may be the command's, the likeliest first; none if it was not recorded."""
    inner = _OWN_LINE.sub("", entry.context, count=1)
    if not inner:
        return _matching(entry, split(entry.query))
    if found := _INNER.match(inner):
        return _matching(entry, split(found[1]))
    if found := _SQL_FUNCTION.match(inner):
        number = int(found[2]) - 1
        bodies = [split(body) for body in entry.bodies]
        return _matching(entry, [body[number] for body in bodies if number < len(body)])
    return []


def _matching(entry: Entry, statements: Sequence[str]) -> list[str]:
    """Those that may be a command of this tag, first those that name its object."""
    kept = [one for one in statements if _may_be(entry.tag, one)]
    if len(kept) < 2:
        return kept
    main = entry.main
    name = main.names[-1] if main and main.names else ""
    name = name.rpartition(".")[2].strip('"')
    naming = [one for one in kept if any(t.name == name for t in scan_tokens(one))]
    return list(dict.fromkeys(naming or kept))


def _may_be(tag: str, statement: str) -> bool:
    words = [token.word for token in list(scan_tokens(statement))[:8]]
    wanted = tag.split()
    if not words or words[0] != wanted[0]:
        return words[:1] == ["WITH"] and wanted[0] == "SELECT"
    return all(word in words for word in wanted[:2])


def fit(statement: str, tag: str) -> str:
    """The statement for the target; "" if nothing of it is left."""
    tokens = list(scan_tokens(statement))
    cuts = [*_concurrently(tokens, tag), *_tablespace(tokens), *_authorization(tokens, tag)]
    if tag.startswith("ALTER TABLE"):
        actions = _actions(tokens)
        out = [one for one in actions if _is_left_out(one)]
        if actions and len(out) == len(actions):
            return ""
        cuts += _action_cuts(actions)
    return _without(statement, cuts)


def _concurrently(tokens: Sequence[Token], tag: str) -> Iterator[tuple[int, int]]:
    if tag.split()[-1] in ("INDEX", "TABLE", "VIEW"):
        for token in tokens:
            if token.text.upper() == "CONCURRENTLY":
                yield token.start, token.end


def _tablespace(tokens: Sequence[Token]) -> Iterator[tuple[int, int]]:
    """TABLESPACE name, behind a table's or an index's definition."""
    if not tokens or tokens[0].word != "CREATE":
        return
    for (depth, token), following in zip(_depths(tokens), tokens[1:], strict=False):
        if depth == 0 and token.word == "TABLESPACE":
            yield token.start, following.end


def _authorization(tokens: Sequence[Token], tag: str) -> Iterator[tuple[int, int]]:
    """The owner of a schema, who need not exist on the target: CREATE SCHEMA [name] ..."""
    if tag != "CREATE SCHEMA":
        return
    words = [token.word for token in tokens]
    if "AUTHORIZATION" not in words:
        return
    at = words.index("AUTHORIZATION")
    has_name = words[at - 1] not in ("SCHEMA", "EXISTS")
    # Without a name of its own, the schema has its owner's.
    yield tokens[at].start, tokens[at + 1].end if has_name else tokens[at].end


def _depths(tokens: Iterable[Token]) -> Iterator[tuple[int, Token]]:
    depth = 0
    for token in tokens:
        if token.text in ("(", "["):
            depth += 1
        elif token.text in (")", "]"):
            depth -= 1
        yield depth, token


def _actions(tokens: Sequence[Token]) -> list[list[Token]]:
    """The actions of ALTER TABLE [IF EXISTS] [ONLY] name [*] action, action ..."""
    at = 2
    while at < len(tokens) and tokens[at].word in ("IF", "EXISTS", "ONLY"):
        at += 1
    at += 1
    while at + 1 < len(tokens) and tokens[at].text == ".":
        at += 2
    if at < len(tokens) and tokens[at].text == "*":
        at += 1
    found: list[list[Token]] = [[]]
    for depth, token in _depths(tokens[at:]):
        if token.text == ";":
            continue
        if depth == 0 and token.text == ",":
            found.append([])
        else:
            found[-1].append(token)
    return [one for one in found if one]


def _is_left_out(action: Sequence[Token]) -> bool:
    words = tuple(token.word for token in action[:3])
    return any(words[: len(one)] == one for one in _LEFT_OUT_ACTIONS)


def _action_cuts(actions: Sequence[Sequence[Token]]) -> Iterator[tuple[int, int]]:
    """Each action that goes, with the comma before it, or behind it if it is the first."""
    kept = [one for one in actions if not _is_left_out(one)]
    for number, action in enumerate(actions):
        if not _is_left_out(action):
            continue
        if number and any(one in kept for one in actions[:number]):
            yield actions[number - 1][-1].end, action[-1].end
        else:
            yield action[0].start, actions[number + 1][0].start


def _without(text: str, cuts: Iterable[tuple[int, int]]) -> str:
    done, parts = 0, []
    for start, end in sorted(cuts):
        parts.append(text[done:start])
        done = max(done, end)
    return "".join([*parts, text[done:]]).strip()


def has_cascade(statement: str) -> bool:
    """Whether a statement drops what depends on its object."""
    return any(token.word == "CASCADE" for token in scan_tokens(statement))
