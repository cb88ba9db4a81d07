"""Commit checkpoints without data, in no time, for tests of what only looks at commits."""

from __future__ import annotations

import datetime
import pickle
import secrets
from pathlib import Path

from ckpt.backends.base import put_bytes
from ckpt.backends.posix import PosixStore
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.consistency.seal import seal_pickle
from ckpt.format.records import CommitRecord, ObjectRef, encode

EPOCH_S = 1_700_000_000
NO_METADATA = seal_pickle(pickle.dumps(None))


def commit_record(step: int | None, at_s: float, checkpoint_id: str) -> bytes:
    """Encode the commit of a save of `step` at `at_s` seconds since 1970."""
    created_at = datetime.datetime.fromtimestamp(at_s, datetime.timezone.utc)
    record = CommitRecord(
        id=checkpoint_id,
        created_at=created_at.isoformat(timespec="seconds"),
        library="",
        torch="",
        world_size=1,
        data_bytes=0,
        index=ObjectRef(path="none.index", size_bytes=0, crc64nvme="0" * 16),
        manifests=[],
        tags={} if step is None else {"step": str(step)},
    )
    return encode(record)


def commit(root: Path, path: str, step: int | None = None, *, at_s: float = 0.0, shown: bool = True) -> str:
    """Commit a checkpoint in a local folder, `at_s` seconds after all that is there; return its id.

    `shown`: also write `.metadata`, of nothing.
    """
    checkpoint_id = secrets.token_hex(8)
    record = commit_record(step, EPOCH_S + at_s, checkpoint_id)
    store = PosixStore(str(root / path), {"fsync": False})
    put_bytes(store, COMMIT_KEY, record)
    if shown:
        put_bytes(store, STOCK_METADATA_KEY, NO_METADATA)
    return checkpoint_id
