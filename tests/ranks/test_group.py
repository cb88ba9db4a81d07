"""The process groups of saves and loads end with those of the program."""

from __future__ import annotations

import contextlib
import gc
import time
import weakref

import pytest
import torch.distributed as dist
from support.ranks import run_ranks

from ckpt.ranks.group import Ranks
from ckpt.ranks.rendezvous import connect, forget
from ckpt.torch_private import default_store


def test_a_group_ends_when_torch_destroys_it() -> None:
    """Its threads would abort the program if one still let go of a tensor when Python ends."""
    assert run_ranks(2, _destroy) == [(True, True)] * 2


@pytest.mark.long
def test_a_rank_that_works_for_long_is_waited_for() -> None:
    """Longer than a silent one would be, and longer than the group may take to connect."""
    assert run_ranks(2, _late) == [[1, 1], [1, 1]]


def _late(rank: int) -> list[int]:
    with contextlib.closing(Ranks(None, no_dist=False, timeout_s=20)) as ranks:
        ranks.together("test", lambda: None)
        for _ in range(80 * rank):
            time.sleep(0.25)
            ranks.progress.moved()
        return ranks.most([rank, rank])


def test_the_rendezvous_store_ends_with_its_group() -> None:
    """The first rank's listens at a port, which the program may want again."""
    assert run_ranks(2, _leave) == [(True, True)] * 2


def _leave(rank: int) -> tuple[bool, bool]:
    store = weakref.ref(default_store())
    first = connect(store(), 5.0)
    is_kept = connect(store(), 5.0) is first
    forget(store())
    is_kept &= connect(store(), 5.0) is not first
    dist.destroy_process_group()
    gc.collect()
    return is_kept, store() is None


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
