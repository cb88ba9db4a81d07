"""Find out which checkpoints the nodes' disks hold together, and give each node the records of one."""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ckpt.backends.base import PutMode, Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.draining.marker import runs_of
from ckpt.errors import AlreadyExists, CheckpointError, NotFound, StorageError
from ckpt.format.names import ObjectName, rank_directory, split_path
from ckpt.format.own_objects import own_objects
from ckpt.format.records import CommitRecord, ManifestRef, StoredCommit, read_commit
from ckpt.format.run_record import RunRecord, read_run
from ckpt.local_first.drain_process import read_status
from ckpt.ranks.group import Ranks
from ckpt.reading.checkpoint import ReadSettings, read_listed
from ckpt.reading.latest import created_at_s, newest_first
from ckpt.siblings.sibling_objects import SiblingObjects

_logger = logging.getLogger(__name__)

_MAX_STEPS = 64
"""Of one node, the newest."""

_MAX_PARTIAL = 8
"""Checkpoints that are not whole, the newest, of which all nodes are asked for parts."""


@dataclass(frozen=True)
class Holding:
    """A checkpoint, of which some node's disk has the commit record.

    Attributes:
        step, path: of the run, and its folder.
        id: of its commit.
        created_at_s: when it was saved, by the clock of the rank that committed it.
        here: the manifests, by number, whose objects all are on some node's disk, as the bits of an integer.
        wanted: how many manifests there are.
        owner: the first rank that has the commit record and the index; None if none has both.
        is_completed: the durable place has what the nodes lack, if that `is_judged`.
        was_durable: a node's process has said that it became durable.
        run: the id of the run that saved it; empty if it names none.
    """

    step: int
    path: str
    id: str
    created_at_s: float
    here: int
    wanted: int
    owner: int | None
    is_completed: bool = False
    is_judged: bool = False
    was_durable: bool = False
    run: str = ""

    @property
    def is_whole(self) -> bool:
        """Tell whether the nodes have all of it."""
        return self.owner is not None and self.here.bit_count() == self.wanted

    @property
    def order(self) -> tuple[int, float, str]:
        return self.step, self.created_at_s, self.id


def holdings(root: str, ranks: Ranks) -> tuple[list[Holding], frozenset[str]]:
    """List what all nodes together have in their folders `root`, the newest first, and the runs that these name (`runs_of`).

    All ranks call it.
    """
    own: dict[tuple[str, str], Holding] = {}
    folders, runs = dict[str, int](), frozenset[str]()
    try:
        with contextlib.closing(open_store(root)) as store:
            states = read_status(root)
            done = {(path, each.id) for path, each in states.items() if each.state == "durable"}
            record = _run_of(store)
            runs = runs_of(store)
            folders = {path: step for step, path in newest_first(store.folders(), record)[:_MAX_STEPS]}
            for each in _of_node(store, folders, ranks.rank):
                own[each.path, each.id] = replace(each, was_durable=(each.path, each.id) in done)
    except Exception as error:  # a node without its disk does without; the others have theirs
        _logger.warning("what %s holds cannot be found out: %s", root, error)
    found, runs = ranks.join(
        (own, runs), lambda some, others: (_joined(some[0], others[0]), some[1] | others[1])
    )
    return _all_parts(found, root, ranks, own=folders), runs - {""} or runs


def holdings_of(root: str, path: str, ranks: Ranks) -> list[Holding]:
    """List what all nodes together have of the folder `path`, the newest save first. All ranks call it."""
    own: dict[tuple[str, str], Holding] = {}
    try:
        with contextlib.closing(open_store(root)) as store:
            folder = PrefixStore(store, path)
            if (commit := read_commit(folder)) is not None:
                each = _holding(folder, commit.record, 0, path, ranks.rank)
                own[path, each.id] = each
    except Exception as error:  # as above
        _logger.warning("what %s holds of %s cannot be found out: %s", root, path, error)
    return _all_parts(ranks.join(own, _joined), root, ranks)


