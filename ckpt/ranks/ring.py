"""Pass parts around a ring of ranks: each is sent by one rank and reaches all, in the memory of two parts."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import torch

from ckpt.errors import CheckpointError
from ckpt.ranks.messages import Messages
from ckpt.ranks.progress import Progress

_PART_TAG, _ERROR_TAG = 0, 1


class Ring:
    """A ring of ranks; each receives from the one before it and sends to the one after it.

    Whatever a member waits for, a rank that is late delays all, and one that is gone is an error of torch.

    Args:
        messages: of this call.
        members: the ranks, in the same order on all of them.
        progress: of this rank.

    Attributes:
        position: of this rank among the members.
    """

    def __init__(self, messages: Messages, members: Sequence[int], progress: Progress) -> None:
        self.members, self.position = members, members.index(messages.rank)
        self._messages, self._progress = messages, progress

    def turn(
        self,
        own: torch.Tensor,
        sizes: Sequence[int],
        incoming: Sequence[torch.Tensor],
        see: Callable[[int, torch.Tensor], None],
    ) -> None:
        """Give every member's part to all of them.

        Args:
            own: bytes that this rank sends.
            sizes: bytes that each member sends; at least one.
            incoming: two tensors of bytes, each as large as the largest part.
            see: is shown each part, this rank's own too, with the position of the member that sent it.
        """
        before, after = self._neighbour(-1), self._neighbour(1)
        part = own
        for step in range(len(self.members)):
            sender = (self.position - step) % len(self.members)
            if step + 1 == len(self.members):
                see(sender, part)
                return
            following = incoming[step % 2][: sizes[sender - 1]]
            received = self._messages.receive(following, before, _PART_TAG)
            sent = self._messages.begin_send(part, after, _PART_TAG)
            see(sender, part)
            self._progress.wait_for(f"rank {before} to pass on what rank {self.members[sender - 1]} read")
            received()
            sent()
            self._progress.begin("loading")
            part = following

    def tell(self, position: int, error: CheckpointError | None) -> CheckpointError:
        """Tell all members the error of the one at `position`, which passes it; return it on all."""
        if self.position == position:
            assert error is not None
            data = pickle.dumps(error)
            message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for rank in self.members:
                if rank != self.members[position]:
                    self._messages.send(torch.tensor([len(data)]), rank, _ERROR_TAG)
                    self._messages.send(message, rank, _ERROR_TAG)
            return error
        rank = self.members[position]
        length = torch.empty(1, dtype=torch.int64)
        self._messages.receive(length, rank, _ERROR_TAG)()
        message = torch.empty(int(length), dtype=torch.uint8)
        self._messages.receive(message, rank, _ERROR_TAG)()
        told = pickle.loads(message.numpy().tobytes())  # of another rank of this program, as torch's own
        assert isinstance(told, CheckpointError)
        return told

    def _neighbour(self, distance: int) -> int:
        return self.members[(self.position + distance) % len(self.members)]
