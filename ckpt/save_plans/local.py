"""Say what this rank holds, and see soon that it is the same as before."""

from __future__ import annotations

import dataclasses
import inspect
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Replicate, Shard

from ckpt.format.columns import Integers
from ckpt.format.dtypes import dtype_name
from ckpt.gc_pause import no_gc
from ckpt.geometry import FIELD, WRITE_ITEMS, attached
from ckpt.save_plans.rules import WHOLE, Rule, box_at
from ckpt.save_plans.sections import OBJECT, Held, Path, digest_of, encode_section, make_sections
from ckpt.save_plans.unplannable import tensors_named
from ckpt.torch_private import (
    ShardedTensor,
    StridedShard,
    caches_plans,
    flatten_sharded_tensors,
    local_tensor,
    plain_attributes,
    spec_of,
)

_MAX_REMEMBERED = 4


class Message(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds, as it tells the coordinator.

    Attributes:
        sections: digests of its sections, one after another.
        coordinates: of the rank in each mesh.
        rows: offsets and sizes of the chunks that follow from no rule, compressed.
        verdict: what its planner found out before, for the planner of the coordinator.
        to_lowest: whether the first of several replicas is to write.
        contents: of all sections, in small jobs.
    """

    sections: bytes
    coordinates: list[tuple[int, ...]]
    rows: bytes
    verdict: bytes
    to_lowest: bool
    contents: list[bytes] = []

    def structure(self) -> bytes:
        """Return what a plan depends on, apart from the verdict."""
        return msgspec.msgpack.encode((self.sections, self.coordinates, self.rows, self.to_lowest))

    def row_numbers(self) -> Integers:
        """Return offsets and sizes of its rows, one after another."""
        return np.frombuffer(zlib.decompress(self.rows) if self.rows else b"", dtype=np.int64)


_MESSAGE = msgspec.msgpack.Decoder(Message)  # made once, before there are threads


def decode_message(data: bytes) -> Message:
    return _MESSAGE.decode(data)


@dataclass(frozen=True, eq=False)
class Structure:
    """What this rank holds.

    Attributes:
        items: in the plan's order; each is numbered by the hint of its index.
        contents: of the sections, by digest.
        counts: items of each section.
    """

    items: list[WriteItem]
    message: Message
    contents: dict[bytes, bytes]
    counts: list[int]


@dataclass(eq=False)
class _Remembered:
    """A structure, and how a state looked that has it; `plans` are the agreed ones, by verdict."""

    signature: list[Any] | None
    mappings: Mapping[str, Any]
    structure: Structure
    plans: dict[bytes, tuple[int, list[WriteItem]]] = field(default_factory=dict)


class Memory:
    """The last structures of this process, and the plans that were agreed for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, _Remembered] = OrderedDict()

    def structure(
        self, planner: DefaultSavePlanner, check: Callable[[Sequence[WriteItem]], None]
    ) -> Structure:
        """Describe what a planner that was set up plans on this rank; `check` may refuse it."""
        with tensors_named(planner.state_dict), no_gc():
            known = self._alike(planner)
            if known is not None:
                return known
            return self.keep(describe(planner, check), _signature(planner), planner.mappings)

    def _alike(self, planner: DefaultSavePlanner) -> Structure | None:
        """Return the structure of a state that looked the same.

        What is noted for that is freed when this returns, while the collector pauses: it would go through all of it.
        """
        signature = _signature(planner) if self._known else None
        with self._lock:
            for known in self._known.values() if signature is not None else ():
                if known.signature == signature and known.mappings == planner.mappings:
                    return known.structure
        return None

    def keep(
        self,
        structure: Structure,
        signature: list[Any] | None = None,
        mappings: Mapping[str, Any] | None = None,
    ) -> Structure:
        """Remember a structure, and how the state looks that has it; return the equal one that was known before."""
        key = digest_of([structure.message.structure()])
        with self._lock:
            known = self._known.setdefault(key, _Remembered(None, {}, structure))
            known.signature, known.mappings = signature, mappings or {}
            self._known.move_to_end(key)
            while len(self._known) > _MAX_REMEMBERED:
                self._known.popitem(last=False)
            return known.structure

    def plan(self, structure: Structure, verdict: bytes) -> tuple[int, list[WriteItem]] | None:
        """Return the plan that was last agreed for a structure: its number, and the items to write."""
        with self._lock:
            known = self._find(structure)
            return None if known is None else known.plans.get(verdict)

    def remember(self, structure: Structure, verdict: bytes, number: int, items: list[WriteItem]) -> None:
        """Note a plan that was agreed."""
        with self._lock:
            if (known := self._find(structure)) is not None:
                known.plans = {verdict: (number, items)}

    def clear(self) -> None:
        with self._lock:
            self._known.clear()

    def _find(self, structure: Structure) -> _Remembered | None:
        return next((known for known in self._known.values() if known.structure is structure), None)


