"""Let all ranks agree on one plan, step by step as the coordinator says."""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from torch.distributed.checkpoint.planner import WriteItem

from ckpt.errors import CheckpointError
from ckpt.gc_pause import no_gc
from ckpt.ranks.first_rank import FirstRank
from ckpt.ranks.group import RanksFailed
from ckpt.ranks.many_failures import Outcome
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.local import Memory, Message, Structure, decode_message
from ckpt.save_plans.sections import Section, decode_section, split_digests

_MAX_PLANS = 4
FEW_RANKS = 16
"""Up to so many all send their sections at once: that is sooner done than asking for them."""


class _Step(enum.IntEnum):
    """What all ranks do next."""

    GO = 0  # what they know is the plan
    TELL = 1
    SEND_SECTIONS = 2
    ANSWER = 3
    FAIL = 4
    LEAVE = 5


_UNKNOWN, _FOREIGN, _FAILED = -1, -2, -3
"""What a rank says if it knows no plan: of several ranks the lowest number tells what all do."""


class Carrier(Protocol):
    """What a planner of the coordinator decides when all ranks have told what they hold: what nobody writes."""

    def decide(self, verdicts: Iterable[bytes]) -> Collection[str]: ...


@dataclass(frozen=True)
class Local:
    """What this rank holds, and what its planner found out."""

    structure: Structure
    verdict: bytes


@dataclass(frozen=True)
class Agreed:
    """What this rank writes; `plan` is that of all ranks, on the coordinator."""

    items: list[WriteItem]
    plan: CentralPlan | None


