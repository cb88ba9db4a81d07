"""Open what is committed at a place: a checkpoint of this library, or one of stock PyTorch."""

from __future__ import annotations

import contextlib

from ckpt.backends.base import Store, exists, read_bytes
from ckpt.consistency.commit import STOCK_METADATA_KEY, is_foreign
from ckpt.errors import (
    CommitConflict,
    IntegrityError,
    NotCommitted,
    NotFound,
    Truncated,
)
from ckpt.format.model_index import find_models
from ckpt.format.names import is_data_key
from ckpt.format.records import MAX_METADATA_BYTES, read_commit
from ckpt.format.saved_over import check_not_saved_over
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, read_listed
from ckpt.reading.latest import await_commit
from ckpt.reading.no_checkpoint import no_checkpoint

_OPEN_ATTEMPTS = 3
_MAX_RANKS = 1 << 20


def open_checkpoint(store: Store, settings: ReadSettings) -> Checkpoint:
    """Open the committed checkpoint at the store's root, or the stock checkpoint there.

    Raises:
        NotFound: nothing is stored there.
        NotCommitted: there are objects, but not (yet) a checkpoint.
        IntegrityError, FormatError, UnsafeContent: a record is damaged, unknown, or not safe.
        NotVisible: a listed object did not appear in time.
        CommitConflict: another program saved over a checkpoint of this library.
    """
    prompt = store.capabilities.cross_client_visibility
    commit = await_commit(store, 0.0 if prompt else settings.timeout_s(store))
    if commit is not None:
        check_not_saved_over(store, commit)
    for attempt in range(1, _OPEN_ATTEMPTS + 1):
        if commit is None:
            break
        try:
            ref = commit.record.described_by
            if settings.tally is not None:
                settings.tally.expect(ref.size_bytes)
            metadata = read_listed(store, settings, ref, commit)
            return Checkpoint(store, settings, commit, ref.path, bytes(metadata))
        except (IntegrityError, CommitConflict):
            # A save that replaces the checkpoint meanwhile can leave us with records of both.
            again = read_commit(store)
            if again == commit or attempt == _OPEN_ATTEMPTS:
                raise
            commit = again
    if is_foreign(store) and (checkpoint := _stock_checkpoint(store, settings)) is not None:
        return checkpoint
    raise no_checkpoint(store)


def open_parts(store: Store, settings: ReadSettings, *, models: bool = False) -> list[Checkpoint]:
    """Open a checkpoint, or all parts of a stock checkpoint; with `models` as `open_loadable`. Raises as that."""
    if (whole := (open_loadable if models else open_whole)(store, settings)) is not None:
        return [whole]
    parts = [open_rank_local(store, settings, 0)]
    with contextlib.suppress(NotFound):
        while len(parts) < _MAX_RANKS:
            parts.append(open_rank_local(store, settings, len(parts)))
    return parts


def open_whole(store: Store, settings: ReadSettings) -> Checkpoint | None:
    """Open as `open_checkpoint` does; return None for a stock checkpoint in parts, one a rank."""
    try:
        return open_checkpoint(store, settings)
    except (NotFound, NotCommitted):
        if not is_rank_local(store):
            raise
        return None


def open_loadable(store: Store, settings: ReadSettings) -> Checkpoint | None:
    """Open as `open_whole` does, or a folder of safetensors files of any program.

    Raises as that; ConfigurationError if there are several models.
    """
    if _may_skip_wait(store, settings) and (model := _open_model(store, settings)) is not None:
        return model
    try:  # first: where a commit may not be visible yet, a model may be what it was trained from
        return open_whole(store, settings)
    except (NotFound, NotCommitted):
        model = _open_model(store, settings)
        if model is None:
            raise
        return model


def _open_model(store: Store, settings: ReadSettings) -> Checkpoint | None:
    keys = find_models(store)
    if not keys:
        return None
    from ckpt.reading.model_folder import open_model  # torch is for who needs it

    return open_model(store, settings, keys)


def _may_skip_wait(store: Store, settings: ReadSettings) -> bool:
    """Tell whether a model of another program need not wait for a commit that storage may show late.

    Nobody asked for a wait, and no checkpoint is to be seen; `open_model` finds none beside a trace of a save.
    """
    lags = not store.capabilities.cross_client_visibility
    return (
        lags
        and settings.visibility_timeout_s is None
        and read_commit(store) is None
        and not is_rank_local(store)
    )


def open_rank_local(store: Store, settings: ReadSettings, rank: int) -> Checkpoint:
    """Open one rank's part of a stock checkpoint that was saved with `use_collectives=False`."""
    key = f"__{rank}{STOCK_METADATA_KEY}"
    return Checkpoint(store, settings, None, key, _read_replaceable(store, key))


def is_rank_local(store: Store) -> bool:
    """Tell whether a stock checkpoint in parts is there."""
    return exists(store, f"__0{STOCK_METADATA_KEY}")


def _stock_checkpoint(store: Store, settings: ReadSettings) -> Checkpoint | None:
    """Open the checkpoint that `.metadata` without our seal describes; None if it is ours."""
    key = STOCK_METADATA_KEY
    checkpoint = Checkpoint(store, settings, None, key, _read_replaceable(store, key))
    # A tool may have cut off the seal, but the names of the files are ours.
    files = (info.relative_path for info in checkpoint.metadata.storage_data.values())
    return None if any(is_data_key("/".join(file.split("/")[-2:])) for file in files) else checkpoint


def _read_replaceable(store: Store, key: str) -> bytes:
    """Read an object without a checksum: all of one version, though it may be replaced meanwhile."""
    for attempt in range(1, _OPEN_ATTEMPTS + 1):
        before = store.stat(key)
        try:
            data = bytes(read_bytes(store, key, max_bytes=MAX_METADATA_BYTES))
        except Truncated:
            if attempt == _OPEN_ATTEMPTS:
                raise
            continue
        if store.stat(key) == before:
            return data
    raise IntegrityError("keeps changing while it is read; is a save running here?", url=store.url, key=key)
