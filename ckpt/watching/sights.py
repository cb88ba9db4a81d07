"""Look at a root again and again, and tell which checkpoints are committed there.

Names come from a listing and from the run's record; the commit record in each folder decides. Once
all folders were seen, a look costs the listing, the run's record, and a bounded number of folders.
"""

from __future__ import annotations

import heapq
import itertools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ckpt.backends.base import ObjectStat, Store, is_key
from ckpt.backends.wrapper import PrefixStore, folder_of
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.errors import AccessDenied, CheckpointError, FormatError, IntegrityError, NotFound, StorageError
from ckpt.format.names import MODEL_INDEX_KEY, is_rank_directory, step_of
from ckpt.format.records import CommitRecord, read_commit
from ckpt.format.run_record import RUN_KEY, read_run
from ckpt.reading.latest import created_at_s, is_stock
from ckpt.transfer.threads import in_order, workers

_logger = logging.getLogger(__name__)

_LOOKS = 64
"""Folders with a checkpoint, and folders without, that are looked at again in one look."""


@dataclass(frozen=True)
class WatchedCheckpoint:
    """A durable checkpoint.

    Attributes:
        path: relative to the root; empty for the root itself.
        url: where it is, without credentials.
        id: names the save. Another save in the same folder has another one.
        step: the tag `step`, or the number in the folder's name.
        created_at_s: seconds since 1970, by the clock of the process that wrote it.
        size_bytes, world_size: of the data, and of the job that saved it; None of stock checkpoints.
        is_stock: another program wrote it, such as stock PyTorch.
    """

    path: str
    url: str
    id: str
    step: int | None
    created_at_s: float | None
    size_bytes: int | None = None
    world_size: int | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    is_stock: bool = False


@dataclass(frozen=True)
class Sight:
    """A checkpoint, and the object that made it one as it was then.

    Attributes:
        stock_key: what other programs look for, which is put after the commit; empty if they made it,
            or if it was left out.
    """

    checkpoint: WatchedCheckpoint
    stat: ObjectStat
    stock_key: str = ""

    @property
    def order(self) -> tuple[float, int, float, str]:
        """Sort by the time of the commit, which has whole seconds, then by step."""
        each = self.checkpoint
        step = -1 if each.step is None else each.step
        return each.created_at_s or 0.0, step, self.stat.modified_at_s or 0.0, each.path


