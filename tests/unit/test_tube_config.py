"""tube.toml is read whole, and everything that is wrong with it is said at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.config.dsn import Dsn
from millrace.errors import ConfigError
from millrace.tube.config import TubeFile, plan_deliveries, read_tube_file
from millrace.tube.delivery.plan import DeliveryLimits, TableDelivery

WHOLE = """
source = "postgresql://app@db.example.com/shop"
schema = "queues"

[limits]
tries = 3
settle_seconds = 5

[tubes.articles]
partitions = 4
workers = 2
predicate = "not is_draft"
sink = "tantivy:/index"

[tubes.articles.limits]
tries = 7

[tubes.articles.tables."public.article"]
shard = 1
predicate = "is_public"
enrich = "SELECT id, title FROM article WHERE id = ANY($1)"

[tubes.articles.tables.'"Odd.One".note']
key = ["a", "b"]
routing = "a % 8"
enrich = "SELECT article, title FROM article WHERE article = ANY($1)"
fan_out = "SELECT a, article FROM note WHERE a = ANY($1)"
sink = "jsonl:/notes"

[tubes.plain.tables."sh0042.item"]
key = "slug"
"""


def read(tmp_path: Path, text: str) -> TubeFile:
    path = tmp_path / "tube.toml"
    path.write_text(text)
    return read_tube_file(path)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, text)
    assert caught.value.exit_code == 2
    found = caught.value.facts["problems"]
    assert caught.value.message.count("fix: ") == len(found)
    return [f"{one['side']}: {one['what']}: {one['fix']}" for one in found]


def test_a_file_says_what_each_tube_is_and_how_it_is_delivered(tmp_path: Path) -> None:
    file = read(tmp_path, WHOLE)
    articles, plain = file.tubes
    assert file.source is not None
    assert file.source.identity() == "postgresql://app@db.example.com/shop"
    assert file.schema == "queues"
    assert (articles.partitions, articles.workers, articles.predicate) == (4, 2, "not is_draft")
    assert articles.limits == DeliveryLimits(tries=7, settle_seconds=5.0)
    assert plain.limits == DeliveryLimits(tries=3, settle_seconds=5.0)
    article, note = articles.tables
    assert (article.label, article.key, article.shard) == ("public.article", None, 1)
    assert (note.schema, note.name, note.key, note.routing) == (
        "Odd.One",
        "note",
        ("a", "b"),
        "a % 8",
    )
    assert article.delivery is not None
    assert (article.delivery.sink, article.predicate) == ("tantivy:/index", "is_public")
    assert isinstance(note.delivery, TableDelivery)
    assert (note.delivery.sink, note.delivery.fan_out[:8]) == ("jsonl:/notes", "SELECT a")
    assert (plain.tables[0].key, plain.tables[0].delivery) == (("slug",), None)


def test_a_run_needs_an_enrichment_and_a_sink_for_every_table(tmp_path: Path) -> None:
    file = read(tmp_path, WHOLE)
    with pytest.raises(ConfigError, match=r"tube plain: sh0042\.item has no enrich"):
        plan_deliveries(file, Dsn({}), "", until_empty=False)
    file = read(tmp_path, WHOLE.partition("[tubes.plain")[0])
    ((delivery, workers),) = plan_deliveries(file, Dsn({}), "queues", until_empty=True)
    assert (delivery.tube, delivery.schema, workers) == ("articles", "queues", 2)
    assert set(delivery.tables) == {"public.article", "Odd.One.note"}


def test_every_problem_of_a_file_is_in_one_error(tmp_path: Path) -> None:
    found = problems(
        tmp_path,
        """
sources = "x"
source = "postgresql://h:hunter/two@x"
zzz = 1
[limits]
trys = 3
tries = 0
settle_seconds = -1.0
batch_ids = true
[tubes.a]
partition = 2
workers = 3
predicate = 5
sink = "nowhere:x"
[tubes.a.tables.article]
enrich = "SELECT"
[tubes.a.tables."public.one"]
shard = "1"
key = []
fan_out = "SELECT"
[tubes.b.tables."PUBLIC.one"]
enrich = "SELECT"
[tubes.b.tables.'"public"."one"']
""",
    )
    wanted = [
        "the file: unknown key sources: write source",
        "the file: unknown key zzz: known are: source, schema, limits, tubes",
        "the file: the port in the source is not a number",
        "the file: limits: unknown key trys: write tries",
        "the file: limits: tries is 0: write a number at least 1",
        "the file: limits: settle_seconds is negative",
        "the file: limits: batch_ids is not a number",
        "tube a: unknown key partition: write partitions",
        "tube a: 3 workers are more than its 1 partitions",
        "tube a: predicate is not a string",
        "tube a, table article: its name is not schema.name",
        "tube a, table article: there is no sink nowhere: known are: ",
        "tube a, table public.one: key is not a list of columns",
        "tube a, table public.one: shard is not a number",
        "tube a, table public.one: it has a fan_out and no enrich",
        "tube b, table PUBLIC.one: it has an enrich and no sink",
        "tube b: public.one is there twice",
    ]
    missing = [one for one in wanted if not any(line.startswith(one) for line in found)]
    assert not missing, found
    # The sink of a tube is said for each of its tables.
    assert len(found) == len(wanted) + 1
    assert not any("hunter" in line or "two" in line for line in found)


@pytest.mark.parametrize(
    ("text", "said"),
    [("tubes = 1", "tubes is not a table"), ("", "it has no tubes"), ("[tubes]\na = 1", "a is")],
)
def test_a_file_without_tubes_is_refused(tmp_path: Path, text: str, said: str) -> None:
    assert any(said in line for line in problems(tmp_path, text))


def test_a_file_that_is_not_toml_or_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not valid TOML"):
        read(tmp_path, "[tubes")
    with pytest.raises(ConfigError, match="can't read the config in"):
        read_tube_file(tmp_path / "none.toml")
