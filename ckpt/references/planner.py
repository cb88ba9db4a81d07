"""Plan only what changed: leave out of DCP's plans what is carried."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from ckpt.errors import BaseGone, CheckpointError, ConfigurationError
from ckpt.format.columns import TensorColumns
from ckpt.format.dtypes import dtype_name
from ckpt.gc_pause import no_gc
from ckpt.ranks.group import Ranks
from ckpt.references.base import UNFIT, Base
from ckpt.references.digests import Comparison
from ckpt.references.owners import MAX_OWNERS, choose_entries, sum_by_owner
from ckpt.references.request import References
from ckpt.save_plans.unplannable import tensors_named
from ckpt.transfer.threads import workers
from ckpt.writing.layout import Chunk, resolved_tensor

_logger = logging.getLogger(__name__)

_THREADS = 4
_CHECKED_BYTES = 64 << 20
"""Read of each file of which a save names entries that it cannot compare, such as rows of tables."""


@dataclass(frozen=True)
class _Verdict:
    """What one rank has found of what it plans.

    Attributes:
        alike: tensors that the base has, declared or with equal rows, and whether they require a gradient now.
        equal: of those that were compared, the rows of the base that are equal.
        refused: what the base has otherwise, or what is to be carried without it.
    """

    alike: dict[str, bool]
    equal: dict[str, list[int]]
    refused: set[str]


_VERDICT = msgspec.msgpack.Decoder(_Verdict)  # made once, before there are threads


@dataclass(frozen=True)
class Sure:
    """Entries that are carried whatever a comparison says, if the state has them, and their owners.

    `named`: these, and others that may be carried without a comparison.
    """

    entries: frozenset[str] = frozenset()
    owners: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()


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
    named = {**declared, **exact}
    chosen, owners = choose_entries(named, base.data_bytes, needed)
    return Sure(frozenset(chosen), frozenset(owners | needed), frozenset(named))


class CarryingPlanner(SavePlanner):
    """Plans as `inner` does, but for what the base holds already.

    Each rank compares its tensors with digests of the base; the coordinator decides, for whole
    entries, and plans what remains.

    Attributes:
        carried: on the coordinator, the entries of the base that the new checkpoint names, and
            whether each requires a gradient now (None: as in the base).
        plain: tensors of this rank that were looked at, and are plain.
    """

    def __init__(
        self,
        inner: SavePlanner,
        base: Base,
        request: References,
        sure: Sure,
        digest: Callable[[Sequence[Comparison]], list[bool]],
        ranks: Ranks,
    ) -> None:
        """`digest` tells which tensors have the digests that are stored."""
        self.inner = inner
        self._base, self._request, self._sure = base, request, sure
        self._digest, self._ranks = digest, ranks
        self.carried: dict[str, bool | None] = {}
        self.plain: set[Chunk] = set()

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
        with tensors_named(getattr(self.inner, "state_dict", {})):
            plan = self.inner.create_local_plan()
        return dataclasses.replace(plan, storage_data=self._look(plan.items))

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        verdicts = [plan.storage_data for plan in all_plans if isinstance(plan.storage_data, _Verdict)]
        self.carried = self._decide(verdicts)
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

    # -- in the place of plans, where ranks exchange columns ------------------------------------------------

    def verdict(self, items: Iterable[WriteItem]) -> bytes:
        """Look at what this rank plans; return what was found, for the coordinator."""
        return msgspec.msgpack.encode(self._look(items), order="deterministic")

    def decide(self, verdicts: Iterable[bytes]) -> Collection[str]:
        """Choose what nobody writes, from what all ranks have found."""
        self.carried = self._decide(map(_VERDICT.decode, verdicts))
        return self.carried

    # -- deciding ------------------------------------------------------------------------------------------

    def _look(self, items: Iterable[WriteItem]) -> _Verdict:
        """Find what the base has alike of what this rank plans."""
        alike: dict[str, bool] = {}
        refused: set[str] = set()
        compared: list[tuple[WriteItem, TensorColumns]] = []
        entries = self._base.columns.entries
        with no_gc():
            for item in items:
                fqn, data = item.index.fqn, item.tensor_data
                if fqn not in entries:
                    continue
                entry = None
                if data is not None and item.type != WriteItemType.BYTE_IO:
                    entry = self._base.tensor(fqn, dtype_name(data.properties.dtype), data.size)
                if entry is None or data is None or fqn in self._request.carried:
                    refused.add(fqn)
                elif self._request.declares(fqn):
                    alike[fqn] = data.properties.requires_grad
                else:
                    compared.append((item, entry))
        equal: dict[str, list[int]] = {}
        ranks = self._ranks
        with self._base_may_be_unfit():
            files = self._base.files_of(self._sure.named, ranks.rank, ranks.size)
            for item, row in self._compare(compared):
                assert item.tensor_data is not None
                fqn = item.index.fqn
                alike[fqn] = item.tensor_data.properties.requires_grad
                equal.setdefault(fqn, []).append(row)
                files.add(self._base.file_of(fqn, row))
            with workers(_THREADS, "ckpt-base") as threads:
                nbytes = _CHECKED_BYTES if self._request.carried else 0
                self._base.check_files(files, threads, ranks.progress.moved, nbytes)
        return _Verdict(alike, equal, refused)

    @contextlib.contextmanager
    def _base_may_be_unfit(self) -> Iterator[None]:
        """Raise BaseGone for errors of the base where the save can do without it."""
        try:
            yield
        except UNFIT as error:
            if self._request.required:
                raise
            raise BaseGone(error.message, url=error.url, key=error.key) from error

    def _compare(self, items: Iterable[tuple[WriteItem, TensorColumns]]) -> Iterator[tuple[WriteItem, int]]:
        """Yield the tensors that equal rows of the base, of those that this rank is to compare.

        Raises as `Base.digests`.
        """
        with no_gc():
            rows = [
                (item, row)
                for item, entry in items
                if item.tensor_data is not None
                for row in self._base.rows_at(
                    entry, item.tensor_data.chunk, self._ranks.rank, self._ranks.size
                )
            ]
        with workers(_THREADS, "ckpt-base") as threads:
            stored = self._base.digests([(item.index.fqn, row) for item, row in rows], threads)
        known = [(*each, digest) for each, digest in zip(rows, stored, strict=True) if digest is not None]
        found = self._digest(
            [Comparison(partial(self._plain_tensor, item), digest) for item, _, digest in known]
        )
        for (item, row, _), is_equal in zip(known, found, strict=True):
            if is_equal:
                yield item, row

    def _plain_tensor(self, item: WriteItem) -> torch.Tensor | None:
        tensor = resolved_tensor(self.inner, item)
        if tensor is not None:
            self.plain.add((item.index.fqn, item.index.offset))
        return tensor

    def _decide(self, verdicts: Iterable[_Verdict]) -> dict[str, bool | None]:
        """Choose what is carried, from what all ranks have found."""
        alike: dict[str, bool] = {}
        equal: dict[str, set[int]] = {}
        refused: set[str] = set()
        for verdict in verdicts:
            alike |= verdict.alike
            refused |= verdict.refused
            for fqn, rows in verdict.equal.items():
                equal.setdefault(fqn, set()).update(rows)
        clash = sorted(refused & self._request.carried)
        if clash:
            raise CheckpointError(f"{clash[0]!r} is to be carried, but the state holds it too")
        candidates = {
            fqn: self._base.bytes_by_owner(fqn)
            for fqn in alike
            if fqn not in refused
            and (fqn not in equal or len(equal[fqn]) == self._base.rows_of(fqn))  # else it is declared
        }
        exact = {fqn: self._base.bytes_by_owner(fqn) for fqn in self._request.carried}
        chosen, owners = choose_entries({**candidates, **exact}, self._base.data_bytes, self._sure.owners)
        _log(self._base, len(chosen), sum_by_owner({**candidates, **exact}[fqn] for fqn in chosen), owners)
        order = [*candidates, *sorted(exact)]
        return {fqn: alike.get(fqn) for fqn in order if fqn in chosen}


def _log(base: Base, count: int, carried_bytes: dict[str, int], owners: Collection[str]) -> None:
    total = sum(carried_bytes.values())
    _logger.info(
        "%d tensors, %d bytes, are carried from %s (%d checkpoints)", count, total, base.url, len(owners)
    )