def _all_parts(
    found: dict[tuple[str, str], Holding], root: str, ranks: Ranks, *, own: Collection[str] | None = None
) -> list[Holding]:
    """List the newest first; with the parts that lie on nodes without their commit record.

    A job that ends while its nodes commit, one after the other, leaves such nodes. `own` are the folders that this
    rank's node does not give up; default all.
    """
    ordered = sorted(found.values(), key=lambda each: each.order, reverse=True)
    partial = [each for each in ordered if each.owner is not None and not each.is_whole][:_MAX_PARTIAL]
    if not partial:
        return ordered
    commits = {
        each.id: data
        for each in partial
        if each.owner == ranks.rank and (data := _commit_of(root, each)) is not None
    }
    commits = ranks.join(commits, operator.or_)
    parts = {
        each.id: _parts_beside(root, each, commits[each.id])
        for each in partial
        if each.id in commits and (own is None or each.path in own)
    }
    parts = ranks.join(
        parts, lambda some, others: {key: some.get(key, 0) | others.get(key, 0) for key in some | others}
    )
    return [replace(each, here=each.here | parts.get(each.id, 0)) for each in ordered]


def _commit_of(root: str, holding: Holding) -> bytes | None:
    try:
        with contextlib.closing(open_store(root)) as store:
            commit = read_commit(PrefixStore(store, holding.path))
        return None if commit is None or commit.record.id != holding.id else commit.raw
    except Exception as error:
        _logger.warning("the commit record of %s cannot be read: %s", holding.path, error)
        return None


def _parts_beside(root: str, holding: Holding, commit: bytes) -> int:
    """Return the bits of the parts of a checkpoint that this node has, with its commit record or without."""
    try:
        with contextlib.closing(open_store(root)) as store:
            folder = PrefixStore(store, holding.path)
            record = StoredCommit(commit, folder.url).record
            return _bits_here(record, _sizes(folder, record))
    except Exception as error:  # as in `holdings`
        _logger.warning("what %s holds of %s cannot be found out: %s", root, holding.path, error)
        return 0


def _of_node(store: Store, folders: Mapping[str, int], rank: int) -> Iterator[Holding]:
    for path, step in folders.items():
        folder = PrefixStore(store, path)
        try:
            commit = read_commit(folder)
            if commit is not None:
                yield _holding(folder, commit.record, step, path, rank)
        except CheckpointError as error:
            _logger.warning("%s cannot be restored from this node: %s", path, error)


def _run_of(store: Store) -> RunRecord:
    try:
        return read_run(store) or RunRecord()
    except CheckpointError as error:
        _logger.warning("the record of the run on this node cannot be used: %s", error)
        return RunRecord()


def manifests_here(store: Store, record: CommitRecord) -> list[ManifestRef]:
    """List the manifests all files of which are on this node."""
    sizes = _sizes(store, record)
    return [ref for ref in record.manifests if _is_here(ref, sizes[ref.owner], of_model=record.is_model)]


def _sizes(store: Store, record: CommitRecord) -> dict[str, dict[str, int]]:
    sizes: dict[str, dict[str, int]] = {}
    with contextlib.closing(SiblingObjects(store)) as objects:
        for owner in ("", *record.owners):
            sizes[owner] = {}
            with contextlib.suppress(NotFound):
                sizes[owner] = {stat.key: stat.size_bytes for stat in objects.of(owner).list()}
    return sizes


def _holding(store: Store, record: CommitRecord, step: int, path: str, rank: int) -> Holding:
    sizes = _sizes(store, record)
    here = _bits_here(record, sizes)
    described = record.described_by
    has_records = sizes[""].get(described.path) == described.size_bytes
    made_s = created_at_s(record) or 0.0
    owner = rank if has_records else None
    return Holding(step, path, record.id, made_s, here, len(record.manifests), owner, run=record.run_id)


def _bits_here(record: CommitRecord, sizes: Mapping[str, dict[str, int]]) -> int:
    here = 0
    for number, ref in enumerate(record.manifests):
        if _is_here(ref, sizes[ref.owner], of_model=record.is_model):
            here |= 1 << number
    return here


def _is_here(ref: ManifestRef, sizes: Mapping[str, int], *, of_model: bool) -> bool:
    keys = ref.data_keys(of_model=of_model)
    if keys is None or sizes.get(split_path(ref.path)[1]) != ref.size_bytes:
        return False
    found_bytes = 0
    for key in keys:
        if key not in sizes:
            return False
        found_bytes += sizes[key]
    return found_bytes == ref.data_bytes


def _joined(
    some: dict[tuple[str, str], Holding], others: dict[tuple[str, str], Holding]
) -> dict[tuple[str, str], Holding]:
    both = dict(some)
    for key, other in others.items():
        known = both.get(key)
        if known is None:
            both[key] = other
        else:
            owners = [owner for owner in (known.owner, other.owner) if owner is not None]
            both[key] = replace(
                known,
                here=known.here | other.here,
                owner=min(owners, default=None),
                was_durable=known.was_durable or other.was_durable,
            )
    return both


