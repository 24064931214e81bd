"""`millrace demo tube`: a full-text index that follows a table.

Invariant: what it claims it has compared: at the end the index has the articles that the table has,
with their revisions, and nothing else.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from millrace.cli import options
from millrace.cli.demo.shop import app, say
from millrace.clone.run import in_thread
from millrace.config.dsn import Dsn
from millrace.demo.library import ENRICH, Authors, create_articles
from millrace.errors import MismatchError
from millrace.log import setup_logging
from millrace.postgres.program.embedded import open_cluster
from millrace.postgres.wire.connect import connect, resolve
from millrace.spark.session import Engine, default_master
from millrace.tube.delivery.plan import Delivery, DeliveryLimits, TableDelivery
from millrace.tube.delivery.run import check_delivery, run_delivery
from millrace.tube.install import install

VERSION = 18
TUBE = "articles"
WORKERS = 2
# How long the index follows before the authors stop.
FOLLOW_SECONDS = 5.0
WORD = "revised"


@app.command()
def tube(
    articles: Annotated[int, typer.Option(min=10, help="Number of articles.")] = 20_000,
    verbose: options.Verbose = 0,
    quiet: options.Quiet = False,
) -> None:
    """Keep a full-text index of a busy table, and prove it equal.

    Starts a throw-away server with a table of articles, attaches a tube to it, lets authors loose
    on it, backfills a Tantivy index while they write, and follows them. Then they stop, the tube
    runs empty, and every article is looked up. Needs no PostgreSQL, no Docker and no root.
    """
    setup_logging(verbose=verbose, quiet=quiet or not verbose)
    with ExitStack() as stack:
        folder = TemporaryDirectory(prefix="millrace-demo-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(folder))
        say(f"starting PostgreSQL {VERSION} with {articles:,} articles")
        uri = stack.enter_context(open_cluster(VERSION)).create_database("library")
        create_articles(uri, articles)
        source = resolve(Dsn.parse(uri))
        with connect(source, "demo") as session:
            install(session)
            session.execute("SET search_path = public, tube")
            session.execute("SELECT tube_ensure_exists(%s, %s)", (TUBE, WORKERS))
            session.execute(
                "SELECT tube_table_attach(%s, 'article', routing => 'id::int %% 8')", (TUBE,)
            )
            session.execute("SELECT tube_backfill_schedule(%s, 'id', 0, 8)", (TUBE,))
        _follow(uri, source, articles, directory, stack)


def _follow(uri: str, source: Dsn, articles: int, directory: Path, stack: ExitStack) -> None:
    index = directory / "index"
    plan = {"": TableDelivery(ENRICH, f"tantivy:{index}")}
    limits = DeliveryLimits(settle_seconds=1.0)
    delivery = check_delivery(Delivery(source, "", TUBE, plan, limits=limits), WORKERS)
    last = Delivery(source, delivery.schema, TUBE, plan, until_empty=True, limits=limits)
    stop = threading.Event()
    engine = stack.enter_context(
        Engine(default_master(WORKERS), log_path=directory / "spark.log", streams=True)
    )
    with Authors(uri, 2 * articles) as authors:
        say("authors are at work; a backfill fills the index, and their changes follow")
        engine.wait()
        following = in_thread(lambda: run_delivery(delivery, WORKERS, engine, stop=stop))
        threading.Event().wait(FOLLOW_SECONDS)
        say(f"a search for {WORD!r} finds {len(_search(index, WORD)):,} articles")
        authors.close()
        say(f"authors stopped after {authors.committed:,} transactions")
    stop.set()
    engine.cancel()
    following.exception()
    counts = run_delivery(last, WORKERS, engine, stop=threading.Event())
    found = _search(index, WORD)
    say(f"a search for {WORD!r} finds {len(found):,} articles; the last {counts.ids:,} ids arrived")
    _compare(source, index)


def _compare(source: Dsn, index: Path) -> None:
    with connect(source, "demo") as session:
        rows = session.execute("SELECT id, revision FROM public.article WHERE is_public").fetchall()
    wanted = {str(id_): revision for id_, revision in rows}
    found = _search(index, None)
    every = wanted.keys() | found.keys()
    different = sorted(id_ for id_ in every if wanted.get(id_) != found.get(id_))
    if different:
        raise MismatchError(
            f"{len(different)} articles differ in the index", hint=f"the first is {different[0]}"
        )
    say(f"equal: the index has all {len(wanted):,} public articles, each in its last revision")


def _search(folder: Path, word: str | None) -> dict[str, int]:
    """The revisions of the documents that have a word, or of all."""
    import tantivy

    if not tantivy.Index.exists(str(folder)):
        return {}
    index: Any = tantivy.Index.open(str(folder))
    searcher = index.searcher()
    query = tantivy.Query.term_query(index.schema, "_deleted", 0)
    if word is not None:
        query = index.parse_query(word, ["title", "body"])
    hits = searcher.search(query, max(1, searcher.num_docs)).hits
    found = (searcher.doc(address).to_dict() for _, address in hits)
    return {one["_id"][0]: one["revision"][0] for one in found if not one["_deleted"][0]}
