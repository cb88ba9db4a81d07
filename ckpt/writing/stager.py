"""Stage states for asynchronous saves: copy them, with all that they hold, into memory that is reused."""

from __future__ import annotations

import copy
import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from ckpt.errors import CheckpointError
from ckpt.gc_pause import no_gc
from ckpt.geometry import Geometry, Offset, Place, Shard, loses_geometry, place_in
from ckpt.transfer.tensor_memory import copy_elements, flat_pairs, has_memory_view, plain
from ckpt.transfer.threads import share
from ckpt.writing.staging_memory import Blocks, Lease, SharedBlock, StagedState, tensor_in
from ckpt.writing.tensor_parts import parts_of, whole_copy, with_parts

_ALIGNMENT_BYTES = 64
_MAX_BLOCKS = 2
_RUN_BYTES = 16 << 20
_ATOMS = frozenset({int, float, complex, bool, str, bytes, type(None)})

_logger = logging.getLogger(__name__)

_Run = tuple[int, int, int]
"""Target address, source address, bytes."""


COMMON_MEMORY = Blocks(most=None)
"""The memory of all copies that are not made by a `Stager`."""


class CommonStager(AsyncStager):
    """Copy states to memory that the process uses again, for any number of saves at a time.

    `close` keeps that memory: DCP closes the stagers that it makes after each save.
    """

    _synchronize_after_execute = False  # a state is copied when `stage` returns
    _memory: Blocks | SharedBlock = COMMON_MEMORY

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Copy `state_dict`: tensors to CPU memory, everything else by `copy.deepcopy`.

        Raises CheckpointError if something cannot be copied, which it names.
        """
        return _staged(state_dict, self._memory)

    def stage_but(self, state_dict: dict[str, Any], kept: Iterable[torch.Tensor]) -> dict[str, Any]:
        """Copy as `stage` does all but the tensors `kept`, which the copy holds as they are."""
        return _staged(state_dict, self._memory, kept)

    def synchronize_staging(self) -> None:
        """Do nothing: the copy is complete when `stage` returns."""


class Stager(CommonStager):
    """Copy states to CPU memory that is reused; also for `dcp.async_save(async_stager=...)`.

    Only the bytes of each tensor are copied, whatever the size of the storage it is a view of;
    tensors that are the same view of the same memory are copied once. Two staged states can exist
    at a time, so that one can be copied while another is still being written; a third is a
    CheckpointError.

    Args:
        shared_memory: for saves by another process, which then needs no further copy. Only one
            staged state can exist at a time then.
    """

    def __init__(self, *, shared_memory: bool = False) -> None:
        self._memory = SharedBlock() if shared_memory else Blocks(_MAX_BLOCKS)

    def provide(self, space: Space) -> None:
        """Make memory ready for the copy of a first state that takes about this `space`, in the background.

        `stage` then takes no longer than for others. It waits for what is not ready yet.
        """
        self._memory.provide(space.nbytes, for_device=space.for_device)

    def lock_provided(self) -> None:
        """Let a GPU copy by itself to what was made ready, if it is; to be called by the thread that trains."""
        self._memory.ahead.lock()

    def forget_provided(self) -> None:
        """Release the memory that was made ready, and that nobody wanted."""
        self._memory.ahead.drop()

    def close(self) -> None:
        """Release the memory that no staged state uses; harmless to call twice."""
        self._memory.clear()


@dataclass(frozen=True)
class Space:
    """What the copy of a state takes: how much memory, and whether a GPU is to copy to it."""

    nbytes: int
    for_device: bool


def space_for(state_dict: Mapping[str, Any]) -> Space | None:
    """Tell what the copy of a state takes, and a little more; None if it cannot be copied, which `stage` will tell."""
    copies = _Copies()
    try:
        for name, value in state_dict.items():
            copies.find(value, str(name))
    except CheckpointError as error:
        _logger.info("no memory is made ready for the first copy: %s", error)
        return None
    return Space(copies.nbytes * 65 // 64, copies.from_device)


def _staged(
    state: Mapping[str, Any], memory: Blocks | SharedBlock, kept: Iterable[torch.Tensor] = ()
) -> StagedState:
    """Copy a state into `memory`. Raises CheckpointError if something in it cannot be copied."""
    # Copies made in inference mode would not be ordinary tensors.
    with torch.inference_mode(False), no_gc():
        copies = _Copies(kept)
        for name, value in state.items():
            copies.find(value, str(name))
        lease = memory.take(copies.nbytes, for_device=copies.from_device)
        copies.fill(lease)
        values = {name: copies.of(value, str(name)) for name, value in state.items()}
        if torch.accelerator.is_available():  # objects may have copied tensors of their own
            torch.accelerator.current_stream().synchronize()
        return StagedState(values, lease)


@dataclass(slots=True)
class _Place:
    """The place of a copy: the elements of `source`, from byte `offset` on in the staging memory."""

    source: torch.Tensor
    offset: int
    requires_grad: bool
    copied: torch.Tensor | None = None


@dataclass(slots=True)
class _Found:
    """A tensor of the state: it is made of parts, or has a place, or is copied as its class does it.

    `own` is the geometry that its copy gets; it is that of a DTensor if this is its local tensor.
    """

    tensor: torch.Tensor
    name: str
    parts: list[_Found] | None = None
    place: _Place | None = None
    own: _OwnGeometry | None = None


@dataclass(slots=True)
class _OwnGeometry:
    """A geometry, and where the copy has the memory of each chunk: in that of its tensor, or in a copy of its own."""

    geometry: Geometry
    shards: dict[Offset, Place | _Found]


class _Copies:
    """The copies of the tensors of a state, which get their memory all at once.

    What holds them is copied by `copy.deepcopy`, which finds their copies in its memo.
    """

    def __init__(self, kept: Iterable[torch.Tensor] = ()) -> None:
        """Tensors of `kept` are their own copies."""
        self.nbytes, self.from_device = 0, False
        self._places: dict[Any, _Place] = {}
        self._found: dict[int, _Found] = {}
        self._containers: dict[int, Any] = {}
        self._mappings: list[tuple[Mapping[Any, Any], dict[Any, Any], str]] = []
        self._memo: dict[int, Any] = {id(tensor): tensor for tensor in kept}

    def find(self, value: Any, name: str) -> None:
        """Note all tensors of `value`, also those in containers, and set a place for each."""
        if isinstance(value, torch.Tensor):
            if id(value) not in self._found and id(value) not in self._memo:
                try:
                    self._found[id(value)] = self._find_tensor(value, name)
                except Exception as error:
                    raise _not_copied(name, error) from error
        elif isinstance(value, dict | list | tuple | Mapping) and id(value) not in self._containers:
            self._containers[id(value)] = value
            items = dict(value if isinstance(value, Mapping) else enumerate(value))
            for key, item in items.items():
                if type(item) not in _ATOMS:
                    self.find(item, f"{name}.{key}")
            if isinstance(value, Mapping) and type(value) is not dict:
                self._mappings.append((value, items, name))  # inner ones first

    def _find_tensor(self, tensor: torch.Tensor, name: str) -> _Found:
        found = self._find_memory(tensor, name)
        if loses_geometry(tensor):
            # DTensors ask their local tensors.
            holder = found.parts[0] if found.parts and isinstance(tensor, DTensor) else found
            holder.own = self._find_geometry(Geometry.of(tensor, name), holder)
        return found

    def _find_geometry(self, geometry: Geometry, holder: _Found) -> _OwnGeometry:
        """Find the memory of all chunks; what is not that of the tensor gets a place of its own."""
        shards: dict[Offset, Place | _Found] = {}
        for offset, shard in geometry.shards.items():
            memory = plain(shard.memory)
            place = None
            if holder.place is not None and memory is not None:
                place = place_in(memory, holder.place.source)
            shards[offset] = self._find_memory(shard.memory, holder.name) if place is None else place
        return _OwnGeometry(geometry, shards)

    def _find_memory(self, tensor: torch.Tensor, name: str) -> _Found:
        parts = parts_of(tensor)
        if parts is not None:
            return _Found(tensor, name, parts=[self._find_memory(part, name) for part in parts])
        source = plain(tensor)
        if source is None or source.device.type == "meta":
            return _Found(tensor, name)
        layout = (
            source.dtype,
            tuple(source.shape),
            tuple(source.stride()),
            source.is_conj(),
            source.is_neg(),
        )
        key = (source.device, source.data_ptr(), tensor.requires_grad, *layout)
        if key not in self._places:
            self.nbytes += -self.nbytes % _ALIGNMENT_BYTES
            self._places[key] = _Place(source, self.nbytes, tensor.requires_grad)
            self.nbytes += source.nbytes
            self.from_device |= source.device.type != "cpu"
        return _Found(tensor, name, place=self._places[key])

    def fill(self, lease: Lease) -> None:
        """Make the copies of all tensors.

        A copy by torch uses all cores for each tensor and waits for the last of them, so memory is
        moved by threads that do not wait for each other. Copies from a device belong into the
        caller's stream.
        """
        runs: list[_Run] = []
        for place in self._places.values():
            source = place.source
            target = place.copied = tensor_in(lease, place.offset, source.dtype, source.shape)
            if has_memory_view(source):
                runs.append((target.data_ptr(), source.data_ptr(), source.nbytes))
            elif source.is_contiguous():
                copy_elements(source, target, non_blocking=True)
            else:
                for part, of_target in flat_pairs(source, 0, target.reshape(-1)):
                    copy_elements(part, of_target, non_blocking=True)
        share(_move, list(_batches(runs)), "ckpt-stage")
        for device in {place.source.device for place in self._places.values()}:
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
        for found in self._found.values():
            try:
                self._memo[id(found.tensor)] = self._copied(found)
            except Exception as error:
                raise _not_copied(found.name, error) from error
        for mapping, items, name in self._mappings:
            try:
                self._memo[id(mapping)] = self._copied_mapping(mapping, items)
            except Exception as error:
                raise _not_copied(name, error) from error

    def of(self, value: Any, name: str) -> Any:
        """Return the copy of a value in which all tensors were found."""
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            raise _not_copied(name, error) from error

    def _copied(self, found: _Found) -> torch.Tensor:
        tensor, place = found.tensor, found.place
        if found.parts is not None:
            copied = with_parts(tensor, [self._copied(part) for part in found.parts])
        elif place is None:
            copied = whole_copy(tensor)
        else:
            assert place.copied is not None
            copied = place.copied.requires_grad_() if place.requires_grad else place.copied
        return copied if found.own is None else self._with_geometry(copied, found.own)

    def _with_geometry(self, copied: torch.Tensor, own: _OwnGeometry) -> torch.Tensor:
        """Return a copy that answers by the geometry of its tensor, for its own memory."""
        if type(copied) is torch.Tensor:
            # Tensors of the same memory share a copy, but each has hooks of its own.
            copied = copied.detach().requires_grad_(copied.requires_grad)
        shards: dict[Offset, Shard] = {}
        for offset, found in own.shards.items():
            # Another tensor of the same memory: the copy would keep itself alive.
            memory = copied.detach() if isinstance(found, Place) else self._copied(found)
            shards[offset] = Shard(memory, found if isinstance(found, Place) else None)
        replace(own.geometry, shards=shards).attach(copied)
        return copied

    def _copied_mapping(self, mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
        """Copy a mapping, as one of its class if it is a dict and can be copied."""
        if isinstance(mapping, dict):
            before = len(self._memo)
            try:
                return copy.deepcopy(mapping, self._memo)
            except Exception:
                while len(self._memo) > before:  # what was half copied must not be taken for a copy
                    self._memo.popitem()
        return copy.deepcopy(items, self._memo)


def _not_copied(name: str, error: Exception) -> CheckpointError:
    if isinstance(error, CheckpointError):
        return error
    reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
    return CheckpointError(f"{name!r} cannot be copied: {reason}")


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Cut large runs and join small ones, to be moved at the same time."""
    batch: list[_Run] = []
    nbytes = 0
    for target, source, length in runs:
        for start in range(0, length, _RUN_BYTES):
            piece = min(_RUN_BYTES, length - start)
            if nbytes + piece > _RUN_BYTES and batch:
                yield batch
                batch, nbytes = [], 0
            batch.append((target + start, source + start, piece))
            nbytes += piece
    if batch:
        yield batch


def _move(batch: list[_Run]) -> None:
    for run in batch:
        ctypes.memmove(*run)
