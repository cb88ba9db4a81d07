"""Read tensors and objects of any format by name, and stream them into files."""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.backends.base import ObjectStat, Store
from ckpt.conversion.locations import Location
from ckpt.errors import CommitConflict
from ckpt.format.fqns import Path
from ckpt.format.stored_tensor import StoredTensor
from ckpt.transfer.boxes import flat_boxes
from ckpt.transfer.buffer_pool import MIN_MEMORY_BUDGET_BYTES, StagingPool
from ckpt.transfer.fetcher import Fetcher, StoredFile
from ckpt.transfer.file_body import Due, StreamedPayload
from ckpt.transfer.read_pieces import Piece, region_pieces
from ckpt.transfer.threads import thread_pool

_REGIONS_AT_ONCE = 4096
"""Planning takes some kilobytes a region, and a part can hold very many small tensors."""

_NOT_OF_MODEL = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".index.json",
    ".distcp", ".ckpt-tmp",
)  # fmt: skip
_MAX_OTHER_BYTES = 256 << 20
_MAX_OTHER_FILES = 1000


@dataclass(frozen=True)
class TensorFacts:
    """A whole tensor's dtype and shape."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    requires_grad: bool = False


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
        """Fetch what reading these names needs, once, before many threads ask for it."""

    @abstractmethod
    def read(self, regions: Sequence[Region]) -> None:
        """Fill all targets, cast to their dtype. May be called from many threads."""

    @abstractmethod
    def load_object(self, name: str) -> Any:
        """Load a value of torch's safe types. Raises UnsafeContent for any other."""

    @abstractmethod
    def stored_object(self, name: str) -> bytes:
        """Return a value as `torch.save` writes it."""

    def nested(self, values: Mapping[str, Any]) -> Any:
        """Put these values into the source's own structure; None if it has none of its own."""
        return None

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        """List other files of the model: its configuration, its tokenizer."""
        yield from ()

    @abstractmethod
    def holds(self, url: str) -> bool:
        """Tell whether the file at a path or URL is a part of the source."""

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CommitConflict if the source was replaced since it was opened."""

    @abstractmethod
    def close(self) -> None: ...


class FileSource(TensorSource):
    """A source whose tensors lie in files, dense or strided, at offsets known beforehand.

    Args:
        has_folder: the folder of the files is the model's, and other files in it belong to it.
    """

    def __init__(
        self, location: Location, files: Mapping[str, ObjectStat], *, format: str, url: str, has_folder: bool
    ) -> None:
        facts = sorted((stat.key, stat.size_bytes, stat.version or "") for stat in files.values())
        super().__init__(format, url, repr(facts))
        self._location, self._has_folder, self._store = location, has_folder, location.folder
        self._stats = dict(files)
        self._files = {key: StoredFile(key, stat.size_bytes) for key, stat in files.items()}
        self._stored: dict[str, tuple[str, StoredTensor]] = {}
        pool = StagingPool(MIN_MEMORY_BUDGET_BYTES)
        self._fetcher = Fetcher(self._store, pool, lambda read: read())
        self._threads = thread_pool(self._store.threads, "ckpt-read")

    def read(self, regions: Sequence[Region]) -> None:
        pieces: dict[StoredFile, list[Piece]] = {}
        for region in regions:
            file, stored = self._stored[region.name]
            of_file = pieces.setdefault(self._files[file], [])
            of_file += region_pieces(stored, region.offsets, region.target.shape, region.target)
        self._fetcher.run(pieces, self._threads)

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        """List small files directly in the model's folder that are not weights."""
        if not self._has_folder:
            return
        keys = [stat.key for stat in self._store.list() if "/" not in stat.key and stat.key[0] != "."]
        for key in sorted(keys)[:_MAX_OTHER_FILES]:
            if not key.endswith(_NOT_OF_MODEL) and key != "commit.json":
                stat = self._store.stat(key)  # a listing describes a link, not its target
                if stat.size_bytes <= _MAX_OTHER_BYTES:
                    yield self._store, stat

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
        self._location.close()


class TensorStream:
    """Read the tensors of a source as payloads of files, part by part when each part is due."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._order = {name: number for number, name in enumerate(source.tensors)}

    def box(
        self, name: str, offsets: Sequence[int], sizes: Sequence[int], dtype: torch.dtype
    ) -> StreamedPayload:
        """Make the payload of a box of a tensor, dense and row-major, in any dtype."""
        return _TensorBox(self, name, offsets, sizes, dtype)

    def whole(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> StreamedPayload:
        """Make the payload of a whole tensor."""
        return _TensorBox(self, name, (0,) * len(shape), shape, dtype)

    def read(self, due: Sequence[Due]) -> None:
        """Fill all memory that is due of a part, in few reads within bounded memory."""
        regions: list[Region] = []
        for payload, begin, memory in due:
            assert isinstance(payload, _TensorBox)
            if not memory.nbytes:
                continue
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
            self._source.read(regions[start : start + _REGIONS_AT_ONCE])


class _TensorBox(StreamedPayload):
    def __init__(
        self,
        stream: TensorStream,
        name: str,
        offsets: Sequence[int],
        sizes: Sequence[int],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(math.prod(sizes) * dtype.itemsize, stream.read)
        self.name, self.offsets, self.sizes, self.dtype = name, tuple(offsets), tuple(sizes), dtype
