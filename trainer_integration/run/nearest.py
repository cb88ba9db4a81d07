"""Restore from the nearest: what the nodes have together, as long as it is not older than what is durable."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from torch.distributed.checkpoint.planner import LoadPlanner

from ckpt.errors import CheckpointError, NotCommitted, NotFound, StorageError
from ckpt.local_first.far_place import Asked, FarPlace
from ckpt.local_first.holdings import Holding, completed_by, holdings
from ckpt.local_first.loading import load_near
from ckpt.ranks.group import Ranks
from ckpt.reading.latest import Candidate
from ckpt.trainer_integration.run.history import History
from ckpt.trainer_integration.run.search import Choice, Search
from ckpt.trainer_integration.run.tier import Tier

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class Nearest:
    """Merge what the nodes of a job have with what is durable, and load it from wherever it is nearest."""

    def __init__(self, tier: Tier, history: History) -> None:
        self._tier, self._history = tier, history

    def shown(self, choice: Choice) -> str:
        """Return where a checkpoint is, for texts."""
        return (self._history if choice.is_durable else self._tier.history).shown(choice.path)

    def merged(self, search: Search, step: int | str, ranks: Ranks) -> Callable[[], Choice | None]:
        """Return what the first rank calls for the next checkpoint to try. All ranks call this.

        What is near is tried before what is durable of the same step; what only some of the nodes have counts if
        the durable place has the rest.
        """
        first = Asked(search.next) if ranks.rank == 0 else None  # while the nodes tell what they have
        found = [] if step == "best" else holdings(self._tier.folder.path, ranks)
        found = [each for each in found if isinstance(step, str) or each.step == step]
        ask = self._tier.far.ask if any(each.is_whole for each in found) else _call
        for number, each in enumerate(found):
            if each.is_whole:
                break
            far, options = self._history.url(each.path), self._history.storage_options
            if completed_by(each, self._tier.folder.path, far, options, ranks, ask=ask):
                found[number] = replace(each, is_completed=True)
                break
        if isinstance(step, int):  # asked for, whatever has become of it in the durable place
            found = [replace(each, was_durable=False) for each in found]
        given_up = ranks.join(self._tier.given_up(), frozenset.union)
        return _Merged(search, first, found, self._history, self._tier.far, given_up).next

    def load(
        self,
        state: dict[str, Any],
        choice: Choice,
        planner: LoadPlanner,
        ranks: Ranks,
        options: Mapping[str, Any],
    ) -> dict[str, float]:
        """Load a checkpoint, and return the bytes that all ranks read, by place. Raises as `ckpt.load`."""
        assert choice.near is not None
        far = self._history.url(choice.path) if choice.is_durable or choice.near.is_completed else None
        read = load_near(state, choice.near, self._tier.folder.path, far, planner=planner, **options)
        sums = ranks.join([read.get(name, 0) for name in _PLACES], _added)
        return {f"{name}_bytes": float(nbytes) for name, nbytes in zip(_PLACES, sums, strict=True)}


_PLACES = ("node", "neighbours", "durable")


class _Merged:
    """Two searches as one, on the first rank."""

    def __init__(
        self,
        search: Search,
        first: Asked[Choice | None] | None,
        found: list[Holding],
        history: History,
        far: FarPlace,
        given_up: frozenset[tuple[str, float]],
    ) -> None:
        self._search, self._asked, self._history, self._far = search, first, history, far
        self._given_up, self._last = given_up, list[Choice]()
        self._tried: Choice | None = None
        self._near = deque(found)
        self._all = {(each.path, each.id): each for each in found}
        self._durable: deque[Choice] = deque()
        self._is_over = self._has_failed = False

    def next(self) -> Choice | None:
        """Return the next checkpoint to try; None if there is no other."""
        tried, self._tried = self._tried, None
        if tried is not None and (candidate := self._became_durable(tried)) is not None:
            return Choice(tried.step, tried.path, candidate)
        self._peek()
        durable = next((choice for choice in self._durable if not choice.is_lost), None)
        while self._near and _comes_first(self._near[0], durable):
            near = self._near.popleft()
            is_durable = durable is not None and (durable.path, durable.candidate.id) == (near.path, near.id)
            if near.was_durable and not is_durable and self._is_removed(near):
                fault = (
                    f"it has been durable, and is not in {self._history.place} any more: if it is wanted all the same, "
                    f"restore(step={near.step}) takes it from the nodes"
                )
                return Choice(near.step, near.path, Candidate(fault), near=near, is_durable=False)
            if near.is_whole or near.is_completed:
                candidate = Candidate(created_at_s=near.created_at_s, id=near.id)
                choice = Choice(near.step, near.path, candidate, near=near, is_durable=is_durable)
                self._tried = None if is_durable else choice
                return choice
            if not is_durable:
                fault = f"the nodes have {near.here.bit_count()} of its {near.wanted} parts, and it is not durable"
                return Choice(near.step, near.path, Candidate(fault), near=near, is_durable=False)
        if self._durable and self._durable[0] is not durable:  # what is lost is told before it
            return self._durable.popleft()
        if durable is None:
            return None
        known = self._all.pop((durable.path, durable.candidate.id or ""), None)
        if (
            known is not None
            and durable.candidate.fault is None
            and not (known.is_whole or known.is_completed)
        ):
            return durable._replace(near=known)  # the rest is read from there; and if that fails, all of it
        return self._durable.popleft()

    def _is_given_up(self, choice: Choice) -> bool:
        """Tell whether the nodes know that the run went back; the root learns it with the next durable one."""
        recorded = (old for old in self._history.known() if old.path == choice.path)
        return any((old.path, old.saved_at_s) in self._given_up for old in recorded)

    def _became_durable(self, tried: Choice) -> Candidate | None:
        """Look whether one that could not be read became durable meanwhile: the nodes may make room of it then."""
        try:
            candidate = self._far.ask(lambda: self._history.examine(tried.path))
        except CheckpointError:
            return None
        return candidate if candidate.id == tried.candidate.id and candidate.fault is None else None

    def _is_removed(self, near: Holding) -> bool:
        """Tell whether a checkpoint is not in the durable place any more, as that says itself."""
        try:
            if not self._has_failed:
                self._far.ask(lambda: self._history.examine(near.path))
        except (NotCommitted, NotFound):
            return True
        except CheckpointError as error:
            _logger.warning("whether step %d is still durable cannot be found out: %s", near.step, error)
        return False

    def _peek(self) -> None:
        """Find the next durable checkpoint, and those before it that are lost; not if the nodes can do without."""
        while not (self._durable and not self._durable[-1].is_lost) and not self._is_over:
            asked = self._asked = self._asked or Asked(self._search.next)
            can_do_without = any(near.is_whole or near.is_completed for near in self._near)
            try:
                choice = self._far.wait(asked) if can_do_without else asked.answer()
            except StorageError as error:
                if not can_do_without:
                    raise
                _logger.warning("the durable place cannot be asked, what the nodes have is taken: %s", error)
                self._has_failed = True
                if not asked.is_answered():
                    return  # it is asked again if nothing of that can be loaded
                choice = None
            self._asked = None
            if choice is None:
                self._is_over = True
                self._durable.extend(self._last)
            elif self._is_given_up(choice):
                self._last.append(choice)
            else:
                self._durable.append(choice)


def _comes_first(near: Holding, durable: Choice | None) -> bool:
    if durable is None:
        return True
    return (near.step, near.created_at_s) >= (durable.step, durable.candidate.created_at_s or 0.0)


def _call(question: Callable[[], T]) -> T:
    return question()


def _added(some: list[int], others: list[int]) -> list[int]:
    return [sum(pair) for pair in zip(some, others, strict=True)]