class Plans:
    """What this process remembers of plans."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.central: OrderedDict[int, CentralPlan] = OrderedDict()

    def keep(self, plan: CentralPlan) -> None:
        self.central[plan.number] = plan
        self.central.move_to_end(plan.number)
        while len(self.central) > _MAX_PLANS:
            self.central.popitem(last=False)

    def sections(self) -> dict[bytes, Section]:
        """Return all known sections by digest."""
        known: dict[bytes, Section] = {}
        for plan in list(self.central.values()):
            known |= plan.contents()
        return known


def agree(
    ranks: FirstRank,
    plans: Plans,
    local: Local | CheckpointError | None,
    carrier: Carrier | None = None,
) -> Agreed | None:
    """Agree with all ranks on what each writes.

    Args:
        local: what this rank holds, an error that kept it from saying so, or None if its planner does not
            plan as DCP's own.
        carrier: on the coordinator, who decides what is carried.

    Returns:
        None, on all ranks, if the planner of one does not plan as DCP's own.

    Raises:
        RanksFailed: on all ranks, if one failed.
    """
    known = plans.memory.plan(local.structure, local.verdict) if isinstance(local, Local) else None
    head = _FOREIGN if local is None else _FAILED if isinstance(local, CheckpointError) else _UNKNOWN
    coordinator = _Coordinator(ranks.size, plans, carrier, local) if ranks.rank == 0 else None
    first = _never if coordinator is None else coordinator.first
    step = _Step(ranks.decide(head if known is None else known[0], _joined, first))
    while True:
        if step is _Step.LEAVE:
            return None
        if step is _Step.FAIL:
            raise _failures(ranks, local, coordinator)
        assert isinstance(local, Local)  # a rank that failed, or plans in its own way, had all stop at once
        if step is _Step.GO:
            assert known is not None
            return Agreed(known[1], None if coordinator is None else coordinator.plan)
        if step is _Step.TELL:
            told = ranks.gather_bytes(_message(local, with_contents=ranks.size <= FEW_RANKS))
            step = step if coordinator is None else coordinator.told(told)
        elif step is _Step.SEND_SECTIONS:
            wanted = ranks.scatter_bytes(None if coordinator is None else coordinator.wanted)
            sent = ranks.gather_bytes(_contents(local, wanted))
            step = step if coordinator is None else coordinator.sent(sent)
        else:
            answer = ranks.scatter_bytes(None if coordinator is None else coordinator.answers)
            number, bits = int.from_bytes(answer[:8], "little"), answer[8:]
            items = _chosen(local.structure, bits)
            plans.memory.remember(local.structure, local.verdict, number, items)
            return Agreed(items, None if coordinator is None else coordinator.plan)
        step = _Step(ranks.first_number(int(step)))


def _joined(some: int, others: int) -> int:
    return some if some == others else min(some, others, _UNKNOWN)


def _never(number: int) -> int:
    raise AssertionError("only the first rank decides")


def _message(local: Local, *, with_contents: bool) -> bytes:
    contents = list(local.structure.contents.values()) if with_contents else []
    message = msgspec.structs.replace(local.structure.message, verdict=local.verdict, contents=contents)
    return msgspec.msgpack.encode(message)


def _contents(local: Local, wanted: bytes) -> bytes:
    contents = local.structure.contents
    return msgspec.msgpack.encode([contents[digest] for digest in split_digests(wanted)]) if wanted else b""


def _chosen(structure: Structure, bits: bytes) -> list[WriteItem]:
    """Choose the items whose bits are set; all if there are none."""
    if not bits:
        return structure.items
    flags: list[bool] = []
    begin = 0
    for count in structure.counts:
        end = begin + -(-count // 8)
        flags += np.unpackbits(np.frombuffer(bits[begin:end], dtype=np.uint8), count=count).tolist()
        begin = end
    return [item for item, flag in zip(structure.items, flags, strict=True) if flag]


def _failures(
    ranks: FirstRank, local: Local | CheckpointError | None, coordinator: _Coordinator | None
) -> RanksFailed:
    """Tell all ranks how many failed, and why."""
    own = coordinator.failure if coordinator is not None and coordinator.failure is not None else local
    outcome = Outcome.of(ranks.rank, "save", own if isinstance(own, CheckpointError) else None)
    outcome = ranks.join(outcome, Outcome.join)
    return RanksFailed(outcome.failures, count=outcome.failed)


class _Coordinator:
    """The first rank's part: it says what comes next."""

    def __init__(
        self, size: int, plans: Plans, carrier: Carrier | None, local: Local | CheckpointError | None
    ) -> None:
        self._size, self._plans, self._carrier, self._local = size, plans, carrier, local
        self._messages: list[Message] = []
        self._sections: dict[bytes, Section] = {}
        self._asked: list[int] = []
        self.wanted: list[bytes] = []
        self.answers: list[bytes] = []
        self.plan: CentralPlan | None = None
        self.failure: CheckpointError | None = None

    def first(self, head: int) -> _Step:
        """Look at what all ranks say first, joined."""
        if head == _FAILED:
            return _Step.FAIL
        if head == _FOREIGN:
            return _Step.LEAVE
        known = self._plans.central.get(head)
        if known is None:
            return _Step.TELL
        self._messages, self._sections = list(known.messages), known.contents()
        return self._try(lambda: self._plan(known))

    def told(self, told: Sequence[bytes] | None) -> _Step:
        """Take what all ranks hold, and ask for sections that are not known."""
        return self._try(lambda: self._told(told or ()))

    def _told(self, told: Sequence[bytes]) -> _Step:
        with no_gc():
            self._messages = [decode_message(data) for data in told]
        self._sections = self._plans.sections()
        missing: dict[bytes, int] = {}
        seen: set[bytes] = set()
        for rank, message in enumerate(self._messages):
            if message.sections in seen:
                continue
            seen.add(message.sections)
            digests = split_digests(message.sections)
            if message.contents:
                fresh = zip(digests, message.contents, strict=True)
                self._sections |= {d: decode_section(c) for d, c in fresh if d not in self._sections}
            for digest in digests:
                if digest not in self._sections:
                    missing.setdefault(digest, rank)
        assert isinstance(self._local, Local)
        for digest, content in self._local.structure.contents.items():
            if missing.pop(digest, None) is not None:
                self._sections[digest] = decode_section(content)
        if not missing:
            return self._plan(None)
        wanted: list[list[bytes]] = [[] for _ in range(self._size)]
        for digest, rank in missing.items():
            wanted[rank].append(digest)
        self.wanted = [b"".join(digests) for digests in wanted]
        return _Step.SEND_SECTIONS

    def sent(self, sent: Sequence[bytes] | None) -> _Step:
        """Take the sections that were asked for."""

        def take() -> _Step:
            for data, wanted in zip(sent or (), self.wanted, strict=True):
                if wanted:
                    contents = msgspec.msgpack.decode(data, type=list[bytes])
                    fresh = zip(split_digests(wanted), contents, strict=True)
                    self._sections |= {digest: decode_section(content) for digest, content in fresh}
            return self._plan(None)

        return self._try(take)

    def _plan(self, known: CentralPlan | None) -> _Step:
        """Make the plan; `known` is the one that all ranks know."""
        carried: Collection[str] = ()
        if self._carrier is not None:
            carried = self._carrier.decide(message.verdict for message in self._messages)
        if known is not None and known.carried == frozenset(carried):
            self.plan = known
            return _Step.GO
        with no_gc():
            self.plan = CentralPlan(self._messages, self._sections, carried)
            self._plans.keep(self.plan)
            head = self.plan.number.to_bytes(8, "little")
            self.answers = [head + answer for answer in self.plan.answers]
        return _Step.ANSWER

    def _try(self, work: Callable[[], _Step]) -> _Step:
        try:
            return work()
        except CheckpointError as error:
            self.failure = error
        except Exception as error:
            self.failure = CheckpointError(f"{type(error).__name__}: {error}", rank=0)
        return _Step.FAIL
