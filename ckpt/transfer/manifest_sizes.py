"""Sum the stored sizes of manifests, by which an index that expands very much is believed."""

from __future__ import annotations

from collections.abc import Callable

from ckpt.backends.base import Store
from ckpt.format.records import CommitRecord
from ckpt.transfer.threads import in_order, workers


def manifest_bytes(store: Store, record: CommitRecord, size_of: Callable[[str], int], needed: int) -> int:
    """Sum the sizes of as many manifests as are enough by the commit record, the largest first.

    `size_of` looks one up; all of them must be there.
    """
    sizes = {ref.path: ref.size_bytes for ref in record.manifests}
    todo, listed = [], 0
    for path in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if listed >= needed:
            break
        todo.append(path)
        listed += sizes[path]
    with workers(store.threads, "ckpt-manifest") as threads:
        return sum(in_order(threads, size_of, todo, ahead=4 * store.threads))
