"""Save as `dcp.save` does, step by step, but with plans that ranks exchange as columns."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from ckpt.errors import CheckpointError
from ckpt.gc_pause import no_gc
from ckpt.ranks.first_rank import FirstRank
from ckpt.ranks.group import Ranks, RanksFailed, portable
from ckpt.save_plans.exchange import Agreed, Carrier, Local, Plans, agree
from ckpt.save_plans.local import plans_like_dcp
from ckpt.torch_private import save_state_dict
from ckpt.writing.layout import refuse_unstorable
from ckpt.writing.receipts import RankReceipt
from ckpt.writing.writer import CheckpointWriter

T = TypeVar("T")

PLANS = Plans()
"""What this process remembers of plans."""


@runtime_checkable
class CarryingPlanner(Carrier, Protocol):
    """A planner around another that leaves out what is carried."""

    inner: SavePlanner

    def verdict(self, items: Iterable[WriteItem]) -> bytes: ...


def save_planned(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner, ranks: Ranks
) -> Metadata:
    """Save a state; as DCP does it if the planner or the writer has a way of its own.

    Raises CheckpointException as `dcp.save` does, on all ranks, if one failed.
    """
    metadata = save_columns(state_dict, writer, planner, ranks) if writer.takes_columns else None
    if metadata is not None:
        return metadata
    group = {"process_group": ranks.group, "no_dist": ranks.no_dist}
    return save_state_dict(state_dict, storage_writer=writer, planner=planner, **group)


def save_columns(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner, ranks: Ranks
) -> Metadata | None:
    """Save a state; return None, on all ranks, if the planner of one does not plan as DCP's own.

    Raises CheckpointException as `dcp.save` does, on all ranks, if one failed.
    """
    first_rank = FirstRank(ranks)
    carrier = planner if isinstance(planner, CarryingPlanner) else None
    inner = planner if carrier is None else carrier.inner
    attempts = _Attempts(writer, ranks.rank)
    local: Local | CheckpointError | None = None
    if isinstance(inner, DefaultSavePlanner) and plans_like_dcp(inner):
        local, failure = attempts.run(lambda: _local(state_dict, writer, planner, inner, carrier, ranks))
        local = local or failure
    try:
        agreed = agree(first_rank, PLANS, local, carrier)
    except RanksFailed as error:
        raise _exception("plan", error.failures) from None
    return None if agreed is None else _write(agreed, writer, planner, first_rank, attempts)


def _local(
    state_dict: dict[str, Any],
    writer: CheckpointWriter,
    planner: SavePlanner,
    inner: DefaultSavePlanner,
    carrier: CarryingPlanner | None,
    ranks: Ranks,
) -> Local:
    """Plan what this rank holds."""
    with no_gc():  # it flattens the state
        planner.set_up_planner(state_dict, storage_meta=writer.storage_meta(), is_coordinator=ranks.rank == 0)
    writer.set_up_storage_writer(
        ranks.rank == 0, rank=ranks.rank, size=ranks.size, use_collectives=True, numbered=True
    )
    structure = PLANS.memory.structure(inner, refuse_unstorable)
    verdict = b"" if carrier is None else carrier.verdict(structure.items)
    writer.look()
    return Local(structure, verdict)


def _write(
    agreed: Agreed, writer: CheckpointWriter, planner: SavePlanner, first_rank: FirstRank, attempts: _Attempts
) -> Metadata:
    """Write this rank's items; the coordinator commits when all have."""

    def write() -> RankReceipt:
        plan = planner.finish_plan(SavePlan(agreed.items))
        (result,) = writer.write_data(plan, planner).value()
        receipt = result.storage_data
        assert isinstance(receipt, RankReceipt)
        return receipt

    receipt, failure = attempts.run(write)
    told = first_rank.gather_bytes(pickle.dumps(failure or receipt))
    answer: Metadata | Mapping[int, CheckpointError] | None = None
    if told is not None:
        assert agreed.plan is not None
        answer = _commit(agreed.plan, [pickle.loads(data) for data in told], writer, attempts)
    answer = first_rank.broadcast(answer)
    if isinstance(answer, Metadata):
        return answer
    raise _exception("write", answer or {})


def _commit(
    plan: Any, told: Sequence[RankReceipt | CheckpointError], writer: CheckpointWriter, attempts: _Attempts
) -> Metadata | Mapping[int, CheckpointError]:
    failures = {rank: each for rank, each in enumerate(told) if isinstance(each, CheckpointError)}
    if failures:
        return failures
    receipts = [each for each in told if isinstance(each, RankReceipt)]
    metadata, failure = attempts.run(lambda: writer.commit(plan, receipts, len(receipts)))
    return {0: failure} if metadata is None and failure is not None else metadata  # type: ignore[return-value]


class _Attempts:
    """Work of this rank, whose errors all ranks are told."""

    def __init__(self, writer: CheckpointWriter, rank: int) -> None:
        self._writer, self._rank = writer, rank

    def run(self, work: Callable[[], T]) -> tuple[T | None, CheckpointError | None]:
        """Return a result, or an error that travels."""
        try:
            return work(), None
        except Exception as error:
            return None, portable(error, self._rank)
        except BaseException as error:
            self._writer.interrupt = self._writer.interrupt or error
            return None, CheckpointError(f"interrupted: {type(error).__name__}", rank=self._rank)


def _exception(step: str, failures: Mapping[int, CheckpointError]) -> CheckpointException:
    return CheckpointException(
        step, {rank: (error, traceback.StackSummary()) for rank, error in failures.items()}
    )
