"""Restore from the nearest: what the nodes have together, as long as it is not older than what is durable."""

from __future__ import annotations

import logging
import math
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
from ckpt.trainer_integration.run.tier import Tier, note_run

_logger = logging.getLogger(__name__)

T = TypeVar("T")


class Nearest:
    """Merge what the nodes of a job have with what is durable, and load it from wherever it is nearest.

    Attributes:
        run: the id of the run, as the first rank knows it after a restore; empty if that has found none.
        seen_s: when the newest of the saves was made that the first rank has seen, given up or not, by their clocks.
    """

    def __init__(self, tier: Tier, history: History) -> None:
        self._tier, self._history = tier, history
        self.run = ""
        self.seen_s = -math.inf

    def shown(self, choice: Choice) -> str:
        """Return where a checkpoint is, for texts."""
        return (self._history if choice.is_durable else self._tier.history).shown(choice.path)

    def merged(self, search: Search, step: int | str, ranks: Ranks) -> Callable[[], Choice | None]:
        """Return what all ranks call for the next checkpoint to try, the same one on all. All ranks call this.

        What is near is tried before what is durable of the same step; what only some of the nodes have counts if
        the durable place has the rest. What is of another run than the nodes or the durable place say does not count.
        """
        first = None
        if ranks.rank == 0:  # while the nodes tell what they have
            first = Asked(lambda: self._first(search, step))
        found, runs = ([], frozenset[str]()) if step == "best" else holdings(self._tier.folder.path, ranks)
        self.seen_s = max([self.seen_s, *(each.created_at_s for each in found)])
        found = [each for each in found if isinstance(step, str) or each.step == step]
        given_up = ranks.join(self._tier.given_up(), frozenset.union)
        merged = _Merged(search, first, found, runs, self._history, self._tier.far, given_up)
        merged.is_asked_for = isinstance(step, int)
        ask = self._tier.far.ask if any(each.is_whole for each in found) else _call

        def agree() -> tuple[Choice | Holding | None, str]:
            return ranks.from_first(lambda: (merged.next(), merged.run))

        def find_next() -> Choice | None:
            chosen, run = agree()
            while isinstance(chosen, Holding):
                far, options = self._history.url(chosen.path), self._history.storage_options
                merged.judge(
                    chosen, completed_by(chosen, self._tier.folder.path, far, options, ranks, ask=ask)
                )
                chosen, run = agree()
            if chosen is not None:
                if chosen.near is not None and chosen.candidate.fault is None:
                    note_run(
                        self._tier, run
                    )  # a load gives nodes that have none the records, which name the run
                self.run = run or chosen.candidate.run
                self.seen_s = max(self.seen_s, chosen.candidate.created_at_s or self.seen_s)
            return chosen

        return find_next

    def _first(self, search: Search, step: int | str) -> Choice | None:
        """Find the first durable one; a run that goes back looks at those that it gives up."""
        if isinstance(step, int):
            self.seen_s = max(self.seen_s, self._history.newest_s(step))
        return search.next()

    def load(
        self,
        state: dict[str, Any],
        choice: Choice,
        planner: LoadPlanner,
        options: Mapping[str, Any],
    ) -> dict[str, int]:
        """Load a checkpoint, and return the bytes that this rank read, by place. Raises as `ckpt.load`."""
        assert choice.near is not None
        far = self._history.url(choice.path) if choice.is_durable or choice.near.is_completed else None
        read = load_near(state, choice.near, self._tier.folder.path, far, planner=planner, **options)
        return {f"{name}_bytes": read.get(name, 0) for name in _PLACES}


_PLACES = ("node", "neighbours", "durable")


