"""The dense part: a small network that every trainer has, and sums that are exact."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from examples.recommender.click_log import SAMPLES

_UNIT = 2.0**-14


class Ranker(nn.Module):
    """Tell how likely a user clicks an item, from the embeddings of both.

    It carries a ledger, as the rows do: number of batches, the sums of their numbers, and of the squares.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))
        self.ledger: torch.Tensor
        self.register_buffer("ledger", torch.zeros(3, dtype=torch.int64))

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers(torch.cat([users, items, users * items], dim=1))
        return logits.squeeze(1)


def exact(gradient: torch.Tensor) -> torch.Tensor:
    """Round to multiples of 2^-14, from -1 to 1: up to 512 of them have the same sum in any order.

    A float32 has 24 bits; 1 + 14 + 9 are needed.
    """
    return (gradient.clamp(-1, 1) / _UNIT).round() * _UNIT


def distributed(model: Ranker, group: Any) -> DistributedDataParallel:
    """Wrap the model: the gradients of all slices of all trainers are summed, exactly."""
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: exact(gradient / SAMPLES))  # type: ignore[no-untyped-call]
    wrapped = DistributedDataParallel(model, process_group=group)
    wrapped.register_comm_hook(group, _sum)  # DDP's own divides by the number of trainers, and rounds
    return wrapped


def _sum(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    assert work is not None
    summed: torch.futures.Future[torch.Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed
