"""Coordinate a save: look at the place first, commit, delete the replaced checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Collection
from functools import partial

import msgspec

from ckpt.backends.base import Store, exists
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency import environment
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc_text
from ckpt.consistency.commit import (
    COMMIT_KEY,
    MAX_COMMIT_BYTES,
    STOCK_METADATA_KEY,
    publish,
)
from ckpt.consistency.conditional_create import learn_condition
from ckpt.consistency.expected import commit_digest
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    CommitUnknown,
    ConfigurationError,
    FormatError,
)
from ckpt.format.columns import Columns
from ckpt.format.config_files import unchanged
from ckpt.format.figures import BlockDigests, Timings
from ckpt.format.index import check_columns, encode_index
from ckpt.format.names import (
    INDEX_SUFFIX,
    MODEL_INDEX_KEY,
    MODEL_PREFIX,
    SINGLE_MODEL_KEY,
    index_key,
    is_our_name,
    probe_key,
    signature_key,
)
from ckpt.format.own_objects import own_objects
from ckpt.format.records import (
    CommitRecord,
    ObjectRef,
    StoredCommit,
    encode,
    read_commit,
)
from ckpt.gc_pause import no_gc
from ckpt.transfer.threads import run_all, workers
from ckpt.writing.pins import HeldBases, PinReader, Referrers, release_bases
from ckpt.writing.save_objects import SaveObjects
from ckpt.writing.stock_metadata import (
    encode_stock_metadata,
    is_anothers,
    is_model,
    put_stock_metadata,
    stock_key,
)

_logger = logging.getLogger(__name__)

_MAX_KEYS = 100_000
"""Looked at for another model; a caller may give a folder of very many checkpoints."""


def _is_referable(commit: StoredCommit) -> bool:
    """Tell whether others may refer to a checkpoint, whose objects are deleted only by a sound record."""
    try:
        return commit.record.is_referable
    except CheckpointError:
        return False


def _with_root(record: CommitRecord, index: bytes) -> CommitRecord:
    """Complete the digests of what a record names, if it is to have them: with that of its index, and the root."""
    wanted = record.block_digests
    if not wanted:
        return record
    algorithm = wanted.algorithm
    ref = msgspec.structs.replace(record.described_by, digest=digest_of(algorithm, index).hex())
    record = msgspec.structs.replace(record, index=ref)
    root = wanted.root_of([ref.digest for ref in record.refs])
    return msgspec.structs.replace(record, block_digests=BlockDigests(algorithm, root))


class Coordinator:
    """Commit one save, on the coordinating rank."""

    def __init__(self, store: Store, objects: SaveObjects, confirm_s: float = math.inf) -> None:
        """`objects` gets each object before it exists; the commit releases them all.

        `committed` is then the commit record, the index that it names, and what that holds. `previous` is what
        `look` has seen committed, which is replaced, and its objects deleted.
        """
        self._store, self._objects = store, objects
        self._confirm_s = confirm_s
        self.previous: StoredCommit | None = None
        self.committed: tuple[StoredCommit, bytes, Columns] | None = None

    @property
    def digest(self) -> str:
        """The digest of what was committed, which names it; empty before."""
        return "" if self.committed is None else commit_digest(self.committed[0].raw)

    def look(self, *, overwrite: bool, model: bool = False) -> None:
        """Raise AlreadyExists, before anything is written, if a checkpoint must not be replaced.

        `model`: this one will be a folder of safetensors files, where no other model may be either.
        """
        previous = read_commit(self._store)
        if previous is not None and not previous.is_ours:
            raise self._foreign(COMMIT_KEY)
        if is_anothers(self._store, STOCK_METADATA_KEY, previous):
            raise self._foreign(STOCK_METADATA_KEY)
        if model and (key := self._foreign_model(previous)) is not None:
            raise self._foreign(key)
        if previous is not None and overwrite and is_model(previous) != model:
            raise AlreadyExists(
                "the checkpoint that is committed here has another format (format=), and one does not replace the "
                "other: save to another place, or remove it first",
                url=self._store.url,
                key=COMMIT_KEY,
            )
        if previous is not None and not overwrite:
            message = (
                "a checkpoint is committed here already; to replace it, pass overwrite=True (--overwrite)"
            )
            raise AlreadyExists(message, url=self._store.url, key=COMMIT_KEY)
        if previous is not None and _is_referable(previous):
            PinReader(self._store).refuse(previous.record, "it is not replaced")
        if previous is None and model and not overwrite and exists(self._store, MODEL_INDEX_KEY):
            message = "a model is here that has lost its commit.json; to replace it, pass overwrite=True (--overwrite)"
            raise AlreadyExists(message, url=self._store.url, key=MODEL_INDEX_KEY)
        self.previous = previous

    def _foreign_model(self, previous: StoredCommit | None) -> str | None:
        """Find a file or an index of a model that is not this library's."""
        if exists(self._store, SINGLE_MODEL_KEY):
            return SINGLE_MODEL_KEY
        if is_anothers(self._store, MODEL_INDEX_KEY, previous):
            return MODEL_INDEX_KEY
        for stat in itertools.islice(self._store.list(), _MAX_KEYS):
            key = stat.key
            is_shard = key.startswith(MODEL_PREFIX) and key.endswith(".safetensors") and not is_our_name(key)
            is_index = key.endswith(INDEX_SUFFIX) and key != MODEL_INDEX_KEY
            if (is_shard or is_index) and "/" not in key:
                return key
        return None

    def _foreign(self, key: str) -> AlreadyExists:
        return AlreadyExists(
            "another program wrote this (stock PyTorch?); only checkpoints of this library are replaced: "
            "save to another place, or move it away first",
            url=self._store.url,
            key=key,
        )

    def commit(
        self,
        columns: Columns,
        record: CommitRecord,
        *,
        check: Callable[[], None] = lambda: None,
        timings: Timings | None = None,
    ) -> None:
        """Write the index of `columns` and commit `record` with it.

        `check` is called in between, and raises if the save must not be committed. `timings` go into the record,
        with how long this took.

        Raises:
            CommitError: nothing was committed (CommitUnknown: perhaps it was), and nothing replaced.
            ConfigurationError: the columns or the tags cannot be stored.
        """
        began_at_s = environment.monotonic()
        with no_gc():
            encoded, stock_metadata = self._index(columns), encode_stock_metadata(record, columns)
            index = CheckedBody(encoded)
        key = index_key(self._objects.rank, self._objects.token)
        ref = ObjectRef(path=key, size_bytes=index.nbytes, crc64nvme=crc_text(index.crc64nvme()))
        record = _with_root(msgspec.structs.replace(record, id=self._objects.token, index=ref), encoded)
        if timings is not None:
            record = msgspec.structs.replace(record, timings=timings)
        sealed = self._sealed(record)
        held = HeldBases(self._store, record)
        self._objects.add(key)
        try:
            works: list[Callable[[], None]] = [partial(self._store.put, key, index)]
            if record.bases:
                works.append(held.hold)
            with workers(min(self._store.threads, len(works)), "ckpt-commit") as threads:
                run_all(threads, lambda work: work(), works)  # in any order: both are there before the commit
            check()
            if timings is not None:
                plan_ms, write_ms, _ = timings.coordinator_ms
                index_ms = round(1000 * (environment.monotonic() - began_at_s))
                timings = Timings.of(plan_ms, write_ms, index_ms, timings.ranks_ms, timings.retries)
                sealed = self._sealed(msgspec.structs.replace(record, timings=timings))
            if self.previous is None:
                learn_condition(self._store, probe_key(self._objects.rank, environment.token()))
            acknowledged = self._publish(sealed, stock_metadata, held)
        except CommitUnknown:
            self._objects.release()
            raise
        except CheckpointError:
            held.release()
            raise
        self._objects.release()
        columns.encoded = encoded
        self.committed = StoredCommit(sealed, self._store.url), encoded, columns
        self._end(record, acknowledged)

    def _sealed(self, record: CommitRecord) -> bytes:
        """Encode a record. Raises ConfigurationError if it is larger than what is read."""
        sealed = encode(record)
        if len(sealed) > MAX_COMMIT_BYTES:
            raise ConfigurationError(
                f"the commit record would take {len(sealed):,} bytes, more than the {MAX_COMMIT_BYTES:,} that "
                f"are read: make the tags smaller ({sum(map(len, record.tags.values())):,} characters)",
                url=self._store.url,
            )
        return sealed

    def commit_as_is(self, commit: StoredCommit, stock_metadata: bytes | None) -> None:
        """Commit a record that is committed elsewhere, all objects of which are here under the same names.

        Raises as `commit`; CommitConflict also if another process has committed this record meanwhile.
        """
        held = HeldBases(self._store, commit.record)
        if commit.record.bases:
            held.hold()
        if self.previous is None:
            learn_condition(self._store, probe_key(self._objects.rank, self._objects.token))
        self._end(commit.record, self._publish(commit.raw, stock_metadata, held))

    def _end(self, record: CommitRecord, acknowledged: bool) -> None:
        with contextlib.suppress(Exception):  # nothing after the commit may make the save look failed
            _logger.info("committed %s (%d ranks)", self._store.url, record.world_size)
            # A store that has not answered may not be done with the old record either.
            if self.previous is not None and acknowledged:
                self._retire(self.previous, {ref.path for ref in record.config_files or ()})

    def _index(self, columns: Columns) -> bytes:
        """Encode the index, once it is sure that readers will accept it."""
        try:
            check_columns(columns)
            return encode_index(columns)
        except (FormatError, ValueError) as error:
            text = error.message if isinstance(error, FormatError) else str(error)
            raise ConfigurationError(f"this state cannot be stored: {text}", url=self._store.url) from None

    def _publish(self, record: bytes, stock_metadata: bytes | None, held: HeldBases) -> bool:
        """Commit, then let stock readers find it; return whether the commit was acknowledged."""
        previous = None if self.previous is None else self.previous.raw
        try:
            acknowledged = held.while_held(
                lambda check: publish(
                    self._store, record, previous=previous, confirm_s=self._confirm_s, check=check
                )
            )
            self._show(record, stock_metadata)
            return acknowledged
        except CheckpointError:
            raise
        except Exception as error:  # a store that breaks its contract: anything may have happened
            message = f"the commit may or may not have happened: {type(error).__name__}: {error}"
            raise CommitUnknown(message, url=self._store.url) from error

    def _show(self, record: bytes, stock_metadata: bytes | None) -> None:
        commit = StoredCommit(record, self._store.url)
        try:
            put_stock_metadata(self._store, commit, stock_metadata)
        except CheckpointError as error:
            # Who looks for `.metadata` does not find this save: it must not be acknowledged.
            key = stock_key(commit.record)
            what, remedy = "not for stock readers", f"write {key}"
            if stock_metadata is None:
                what, remedy = f"the {key} of the one before may still be there", "remove it"
            raise CommitUnknown(
                f"the checkpoint was committed, but {what}: {error.message}; save again, or let `ckpt gc` {remedy}",
                url=self._store.url,
                key=key,
            ) from error

    def _retire(self, previous: StoredCommit, config_keys: Collection[str]) -> None:
        """Delete the objects of the replaced checkpoint, as well as it goes, but `config_keys`, which the new one lists."""
        try:
            commit = previous.record
            release_bases(self._store, commit)
            if commit.is_referable and not self._store.capabilities.cross_client_visibility:
                # A save that refers to it may not see for a while that it was replaced, nor its pins be seen.
                _logger.info("`ckpt gc` removes the objects of the checkpoint that was replaced")
                return
            keys = [*own_objects(self._store, commit), signature_key(commit.described_by.path)]
            referrers = Referrers()
            if commit.is_referable:
                referrers = PinReader(self._store).look()
            others = [ref for ref in commit.config_files or () if ref.path not in config_keys]
            # A record may be damaged or forged: only names that this library gives are deleted.
            keys = [key for key in keys if is_our_name(key) and not referrers.hold(key)]
            self._store.delete([*keys, *unchanged(self._store, others)])
        except Exception as error:  # nothing after the commit may make the save look failed
            _logger.warning(
                "the replaced checkpoint's objects could not all be deleted (`ckpt gc` can): %s", error
            )
