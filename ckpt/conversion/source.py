"""What a conversion reads: tensors and objects by name, whatever holds them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.backends.base import ObjectStat, Store
from ckpt.errors import CommitConflict
from ckpt.format.fqns import Path
from ckpt.format.stored_tensor import StoredTensor
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.read_pieces import Piece, region_pieces
from ckpt.transfer.threads import thread_pool

__all__ = ["FileSource", "Region", "Source", "TensorFacts"]


@dataclass(frozen=True)
class TensorFacts:
    """A whole tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False


@dataclass(frozen=True)
class Region:
    """The part of a tensor at `offsets` that `target`, which has its shape, is to be filled with."""

    name: str
    offsets: Sequence[int]
    target: torch.Tensor


@dataclass
class Source(ABC):
    """A model or checkpoint of any format, opened; its data are read when they are asked for.

    Attributes:
        format: `ckpt`, `dcp`, `torch` or `safetensors`.
        identity: tells it from another one at the same place, on every rank alike.
        tensors, objects: by name, in the order of the source.
        paths: where each is in the nested state, where that is known.
        aliases: tensors that are the same memory as another one, and its name.
        tags: of a checkpoint of this library.
    """

    format: str
    url: str
    identity: str
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    objects: dict[str, None] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)

    def prepare(self, names: Collection[str]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Fetch what reading these will need, once, before many threads ask for it."""

    @abstractmethod
    def read(self, regions: Sequence[Region]) -> None:
        """Fill all targets, cast to their dtype. May be called from many threads."""

    @abstractmethod
    def load_object(self, name: str) -> Any:
        """A value of torch's safe types. Raises UnsafeContent where it is more than that."""

    @abstractmethod
    def stored_object(self, name: str) -> bytes:
        """The value as `torch.save` writes it."""

    def nested(self, values: Mapping[str, Any]) -> Any:
        """The source's own structure with these values in it; None where it has none of its own."""
        return None

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        """What stands beside the weights and belongs to the model: its configuration, its tokenizer."""
        yield from ()

    @abstractmethod
    def holds(self, url: str) -> bool:
        """Whether the file at a path or URL is a part of it."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CommitConflict if it was replaced since it was opened."""

    @abstractmethod
    def close(self) -> None: ...


class FileSource(Source):
    """A source whose tensors lie in files, dense or with steps, at places known beforehand."""

    def __init__(self, store: Store, files: Mapping[str, ObjectStat], *, format: str, url: str) -> None:
        facts = sorted((stat.key, stat.size_bytes, stat.version or "") for stat in files.values())
        super().__init__(format, url, repr(facts))
        self._store, self._stats = store, dict(files)
        self._files = {key: StoredFile(key, stat.size_bytes) for key, stat in files.items()}
        self._places: dict[str, tuple[str, StoredTensor]] = {}
        pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)
        self._fetcher = Fetcher(store, pool, lambda read: read())
        self._threads = thread_pool(store.threads, "ckpt-read")

    def read(self, regions: Sequence[Region]) -> None:
        pieces: dict[StoredFile, list[Piece]] = {}
        for region in regions:
            file, stored = self._places[region.name]
            found = pieces.setdefault(self._files[file], [])
            found += region_pieces(stored, region.offsets, region.target.shape, region.target)
        self._fetcher.run(pieces, self._threads)

    def holds(self, url: str) -> bool:
        root = self._store.url.rstrip("/")
        return os.path.realpath(url) in {os.path.realpath(f"{root}/{key}") for key in self._stats}

    def check_unchanged(self) -> None:
        for key, before in self._stats.items():
            now = self._store.stat(key)
            if (now.size_bytes, now.version) != (before.size_bytes, before.version):
                raise CommitConflict(
                    "was replaced while it was being converted", url=self._store.url, key=key
                )

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._store.close()
