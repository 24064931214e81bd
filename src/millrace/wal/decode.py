"""The sequential pass: WAL records in, whole transactions in commit order out.

Invariant: each transaction that commits at or after the start is emitted once and whole, with the
relations of its changes as they were for itself; or it is named as withheld. What is emitted
depends on the WAL and the base alone, not on how the WAL was cut into pieces.

A piece is taken in three steps. Its transaction ids and changes are registered with array
operations. Its events are handled one by one: ends of transactions, commands, changes of catalogs.
Last, the files that the changes of all ended transactions name are resolved together: a relation
depends on the file and the position alone, but in a transaction that changed catalogs itself, which
is walked change by change.

Facts: decode.c, reorderbuffer.c, snapbuild.c; docs/design/wal.md.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from millrace.errors import FormatError
from millrace.lsn import render_lsn
from millrace.wal import classify as kind
from millrace.wal import small_records as small
from millrace.wal.catalog.base_image import MultiXacts, read_relmap
from millrace.wal.catalog.catalog_records import CatalogRecords
from millrace.wal.catalog.historic_catalog import HistoricCatalog
from millrace.wal.catalog.relation_resolver import RelationResolver
from millrace.wal.classify import Roles, classify, in_files
from millrace.wal.read.record import Records
from millrace.wal.reorder_buffer import ReorderBuffer, WholeTransaction
from millrace.wal.snapshot_builder import SnapshotBuilder, precedes
from millrace.wal.transaction import Batch, Ending, Transaction, Withheld

log = logging.getLogger(__name__)

_LOGICAL = 2
# A transaction with this in its name is not decoded when it is prepared (test_decoding's filter).
_NO_DECODE = "_nodecode"
_INVALID_CID = 0xFFFFFFFF


@dataclass(slots=True)
class DecoderOptions:
    """What is decoded, and how."""

    two_phase: bool = False
    strict: bool = False
    # Transactions that were prepared before the WAL begins.
    prepared: frozenset[int] = frozenset()


class Decoder:
    """The state of one decoding, from piece to piece."""

    def __init__(
        self,
        catalog: HistoricCatalog,
        resolver: RelationResolver,
        builder: SnapshotBuilder,
        *,
        multixacts: MultiXacts | None = None,
        backup_start: int | None = None,
        options: DecoderOptions | None = None,
    ) -> None:
        self.catalog = catalog
        self.resolver = resolver
        self.builder = builder
        self.buffer = ReorderBuffer()
        self.options = options or DecoderOptions()
        self.prepared = set(self.options.prepared)
        # The position of the backup whose end makes the catalog exact; None once it is.
        self.backup_start = backup_start
        self.catalog_exact_at = 0
        self.commits_before_exact = 0
        self.multixacts = multixacts or MultiXacts(None)
        self._records = CatalogRecords(catalog, self.multixacts)
        self._batch = Batch(0)
        self._ended: list[tuple[Transaction, WholeTransaction]] = []
        self._horizon: int | None = None
        self._piece = 0

    def feed(self, piece: int, records: Records) -> Batch:
        """Take a piece; returns what it has completed. What that refers to in the catalog stays
        until the next piece is taken."""
        self.forget()
        self._batch = Batch(int(records.next_lsn))
        self._piece = piece
        self._ended = []
        roles = classify(records, self.catalog.database)
        at = 0
        while at < len(records):
            end = self._next_transition(records, at)
            self._register(piece, records, roles, at, end)
            self._handle_events(records, roles, at, end)
            at = end
        self._resolve()
        return self._batch

    def _next_transition(self, records: Records, at: int) -> int:
        """Up to where the state of the builder cannot change."""
        if self.builder.is_consistent:
            return len(records)
        running = (records.rmid[at:] == kind.STANDBY) | (
            (records.rmid[at:] == kind.XLOG) & (records.info[at:] & 0xF0 == 0)
        )
        found = np.flatnonzero(running)
        return at + int(found[0]) + 1 if len(found) else len(records)

    # Registration

    def _register(self, piece: int, records: Records, roles: Roles, begin: int, end: int) -> None:
        """The transaction ids of a range of records, and where their changes are."""
        for i in np.flatnonzero(records.top_xid[begin:end]) + begin:
            self.buffer.assign(int(records.top_xid[i]), int(records.xid[i]), int(records.lsn[i]))
        seen = np.flatnonzero(roles.registers[begin:end]) + begin
        xids, first = np.unique(records.xid[seen], return_index=True)
        lsns = records.lsn[seen[first]]
        for xid, lsn in zip(xids.tolist(), lsns.tolist(), strict=True):
            self.buffer.register(xid, lsn)
        changes = np.flatnonzero(roles.is_change[begin:end]) + begin
        changes = changes[self._accepted(records.xid[changes])]
        if len(changes):
            self._add_changes(piece, records, roles, changes)

    def _accepted(self, xids: NDArray[np.uint32]) -> NDArray[np.bool_]:
        if self.builder.is_consistent:
            return np.ones(len(xids), np.bool_)
        accepted = {xid: self.builder.accepts_change(xid) for xid in np.unique(xids).tolist()}
        return np.array([accepted[xid] for xid in xids.tolist()], np.bool_)

    def _add_changes(
        self, piece: int, records: Records, roles: Roles, changes: NDArray[np.int64]
    ) -> None:
        order = np.argsort(records.xid[changes], kind="stable")
        changes = changes[order]
        xids = records.xid[changes]
        cuts = np.flatnonzero(np.diff(xids)) + 1
        starts = np.concatenate(([0], cuts))
        referenced = roles.is_referenced[changes]
        every = bool(referenced.all())
        for start, stop, xid in zip(
            starts.tolist(), [*cuts.tolist(), len(changes)], xids[starts].tolist(), strict=True
        ):
            own = changes[start:stop]
            self.buffer.add_changes(xid, piece, own if every else own[referenced[start:stop]])

    # Events

    def _handle_events(self, records: Records, roles: Roles, begin: int, end: int) -> None:
        at = begin
        while at < end:
            files = len(self.catalog.files)
            mask = roles.is_event | in_files(roles, self.catalog.files)
            for i in (np.flatnonzero(mask[at:end]) + at).tolist():
                at = i + 1
                self._handle(records, i)
                if len(self.catalog.files) != files:
                    break  # a catalog is being rewritten: its new file counts from here on
            else:
                return

    def _handle(self, records: Records, i: int) -> None:
        handlers: dict[int, Callable[[Records, int], None]] = {
            kind.XLOG: self._xlog,
            kind.XACT: self._xact,
            kind.STANDBY: self._running_xacts,
            kind.HEAP2: self._heap2,
            kind.HEAP: self._heap,
            kind.RELMAP: self._relmap,
            kind.MULTIXACT: self._multixact,
            kind.MESSAGE: self._message,
        }
        handlers[int(records.rmid[i])](records, i)

    def _xlog(self, records: Records, i: int) -> None:
        op, lsn = int(records.info[i]) & 0xF0, int(records.lsn[i])
        if op == kind.FPI:
            self._records.apply(records, i)
        elif op == kind.PARAMETER_CHANGE:
            self._check_wal_level(small.decode_wal_level(records, i), lsn)
        elif op == kind.CHECKPOINT_SHUTDOWN:
            self._shutdown(lsn, small.decode_next_xid(records, i))
        elif op == kind.BACKUP_END and self._ends_backup(records, i):
            self.set_exact(lsn + 1)

    def _ends_backup(self, records: Records, i: int) -> bool:
        return small.decode_backup_start(records, i) == self.backup_start

    def set_exact(self, lsn: int) -> None:
        """From this position on the catalog is that of the server."""
        self.backup_start = None
        self.catalog_exact_at = lsn
        self.builder.start_decoding_at = max(self.builder.start_decoding_at, lsn)

    def _check_wal_level(self, wal_level: int, lsn: int) -> None:
        if wal_level < _LOGICAL:
            raise FormatError(
                f"wal_level was lowered below logical at {render_lsn(lsn)}",
                hint="changes from there on cannot be decoded; end before it with --to",
                lsn=render_lsn(lsn),
            )

    def _shutdown(self, lsn: int, next_xid: int) -> None:
        oldest = next_xid
        for xid in self.prepared:
            oldest = xid if precedes(xid, oldest) else oldest
        self.builder.process_shutdown(lsn, next_xid, oldest if self.prepared else None)
        if not self.builder.strict:
            # Those of the rest of the piece are registered already.
            before = (xid for xid in self.buffer.open if precedes(xid, next_xid))
            self.buffer.drop([xid for xid in before if not self._is_prepared(xid)])

    def _is_prepared(self, xid: int) -> bool:
        found = self.buffer.open.get(xid)
        top = found.top_xid if found else 0
        return xid in self.prepared or top in self.prepared

    def _running_xacts(self, records: Records, i: int) -> None:
        lsn = int(records.lsn[i])
        running = small.decode_running_xacts(records, i)
        self.builder.process_running_xacts(lsn, running)
        self.buffer.drop_before(running.oldest_running_xid)
        self.catalog.abort_before(running.oldest_running_xid, precedes)
        self._horizon = lsn

    def _heap2(self, records: Records, i: int) -> None:
        if int(records.info[i]) & 0x70 != kind.NEW_CID:
            self._records.apply(records, i)
            return
        main = records.main_data(i)
        top_xid, cmin, cmax, _, spc, db, rel, high, low, offset = struct.unpack_from(
            "<IIIIIIIHHH", main
        )
        self.catalog.note_cids((spc, db, rel), (high << 16 | low) << 16 | offset, cmin, cmax)
        valid = [cid for cid in (cmin, cmax) if cid != _INVALID_CID]
        self.buffer.add_command(
            int(records.xid[i]), top_xid, int(records.lsn[i]), max(valid, default=0) + 1
        )

    def _heap(self, records: Records, i: int) -> None:
        self._records.apply(records, i)
        if int(records.info[i]) & 0x70 == kind.INPLACE:
            xid = int(records.xid[i])
            if xid and not records.version.inplace_has_invalidations:
                self.buffer.mark_catalog_change(xid, int(records.lsn[i]))

    def _relmap(self, records: Records, i: int) -> None:
        database, image = small.decode_relmap(records, i)
        if database not in (0, self.catalog.database):
            return
        mapping = read_relmap(image)
        self.resolver.tables.mapped_files.update(mapping.values())
        for oid, number in mapping.items():
            self.catalog.use_mapped_file(oid, number, int(records.lsn[i]))

    def _multixact(self, records: Records, i: int) -> None:
        self.multixacts.note(*small.decode_multixact(records, i))

    def _message(self, records: Records, i: int) -> None:
        """A message that stands alone; those of transactions are changes."""
        found = small.decode_message(records, i)
        lsn, end_lsn = int(records.lsn[i]), int(records.end_lsn[i])
        if found.is_transactional or found.database != self.catalog.database:
            return
        if self.builder.emits(lsn):
            alone = Transaction(Ending.MESSAGE, int(records.xid[i]), lsn, lsn, end_lsn)
            self.resolver.add_message(alone, self._piece, i)
            self._ended.append((alone, NOTHING))

    # Ends of transactions

    def _xact(self, records: Records, i: int) -> None:
        op, xid, lsn = int(records.info[i]) & 0x70, int(records.xid[i]), int(records.lsn[i])
        if op in (kind.COMMIT, kind.COMMIT_PREPARED):
            self._commit(records, i)
        elif op in (kind.ABORT, kind.ABORT_PREPARED):
            self._abort(records, i)
        elif op == kind.PREPARE:
            self._prepare(records, i)
        elif op == kind.INVALIDATIONS and xid:
            self.buffer.mark_catalog_change(xid, lsn)

    def _commit(self, records: Records, i: int) -> None:
        end = small.decode_end(records, i)
        lsn, end_lsn = int(records.lsn[i]), int(records.end_lsn[i])
        members = (end.xid, *end.subxids)
        changed = [x for x in members if self._changed_catalog(x)]
        self.builder.process_commit(lsn, changed)
        whole = self.buffer.gather(end.xid, end.subxids)
        self.catalog.commit(members, lsn)
        if changed and self.backup_start is not None:
            self.commits_before_exact += 1
        if whole is not None and self._is_ours(end.database) and self.builder.emits(lsn):
            self._end(whole, end, lsn, end_lsn, int(records.origin[i]))
        self.buffer.drop(members)
        self.prepared.discard(end.xid)

    def _changed_catalog(self, xid: int) -> bool:
        return self.catalog.has_written(xid) or self.buffer.changed_catalog(xid)

    def _is_ours(self, database: int) -> bool:
        return database in (0, self.catalog.database)

    def _end(
        self,
        whole: WholeTransaction,
        end: small.TransactionEnd,
        lsn: int,
        end_lsn: int,
        origin: int,
    ) -> None:
        """A commit that is emitted, in one step or, if it was prepared, in two."""
        is_two_phase = end.gid is not None and self._decodes_prepare(end.gid)
        opened = self.buffer.open.get(whole.xid)
        done = Transaction(
            Ending.COMMIT_PREPARED if is_two_phase else Ending.COMMIT,
            whole.xid,
            whole.first_lsn,
            lsn,
            end_lsn,
            end.time,
            origin,
            end.origin_lsn,
            end.gid or "",
        )
        if is_two_phase:
            if opened is not None and opened.prepared is not None and not opened.was_emitted:
                self._emit(opened.prepared, whole)
            self._ended.append((done, NOTHING))
        else:
            self._emit(done, whole)

    def _emit(self, transaction: Transaction, whole: WholeTransaction) -> None:
        if not whole.has_snapshot and not whole.has_catalog_changes:
            return
        if whole.first_lsn < self.catalog_exact_at and self.commits_before_exact:
            self._batch.withheld.append(
                Withheld(
                    whole.xid,
                    transaction.commit_lsn,
                    transaction.end_lsn,
                    "it began before the base was complete, while catalogs were changed",
                )
            )
            return
        self._ended.append((transaction, whole))

    def _abort(self, records: Records, i: int) -> None:
        end = small.decode_end(records, i)
        lsn, end_lsn = int(records.lsn[i]), int(records.end_lsn[i])
        members = (*end.subxids, end.xid)
        opened = self.buffer.open.get(end.xid)
        if end.gid is not None and opened is not None and self._emits_rollback(end, lsn):
            rollback = Transaction(
                Ending.ROLLBACK_PREPARED,
                end.xid,
                opened.first_lsn,
                lsn,
                end_lsn,
                end.time,
                gid=end.gid,
            )
            self._ended.append((rollback, NOTHING))
        if opened is not None and opened.was_emitted:
            self._resolve()  # as long as what it had made in the catalog is there
        for xid in members:
            self.catalog.abort(xid)
        self.buffer.drop(members)
        self.prepared.discard(end.xid)

    def _emits_rollback(self, end: small.TransactionEnd, lsn: int) -> bool:
        is_two_phase = end.gid is not None and self._decodes_prepare(end.gid)
        return is_two_phase and self._is_ours(end.database) and self.builder.emits(lsn)

    def _prepare(self, records: Records, i: int) -> None:
        found = small.decode_prepare(records, i)
        self.prepared.add(found.xid)
        lsn, end_lsn = int(records.lsn[i]), int(records.end_lsn[i])
        opened = self.buffer.register(found.xid, lsn)
        if not self._decodes_prepare(found.gid):
            return
        opened.prepared = Transaction(
            Ending.PREPARE,
            found.xid,
            opened.first_lsn,
            lsn,
            end_lsn,
            found.time,
            int(records.origin[i]),
            found.origin_lsn,
            found.gid,
        )
        if self._is_ours(found.database) and self.builder.emits(lsn):
            whole = self.buffer.gather(found.xid, found.subxids)
            if whole is not None:
                self._emit(opened.prepared, whole)
            opened.was_emitted = True

    def _decodes_prepare(self, gid: str) -> bool:
        return self.options.two_phase and _NO_DECODE not in gid

    def _resolve(self) -> None:
        ended, self._ended = self._ended, []
        self.resolver.resolve(ended, self._batch)

    # Garbage

    def forget(self) -> None:
        """What no open transaction can ask for goes."""
        if self._horizon is None:
            return
        oldest = self.buffer.oldest_lsn()
        horizon = self._horizon
        if oldest is not None:
            horizon = min(horizon, oldest)
        self.catalog.forget(horizon)
        self.resolver.forget(horizon)
        self._horizon = None


NOTHING = WholeTransaction(0, 0, frozenset(), False, False, (), ())