@contextmanager
def set_up_in_one_pass(planner: DefaultSavePlanner) -> Iterator[None]:
    """Let DCP's own planner, which is set up meanwhile, look for FSDP1's nested shards only if there are sharded tensors.

    It would go through the whole state a second time: of 4,620 tensors that takes 6 ms, more than all else that
    a later save does.
    """
    if type(planner) is not DefaultSavePlanner or not planner.flatten_state_dict:
        yield
        return
    wanted, planner.flatten_sharded_tensors = planner.flatten_sharded_tensors, False
    try:
        yield
    finally:
        planner.flatten_sharded_tensors = wanted
    if wanted and any(isinstance(value, ShardedTensor) for value in planner.state_dict.values()):
        planner.state_dict = flatten_sharded_tensors(planner.state_dict)


def plans_like_dcp(planner: object) -> bool:
    """Tell whether a planner plans as DCP's own; it may choose what is saved, and give other values for it."""
    if not isinstance(planner, DefaultSavePlanner) or caches_plans(planner):
        return False
    planning = (
        "create_local_plan",
        "create_global_plan",
        "_create_global_plan",
        "_dedup_save_plans",
        "finish_plan",
    )
    if "storage_meta" not in inspect.signature(planner.set_up_planner).parameters:
        return False  # of before torch 2.3
    return all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name) and name not in vars(planner)
        for name in planning
    )


# -- how a state looks -------------------------------------------------------------------------------------


def _signature(planner: DefaultSavePlanner) -> list[Any] | None:
    """Note what the plan of a state follows from; None if it holds what may plan its chunks itself.

    Of a tensor it notes values that nothing changes: not the tensor or its spec, which can change in place
    and would then still be equal to what was noted. Nor does it ask hooks of a tensor, but for those of a copy.
    """
    seen: list[Any] = [planner.flatten_state_dict, planner.dedup_save_to_lowest_rank, torch.is_grad_enabled()]
    with plain_attributes():
        for name, value in planner.state_dict.items():
            kind = type(value)
            if kind is DTensor:
                local, spec = local_tensor(value), spec_of(value)
                if type(local) not in _PLAIN or WRITE_ITEMS in value.__dict__:
                    return None
                if hasattr(local, WRITE_ITEMS):
                    if (geometry := attached(local)) is None:
                        return None
                    seen.append(geometry.key)
                seen += (
                    kind, name, value.shape, spec.mesh, spec.placements, value.requires_grad,
                    local.dtype, local.layout, local.requires_grad,
                )  # fmt: skip
            elif kind in _PLAIN:
                if hasattr(value, WRITE_ITEMS) or hasattr(value, FIELD):
                    if (geometry := attached(value)) is None:
                        return None
                    seen.append(geometry.key)
                seen += (kind, name, value.dtype, value.shape, value.requires_grad, value.layout)
            elif isinstance(value, torch.Tensor) or hasattr(value, WRITE_ITEMS):
                return None
            else:
                seen += (None, name)
    return seen


_PLAIN = (torch.Tensor, torch.nn.Parameter)


