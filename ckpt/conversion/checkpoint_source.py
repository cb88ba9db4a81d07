"""Read checkpoints of this library and of stock DCP as a source of tensors."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ckpt.backends.base import exists, read_bytes
from ckpt.conversion.locations import Guard
from ckpt.conversion.source import Region, TensorFacts, TensorSource
from ckpt.errors import CommitConflict, ConfigurationError, UnsafeContent
from ckpt.format.columns import ObjectRow, is_quantized
from ckpt.format.fqns import paths_of
from ckpt.format.records import read_commit
from ckpt.reading.slices import OpenCheckpoint
from ckpt.stock.metadata_reader import MAX_METADATA_BYTES


class CheckpointSource(TensorSource):
    """A checkpoint as a source.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, NotVisible: as
            `ckpt.inspect`.
        ConfigurationError: each rank saved a part, which only those ranks can put together.
    """

    def __init__(
        self, url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None, guard: Guard
    ) -> None:
        self._open = OpenCheckpoint(url, storage_options, guard=guard)
        try:
            if len(self._open.parts) > 1:
                raise ConfigurationError(
                    f"{len(self._open.parts)} ranks saved a part each (use_collectives=False); load it on as "
                    "many ranks, save it again with collectives, and convert that",
                    url=self._open.store.url,
                )
        except BaseException:
            self.close()
            raise
        part = self._open.parts[0]
        ours = part.commit is not None
        super().__init__("ckpt" if ours else "dcp", self._open.store.url, part.identity)
        for name in self._open.names:
            entry = self._open.find(name)[3]
            if isinstance(entry, ObjectRow):
                self.objects[name] = None
            else:
                self.tensors[name] = TensorFacts(entry.dtype, entry.size, entry.requires_grad)
        self.paths = paths_of(part.metadata.planner_data)
        self.tags = part.commit.tags if part.commit is not None else {}

    def prepare(self, names: Collection[str]) -> None:
        for name, facts in self.tensors.items():
            if name in names and is_quantized(facts.dtype):
                raise ConfigurationError(
                    f"{name[:200]!r} is quantized and cannot be converted; --exclude it, or dequantize and save it",
                    url=self.url,
                )
        part, fqns = self._open.parts[0], set(names)
        storage = part.metadata.storage_data
        part.prepare((info for index, info in storage.items() if index.fqn in fqns), self._open.threads)

    def read(self, regions: Sequence[Region]) -> None:
        self._open.read_into([(region.name, region.offsets, region.target) for region in regions])

    def load_object(self, name: str) -> Any:
        try:
            return self._open.read_object(name)
        except UnsafeContent as error:
            raise UnsafeContent(
                error.fault,
                advice=f"--exclude {name!r}, or declare its class with torch.serialization.add_safe_globals",
                url=error.url,
                key=error.key,
            ) from None

    def stored_object(self, name: str) -> bytes:
        return self._open.stored_object(name)

    def holds(self, url: str) -> bool:
        """Tell whether a file exists in the checkpoint's folder."""
        root, path = os.path.realpath(self.url), os.path.realpath(url)
        return path.startswith(f"{root}/") and exists(self._open.store, path.removeprefix(f"{root}/"))

    def check_unchanged(self) -> None:
        part, store = self._open.parts[0], self._open.store
        if part.commit is not None:
            unchanged = read_commit(store) == part.stored_commit
        else:
            metadata = read_bytes(store, part.metadata_key, max_bytes=MAX_METADATA_BYTES)
            unchanged = bytes(metadata) == part.metadata_bytes
        if not unchanged:
            raise CommitConflict("was replaced while it was being converted", url=self.url)

    def close(self) -> None:
        self._open.close()
