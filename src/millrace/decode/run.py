"""One decoding from files to outputs.

Invariant: outputs get whole transactions in commit order. A transaction in which one change cannot
be decoded or printed reaches no output; it is in the report.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millrace import failpoint
from millrace.decode.by_column import BatchSource, ByColumn
from millrace.decode.checkpoint import (
    Checkpoint,
    is_checkpoint,
    read_checkpoint,
    write_checkpoint,
)
from millrace.decode.inputs import open_base
from millrace.decode.outputs import Output
from millrace.decode.report import Report
from millrace.decode.selection import Selection
from millrace.decode.settings import change_settings, encoding_of, output_settings
from millrace.errors import ConfigError, FormatError
from millrace.lsn import render_lsn
from millrace.wal.catalog.base_image import (
    BaseLabel,
    Database,
    MultiXacts,
    find_database,
    image_multixacts,
    list_prepared,
    load_catalog,
    mapped_files,
    read_label,
)
from millrace.wal.catalog.object_names import HistoricNames
from millrace.wal.catalog.relation_resolver import RelationResolver
from millrace.wal.catalog.table_lookup import TableLookup
from millrace.wal.decode import Decoder, DecoderOptions
from millrace.wal.read.files import WalFiles, open_wal
from millrace.wal.read.pieces import Pieces
from millrace.wal.reorder_buffer import ReorderBuffer
from millrace.wal.row.rows import RowReader
from millrace.wal.snapshot_builder import SnapshotBuilder
from millrace.wal.transaction import Batch, Transaction, Withheld
from millrace.wal.types.registry import Renderers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DecodeSettings:
    """What is decoded."""

    wal: Sequence[Path]
    base: Path
    database: str
    from_lsn: int | None = None
    to_lsn: int | None = None
    timeline: int | None = None
    two_phase: bool = False
    strict: bool = False
    unknown_as_raw: bool = False
    check_crc: bool = True
    # Where the state is kept, and found again after an interruption.
    checkpoint: Path | None = None
    # DateStyle and the like, where they differ from the base's configuration.
    given: Mapping[str, str] = field(default_factory=dict)
    selection: Selection = field(default_factory=Selection)


class Decoding:
    """Base, WAL and decoder of one run."""

    def __init__(self, settings: DecodeSettings) -> None:
        self.settings = settings
        state = _open_state(settings)
        self.label: BaseLabel = state.label
        self.database: Database = state.database
        self.output_settings = change_settings(state.settings, settings.given)
        self.next_lsn = state.next_lsn
        self.output_bytes = state.output_bytes
        self._check_range(state)
        self.wal = _open_wal(settings, self.label, state.needed_lsn)
        self.report = Report(settings.from_lsn, settings.to_lsn, end_lsn=state.next_lsn)
        self.pieces = self._open_pieces(state.bounds)
        self.decoder = self._build(state)
        self.names = HistoricNames(self.decoder.catalog, self.output_settings.encoding)
        self.renderers = Renderers(
            self.output_settings, self.names, unknown_as_raw=settings.unknown_as_raw
        )
        self.rows = RowReader(self.pieces, self.decoder.resolver.relations)

    def run(self, outputs: Sequence[Output]) -> Report:
        """Decode the whole range into the outputs."""
        relations = self.decoder.resolver.relations
        source = BatchSource(self.pieces, relations)
        together = ByColumn(source, relations, outputs, self.settings.selection)
        for batch in self.batches():
            if outputs:
                together.emit(batch, lambda one, of: self._emit(one, of, outputs), self.report)
            self.report.withheld += batch.withheld
            for output in outputs:
                output.flush()
            if self.settings.checkpoint is not None:
                self._save(self.settings.checkpoint, outputs)
        builder = self.decoder.builder
        self.report.first_lsn = builder.start_decoding_at if builder.is_consistent else 0
        for output in outputs:
            output.finish(self.report.end_lsn)
        return self.report

    def batches(self) -> Iterator[Batch]:
        for piece, records in self.pieces.read(self.next_lsn, self.settings.to_lsn):
            batch = self.decoder.feed(piece, records)
            self.report.end_lsn = self.next_lsn = batch.end_lsn
            yield batch
        if self.decoder.backup_start is not None:
            raise FormatError(
                f"the WAL ends at {render_lsn(self.report.end_lsn)}, before the base was complete",
                hint="add the WAL up to the end of the base backup",
                lsn=render_lsn(self.report.end_lsn),
            )

    def _emit(self, transaction: Transaction, batch: Batch, outputs: Sequence[Output]) -> None:
        selection = self.settings.selection
        if not selection.takes(transaction):
            self.report.not_selected += 1
            return
        try:
            for output in outputs:
                output.begin(transaction)
            for lsn, event in selection.filter(self.rows.read(transaction, batch)):
                self.report.changes += 1
                self.names.move_to(lsn, transaction.end_lsn)
                for output in outputs:
                    output.add(lsn, event)
        except FormatError as error:
            for output in outputs:
                output.discard()
            log.error("transaction %d is withheld: %s", transaction.xid, error)
            self.report.withheld.append(
                Withheld(transaction.xid, transaction.commit_lsn, transaction.end_lsn, str(error))
            )
            return
        self.report.transactions += 1
        for output in outputs:
            output.commit()

    def checkpoint(self, output_bytes: int = 0) -> Checkpoint:
        """The state between two pieces."""
        decoder = self.decoder
        decoder.forget()
        return Checkpoint(
            label=self.label,
            database=self.database,
            settings=self.output_settings,
            next_lsn=self.next_lsn,
            catalog=decoder.catalog,
            builder=decoder.builder,
            buffer=decoder.buffer,
            prepared=decoder.prepared,
            bounds=self.pieces.bounds,
            mapped_files=decoder.resolver.tables.mapped_files,
            multixacts=decoder.multixacts.updaters,
            backup_start=decoder.backup_start,
            catalog_exact_at=decoder.catalog_exact_at,
            commits_before_exact=decoder.commits_before_exact,
            output_bytes=output_bytes,
        )

    def _save(self, path: Path, outputs: Sequence[Output]) -> None:
        sizes = [output.position for output in outputs]
        write_checkpoint(path, self.checkpoint(sizes[0] if sizes else 0))
        failpoint.hit("decode.after_checkpoint")

    def _open_pieces(self, bounds: dict[int, int]) -> Pieces:
        return Pieces(self.wal, bounds, check_crc=self.settings.check_crc)

    def _build(self, state: Checkpoint) -> Decoder:
        tables = TableLookup(state.catalog, encoding=encoding_of(self.database))
        tables.mapped_files |= state.mapped_files
        builder = state.builder
        builder.strict = self.settings.strict
        builder.start_decoding_at = max(builder.start_decoding_at, self.settings.from_lsn or 0)
        decoder = Decoder(
            state.catalog,
            RelationResolver(tables, self.pieces, builder),
            builder,
            multixacts=MultiXacts(None, state.multixacts),
            backup_start=state.backup_start,
            options=DecoderOptions(
                two_phase=self.settings.two_phase, prepared=frozenset(state.prepared)
            ),
        )
        decoder.buffer = state.buffer
        decoder.catalog_exact_at = state.catalog_exact_at
        decoder.commits_before_exact = state.commits_before_exact
        return decoder

    def _check_range(self, state: Checkpoint) -> None:
        asked = self.settings.from_lsn
        oldest = max(self.label.consistent_lsn or self.label.start_lsn, state.catalog_exact_at - 1)
        if asked is not None and asked < oldest:
            raise FormatError(
                f"the base is newer than the WAL asked for: it begins at {render_lsn(oldest)}, "
                f"--from is {render_lsn(asked)}",
                hint="use an older base, or a later --from",
                lsn=render_lsn(oldest),
            )
        end = self.settings.to_lsn
        if end is not None and end < state.next_lsn:
            raise ConfigError(
                f"--to {render_lsn(end)} is before the base, {render_lsn(state.next_lsn)}"
            )


def _open_state(settings: DecodeSettings) -> Checkpoint:
    """Where to begin: the last checkpoint of this decoding, or its base."""
    for path in (settings.checkpoint, settings.base):
        if path is not None and is_checkpoint(path):
            state = read_checkpoint(path)
            if state.database.name != settings.database:
                raise ConfigError(
                    f"{path} is of database {state.database.name}, not {settings.database}"
                )
            return state
    return _state_of_base(settings)


def _state_of_base(settings: DecodeSettings) -> Checkpoint:
    files = open_base(settings.base)
    label = read_label(files)
    database = find_database(files, label.version, settings.database)
    multixacts = MultiXacts(files, image_multixacts(files))
    exact_at = label.consistent_lsn
    return Checkpoint(
        label=label,
        database=database,
        settings=output_settings(files, label.version, database),
        next_lsn=label.start_lsn,
        catalog=load_catalog(files, label, database, multixacts),
        builder=SnapshotBuilder(exact_at or 0),
        buffer=ReorderBuffer(),
        prepared=set(list_prepared(files)),
        bounds={},
        mapped_files=mapped_files(files, database),
        multixacts=multixacts.updaters,
        backup_start=label.start_lsn if exact_at is None else None,
        catalog_exact_at=exact_at or 0,
        commits_before_exact=0,
    )


def _open_wal(settings: DecodeSettings, label: BaseLabel, start_lsn: int) -> WalFiles:
    wal = open_wal(
        settings.wal,
        timeline=settings.timeline,
        start_lsn=start_lsn,
        end_lsn=settings.to_lsn,
        system_identifier=label.system_identifier,
    )
    if wal.version.major != label.version:
        raise FormatError(
            f"the WAL is of PostgreSQL {wal.version.major}, the base of {label.version}",
            hint="use a base backup of the same server",
        )
    return wal