# -- what a rank holds -------------------------------------------------------------------------------------


def describe(planner: DefaultSavePlanner, check: Callable[[Sequence[WriteItem]], None]) -> Structure:
    """Describe what a planner that was set up plans on this rank."""
    items: list[WriteItem] = []
    helds: list[Held] = []
    rows: list[int] = []
    rules = _Rules()
    seen: set[tuple[str, tuple[int, ...] | None]] = set()
    with no_gc():
        plan = planner.create_local_plan()
        check(plan.items)
        for item in plan.items:
            key = item.index.fqn, None if item.index.offset is None else tuple(item.index.offset)
            if key in seen:
                continue
            seen.add(key)
            index = MetadataIndex(item.index.fqn, item.index.offset, len(items))
            items.append(dataclasses.replace(item, index=index))
            helds.append(_held(item, planner.state_dict.get(item.index.fqn), rules, rows))
    paths = [planner.mappings[item.index.fqn] for item in items] if planner.flatten_state_dict else None
    return assemble(items, helds, paths, rules.coordinates, rows, to_lowest=planner.dedup_save_to_lowest_rank)


def assemble(
    items: list[WriteItem],
    helds: Sequence[Held],
    paths: Sequence[Path] | None,
    coordinates: list[tuple[int, ...]],
    rows: Sequence[int],
    *,
    to_lowest: bool = False,
) -> Structure:
    """Put what is known of a rank's items together; `rows` are offsets and sizes of those that no rule describes."""
    sections = list(make_sections([item.index.fqn for item in items], helds, paths))
    encoded = [encode_section(section) for section in sections]
    message = Message(
        b"".join(digest for digest, _ in encoded),
        coordinates,
        zlib.compress(np.array(rows, dtype=np.int64).tobytes(), 1) if rows else b"",
        b"",
        to_lowest,
    )
    return Structure(items, message, dict(encoded), [len(section.names) for section in sections])


def _held(item: WriteItem, value: Any, rules: _Rules, rows: list[int]) -> Held:
    data = item.tensor_data
    if data is None:
        return OBJECT
    shape, offsets, sizes = tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes)
    rule: Rule | None = None
    if type(value) is DTensor:
        rule = rules.of(value, shape, offsets, sizes)
    elif sizes == shape and not any(offsets):
        rule = WHOLE
    if rule is None:
        rows += *offsets, *sizes
    return Held(dtype_name(data.properties.dtype), shape, bool(data.properties.requires_grad), rule)


class _Rules:
    """The meshes of a rank, and the rules of its DTensors."""

    def __init__(self) -> None:
        self.coordinates: list[tuple[int, ...]] = []
        self._numbers: dict[Any, int] = {}
        self._known: dict[Any, tuple[Rule, Any] | None] = {}

    def of(
        self, tensor: DTensor, shape: tuple[int, ...], offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> Rule | None:
        """Return the rule that gives just this chunk; None if there is none."""
        key = tensor.device_mesh, tensor.placements, shape
        if key not in self._known:
            rule = self._rule(tensor)
            self._known[key] = (
                None if rule is None else (rule, box_at(shape, rule, self.coordinates[rule.mesh]))
            )
        known = self._known[key]
        return known[0] if known is not None and known[1] == (offsets, sizes) else None

    def _rule(self, tensor: DTensor) -> Rule | None:
        mesh = tensor.device_mesh
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return None
        placements: list[int] = []
        strided: list[int] = []
        for number, placement in enumerate(tensor.placements):
            kind = type(placement)
            if kind not in (Replicate, Shard, StridedShard):
                return None
            placements.append(-1 if kind is Replicate else placement.dim)  # type: ignore[attr-defined]
            if kind is StridedShard:
                strided.append(number)
        if mesh not in self._numbers:
            self._numbers[mesh] = len(self.coordinates)
            self.coordinates.append(tuple(coordinate))
        return Rule(self._numbers[mesh], tuple(mesh.shape), tuple(placements), tuple(strided))
