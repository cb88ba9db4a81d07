"""Plan only what changed: leave out of DCP's plans what is carried."""

from __future__ import annotations

import dataclasses
import inspect
import io
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt.errors import BaseGone, CheckpointError, ConfigurationError
from ckpt.format.columns import TensorColumns
from ckpt.format.dtypes import dtype_name
from ckpt.references.base import UNFIT, Base
from ckpt.references.digests import Digests
from ckpt.references.owners import MAX_OWNERS, choose_entries, sum_by_owner
from ckpt.references.request import References
from ckpt.transfer.threads import workers
from ckpt.writing.layout import resolved_tensor

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Verdict:
    """What one rank has found: the rows of the base that it compared, and that are equal, by entry."""

    equal: dict[str, list[int]]


@dataclass(frozen=True)
class Sure:
    """Entries that are carried whatever a comparison says, if the state has them, and their owners."""

    entries: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()


def sure_entries(base: Base, request: References) -> Sure:
    """Choose entries that the caller declares, or names.

    Every rank comes to the same answer, before the state is looked at.
    """
    missing = sorted(request.carried - base.columns.entries.keys())
    if missing:
        raise ConfigurationError(f"{missing[0]!r} is to be carried, but is not in the base", url=base.url)
    exact = {fqn: base.bytes_by_owner(fqn) for fqn in request.carried}
    needed = {owner for owners in exact.values() for owner in owners}
    if len(needed) > MAX_OWNERS:
        raise ConfigurationError(
            f"what is to be carried lies in {len(needed)} checkpoints, more than {MAX_OWNERS}: save it anew",
            url=base.url,
        )
    declared = {
        fqn: base.bytes_by_owner(fqn)
        for fqn, entry in base.columns.entries.items()
        if isinstance(entry, TensorColumns) and request.declares(fqn)
    }
    chosen, owners = choose_entries({**declared, **exact}, base.data_bytes, needed)
    return Sure(frozenset(chosen), frozenset(owners | needed))


