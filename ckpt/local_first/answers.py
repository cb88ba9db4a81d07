"""Answer what other ranks ask of the files on this node's disk."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ckpt.errors import NotFound, StorageError, Truncated
from ckpt.ranks.messages import MAX_TAGS, Messages
from ckpt.transfer.tensor_memory import memory_of
from ckpt.transfer.threads import workers

_logger = logging.getLogger(__name__)

_AT_ONCE = 4
_KEY_BYTES = 1024
_WORDS = 4 + _KEY_BYTES // 8
"""Of a request: the rank that asks, where the bytes begin, how many (or FAREWELL), the tag of the answer; the key."""

FAREWELL = -1
SIZE = -1
"""Where the bytes begin, of a request for the object's size."""


ASK, FIRST_ANSWER = 0, 2
_FAILED, _READ, _ENDS, _GONE = range(4)
"""How an answer went. `_ENDS`: the file ends before the bytes that are asked for; `_GONE`: it was removed meanwhile."""

ANSWERS = (MAX_TAGS - FIRST_ANSWER) // 2


class Answers:
    """Answers what other ranks ask, until all have said farewell."""

    def __init__(self, messages: Messages, read: Callable[[str, int, memoryview], None]) -> None:
        self._messages, self._read = messages, read

    def run(self, asking: set[int]) -> None:
        try:
            with workers(_AT_ONCE, "ckpt-answer") as threads:
                while asking:
                    request = torch.zeros(_WORDS, dtype=torch.int64)
                    self._messages.receive_any(request, ASK)
                    rank, offset, nbytes, tag = request[:4].tolist()
                    if nbytes == FAREWELL:
                        asking.discard(rank)
                        continue
                    key = request[4:].numpy().tobytes().rstrip(b"\0").decode()
                    threads.submit(self._answer, rank, key, offset, nbytes, tag)
        except Exception as error:  # the group is broken: all ranks hear of that where they wait
            _logger.debug("no more answers to other nodes: %s", error)

    def _answer(self, rank: int, key: str, offset: int, nbytes: int, tag: int) -> None:
        memory, outcome = torch.zeros(nbytes, dtype=torch.uint8), _READ
        try:
            self._read(key, offset, memory_of(memory))
        except Exception as error:
            outcome = _outcome_of(error)
            if outcome != _GONE:  # room was made meanwhile
                _logger.warning("rank %d asked for %s, which could not be read: %s", rank, key, error)
        try:
            sent = self._messages.begin_send(memory, rank, tag)
            self._messages.send(torch.tensor([outcome]), rank, tag + 1)
            sent()
        except Exception as error:
            _logger.debug("rank %d was not answered: %s", rank, error)


def request_of(rank: int, offset: int, nbytes: int, tag: int, key: str) -> torch.Tensor:
    request = torch.zeros(_WORDS, dtype=torch.int64)
    request[:4] = torch.tensor([rank, offset, nbytes, tag])
    encoded = key.encode()
    request[4:].view(torch.uint8)[: len(encoded)] = (
        torch.frombuffer(bytearray(encoded), dtype=torch.uint8) if encoded else 0
    )
    return request


def _outcome_of(error: Exception) -> int:
    if isinstance(error, Truncated):
        return _ENDS
    return _GONE if isinstance(error, NotFound) else _FAILED


def check_outcome(outcome: int, holder: int, url: str, key: str) -> None:
    """Raise the error of an answer that has none of the bytes: with damage another checkpoint may be tried."""
    if outcome == _ENDS:
        raise Truncated(f"ends too soon on the disk of rank {holder}", url=url, key=key)
    if outcome == _GONE:
        raise NotFound(f"rank {holder} does not have it any more", url=url, key=key)
    if outcome != _READ:
        raise StorageError(f"rank {holder} could not read it", url=url, key=key)
