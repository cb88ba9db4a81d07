"""Write `.metadata`, which stock readers look for, after a commit; for models, their index.

What is said here of `.metadata` holds for the `model.safetensors.index.json` of a model too, which
transformers looks for. A process can stall right before it puts `.metadata`, until another save has replaced its
checkpoint. So whoever has put it looks at the commit afterwards, and if that is another one, puts
the `.metadata` of that. Whoever commits later puts its own later too. So the last put is right,
unless its process dies before it looks; then `ckpt gc` writes it anew.

A save leaves out a `.metadata` that would be too large, and its commit record says so. Then nothing
is put, and that of the checkpoint which it replaced is deleted.
"""

from __future__ import annotations

import dataclasses
import functools
import logging

from ckpt.backends.base import Store, exists, read_bytes
from ckpt.backends.bodies import CheckedBody
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, is_foreign, read_json_seal
from ckpt.consistency.seal import is_sealed_json, seal_pickle
from ckpt.errors import CheckpointError, ConfigurationError, FormatError, IntegrityError, NotFound, Truncated
from ckpt.format.columns import Columns
from ckpt.format.index import decode_index
from ckpt.format.model_index import MAX_INDEX_BYTES, parse_model_index, sealed_model_index
from ckpt.format.names import MODEL_INDEX_KEY, is_our_name, split_path
from ckpt.format.records import CommitRecord, StoredCommit, read_commit
from ckpt.format.saved_over import is_saved_over
from ckpt.siblings.sibling_objects import SiblingObjects
from ckpt.stock.metadata_writer import estimated_bytes, pickled_metadata
from ckpt.transfer.manifest_sizes import manifest_bytes

_logger = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 256 << 20
"""Of the `.metadata` that a save writes: some 2 million chunks, for which the coordinator takes about 3 s."""

_MAX_TRIES = 10
_HINT = "run 'ckpt cp --materialise SRC DST' to read this with stock PyTorch"


def stock_key(record: CommitRecord) -> str:
    """Name the object that readers of other programs look for."""
    return MODEL_INDEX_KEY if record.is_model else STOCK_METADATA_KEY


def oversize_bytes(columns: Columns, record: CommitRecord, max_bytes: int | None) -> int | None:
    """Estimate the size of a `.metadata` that is to be left out; None if it is to be written."""
    if max_bytes is None or record.is_model:
        return None
    size_bytes = estimated_bytes(columns, max_bytes)
    return size_bytes if size_bytes > max_bytes else None


def checked_max_bytes(max_bytes: int | None) -> int | None:
    """Raise ConfigurationError if `stock_metadata_max_bytes` is no size."""
    if max_bytes is not None and (
        isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0
    ):
        raise ConfigurationError(
            "stock_metadata_max_bytes must be a number of bytes, 0 (never write .metadata) or None (always), "
            f"not {max_bytes!r:.100}"
        )
    return max_bytes


def encode_stock_metadata(record: CommitRecord, columns: Columns) -> bytes | None:
    """Make that object; None if it was left out.

    Stock readers are not sent to other folders: for what lies there it names a file that does not exist,
    and whose name, which their error shows, says what to do.
    """
    if record.is_model:
        return sealed_model_index(columns)
    if not record.is_for_stock:
        return None
    return seal_pickle(pickled_metadata(stock_columns(columns)))


def stock_columns(columns: Columns) -> Columns:
    """Name files as `.metadata` does."""
    files = [f"{_HINT}/{path}" if split_path(path)[0] else path for path in columns.files]
    return dataclasses.replace(columns, files=files)


def is_anothers(store: Store, key: str, commit: StoredCommit | None = None) -> bool:
    """Return True if another program wrote the `.metadata`, or the index of a model, at this place.

    `commit`: what is committed there, or was until now. Then `.metadata` that is only damaged is its own; and so is the
    index of a model that names only files of this library, which another program may have written without the seal.
    """
    if key == STOCK_METADATA_KEY:
        return is_foreign(store) if commit is None else is_saved_over(store, commit)
    seal = read_json_seal(store, key)
    if seal is None or is_sealed_json(seal):
        return False
    return commit is None or not is_model(commit) or not names_only_ours(store, key)