class CarryingPlanner(SavePlanner):
    """Plans as `inner` does, but for what the base holds already.

    Each rank compares its tensors with digests of the base; the coordinator decides, for whole
    entries, and plans what remains.

    Attributes:
        carried: on the coordinator, the entries of the base that the new checkpoint names, and
            whether each requires a gradient now (None: as in the base).
    """

    def __init__(
        self,
        inner: SavePlanner,
        base: Base,
        request: References,
        sure: Sure,
        digests: Digests,
        rank: int,
        size: int,
    ) -> None:
        self.inner = inner
        self._base, self._request, self._digests = base, request, digests
        self._rank, self._size = rank, size
        self._sure = sure
        self.carried: dict[str, bool | None] = {}

    # -- what DCP calls ------------------------------------------------------------------------------------

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        if "storage_meta" in inspect.signature(self.inner.set_up_planner).parameters:
            self.inner.set_up_planner(state_dict, storage_meta, is_coordinator)
        else:  # of before torch 2.3, which DCP serves too
            self.inner.set_up_planner(state_dict, is_coordinator=is_coordinator)

    def create_local_plan(self) -> SavePlan:
        plan = self.inner.create_local_plan()
        return dataclasses.replace(plan, storage_data=_Verdict(self._compare(plan.items)))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        verdicts = [plan.storage_data for plan in all_plans if isinstance(plan.storage_data, _Verdict)]
        self.carried = self._decide(verdicts, [item for plan in all_plans for item in plan.items])
        remaining = [
            dataclasses.replace(
                plan,
                items=[item for item in plan.items if item.index.fqn not in self.carried],
                storage_data=None,
            )
            for plan in all_plans
        ]
        return self.inner.create_global_plan(remaining)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self.inner.finish_plan(new_plan)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self.inner.resolve_data(write_item)

    # -- deciding ------------------------------------------------------------------------------------------

    def _compare(self, items: Iterable[WriteItem]) -> dict[str, list[int]]:
        """Find the rows of the base that this rank is to compare, and that equal what it holds."""
        held: dict[tuple[str, tuple[int, ...], tuple[int, ...]], WriteItem] = {}
        for item in items:
            entry = self._stored(item)
            if entry is not None and item.tensor_data is not None and not self._is_declared(item.index.fqn):
                chunk = item.tensor_data.chunk
                held[item.index.fqn, tuple(chunk.offsets), tuple(chunk.sizes)] = item
        rows, wanted = [], []
        for fqn, row in self._base.rows_of_rank(
            self._rank, self._size, dict.fromkeys(fqn for fqn, *_ in held)
        ):
            tensor = self._base.columns.entries[fqn]
            assert isinstance(tensor, TensorColumns)
            box = fqn, tuple(tensor.offsets[row].tolist()), tuple(tensor.sizes[row].tolist())
            if box in held:
                rows.append((fqn, row))
                wanted.append(held[box])
        try:
            with workers(4, "ckpt-base") as threads:
                expected = self._base.digests(rows, threads)
        except UNFIT as error:
            if self._request.required:
                raise
            raise BaseGone(error.message, url=error.url, key=error.key) from error  # the save can do without
        known = [
            (row, item, digest) for row, item, digest in zip(rows, wanted, expected, strict=True) if digest
        ]
        found = self._digest([item for _, item, _ in known])
        equal: dict[str, list[int]] = {}
        for ((fqn, row), _, digest), made in zip(known, found, strict=True):
            if digest == made:
                equal.setdefault(fqn, []).append(row)
        return equal

    def _digest(self, items: Collection[WriteItem]) -> list[bytes]:
        """Digest tensors; those that are not plain have none."""
        wanted: dict[tuple[str, tuple[int, ...]], Callable[[], torch.Tensor]] = {}
        chunks = []
        for item in items:
            chunk = item.index.fqn, tuple(item.index.offset or ())
            chunks.append(chunk)
            if resolved_tensor(self.inner, item) is not None:
                wanted[chunk] = lambda item=item: _resolve(self.inner, item)  # type: ignore[misc]
        self._digests.make(wanted.items())
        return [self._digests.of(chunk) for chunk in chunks]

    def _decide(self, verdicts: Iterable[_Verdict], items: Iterable[WriteItem]) -> dict[str, bool | None]:
        """Choose what is carried, from what all ranks have found and plan."""
        equal: dict[str, set[int]] = {}
        for verdict in verdicts:
            for fqn, rows in verdict.equal.items():
                equal.setdefault(fqn, set()).update(rows)
        planned: dict[str, bool | None] = {}
        refused: set[str] = set()
        for item in items:
            fqn, entry = item.index.fqn, self._stored(item)
            if entry is None or item.tensor_data is None:
                refused.add(fqn)
            elif self._is_declared(fqn) or len(equal.get(fqn, ())) == len(entry.file) > 0:
                planned[fqn] = item.tensor_data.properties.requires_grad
        clash = sorted((planned.keys() | refused) & self._request.carried)
        if clash:
            raise CheckpointError(f"{clash[0]!r} is to be carried, but the state holds it too")
        candidates = {fqn: self._base.bytes_by_owner(fqn) for fqn in planned if fqn not in refused}
        exact = {fqn: self._base.bytes_by_owner(fqn) for fqn in self._request.carried}
        chosen, owners = choose_entries({**candidates, **exact}, self._base.data_bytes, self._sure.owners)
        _log(self._base, len(chosen), sum_by_owner({**candidates, **exact}[fqn] for fqn in chosen), owners)
        order = [*candidates, *sorted(exact)]
        return {fqn: planned.get(fqn) for fqn in order if fqn in chosen}

    def _is_declared(self, fqn: str) -> bool:
        return self._request.declares(fqn)

    def _stored(self, item: WriteItem) -> TensorColumns | None:
        """Return the base's entry of a planned item, if it is the same kind of tensor."""
        data = item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            return None
        return self._base.tensor(item.index.fqn, dtype_name(data.properties.dtype), data.size)


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    tensor = resolved_tensor(planner, item)
    assert tensor is not None  # it was plain when it was looked at
    return tensor


def _log(base: Base, count: int, carried_bytes: dict[str, int], owners: Collection[str]) -> None:
    total = sum(carried_bytes.values())
    _logger.info(
        "%d tensors, %d bytes, are carried from %s (%d checkpoints)", count, total, base.url, len(owners)
    )
