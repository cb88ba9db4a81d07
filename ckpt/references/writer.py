"""Write checkpoints that others may refer to, and that refer to others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt.content.replicas import Difference
from ckpt.errors import (
    BaseGone,
    CheckpointError,
    ConfigurationError,
)
from ckpt.format.columns import Columns
from ckpt.format.dtypes import dtype_name
from ckpt.format.records import CommitRecord
from ckpt.ranks.group import Ranks
from ckpt.references.base import UNFIT, Base, base_name
from ckpt.references.carrying import carry, referable
from ckpt.references.digests import Comparison, compare
from ckpt.references.frozen import Patterns
from ckpt.references.planner import CarryingPlanner, Sure, sure_entries
from ckpt.references.request import References
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.torch_private import caches_plans, flatten_state_dict
from ckpt.writing.layout import Chunk
from ckpt.writing.writer import CheckpointWriter

_logger = logging.getLogger(__name__)

_MAX_SHOWN = 5


class ReferringWriter(CheckpointWriter):
    """Write a checkpoint with digests, and leave unwritten what its base holds already."""

    def __init__(self, url: Any, *, references: References, planner: object, **options: Any) -> None:
        """`planner` is the one that was asked for. Raises ConfigurationError if it cannot serve a save with a base."""
        if references.base is not None and caches_plans(planner):
            raise ConfigurationError(
                "base= needs a planner that plans every save: turn enable_plan_caching off"
            )
        super().__init__(url, **options)
        self._request = references
        self.shared_options["digests"] = True
        self._base_name, self._unfit = "", None
        if references.base is not None:
            try:
                self._base_name = base_name(references.base, self._url)
            except ConfigurationError as error:
                if references.required:
                    raise
                self._unfit = error
        self._base: Base | None = None
        self._planner: CarryingPlanner | None = None
        self._sure = Sure()

    @property
    def wants_base(self) -> bool:
        return self._request.base is not None

    def unite(self, values: dict[str, Any], ranks: Ranks) -> None:
        """Take over what other ranks declare as frozen, or carry; all ranks call it.

        Raises RanksFailed if a rank holds a tensor that another one declares as frozen, and does not declare it.
        """
        wanted = ranks.gather((self._request.carried, self._request.frozen.names))
        prefixes, names = (frozenset[str]().union(*each) for each in zip(*wanted, strict=True))
        # Stages of a pipeline have other parameters each; what one rank vouches for goes for all.
        united = replace(self._request, carried=prefixes, frozen=Patterns(names))

        def check() -> None:
            if names != self._request.frozen.names:
                flat, _ = flatten_state_dict(values)
                other = [fqn for fqn in flat if united.declares(fqn) and not self._request.declares(fqn)]
                if other:
                    shown = ", ".join(map(repr, other[:_MAX_SHOWN]))
                    raise ConfigurationError(
                        f"frozen= of another rank names {shown}, and that of this rank does not: "
                        "all ranks that hold a tensor have to name it"
                    )

        ranks.together("save with frozen=", check)
        self._request = united

    def open_base(self, ranks: Ranks) -> None:
        """Open the base on the first rank, and share it with all. Raises what makes it unfit, if it is required."""

        def open_first() -> bytes | None:
            ranks.progress.begin("opening the base")
            try:
                if self._unfit is not None:
                    raise self._unfit
                self._base = Base.open(self._store, self._base_name, block_digests=self.block_digests)
                return self._base.share() if ranks.size > 1 else b""
            except UNFIT as error:
                if self._request.required:
                    raise
                _logger.warning("everything is saved again: %s", error)
                return None

        ranks.progress.wait_for("rank 0 to open the base")
        shared = ranks.from_first(open_first)

        def adopt() -> Base | None:
            if shared is None or self._base is not None:
                return self._base
            return Base.open(self._store, self._base_name, shared)

        self._base = ranks.together("opening of the base", adopt)
        if self._base is not None:
            names = self._request.frozen.names
            carried = frozenset(self._base.names_of(self._request.carried))
            self._request = replace(self._request, carried=carried)
            self._sure = sure_entries(self._base, self._request)
            if ranks.rank == 0 and names and not any(map(self._request.declares, self._base.columns.entries)):
                shown = ", ".join(map(repr, sorted(names)[:_MAX_SHOWN]))
                _logger.warning("frozen= names nothing that the base %s has: %s", self._base.url, shown)

    def unstaged(self, values: dict[str, Any]) -> list[torch.Tensor]:
        """List tensors that need no copy: the base holds them, and the caller vouches that they do not change."""
        if self._base is None or not self._request.frozen:
            return []
        flat, _ = flatten_state_dict(values)
        return [
            value
            for fqn, value in flat.items()
            if fqn in self._sure.entries
            and isinstance(value, torch.Tensor)
            and self._base.tensor(fqn, dtype_name(value.dtype), value.size()) is not None
        ]

    def planner(self, inner: SavePlanner, ranks: Ranks) -> SavePlanner:
        """Return the planner for this save: `inner`, or one that leaves out what is carried."""
        if self._base is None:
            self._planner = None
            return inner
        self._planner = CarryingPlanner(
            inner,
            self._base,
            self._request,
            self._sure,
            self._compare,
            ranks,
        )
        return self._planner

    def goes_on_after(self, failures: Iterable[BaseException]) -> bool:
        """Tell whether a save failed only because its base is gone, which it need not have; then let go of that."""
        failures = list(failures)
        gone = next((failure for failure in failures if isinstance(failure, BaseGone)), None)
        if gone is None or self._request.required or not all(isinstance(each, BaseGone) for each in failures):
            return False
        _logger.warning("everything is saved again: %s of %s is gone, or damaged", gone.key, gone.url)
        self._let_go()
        return True

    def _let_go(self) -> None:
        base, self._base, self._planner = self._base, None, None
        if base is not None:
            base.close()

    def close(self) -> None:
        self._let_go()
        super().close()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_base": None, "_planner": None}

    def commit(
        self,
        planned: Metadata | CentralPlan,
        receipts: Sequence[RankReceipt],
        world_size: int,
        differences: Sequence[Difference] = (),
    ) -> Metadata:
        described = super().commit(planned, receipts, world_size, differences)
        if self._coordinator is not None and self._coordinator.committed is not None:
            Base.remember(*self._coordinator.committed)
        return described

    # -- writing -------------------------------------------------------------------------------------------

    def _compare(self, todo: Sequence[Comparison]) -> list[bool]:
        if (
            torch.accelerator.is_available()
        ):  # the caller's stream may still compute what threads will look at
            torch.accelerator.current_stream().synchronize()
        return compare(todo, self._pool, self.progress.moved)

    def _known_plain(self) -> Collection[Chunk]:
        return () if self._planner is None else self._planner.plain

    def _digested(self) -> Callable[[str], bool]:
        undigested = self._request.undigested
        return lambda fqn: undigested is None or not fqn.startswith(undigested)

    def _records(
        self, planned: Metadata | CentralPlan, receipts: Sequence[RankReceipt], world_size: int
    ) -> tuple[Columns, CommitRecord]:
        columns, record = super()._records(planned, receipts, world_size)
        if self._base is None or self._planner is None:
            return columns, referable(record)
        missing = sorted(self._request.carried - self._planner.carried.keys())
        if missing:
            raise CheckpointError(f"{missing[0]!r} is to be carried, but the base does not hold it")
        return carry(columns, record, self._base, self._planner.carried)
