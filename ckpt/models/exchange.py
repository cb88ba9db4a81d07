"""Put tensors together from the parts that the ranks hold, while their files are written.

The rank that writes a file asks the others for their parts of the next few MiB, when they are due;
each rank answers in a thread of its own. So no rank ever holds more than a few windows of what is
not its own, and retries of a part just ask again.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence

import torch

from ckpt.consistency import environment
from ckpt.models.layout import ModelFile, ModelLayout, ModelTensor, Region, TensorPart
from ckpt.ranks.lost_ranks import StoppedForAnother
from ckpt.ranks.messages import MAX_TAGS, Messages
from ckpt.ranks.progress import Progress
from ckpt.transfer.file_body import BytesPayload, Due, FileItem, Payload, StreamedPayload
from ckpt.transfer.tensor_memory import copy_elements, has_memory_view

WINDOW_BYTES = 4 << 20
_WINDOWS_AT_ONCE = 4
_ASK, _FAREWELL, _FIRST_REPLY = range(3)
_REPLIES = MAX_TAGS - _FIRST_REPLY
_WORDS = 5  # of a request: rank, file or _DONE or _FAILED, start, stop, tag of the reply
_DONE, _FAILED = -1, -2


class ModelExchange:
    """The parts that this rank gives, and the payloads that it makes of those of all ranks.

    `part_of` returns this rank's part of a tensor, or raises; the save then fails on this rank.
    """

    def __init__(
        self,
        layout: ModelLayout,
        messages: Messages,
        part_of: Callable[[ModelTensor, TensorPart], torch.Tensor],
        progress: Progress,
    ) -> None:
        self._layout, self._messages, self._part_of, self._progress = layout, messages, part_of, progress
        self._tags = itertools.count()
        self._failed_rank: int | None = None
        self._failure: BaseException | None = None
        self._served = threading.Event()
        others = [rank for rank in range(messages.size) if rank != messages.rank]
        self._farewells = {
            rank: messages.receive(torch.empty(_WORDS, dtype=torch.int64), rank, _FAREWELL) for rank in others
        }
        if others:
            environment.start_thread(self._serve, "ckpt-parts")
        else:
            self._served.set()

    def items(self, number: int) -> list[FileItem]:
        """Lay out a file: its header, and its tensors end to end."""
        file = self._layout.files[number]
        payloads: list[Payload] = [BytesPayload(file.header)]
        payloads += [
            _Tensor(self, number, begin, t.nbytes)
            for begin, t in zip(file.offsets, file.tensors, strict=False)
        ]
        offsets = [0, *file.offsets]
        return [
            FileItem(offset, b"", payload, b"") for offset, payload in zip(offsets, payloads, strict=False)
        ]

    def check(self) -> None:
        """Raise if this rank's files are not wanted any more: the save has failed here or elsewhere."""
        if self._failure is not None:
            raise self._failure
        if self._failed_rank is not None:
            raise StoppedForAnother(f"stopped: rank {self._failed_rank} failed")

    def end(self, *, failed: bool) -> None:
        """Tell the other ranks that this one asks no more, and wait until none of them does.

        Raises what kept this rank from giving its parts.
        """
        word = torch.tensor([self._messages.rank, _FAILED if failed else _DONE, 0, 0, 0])
        lost: Exception | None = None
        for rank in self._farewells:
            try:
                self._messages.send(word, rank, _ASK)
                self._messages.send(word, rank, _FAREWELL)
            except Exception as error:
                lost = error
        for rank, received in self._farewells.items():
            try:
                received()
                self._progress.moved()
            except Exception as error:  # of a rank that died; who waits for just any rank is not told
                lost = error
                self._failed_rank = rank
        if lost is None:
            self._served.wait()
        self._failure = self._failure or lost
        if self._failure is not None and not failed:
            raise self._failure

    # -- what this rank asks for ---------------------------------------------------------------------------

    def read(self, due: Sequence[Due]) -> None:
        """Fill what is due of a part of a file, a few windows at a time."""
        begun: deque[Callable[[], None]] = deque()
        for start, memories in _windows(due):
            self.check()
            if len(begun) == _WINDOWS_AT_ONCE:
                begun.popleft()()
            number = due[0][0].file  # type: ignore[attr-defined]
            begun.append(self._begin(number, start, memories))
        for finish in begun:
            finish()

    def _begin(self, number: int, start: int, memories: Sequence[memoryview]) -> Callable[[], None]:
        """Begin to fill a window; call what is returned to wait for it."""
        file = self._layout.files[number]
        stop = start + sum(memory.nbytes for memory in memories)
        window = _Window(memories)
        by_rank: dict[int, list[Region]] = defaultdict(list)
        for region in file.regions(start, stop):
            by_rank[region.part.rank].append(region)
        own = by_rank.pop(self._messages.rank, [])
        waits = [self._ask(rank, number, start, stop, window, regions) for rank, regions in by_rank.items()]
        for region in own:
            copy_elements(self._part(region), window.of(region))

        def finish() -> None:
            for wait in waits:
                wait()
            self._progress.moved()

        return finish

    def _ask(
        self, rank: int, number: int, start: int, stop: int, window: _Window, regions: Sequence[Region]
    ) -> Callable[[], None]:
        nbytes = sum(region.nbytes for region in regions)
        only = window.of(regions[0]) if len(regions) == 1 else None
        direct = only is not None and only.is_contiguous()
        memory = _bytes_of(only) if direct and only is not None else torch.empty(nbytes, dtype=torch.uint8)
        tag = next(self._tags) % _REPLIES + _FIRST_REPLY
        received = self._messages.receive(
            memory, rank, tag
        )  # before it is asked for: so no reply has to wait
        self._messages.send(torch.tensor([self._messages.rank, number, start, stop, tag]), rank, _ASK)

        def wait() -> None:
            received()
            if not direct:
                for region, packed in zip(regions, _split(memory, regions), strict=True):
                    copy_elements(packed, window.of(region))

        return wait

    # -- what others ask for -------------------------------------------------------------------------------

    def _serve(self) -> None:
        request = torch.empty(_WORDS, dtype=torch.int64)
        asking = set(range(self._messages.size)) - {self._messages.rank}
        try:
            while asking:
                self._messages.receive_any(request, _ASK)
                rank, number, start, stop, tag = request.tolist()
                if number >= 0:
                    self._messages.send(self._reply(self._layout.files[number], start, stop), rank, tag)
                    continue
                asking.discard(rank)
                if number == _FAILED and self._failed_rank is None:
                    self._failed_rank = rank
        except BaseException as error:
            self._failure = self._failure or error
        finally:
            self._served.set()

    def _reply(self, file: ModelFile, start: int, stop: int) -> torch.Tensor:
        """Make the bytes that are asked for; any, after an error that keeps all from being committed."""
        regions = list(file.regions(start, stop, self._messages.rank))
        nbytes = sum(region.nbytes for region in regions)
        try:
            parts = [self._part(region) for region in regions]
            if len(parts) == 1 and has_memory_view(parts[0]):
                return _bytes_of(parts[0])
            reply = torch.empty(nbytes, dtype=torch.uint8)
            for part, packed in zip(parts, _split(reply, regions), strict=True):
                copy_elements(part, packed)
            return reply
        except Exception as error:
            self._failure = self._failure or error
            return torch.empty(nbytes, dtype=torch.uint8)

    def _part(self, region: Region) -> torch.Tensor:
        return self._part_of(region.tensor, region.part)[region.in_part]


