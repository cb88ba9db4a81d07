"""Read tensors and objects of any format by name, and stream them into files."""

from __future__ import annotations

import functools
import io
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.backends.base import ObjectStat, Store
from ckpt.errors import CommitConflict
from ckpt.format.config_files import list_config_files
from ckpt.format.elements import StoredTensor
from ckpt.format.fqns import Path
from ckpt.stock.safetensors_format import UnreadableTensor
from ckpt.transfer.boxes import flat_boxes
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.file_body import Due, StreamedPayload
from ckpt.transfer.pieces import Piece
from ckpt.transfer.read_pieces import region_pieces

_REGIONS_AT_ONCE = 4096
"""Planning takes some kilobytes a region, and a part can hold very many small tensors."""


@dataclass(frozen=True)
class Location:
    """An open folder, or one file of it (`key`, with its `stat` if it exists)."""

    folder: Store
    key: str | None = None
    stat: ObjectStat | None = None

    @property
    def url(self) -> str:
        return self.folder.url if self.key is None else f"{self.folder.url.rstrip('/')}/{self.key}"


@dataclass(frozen=True)
class TensorFacts:
    """A whole tensor's dtype and shape.

    Attributes:
        unreadable: of one that torch cannot hold; `dtype` and `shape` are then those of its bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False
    unreadable: UnreadableTensor | None = None


@dataclass(frozen=True)
class Region:
    """A region of a tensor, at `offsets`, and the `target` to fill, of the region's shape."""

    name: str
    offsets: Sequence[int]
    target: torch.Tensor


@dataclass
class TensorSource(ABC):
    """An open model or checkpoint of any format, whose data are read when they are asked for.

    Attributes:
        format: `ckpt`, `dcp`, `torch` or `safetensors`.
        identity: tells it from another one at the same place, on every rank alike.
        tensors, objects: by name, in the order of the source.
        paths: in the nested state, by name, where known.
        aliases: tensors that share memory with another one, and its name.
        unmade: objects of classes that are not known here, by name, and the class: they can be left out alone.
        tags: of a checkpoint of this library.
        model_folder: the folder whose other files belong to the model: its configuration, its
            tokenizer.
    """

    format: str
    url: str
    identity: str
    tensors: dict[str, TensorFacts] = field(default_factory=dict)
    objects: list[str] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    unmade: dict[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    model_folder: Store | None = None

    def prepare(self, names: Collection[str]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Fetch what reading these names needs, once, before many threads ask for it."""

    def check_readable(self, names: Iterable[str]) -> None:  # noqa: B027 (most hold tensors of torch only)
        """Raise FormatError for a tensor that torch cannot hold: to leave it out would make another model."""

    @abstractmethod
    def read(self, regions: Sequence[Region]) -> None:
        """Fill all targets, cast to their dtype. May be called from many threads."""

    def load_object(self, name: str) -> Any:
        """Load a value of torch's safe types. Raises UnsafeContent for any other."""
        raise NotImplementedError("files of this format hold no objects")

    def stored_object(self, name: str) -> bytes:
        """Return a value as `torch.save` writes it."""
        file = io.BytesIO()
        torch.save(self.load_object(name), file)
        return file.getvalue()

    def nested(self, values: Mapping[str, Any]) -> Any:
        """Put these values into the source's own structure; None if it has none of its own."""
        return None

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        """List small files directly in the model's folder that are not weights."""
        if self.model_folder is not None:
            for stat in list_config_files(self.model_folder):
                yield self.model_folder, stat

    @abstractmethod
    def holds(self, url: str) -> bool:
        """Tell whether the file at a path or URL is a part of the source."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CommitConflict if the source was replaced since it was opened."""

    def payload(
        self, name: str, dtype: torch.dtype, sizes: Sequence[int], offsets: Sequence[int] | None = None
    ) -> StreamedPayload:
        """Make the payload, row-major, of a whole tensor or a box of it; it is read when due."""
        return _TensorBox(self, name, dtype, sizes, offsets or (0,) * len(sizes))

    def read_due(self, due: Sequence[Due]) -> None:
        """Fill all memory that is due of a part, in few reads within bounded memory."""
        regions: list[Region] = []
        for payload, begin, memory in due:
            assert isinstance(payload, _TensorBox)
            flat = torch.frombuffer(memory, dtype=torch.uint8).view(payload.dtype)
            first, position = begin // payload.dtype.itemsize, 0
            for box in flat_boxes(payload.sizes, first, first + flat.numel()):
                shape = [part.stop - part.start for part in box]
                count = math.prod(shape)
                offsets = [o + part.start for o, part in zip(payload.offsets, box, strict=True)]
                regions.append(Region(payload.name, offsets, flat[position : position + count].view(shape)))
                position += count
        # In the source's order, of which neighbours are read together.
        regions.sort(key=lambda region: self._order[region.name])
        for start in range(0, len(regions), _REGIONS_AT_ONCE):
            self.read(regions[start : start + _REGIONS_AT_ONCE])

    @functools.cached_property
    def _order(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.tensors)}


class _TensorBox(StreamedPayload):
    def __init__(
        self,
        source: TensorSource,
        name: str,
        dtype: torch.dtype,
        sizes: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        super().__init__(math.prod(sizes) * dtype.itemsize, source.read_due)
        self.name, self.dtype, self.sizes, self.offsets = name, dtype, sizes, offsets


class FileSource(TensorSource):
    """A source whose tensors lie in files, dense or strided, at offsets known beforehand.

    Args:
        has_folder: the folder of the files is the model's, and other files in it belong to it.
    """

    def __init__(
        self,
        format: str,
        location: Location,
        files: Mapping[str, ObjectStat],
        threads: Executor,
        has_folder: bool,
    ) -> None:
        facts = sorted((stat.key, stat.size_bytes, stat.version or "") for stat in files.values())
        super().__init__(format, location.url, repr(facts))
        self._store, self._stats, self._threads = location.folder, files, threads
        self.model_folder = location.folder if has_folder else None
        self._files = {key: StoredFile(key, stat.size_bytes) for key, stat in files.items()}
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        self._fetcher = Fetcher(self._store, StagingPool(MIN_MEMORY_BUDGET_BYTES), lambda read: read())

    def read(self, regions: Sequence[Region]) -> None:
        pieces: dict[StoredFile, list[Piece]] = {}
        for region in regions:
            file, stored = self._stored[region.name]
            of_file = pieces.setdefault(self._files[file], [])
            of_file += region_pieces(stored, region.offsets, region.target.shape, region.target)
        self._fetcher.run(pieces.items(), self._threads)

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