class _Merged:
    """Two searches as one, on the first rank.

    Attributes:
        is_asked_for: one step is, whatever has become of it in the durable place.
    """

    def __init__(
        self,
        search: Search,
        first: Asked[Choice | None] | None,
        found: list[Holding],
        runs: frozenset[str],
        history: History,
        far: FarPlace,
        given_up: frozenset[tuple[str, float]],
    ) -> None:
        self._search, self._asked, self._history, self._far = search, first, history, far
        self._runs, self._given_up, self._last = runs, given_up, list[Choice]()
        self._tried: Holding | None = None
        self._near = deque(found)
        self._all = {(each.path, each.id): each for each in found}
        self._durable: deque[Choice] = deque()
        self._is_over = self._has_failed = self.is_asked_for = False

    @property
    def run(self) -> str:
        """The id of the run: the durable place says it, or all nodes that have one do; empty if it is not clear."""
        named = self._runs - {""}
        return self._history.run or (next(iter(named)) if len(named) == 1 else "")

    def judge(self, near: Holding, is_completed: bool) -> None:
        """Take back, on all ranks, one that `next` has asked about: the durable place has the rest of it or not."""
        judged = replace(near, is_completed=is_completed, is_judged=True)
        self._near.appendleft(judged)
        self._all[near.path, near.id] = judged

    def next(self) -> Choice | Holding | None:
        """Return the next checkpoint to try; None if there is no other.

        One that is not whole on the nodes is returned as it is: whether the durable place has the rest, all ranks ask,
        and call `judge`.
        """
        tried, self._tried = self._tried, None
        if tried is not None and (choice := self._became_durable(tried)) is not None:
            return choice
        self._peek()
        durable = next((choice for choice in self._durable if not choice.is_lost), None)
        while self._near and _comes_first(self._near[0], durable):
            near = self._near.popleft()
            if self._is_foreign(near):
                named = near.run or "it names none"
                fault = f"it is of another run ({named}, this one is {self.run or 'new'}): remove it, or move it away"
                candidate = Candidate(fault, is_foreign=True)
                return Choice(near.step, near.path, candidate, near=near, is_durable=False)
            is_durable = durable is not None and (durable.path, durable.candidate.id) == (near.path, near.id)
            if not is_durable and self._is_removed(near):
                fault = (
                    f"it has been durable, and is not in {self._history.place} any more: if it is wanted all the same, "
                    f"restore(step={near.step}) takes it from the nodes"
                )
                return Choice(near.step, near.path, Candidate(fault), near=near, is_durable=False)
            if not (near.is_whole or near.is_judged or is_durable):
                return near
            if near.is_whole or near.is_completed:
                candidate = Candidate(created_at_s=near.created_at_s, id=near.id, run=near.run)
                choice = Choice(near.step, near.path, candidate, near=near, is_durable=is_durable)
                self._tried = None if is_durable else near
                return choice
            if not is_durable and (choice := self._became_durable(near)) is not None:
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

    def _is_foreign(self, near: Holding) -> bool:
        """Tell whether a checkpoint names another run than the durable place; where that names none, than the nodes.

        One that names none is of no run that has an id. While no node knows a run, and the durable place gives no
        answer, it may be of any.
        """
        runs = {self._history.run} if self._history.run else self._runs
        return not runs & {"", near.run} if near.run else bool(runs - {""})

    def _is_given_up(self, choice: Choice) -> bool:
        """Tell whether the nodes know that the run went back; the root learns it with the next durable one."""
        recorded = (old for old in self._history.known() if old.path == choice.path)
        return any((old.path, old.saved_at_s) in self._given_up for old in recorded)

    def _became_durable(self, near: Holding) -> Choice | None:
        """Look whether one that cannot be read became durable meanwhile: the nodes may make room of it then."""
        try:
            candidate = self._far.ask(lambda: self._history.examine(near.path))
        except CheckpointError:
            return None
        is_same = candidate.id == near.id and candidate.fault is None
        return Choice(near.step, near.path, candidate) if is_same else None

    def _is_removed(self, near: Holding) -> bool:
        """Tell whether a checkpoint is not in the durable place any more, as that says itself."""
        if not self.is_asked_for and near.id in self._history.removed:
            return True
        if not near.was_durable or self.is_asked_for:
            return False
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
            can_do_without = len(
                self._runs - {""}
            ) <= 1 and any(  # else the durable place says which is this run
                near.is_whole and not self._is_foreign(near) for near in self._near
            )
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