class Sights:
    """Know the folders of a root, and the checkpoint in each as it was last seen.

    Attributes:
        looks: how often the root was looked at.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Sight] = {}
        self._looked: dict[str, int] = {}  # the number of the look that saw the folder last
        self._saved_at_s: dict[str, float] = {}
        self._told: set[str] = set()
        self.looks = 0

    def look(self, *, everywhere: bool) -> Iterator[Sight]:
        """Look at the root; yield checkpoints that are new, or were not so when last seen.

        Args:
            everywhere: look into all folders, not only at a bounded number of those seen before.

        Raises AccessDenied, and what else hides the root.
        """
        self.looks += 1
        saved_at_s = self._recorded()
        names = {"", *saved_at_s}
        folders = itertools.chain(self._store.folders(), self._store.links())
        names |= {name for name in folders if is_key(name) and not is_rank_directory(name)}
        due = names if everywhere else self._due(names, saved_at_s)
        self._forget(names)
        with workers(self._store.threads, "ckpt-watch") as threads:
            seen = in_order(threads, self._see, sorted(due), ahead=4 * self._store.threads)
            for path, known in seen:
                before = self._known.pop(path, None)
                self._looked[path] = self.looks
                if known is None:
                    continue
                self._known[path] = known
                if before is None or before.checkpoint.id != known.checkpoint.id:
                    yield known
        self._saved_at_s = saved_at_s  # after all went well: else they are due again

    def names(self) -> set[tuple[str, str]]:
        """List path and id of each checkpoint that was there when last seen."""
        return {(path, known.checkpoint.id) for path, known in self._known.items()}

    def is_there(self, checkpoint: WatchedCheckpoint) -> bool:
        """Tell whether a checkpoint is still there, neither removed nor replaced."""
        _, known = self._see(checkpoint.path)
        return known is not None and known.checkpoint.id == checkpoint.id

    def is_readable_by_others(self, sight: Sight, *, surely: bool) -> bool:
        """Tell whether other programs can read a checkpoint.

        Args:
            surely: if what they look for is older than the commit, it is that of a replaced save.
        """
        if not sight.stock_key:
            return True
        try:
            stat = folder_of(self._store, sight.checkpoint.path).stat(sight.stock_key)
        except NotFound:
            return False
        return not surely or (stat.modified_at_s or 0.0) >= (sight.stat.modified_at_s or 0.0)

    def offer_again(self, checkpoint: WatchedCheckpoint) -> None:
        """Have the next look yield a checkpoint if it is there."""
        self._known.pop(checkpoint.path, None)
        self._looked.pop(checkpoint.path, None)

    def _recorded(self) -> dict[str, float]:
        """Read the run's record: folders, and when the save in each began."""
        try:
            record = read_run(self._store)
        except (FormatError, IntegrityError) as error:
            self._tell_once(RUN_KEY, "the run's record cannot be used, its checkpoints are listed: %s", error)
            return {}
        return {} if record is None else {each.path: each.saved_at_s for each in record.checkpoints}

    def _due(self, names: set[str], saved_at_s: Mapping[str, float]) -> set[str]:
        due = {name for name in names if name not in self._looked}
        due |= {path for path, at_s in saved_at_s.items() if self._saved_at_s.get(path) != at_s}
        for is_known in (True, False):
            rest = (name for name in names - due if (name in self._known) == is_known)
            due |= set(heapq.nsmallest(_LOOKS, rest, key=lambda name: (self._looked[name], name)))
        return due

    def _forget(self, names: set[str]) -> None:
        """Forget folders that are gone: what is kept is bounded by what there is."""
        self._told &= {*names, RUN_KEY}
        for kept in (self._known, self._looked):
            for name in kept.keys() - names:
                del kept[name]

    def _see(self, path: str) -> tuple[str, Sight | None]:
        try:
            return path, self._checkpoint_in(folder_of(self._store, path))
        except NotFound:  # removed meanwhile
            return path, None
        except CheckpointError as error:
            is_denied = isinstance(error, AccessDenied)
            # A folder that only its owner may open hides no others; a bucket that denies does.
            if isinstance(error, StorageError) and not (is_denied and self._store.directory):
                raise
            self._tell_once(path, "passed over: %s", error)
            return path, None

    def _checkpoint_in(self, folder: PrefixStore) -> Sight | None:
        before = self._known.get(folder.path)
        try:
            stat = folder.stat(COMMIT_KEY)
        except NotFound:
            return _stock_checkpoint(folder, before)
        # Else this client may have been told of a new object, and be shown an old one.
        is_prompt = folder.capabilities.cross_client_visibility
        if before is not None and before.stat == stat and is_prompt:
            return before
        commit = read_commit(folder)
        if commit is None or not commit.is_ours:
            return _stock_checkpoint(folder, before)
        record = commit.record
        stock_key = MODEL_INDEX_KEY if record.is_model else STOCK_METADATA_KEY
        return Sight(_described(folder, record), stat, stock_key if record.is_for_stock else "")

    def _tell_once(self, about: str, text: str, error: CheckpointError) -> None:
        if about not in self._told:
            self._told.add(about)
            _logger.warning(text, error)


def _described(folder: PrefixStore, record: CommitRecord) -> WatchedCheckpoint:
    return WatchedCheckpoint(
        path=folder.path,
        url=folder.url,
        id=record.id,
        step=record.step(folder.path or folder.url),
        created_at_s=created_at_s(record),
        size_bytes=record.data_bytes,
        world_size=record.world_size,
        tags=record.tags,
    )


def _stock_checkpoint(folder: PrefixStore, before: Sight | None) -> Sight | None:
    for key in (STOCK_METADATA_KEY, f"__0{STOCK_METADATA_KEY}"):  # the second without collectives
        try:
            stat = folder.stat(key)
        except NotFound:
            continue
        if before is not None and before.stat == stat:
            return before
        if not is_stock(folder):
            return None
        # It has no id, and two saves of one model can have equal metadata: the time tells them apart.
        name = f"{stat.size_bytes}-{stat.modified_at_s}-{stat.version or ''}"
        step = step_of(folder.path or folder.url)
        checkpoint = WatchedCheckpoint(folder.path, folder.url, name, step, stat.modified_at_s, is_stock=True)
        return Sight(checkpoint, stat)
    return None
