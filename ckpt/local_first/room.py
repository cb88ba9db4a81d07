"""Make room in a run's folder on a node: what is not needed there any more goes first."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import CheckpointError
from ckpt.format.records import read_commit
from ckpt.format.run_record import RunRecord, read_run
from ckpt.local_first.drain_process import current_status
from ckpt.tools.gc import collect_garbage
from ckpt.tools.remove import remove

_MARGIN = 1.05


def has_room(folder: str, budget_bytes: int | None, own: Collection[str] = ()) -> bool:
    """Tell whether a run's folder has room for one checkpoint more like the largest that it has.

    What the run has given up, and what is durable, is removed for it, the oldest first; before that, what saves have
    left that were killed. So no save may be under way. `own` are the folders of checkpoints that this process has saved
    and not superseded, whatever the record on the disk says of them. Raises OSError.
    """
    names = [entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False)]
    for name in names:
        if not os.path.exists(os.path.join(folder, name, COMMIT_KEY)):
            with contextlib.suppress(CheckpointError):
                collect_garbage(os.path.join(folder, name), grace_s=0.0, depth=0)
    sizes = {name: _size_bytes(os.path.join(folder, name)) for name in sorted(names)}
    needed = int(max(sizes.values(), default=0) * _MARGIN)
    states = current_status(folder)
    given_up = _given_up(folder).difference(own)
    spare = [path for path in sizes if path in states and states[path].state == "durable"]
    spare = [path for path in sizes if path in given_up] + spare
    while needed > _free_bytes(folder, budget_bytes, sum(sizes.values())):
        path = next((path for path in spare if path in sizes), None)
        if path is None:
            return False
        del sizes[path]
        with contextlib.suppress(CheckpointError):
            remove(os.path.join(folder, path))
    return True


def _given_up(folder: str) -> set[str]:
    """Find the folders of checkpoints that are not wanted any more."""
    with contextlib.suppress(CheckpointError), contextlib.closing(open_store(folder)) as store:
        record = read_run(store) or RunRecord()
        paths = [each.path for each in record.checkpoints if each.superseded]
        return {path for path in paths if not _is_foreign(PrefixStore(store, path), record.run)}
    return set()


def _is_foreign(store: Store, run: str) -> bool:
    """Tell whether a checkpoint of another run lies where this one has saved."""
    commit = read_commit(store)
    return commit is not None and run != "" and commit.record.run_id not in ("", run)


def _free_bytes(folder: str, budget_bytes: int | None, used_bytes: int) -> int:
    free_bytes = shutil.disk_usage(folder).free
    return free_bytes if budget_bytes is None else min(free_bytes, budget_bytes - used_bytes)


def _size_bytes(folder: str) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
