"""Read checkpoints of this library and of stock DCP as a source of tensors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ckpt.backends.base import ObjectStat, Store, exists, read_bytes
from ckpt.conversion.source import Region, TensorFacts, TensorSource
from ckpt.errors import AccessDenied, CommitConflict, ConfigurationError, UnsafeContent
from ckpt.format.columns import ObjectRow
from ckpt.format.config_files import CONFIG_KEY
from ckpt.format.dtypes import dtype_name, is_quantized, torch_dtype
from ckpt.format.fqns import paths_of
from ckpt.format.records import MAX_METADATA_BYTES, read_commit
from ckpt.reading.slices import OpenCheckpoint


class CheckpointSource(TensorSource):
    """A checkpoint as a source. Raises ConfigurationError if each rank saved a part."""

    def __init__(self, checkpoint: OpenCheckpoint) -> None:
        url, parts = checkpoint.store.url, checkpoint.parts
        if len(parts) > 1:
            raise ConfigurationError(
                f"{len(parts)} ranks saved a part each (use_collectives=False); load it on as "
                "many ranks, save it again with collectives, and convert that",
                url=url,
            )
        self._open, self._part = checkpoint, parts[0]
        commit = self._part.commit
        super().__init__("dcp" if commit is None else "ckpt", url, self._part.identity)
        for name in checkpoint.names:
            entry = checkpoint.find(name)[3]
            if isinstance(entry, ObjectRow):
                self.objects.append(name)
            else:
                self.tensors[name] = TensorFacts(torch_dtype(entry.dtype), entry.size, entry.requires_grad)
        self.paths = paths_of(self._part.metadata.planner_data)
        self.tags = {} if commit is None else commit.tags

    def prepare(self, names: Collection[str]) -> None:
        for name, facts in self.tensors.items():
            if name in names and is_quantized(dtype_name(facts.dtype)):
                raise ConfigurationError(
                    f"{name[:200]!r} is quantized and cannot be converted; --exclude it, or dequantize and save it",
                    url=self.url,
                )
        self._open.prepare(names)

    def read(self, regions: Sequence[Region]) -> None:
        self._open.read_into([(region.name, region.offsets, region.target) for region in regions])

    def load_object(self, name: str) -> Any:
        try:
            return self._open.read_object(name)
        except UnsafeContent as error:
            advice = f"--exclude {name!r}"
            if error.fault != error.message:  # it has an advice of its own: what is refused is a class
                advice += ", or declare its class with torch.serialization.add_safe_globals"
            raise UnsafeContent(error.fault, advice=advice, url=error.url, key=error.key) from None

    def stored_object(self, name: str) -> bytes:
        return self._open.stored_object(name)

    def other_files(self) -> Iterator[tuple[Store, ObjectStat]]:
        # Without permission to list, a missing file is refused.
        with contextlib.suppress(AccessDenied):
            if self.model_folder is None and exists(self._open.store, CONFIG_KEY):
                self.model_folder = self._open.store
        yield from super().other_files()

    def holds(self, url: str) -> bool:
        """Tell whether a file exists in the checkpoint's folder."""
        root, path = os.path.realpath(self.url), os.path.realpath(url)
        return path.startswith(f"{root}/") and exists(self._open.store, path.removeprefix(f"{root}/"))

    def check_unchanged(self) -> None:
        part, store = self._part, self._open.store
        if part.commit is not None:
            unchanged = read_commit(store) == part.stored_commit
        else:
            metadata = read_bytes(store, part.metadata_key, max_bytes=MAX_METADATA_BYTES)
            unchanged = bytes(metadata) == part.metadata_bytes
        if not unchanged:
            raise CommitConflict("was replaced while it was being converted", url=self.url)