class _Tensor(StreamedPayload):
    """A tensor of a file, which begins at `begin` of it."""

    def __init__(self, exchange: ModelExchange, file: int, begin: int, nbytes: int) -> None:
        super().__init__(nbytes, exchange.read)
        self.file, self.begin = file, begin


class _Window:
    """The memory of a run of a file's bytes, in pieces: one for each tensor in it."""

    def __init__(self, memories: Sequence[memoryview]) -> None:
        begins = itertools.accumulate((memory.nbytes for memory in memories), initial=0)
        self._memories = memories
        self._begins = list(begins)[:-1]

    def of(self, region: Region) -> torch.Tensor:
        """Show the memory of a region's elements."""
        number = bisect.bisect_right(self._begins, region.box_begin) - 1
        first = region.box_begin - self._begins[number]
        box_bytes = math.prod(region.box_shape) * region.tensor.dtype.itemsize
        memory = self._memories[number][first : first + box_bytes]
        box = torch.frombuffer(memory, dtype=torch.uint8).view(region.tensor.dtype).view(region.box_shape)
        return box[region.in_box]


def _windows(due: Sequence[Due]) -> Iterator[tuple[int, list[memoryview]]]:
    """Cut what is due, which is one run of a file, into windows: where each begins, and its memory."""
    memories: list[memoryview] = []
    begin = size = 0
    for payload, first, memory in due:
        while memory.nbytes:
            if not memories:
                begin = payload.begin + first  # type: ignore[attr-defined]
            piece = memory[: WINDOW_BYTES - size]
            memories.append(piece)
            size, first, memory = size + piece.nbytes, first + piece.nbytes, memory[piece.nbytes :]
            if size == WINDOW_BYTES:
                yield begin, memories
                memories, size = [], 0
    if memories:
        yield begin, memories


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Show a dense tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _split(packed: torch.Tensor, regions: Sequence[Region]) -> Iterator[torch.Tensor]:
    """Show the elements of regions that lie packed, end to end."""
    begin = 0
    for region in regions:
        flat = packed[begin : begin + region.nbytes].view(region.tensor.dtype)
        yield flat.view(region.shape)
        begin += region.nbytes
