"""Send memory from rank to rank, beside the collectives of a save."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ckpt.errors import ConfigurationError
from ckpt.ranks.group import Ranks
from ckpt.ranks.point_to_point import LONGEST_WAIT, finish

MAX_TAGS = 1 << 16

_FIRST_TAG = 1 << 30


class Messages:
    """Messages between the ranks of a save, from many threads at a time.

    A message has a tag below `MAX_TAGS`, and goes to a rank that waits for it, or will. When the ranks lose each
    other, all that wait fail with the error of torch.

    The tags are those of this call alone: where the ranks talk over the caller's group, those of a
    save in the background, or of one that failed, may be under way in it.
    """

    def __init__(self, ranks: Ranks) -> None:
        """Raise ConfigurationError if the ranks talk over a group without messages between CPUs."""
        self.rank, self.size = ranks.rank, ranks.size
        self._group, self._progress = ranks.group, ranks.progress
        self._first_tag = _FIRST_TAG + MAX_TAGS * (ranks.call % 4096 + 4096 * (ranks.purpose == "background"))
        if self.size > 1 and dist.get_backend(self._group) != "gloo":
            raise ConfigurationError(
                f"these ranks can only talk over {dist.get_backend(self._group)!r}; pass a process_group of gloo"
            )

    def send(self, memory: torch.Tensor, rank: int, tag: int) -> None:
        """Send a dense CPU tensor; return when it has been received."""
        self.begin_send(memory, rank, tag)()

    def begin_send(self, memory: torch.Tensor, rank: int, tag: int) -> Callable[[], None]:
        """Begin to send a dense CPU tensor; call what is returned to wait until it has been received."""
        work = dist.isend(memory, group=self._group, group_dst=rank, tag=self._first_tag + tag)
        return self._waits_for(work, memory)

    def receive(self, memory: torch.Tensor, rank: int, tag: int) -> Callable[[], None]:
        """Begin to receive into a dense CPU tensor of the very size; call what is returned to wait for it."""
        work = dist.irecv(memory, group=self._group, group_src=rank, tag=self._first_tag + tag)
        return self._waits_for(work, memory)

    def receive_any(self, memory: torch.Tensor, tag: int) -> None:
        """Wait for the next message of any rank."""
        work = dist.irecv(memory, group=self._group, tag=self._first_tag + tag)
        assert work is not None
        work.wait(LONGEST_WAIT)

    def _waits_for(self, work: dist.Work | None, memory: torch.Tensor) -> Callable[[], None]:
        """Make a wait that ends when this save has failed elsewhere."""
        assert work is not None  # this rank is in the group

        def wait(memory: torch.Tensor = memory) -> None:  # which must live as long
            finish([work], self._progress)

        return wait
