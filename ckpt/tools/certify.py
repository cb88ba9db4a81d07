"""Certify a live state by reading the checkpoint again: each rank its own regions, verified, and none of it kept."""

from __future__ import annotations

import dataclasses
import io
import os
import time
from collections.abc import Collection, Mapping
from contextlib import closing
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ckpt.collective import load_by, place_of
from ckpt.errors import LoadFailed, short_traceback
from ckpt.format.dcp_view import Chunks
from ckpt.format.names import last_segment
from ckpt.gc_pause import rare_gc
from ckpt.load_plans.local import read_items
from ckpt.options import LoadOptions
from ckpt.ranks.failures import same_failure
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.reading.reader import CheckpointReader
from ckpt.state.load_planner import StateLoadPlanner
from ckpt.state.optimizer_groups import names_in_groups
from ckpt.state.stored import structure_names
from ckpt.tools.certificate import Certificate, certificate_of
from ckpt.tools.live_compare import local_chunks
from ckpt.transfer.tensor_memory import plain


@short_traceback
def certify(
    state: Mapping[str, Any],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    memory_budget_bytes: int | None = None,
    trusted_objects: Collection[str] = (),
    timeout_s: float = DEFAULT_TIMEOUT_S,
    read_once: bool = True,
    expect: str | None = None,
    options: LoadOptions | None = None,
) -> Certificate:
    """Compare a live state with a checkpoint, on all ranks that hold parts of it; they need not be those that saved.

    Each rank reads its own regions, verified, into scratch that is reused; replicas read them once. Nothing of
    the state is changed. The arguments are those of `ckpt.load`; of `options`, names are taken by `rename`. All ranks
    return the same certificate, which lists what `strict`, `on_shape` and `allow_casts` would accept or refuse.

    Raises:
        DigestMismatch, NotFound, NotCommitted, IntegrityError, UnsafeContent, LoadFailed, ...: as `ckpt.load`.
    """
    began_s, place = time.monotonic(), place_of(url)

    def make_reader(ranks: Ranks) -> CheckpointReader:
        reader = CheckpointReader(
            url,
            storage_options=storage_options,
            threads=threads,
            memory_budget_bytes=memory_budget_bytes,
            trusted_objects=trusted_objects,
            timeout_s=timeout_s,
            expect=expect,
        )
        reader.use_ranks(ranks, read_once=read_once)
        reader.keep_nothing()
        return reader

    call = f"certificate of {last_segment(place)}"
    with rare_gc(), closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
        planner = _Planner(dataclasses.replace(options or LoadOptions(), strict=False))
        load_by(cast("dict[str, Any]", state), url, planner, make_reader, ranks)
        with same_failure(LoadFailed, place, ranks):
            own = ranks.together(call, lambda: certificate_of(planner.state_dict, planner))
        return dataclasses.replace(own, took_s=time.monotonic() - began_s).of_all(ranks)


class _Planner(StateLoadPlanner):
    """Plan to read the regions that the chunks of a state need, into tensors without memory."""

    def __init__(self, options: LoadOptions) -> None:
        super().__init__(options, records=True)
        self._without_memory: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def targets_for(
        self, state_dict: dict[str, Any], metadata: Metadata, texts: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the state itself, by stored names."""
        notes = {*structure_names(metadata)}
        objects = {name: value for name, value in texts.items() if name not in notes}
        self.plan_dry(state_dict, metadata, {name: texts[name] for name in notes}, objects)
        return self.live()

    def read_before(self, metadata: Metadata) -> list[str]:
        """List the names of parameters in groups too: they say which group of an optimizer is which."""
        return [*super().read_before(metadata), *names_in_groups(metadata)]

    def put_back(self) -> None:
        """Leave the state as it is."""

    def create_local_plan(self) -> LoadPlan:
        """Plan all that can be compared: names that the checkpoint has, of the kind and size that it has."""
        assert self.metadata is not None
        items: list[ReadItem] = []
        for name, value in self.state_dict.items():
            stored = self.metadata.state_dict_metadata.get(name)
            if isinstance(stored, TensorStorageMetadata):
                if isinstance(value, torch.Tensor) and value.size() == stored.size:
                    items += self._items(name, value, stored)
            elif stored is not None and not isinstance(value, torch.Tensor):
                index, nothing = MetadataIndex(name), torch.Size([0])
                items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return LoadPlan(items)

    def _items(self, name: str, value: torch.Tensor, stored: TensorStorageMetadata) -> list[ReadItem]:
        chunks: list[ChunkStorageMetadata] = []
        try:
            for begin, local in local_chunks(name, value):
                if (dense := plain(local)) is not None and dense.device.type != "meta":
                    chunk = ChunkStorageMetadata(torch.Size(begin), dense.size())
                    target = torch.empty(dense.size(), dtype=dense.dtype, device="meta")
                    self._without_memory[name, chunk.offsets] = target
                    chunks.append(chunk)
        except (ValueError, RuntimeError, NotImplementedError):
            return []  # the comparison reports it
        if isinstance(stored.chunks, Chunks):
            return read_items(name, stored.chunks.tensor, chunks)
        return create_read_items_for_chunk_list(name, stored, chunks)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        return self._without_memory[index.fqn, torch.Size(index.offset or ())]

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Drop an object: its digest is noted."""
