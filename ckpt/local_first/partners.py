"""Keep copies of what each node has on another node's disk, so that a lost node loses nothing."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckpt.backends.base import Store
from ckpt.backends.bodies import CheckedBody
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.draining.carry import Share, files_of, put_once
from ckpt.errors import CheckpointError, NotFound
from ckpt.format.names import rank_directory
from ckpt.format.records import ManifestRef, ObjectRef, decode_manifest, read_commit
from ckpt.local_first.holdings import manifests_here
from ckpt.local_first.neighbours import Neighbours, NeighbourStore
from ckpt.ranks.group import Ranks
from ckpt.reading.checkpoint import ReadSettings, read_listed
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.fetcher import at_once
from ckpt.transfer.relay_bodies import VerifiedBody
from ckpt.transfer.threads import workers

_logger = logging.getLogger(__name__)


_AT_ONCE = 2
_SETTINGS = ReadSettings(visibility_timeout_s=0.0)


@dataclass(frozen=True)
class Node:
    """A disk, and the ranks that share it.

    Attributes:
        domain: what fails together with it, such as a rack; empty if that is not known.
        has: by the id of its commit, of each checkpoint that is not durable, the manifests whose files are here, and
            the ranks that wrote them.
    """

    ranks: tuple[int, ...]
    domain: str = ""
    has: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def joined(self, other: Node) -> Node:
        return replace(self, ranks=tuple(sorted({*self.ranks, *other.ranks})), has={**self.has, **other.has})


def meet(ranks: Ranks, disk: str, own: Node) -> list[Node]:
    """Return all nodes, in the order of their first ranks. All ranks call it; `disk` is what tells nodes apart."""
    nodes = ranks.join({disk: own}, _joined)
    return sorted(nodes.values(), key=lambda node: node.ranks)


def undurable(root: str, is_durable: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """List what this node has of checkpoints that are not durable yet, as `Node.has`.

    Args:
        is_durable: by the folders of durable checkpoints, the ids of their commits.
    """
    found: dict[str, dict[str, int]] = {}
    with contextlib.closing(open_store(root)) as store:
        for path in store.folders():
            with contextlib.suppress(CheckpointError):
                folder = PrefixStore(store, path)
                commit = read_commit(folder)
                if commit is not None and is_durable.get(path) != commit.record.id:
                    refs = manifests_here(folder, commit.record)
                    found[commit.record.id] = {ref.path: ref.rank for ref in refs}
    return found


def share_of(node: Node, nodes: Sequence[Node]) -> Share:
    """Choose the files that a node carries to the durable place, of all that it has: each has one that carries it."""
    first: dict[str, dict[str, tuple[bool, tuple[int, ...]]]] = {}
    for each in nodes:
        for commit_id, has in each.has.items():
            known = first.setdefault(commit_id, {})
            for path, rank in has.items():
                order = rank not in each.ranks, each.ranks
                known[path] = min(order, known.get(path, order))
    # A node without the record may be given it, and then has what none of those has that have it now.
    left = {
        commit_id: frozenset(path for path, (_, ranks) in known.items() if ranks != node.ranks)
        for commit_id, known in first.items()
    }
    return Share(frozenset(node.ranks), left)


def sources_of(rank: int, nodes: Sequence[Node]) -> tuple[int, ...]:
    """Choose the ranks of which this one keeps copies: those of one other node, of another failure domain if possible.

    Each node keeps the copies of one other. Nodes of one domain follow each other in the ring, and each
    passes its copies on by as many nodes as the largest domain has.
    """
    ring = sorted(nodes, key=lambda node: (node.domain, node.ranks))
    if len(ring) == 1:
        return ()
    sizes = Counter(node.domain for node in ring)
    shift = max(sizes.values()) if len(sizes) > 1 and max(sizes.values()) < len(ring) else 1
    here = next(number for number, node in enumerate(ring) if rank in node.ranks)
    own, theirs = ring[here].ranks, ring[here - shift].ranks
    return tuple(each for number, each in enumerate(theirs) if number % len(own) == own.index(rank))


def shared_domains(nodes: Sequence[Node]) -> str:
    """Say why copies would be lost together with what they are copies of; empty if they are not."""
    if len(nodes) == 1:
        return "all ranks share one disk"
    sizes = Counter(node.domain for node in nodes)
    domain, most = sizes.most_common(1)[0]
    if domain and 2 * most > len(nodes):
        return f"{most} of {len(nodes)} nodes are in the failure domain {domain!r}"
    return ""


@dataclass(frozen=True)
class Copied:
    """What became of the copies of a save.

    Attributes:
        nbytes: that this rank has copied.
        failure: of a rank that could not copy.
    """

    nbytes: int = 0
    took_s: float = 0.0
    failure: str = ""


def copy_from_partners(url: str, sources: Collection[int], ranks: Ranks) -> Copied:
    """Copy to this node what the ranks `sources` have saved to theirs. All ranks call it; it raises nothing.

    Args:
        url: the checkpoint on this node, which is committed.
    """
    began_s, nbytes, failure = time.monotonic(), 0, ""
    try:
        with contextlib.closing(open_store(url)) as here:
            neighbours = Neighbours(ranks, here, None, work="copying to partners")
            try:
                nbytes = _copy(here, neighbours, sources)
            except Exception as error:
                failure = f"rank {ranks.rank}: {error}"
            neighbours.leave()
        failure = ranks.join(failure, lambda one, other: one or other)
    except Exception as error:  # of the group: what was saved is there nevertheless
        failure = failure or f"rank {ranks.rank}: {error}"
    return Copied(nbytes, time.monotonic() - began_s, failure)


def _copy(here: Store, neighbours: Neighbours, sources: Collection[int]) -> int:
    commit = read_commit(here)
    if commit is None:
        raise NotFound("no checkpoint is committed here any more", url=here.url, key=COMMIT_KEY)
    there, pool = NeighbourStore(neighbours, here), StagingPool(MIN_MEMORY_BUDGET_BYTES)

    def copy(ref: ObjectRef) -> bytearray:
        """Copy the files of a manifest, and then it: so what has the manifest has all."""
        assert isinstance(ref, ManifestRef)
        data = read_listed(there, _SETTINGS, ref, commit)
        manifest = decode_manifest(data, url=here.url, key=ref.path)
        here.prepare(rank_directory(ref.rank))
        for file in files_of(ref, manifest):
            put_once(here, file.key, VerifiedBody(there, file, pool, _no_check, at_once))
        put_once(here, ref.path, CheckedBody(data))
        return data

    wanted = [ref for ref in commit.record.own_manifests if ref.rank in sources]
    with workers(_AT_ONCE, "ckpt-copy") as threads:
        neighbours.records(wanted, copy, threads)
    return sum(ref.data_bytes for ref in wanted)


def _no_check() -> None:
    """Nothing ends a copy early."""


def _joined(some: dict[str, Node], others: dict[str, Node]) -> dict[str, Node]:
    both = dict(some)
    for disk, other in others.items():
        both[disk] = both[disk].joined(other) if disk in both else other
    return both
