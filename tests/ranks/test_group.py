"""The process groups of saves and loads end with those of the program."""

from __future__ import annotations

import weakref

import torch.distributed as dist
from support.ranks import run_ranks

from ckpt.ranks.group import Ranks


def test_a_group_ends_when_torch_destroys_it() -> None:
    """Its threads would abort the program if one still let go of a tensor when Python ends."""
    assert run_ranks(2, _destroy) == [(True, True)] * 2


def _destroy(rank: int) -> tuple[bool, bool]:
    groups = []
    for _ in range(2):
        ranks = Ranks(None, no_dist=False)
        ranks.connect()
        groups.append(weakref.ref(ranks.group))
        ranks.gather(rank)
        ranks.close()
        del ranks
    is_kept = groups[0]() is groups[1]() is not None
    dist.destroy_process_group(groups[1]())
    return is_kept, groups[1]() is None