def is_model(commit: StoredCommit) -> bool:
    """Return whether a model was committed, also by the record of a damaged checkpoint, which may be replaced."""
    try:
        return commit.record.is_model
    except CheckpointError:
        return b'"layout":"safetensors"' in commit.raw


def names_only_ours(store: Store, key: str) -> bool:
    """Tell whether an index of a model names only files of this library."""
    try:
        raw = read_bytes(store, key, max_bytes=MAX_INDEX_BYTES)
        return all(map(is_our_name, parse_model_index(raw, url=store.url, key=key).values()))
    except (FormatError, IntegrityError, NotFound):  # also one that is too large
        return False


def put_stock_metadata(store: Store, commit: StoredCommit, stock_metadata: bytes | None) -> None:
    """Put the `.metadata` of a commit, or of what has replaced that meanwhile; None deletes an older one.

    Raises CheckpointError if the first put fails; what follows is `ckpt gc`'s to repeat.
    """
    _put_or_delete(store, stock_key(commit.record), stock_metadata, commit)
    follow_commit(store, commit)


def _put_or_delete(store: Store, key: str, stock_metadata: bytes | None, commit: StoredCommit) -> None:
    if stock_metadata is not None:
        store.put(key, CheckedBody(stock_metadata))
    elif not is_anothers(store, key, commit):
        store.delete([key])  # also if it is not there: storage that lags may not show it yet


def follow_commit(store: Store, described: StoredCommit) -> None:
    """Have `.metadata`, that of the commit `described`, be that of the commit that is there, if any.

    Whoever has put it or has removed its checkpoint calls this. Failures are logged.
    """
    try:
        if not is_there(store, described) and not _follow(store, described):
            _warn(store, "the records of the checkpoint that replaced it are not to be seen yet")
    except CheckpointError as error:
        _warn(store, error)


def _warn(store: Store, reason: object) -> None:
    text = "%s: .metadata, or the index of the model, may be that of a checkpoint that is gone (`ckpt gc` mends it): %s"
    _logger.warning(text, store.url, reason)


def is_there(store: Store, commit: StoredCommit) -> bool:
    """Tell whether this commit is still there, by one request; no other record begins with a whole one."""
    data = bytearray(len(commit.raw))
    try:
        store.read_into(COMMIT_KEY, 0, [memoryview(data)])
    except (NotFound, Truncated):
        return False
    return data == commit.raw


def _follow(store: Store, described: StoredCommit | None) -> bool:
    """Replace or delete `.metadata` until its commit is the one that is there; return whether it is."""
    for _ in range(_MAX_TRIES):
        commit = read_commit(store)
        if commit == described:
            return True
        old_key = "" if described is None else stock_key(described.record)
        if commit is not None:
            try:
                stock_metadata = stock_metadata_of(store, commit.record)
            except NotFound:  # replaced again, or not visible yet
                continue
            _put_or_delete(store, key := stock_key(commit.record), stock_metadata, commit)
            if old_key not in ("", key) and not is_anothers(store, old_key, described):
                store.delete([old_key])
        elif (
            described is not None
            and _is_removed(store, described)
            and not is_anothers(store, old_key, described)
        ):
            store.delete([old_key])
        described = commit
    return False


def _is_removed(store: Store, commit: StoredCommit) -> bool:
    """Tell whether a checkpoint is gone: its index too, not only its commit record out of sight."""
    return not exists(store, commit.record.described_by.path)


def stock_metadata_of(store: Store, record: CommitRecord) -> bytes | None:
    """Make the `.metadata` that belongs to a commit record; None if none does.

    Raises NotFound if its records are gone.
    """
    if not record.is_for_stock:
        return None
    ref = record.described_by
    data = bytes(read_bytes(store, ref.path, size_bytes=ref.size_bytes))
    if not record.has_index:  # format version 1 kept a copy
        return data
    objects = SiblingObjects(store)
    stored = functools.partial(manifest_bytes, store, record, lambda path: objects.stat(path).size_bytes)
    try:
        columns = decode_index(data, url=store.url, key=ref.path, manifest_bytes=stored)
    finally:
        objects.close()
    return encode_stock_metadata(record, columns)
