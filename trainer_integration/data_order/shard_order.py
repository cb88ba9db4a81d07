"""Read sources whose lengths are not known: each rank reads its shards in turn, by the share of them that is read."""

from __future__ import annotations

import heapq
import logging
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ckpt.errors import CheckpointError, ConfigurationError, FormatError
from ckpt.trainer_integration.data_order.plan import Plan, Sample
from ckpt.trainer_integration.data_order.shards import ContiguousShards, Cursor, DealtShards, Position, Shard

_logger = logging.getLogger(__name__)

_FIELDS = len(Position._fields)
_LANES = 16
"""Shards of a source that a rank reads at a time."""
_MIN_SEQUENCES = 4
"""Of a shard in an epoch: with fewer much of the next epoch is read before this one is over."""


def _ignore(_: int) -> None:
    pass


class ShardOrder:
    """Rank r of W reads shards r, r + W, r + 2W, ... of each source; their positions are the state.

    It reads them in lanes, in each one shard after the other. The next source is the one that is furthest behind its
    weight, and of its lanes the one of which the least share is read. So any subset of a source's lanes, read on its own, is
    read in the order that it has among all.

    There are few lanes: a document is read from its begin, so where many begin at the same time short ones are too many,
    until the long ones are in the middle of theirs.
    """

    kind = "shards"

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.shards = dict(self._own_shards())
        self._means = {name: plan.mean_tokens(name) for name in plan.sources}
        self._sources = {
            name: self._dealt(source, self._total(name), plan.seed, name)
            for name, source in plan.sources.items()
        }
        _check_totals(plan, {name: self._total(name) for name in plan.sources}, self._means)
        self._documents: dict[int, tuple[int, int]] = {}  # epoch of each shard, and its documents in it
        self.positions = dict.fromkeys(self.shards, Position())
        self._lane_of = dict(self._lanes())

    _dealt: Callable[..., Any] = DealtShards

    def _total(self, name: str) -> int:
        return min(self._plan.shards, self._plan.sources[name].documents)

    def _own_shards(self) -> Iterator[tuple[int, Shard]]:
        for number, name in enumerate(self._plan.sources):
            total = self._total(name)
            for shard in range(self._plan.rank, total, self._plan.world_size):
                yield number * self._plan.shards + shard, Shard(name, shard, total)

    def _lanes(self) -> Iterator[tuple[int, int]]:
        """Yield the lane of each shard: each is one with turns by count, and where the stored order is kept."""
        are_few = self._plan.options.turns == "share" and self._plan.seed is not None
        seen: Counter[str] = Counter()
        for index, shard in self.shards.items():
            lane = seen[shard.source_name]
            seen[shard.source_name] += 1
            yield index, lane % _LANES if are_few else lane

    @property
    def parts(self) -> int | None:
        """The most parts in which this rank can read."""
        return max(self._lane_of.values()) + 1

    def part(self, first: int, step: int) -> dict[str, Any]:
        """Return where every `step`-th lane of this rank from the `first` on is: plain values, which `note` moves on."""
        own = [index for index, lane in self._lane_of.items() if lane % step == first]
        return {str(index): [*self.positions[index]] for index in own}

    def note(self, part: dict[str, Any], sample: Sample) -> None:
        part[str(sample.shard)] = [*sample.position]

    def taken(self) -> torch.Tensor | None:
        """Make a counter, for a worker, of the sequences of each source that were taken from it."""
        taken = torch.zeros(len(self._plan.sources), dtype=torch.int64)
        taken.share_memory_()  # type: ignore[no-untyped-call]
        return taken

    def samples(
        self, part: Mapping[str, Any], first: int, step: int, taken: torch.Tensor | None = None
    ) -> Iterator[Sample]:
        """Read the sequences of a part, its shards in turn; of the source of which least is waiting, if `taken` counts."""
        positions = {int(index): Position(*position) for index, position in part.items()}
        cursors: dict[int, Cursor] = {}

        def cursor(index: int) -> Cursor:
            if index not in cursors:
                cursors[index] = self._cursor(index, positions[index])
            return cursors[index]

        def read(index: int) -> Sample:
            tokens = cursor(index).take(self._plan.sequence_length)
            return Sample(index, cursor(index).position, tokens)

        def announce(index: int) -> None:
            cursor(index).announce()

        return self.in_turn(positions, read, taken, announce if self._plan.reads_ahead else _ignore)

    def joined(
        self, streams: Sequence[Iterator[Sample]], taken: Sequence[torch.Tensor | None]
    ) -> Iterator[Sample]:
        """Yield the samples of all parts, each of some of the shards, in the order of all of them."""
        numbers = {name: number for number, name in enumerate(self._plan.sources)}
        stream_of = {index: lane % len(streams) for index, lane in self._lane_of.items()}
        early: dict[tuple[int, str], deque[Sample]] = defaultdict(deque)

        def read(index: int) -> Sample:
            """A part is in the order of all within each source, and not between sources."""
            number, name = stream_of[index], self.shards[index].source_name
            while not early[number, name]:
                sample = next(streams[number], None)
                if sample is None:
                    raise CheckpointError(
                        f"the worker {number} that reads data returned no sample of shard {index}"
                    )
                early[number, self.shards[sample.shard].source_name].append(sample)
            sample = early[number, name].popleft()
            counter = taken[number]
            assert counter is not None
            counter[numbers[name]] += 1
            if sample.shard != index:
                raise CheckpointError(
                    f"the worker {number} that reads data returned no sample of shard {index}"
                )
            return sample

        return self.in_turn(self.positions, read)

    def _cursor(self, index: int, position: Position) -> Cursor:
        shard = self.shards[index]
        return Cursor(self._plan, shard, self._sources[shard.source_name], position)

    def in_turn(
        self,
        positions: Mapping[int, Position],
        read: Callable[[int], Sample],
        taken: torch.Tensor | None = None,
        announce: Callable[[int], None] = _ignore,
    ) -> Iterator[Sample]:
        """Yield the samples that `read` returns of shards; `announce` is called with those that are read soon."""
        plan = self._plan
        numbers = {name: number for number, name in enumerate(plan.sources)}
        here = {index: at for index, at in positions.items() if plan.weights[self.shards[index].source_name]}
        # A part can be without shards of a small source.
        waiting: dict[str, list[tuple[float, int]]] = {self.shards[index].source_name: [] for index in here}
        counts = dict.fromkeys(waiting, 0)
        begun = dict.fromkeys(waiting, 0)
        behind = sum(at.epoch < (plan.epochs or 0) for at in here.values())
        lanes: dict[tuple[str, int], list[int]] = defaultdict(list)
        for index, position in here.items():
            counts[self.shards[index].source_name] += position.sequences
            lanes[self.shards[index].source_name, self._lane_of[index]].append(index)
        reading = {key: _Lane(indices, here) for key, indices in lanes.items()}

        def wait(name: str, number: int) -> None:
            lane = reading[name, number]
            if not plan.ends_at(lane.epoch):
                for index in lane.soon:
                    announce(index)
                turn = self._turn(lane.shard, here[lane.shard], lane)
                heapq.heappush(waiting[name], (turn, number))

        for key in reading:
            wait(*key)
        is_whole = taken is None  # a worker reads on: where the end is follows from the shards of all
        while plan.epochs is None or behind or not is_whole:
            left = {name for name, shards in waiting.items() if shards}
            is_exhausted = len(left) < len(waiting)
            if not left or (is_whole and is_exhausted and plan.options.on_exhausted == "stop"):
                return
            waits = counts
            if taken is not None:
                waits = {name: begun[name] - int(taken[numbers[name]]) for name in left}
            name = min(left, key=lambda name: ((waits[name] + 0.5) / plan.weights[name], name))
            number = heapq.heappop(waiting[name])[1]
            sample = read(reading[name, number].shard)
            counts[name] += 1
            begun[name] += 1
            position = Position(*sample.position)
            behind -= here[sample.shard].epoch < (plan.epochs or 0) <= position.epoch
            here[sample.shard] = position
            reading[name, number].move()
            wait(name, number)
            yield sample

    def _turn(self, index: int, position: Position, lane: _Lane) -> float:
        """Return what decides between the lanes of a source: the share that is read, or the sequences read."""
        shard = self.shards[index]
        phase = shard.number / shard.total
        if self._plan.options.turns == "count":
            return position.sequences + phase
        epoch, documents = self._documents.get(index, (None, 0))
        if epoch != position.epoch:
            documents = self._dealt_to(shard, position.epoch)
            self._documents[index] = position.epoch, documents
        left = (documents - position.document) * self._means[shard.source_name]
        # The phase spreads the lanes in which nothing is read yet.
        first = phase * self._plan.sequence_length
        share = (position.tokens + first) / (position.tokens + first + left)
        return lane.epoch + (lane.finished + share) / lane.size

    def _dealt_to(self, shard: Shard, epoch: int) -> int:
        documents: int = self._sources[shard.source_name].of(shard.number, epoch)[0]
        return documents

    # -- the state -------------------------------------------------------------------------------------------

    def restart(self) -> None:
        """Begin an iteration."""

    def record(self, moves: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Note the positions after sequences that were used; the last one of a shard counts."""
        for index, position in moves:
            self.positions[index] = Position(*position)

    @property
    def epoch(self) -> int:
        read = [index for index, shard in self.shards.items() if self._plan.weights[shard.source_name]]
        return min(self.positions[index].epoch for index in read)

    def state(self) -> dict[str, Any]:
        """Return one tensor of this rank's positions for each source: int64, with the shard's number in front."""
        rows: dict[str, list[list[int]]] = {}
        for index, shard in self.shards.items():
            rows.setdefault(shard.source_name, []).append([shard.number, *self.positions[index]])
        own = f"{self._plan.rank:05d}-of-{self._plan.world_size:05d}"
        return {
            "positions": {name: {own: torch.tensor(each, dtype=torch.int64)} for name, each in rows.items()}
        }

    def load(self, state: Mapping[str, Any], *, saved: Mapping[str, Any], is_same_mix: bool) -> None:
        """Continue from `state`, which holds at least this rank's shards. Raises FormatError if it is no state."""
        stored = {name: _rows(name, of_ranks) for name, of_ranks in state["positions"].items()}
        positions = {
            index: self._stored(shard, stored[shard.source_name])
            if shard.source_name in stored
            else Position()
            for index, shard in self.shards.items()
        }
        if not is_same_mix:
            positions = {index: position._replace(sequences=0) for index, position in positions.items()}
        self.positions = positions

    def _stored(self, shard: Shard, stored: Mapping[int, Position]) -> Position:
        """Return the position of a shard; of other data, which may have more or fewer documents, one that can be."""
        where = f"loader state of source {shard.source_name!r}, shard {shard.number}"
        takes_other_data = self._plan.options.allow_other_data
        position = stored.get(shard.number, Position() if takes_other_data else None)
        if position is None:
            raise FormatError(f"{where}: missing")
        if min(position) < 0:
            raise FormatError(f"{where}: impossible {position}")
        if position.document >= self._dealt_to(shard, position.epoch):
            if not takes_other_data:
                raise FormatError(f"{where}: impossible {position}")
            return Position(epoch=position.epoch + 1, sequences=position.sequences)
        return position


class _Lane:
    """Shards that are read one after the other; those that were begun first.

    Attributes:
        shard: the index of the one that is read.
        epoch: that all of them have begun.
        finished: shards whose epoch is over.
    """

    def __init__(self, indices: Sequence[int], positions: Mapping[int, Position]) -> None:
        self._indices, self._positions = indices, positions
        self.size = len(indices)
        self._begin()

    def _begin(self) -> None:
        self.epoch = min(self._positions[index].epoch for index in self._indices)
        left = [index for index in self._indices if self._positions[index].epoch == self.epoch]
        self._left = deque(sorted(left, key=lambda index: (self._positions[index][1:3] == (0, 0), index)))
        self.finished = self.size - len(left)

    @property
    def shard(self) -> int:
        return self._left[0]

    @property
    def soon(self) -> list[int]:
        """List the shard that is read and the next one."""
        return [self._left[at] for at in range(min(2, len(self._left)))]

    def move(self) -> None:
        """Move to the next shard if this one's epoch is over."""
        if self._positions[self.shard].epoch > self.epoch:
            self._left.popleft()
            self.finished += 1
            if not self._left:
                self._begin()


class ContiguousOrder(ShardOrder):
    """The order of runs that began before documents were dealt; they continue in it.

    A shard is a range of documents, and all shards, of whatever source, take turns by the number of their sequences.
    """

    kind = "ranges"
    _dealt = ContiguousShards

    def _lanes(self) -> Iterator[tuple[int, int]]:
        return ((index, number) for number, index in enumerate(self.shards))

    def _total(self, name: str) -> int:
        documents = self._plan.sources[name].documents
        if documents < self._plan.shards:
            raise ConfigurationError(
                f"source {name!r} has {documents} documents, fewer than shards={self._plan.shards}"
            )
        return self._plan.shards

    def in_turn(
        self,
        positions: Mapping[int, Position],
        read: Callable[[int], Sample],
        taken: torch.Tensor | None = None,
        announce: Callable[[int], None] = _ignore,
    ) -> Iterator[Sample]:
        waiting: list[tuple[float, int]] = []

        def wait(index: int, position: Position) -> None:
            shard = self.shards[index]
            weight = self._plan.weights[shard.source_name]
            if weight and not self._plan.ends_at(position.epoch):
                turns = position.sequences + shard.number / shard.total
                heapq.heappush(waiting, (turns / weight, index))

        for index, position in positions.items():
            wait(index, position)
        while waiting:
            sample = read(heapq.heappop(waiting)[1])
            wait(sample.shard, Position(*sample.position))
            yield sample

    def state(self) -> dict[str, Any]:
        shards: dict[str, dict[str, torch.Tensor]] = {}
        for index, shard in self.shards.items():
            values = torch.tensor(self.positions[index][:4], dtype=torch.int64)
            shards.setdefault(shard.source_name, {})[f"{shard.number:06d}"] = values
        return {"shards": shards}

    def load(self, state: Mapping[str, Any], *, saved: Mapping[str, Any], is_same_mix: bool) -> None:
        positions: dict[int, Position] = {}
        for index, shard in self.shards.items():
            where = f"loader state of source {shard.source_name!r}, shard {shard.number}"
            try:
                values = torch.as_tensor(
                    state["shards"][shard.source_name][f"{shard.number:06d}"], dtype=torch.int64
                )
                position = Position(*values.reshape(4).tolist())
            except (KeyError, TypeError, ValueError, RuntimeError) as error:
                raise FormatError(f"{where}: not a position ({type(error).__name__}: {error})") from error
            documents = self._sources[shard.source_name].of(shard.number, position.epoch)[0]
            if min(position) < 0 or position.document >= documents:
                raise FormatError(f"{where}: impossible {position}")
            positions[index] = position
        self.positions = positions


def _check_totals(plan: Plan, totals: Mapping[str, int], means: Mapping[str, float]) -> None:
    """Refuse more ranks than have shards of any source; warn of sources that are small for their number of shards."""
    if plan.world_size > plan.shards:
        raise ConfigurationError(
            f"{plan.shards} shards are too few for {plan.world_size} ranks; raise shards="
        )
    most = max(total for name, total in totals.items() if plan.weights[name])
    if plan.world_size > most:
        raise ConfigurationError(
            f"{most} documents are too few for {plan.world_size} ranks; take fewer ranks"
        )
    for name, total in totals.items():
        sequences = plan.sources[name].documents * means[name] / plan.sequence_length
        if plan.rank == 0 and plan.weights[name] and sequences < _MIN_SEQUENCES * total:
            _logger.warning(
                "source %r has about %d sequences an epoch for %d shards: many documents are read twice before others are "
                "read once. With shards=%d they are not, and that many ranks can read",
                name, sequences, total, max(1, sequences / (4 * _MIN_SEQUENCES)),
            )  # fmt: skip


def _rows(name: str, of_ranks: Mapping[str, Any]) -> dict[int, Position]:
    """Return positions by the number of their shard, of all ranks that have saved."""
    stored: dict[int, Position] = {}
    try:
        for rows in of_ranks.values():
            for number, *position in (
                torch.as_tensor(rows, dtype=torch.int64).reshape(-1, _FIELDS + 1).tolist()
            ):
                stored[number] = Position(*position)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FormatError(f"loader state of source {name!r}: not positions ({error})") from error
    return stored