@dataclass(frozen=True)
class Records:
    """The commit record of a checkpoint, and the object that describes its contents."""

    commit: bytes
    described: bytes

    @staticmethod
    def read(store: Store) -> Records:
        """Read them at the store's root. Raises NotFound, IntegrityError, FormatError."""
        commit = read_commit(store)
        if commit is None:
            raise NotFound("no checkpoint is committed here any more", url=store.url, key=COMMIT_KEY)
        settings = ReadSettings(visibility_timeout_s=0.0)
        return Records(commit.raw, bytes(read_listed(store, settings, commit.record.described_by, commit)))

    def keep(self, store: Store) -> None:
        """Put them where they are not: a node whose disk has neither has the files of its ranks, and no more.

        The commit record goes last. It says that all ranks have written all, so it may be on any node.

        Raises StorageError, IntegrityError.
        """
        commit = StoredCommit(self.commit, store.url)
        ref = commit.record.described_by
        before = read_commit(store)
        if before == commit:
            return
        name = ObjectName.parse(ref.path)
        store.prepare(rank_directory(0 if name is None else name.rank))
        with contextlib.suppress(AlreadyExists):
            put_bytes(store, ref.path, self.described, mode=PutMode.CREATE)
        put_bytes(store, COMMIT_KEY, self.commit)
        if before is not None and before.is_ours:
            _delete_replaced(store, before)


def completed_by(
    holding: Holding,
    root: str,
    far: str,
    storage_options: Mapping[str, Any] | None,
    ranks: Ranks,
    *,
    ask: Callable[[Callable[[], bool]], bool],
) -> bool:
    """Tell, on all ranks, whether what the nodes lack of a checkpoint was carried to `far` before. All ranks call it.

    `ask` is given what reads the durable place, and may give up on it.
    """
    if holding.owner is None:
        return False
    try:
        with contextlib.closing(open_store(root)) as store:
            records = shared(ranks, holding.owner, PrefixStore(store, holding.path), holding.id)
    except CheckpointError:  # the same on all ranks
        return False

    def look() -> bool:
        record = StoredCommit(records.commit, far).record
        with contextlib.closing(open_store(far, storage_options)) as store:
            sizes = {stat.key: stat.size_bytes for stat in store.list()}
        missing = [ref for number, ref in enumerate(record.manifests) if not holding.here >> number & 1]
        return all(not ref.owner and _is_here(ref, sizes, of_model=record.is_model) for ref in missing)

    try:
        return ranks.from_first(lambda: ask(look))
    except CheckpointError as error:
        _logger.warning(
            "step %d is not whole on the nodes, and not in the durable place: %s", holding.step, error
        )
        return False


def _delete_replaced(store: Store, before: StoredCommit) -> None:
    """Delete what this node has of a checkpoint that another one of the same step has replaced."""
    with contextlib.suppress(CheckpointError):
        store.delete(own_objects(store, before.record))


def shared(ranks: Ranks, owner: int, store: Store, commit_id: str | None = None) -> Records:
    """Return on all ranks the records that the rank `owner` reads. All ranks call it. Raises its error on all.

    With a `commit_id` they are those of that commit, and any other rank's node will do, if `owner` has not got them.
    """
    records, failure = _read_on(ranks, store, commit_id, reads=ranks.rank == owner)
    if records is None and commit_id is not None:
        records, _ = _read_on(ranks, store, commit_id, reads=True)
    if records is None:
        assert failure is not None
        raise failure
    return records


_Read = tuple[Records | None, CheckpointError | None]


def _read_on(ranks: Ranks, store: Store, commit_id: str | None, *, reads: bool) -> _Read:
    """Return on all ranks what the first rank reads that can, or why none can."""
    own: _Read = None, None
    if reads:
        try:
            records = Records.read(store)
            if commit_id not in (None, StoredCommit(records.commit, store.url).record.id):
                raise NotFound("another checkpoint is committed here", url=store.url, key=COMMIT_KEY)
            own = records, None
        except CheckpointError as error:
            own = None, error
        except Exception as error:
            own = None, StorageError(f"{type(error).__name__}: {error}", url=store.url)
    return ranks.join(own, _first_read)


def _first_read(some: _Read, others: _Read) -> _Read:
    return others if some[0] is None and (others[0] is not None or some[1] is None) else some
