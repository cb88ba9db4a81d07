"""Return whether another program has saved over a checkpoint that is committed."""

from __future__ import annotations

from ckpt.backends.base import Store
from ckpt.consistency.commit import STOCK_METADATA_KEY, is_foreign
from ckpt.errors import CheckpointError, CommitConflict, NotFound
from ckpt.format.names import DATA_KEY_IN_BYTES, split_path
from ckpt.format.records import StoredCommit

_END_BYTES = 4 << 20

SAVED_OVER = (
    "another program (stock PyTorch?) saved over the checkpoint that is committed here: remove commit.json to load "
    "the newer one, or .metadata to load the older one; and save to a new place"
)


def is_saved_over(store: Store, commit: StoredCommit) -> bool:
    """Return whether `.metadata` is another program's: readers do not choose between that and the commit.

    Without the seal of this library it counts as damaged, and not as another program's, only if it names a data file
    that the commit lists, or is empty or zeros.
    """
    if not is_foreign(store):
        return False
    try:
        content = _ends(store)
    except NotFound:
        return False
    named = {match[0].rpartition(b"-")[0].decode() for match in DATA_KEY_IN_BYTES.finditer(content)}
    return bool(content.strip(b"\0")) and named.isdisjoint(_stems(commit))


def check_not_saved_over(store: Store, commit: StoredCommit) -> None:
    """Raise CommitConflict if another program has saved over a commit."""
    if is_saved_over(store, commit):
        raise CommitConflict(SAVED_OVER, url=store.url, key=STOCK_METADATA_KEY)


def _ends(store: Store) -> bytes:
    """Read `.metadata`, of a large one the first and last 4 MiB: names of files are in its second half."""
    size_bytes = store.stat(STOCK_METADATA_KEY).size_bytes
    head = bytearray(min(size_bytes, _END_BYTES))
    tail = bytearray(min(size_bytes - len(head), _END_BYTES))
    store.read_into(STOCK_METADATA_KEY, 0, [memoryview(head)])
    if tail:
        store.read_into(STOCK_METADATA_KEY, size_bytes - len(tail), [memoryview(tail)])
    return bytes(head + tail)


def _stems(commit: StoredCommit) -> set[str]:
    """List how the names of a commit's data files begin; of a damaged record none is known."""
    try:
        manifests = commit.record.manifests
    except CheckpointError:
        return set()
    return {split_path(ref.path)[1].removesuffix(".json") for ref in manifests}
