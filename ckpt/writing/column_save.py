"""Save as `dcp.save` does, step by step, but with plans that ranks exchange as columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from ckpt.content.rank_content import decode_content, encode_content
from ckpt.content.replicas import Difference, Replicas, differences, differing
from ckpt.errors import CheckpointError
from ckpt.format.dcp_view import share_metadata, shared_metadata
from ckpt.gc_pause import no_gc
from ckpt.ranks.failures import StepFailed
from ckpt.ranks.first_rank import FirstRank
from ckpt.ranks.group import Ranks, RanksFailed, portable
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.exchange import Agreed, Carrier, Local, Plans, agree
from ckpt.save_plans.local import plans_like_dcp, set_up_in_one_pass
from ckpt.save_plans.receipt_messages import Layouts, RankReceipt, Receipts, gather_receipts
from ckpt.torch_private import save_state_dict
from ckpt.writing.layout import refuse_unstorable, resolved_tensor
from ckpt.writing.writer import CheckpointWriter

T = TypeVar("T")

_Details = list[tuple[str, tuple[int, ...], bool, bytes]]
_ANSWER = msgspec.msgpack.Decoder(_Details | str)  # made once, before there are threads

PLANS, LAYOUTS = Plans(), Layouts()
"""What this process remembers of plans, and of where ranks put what they write."""


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
        raise StepFailed("plan", error.failures, error.count) from None
    if agreed is None:
        return None
    assert isinstance(local, Local)
    return _write(
        agreed, writer, planner, first_rank, attempts, lambda: _replicas(local, writer, inner, ranks)
    )


def _local(
    state_dict: dict[str, Any],
    writer: CheckpointWriter,
    planner: SavePlanner,
    inner: DefaultSavePlanner,
    carrier: CarryingPlanner | None,
    ranks: Ranks,
) -> Local:
    """Plan what this rank holds."""
    with no_gc():
        with set_up_in_one_pass(inner):  # it flattens the state
            planner.set_up_planner(
                state_dict, storage_meta=writer.storage_meta(), is_coordinator=ranks.rank == 0
            )
        writer.set_up_storage_writer(
            ranks.rank == 0, rank=ranks.rank, size=ranks.size, use_collectives=True, numbered=True
        )
        structure = PLANS.memory.structure(inner, refuse_unstorable)
    verdict = b"" if carrier is None else carrier.verdict(structure.items)
    writer.look()
    return Local(structure, verdict)


def _replicas(local: Local, writer: CheckpointWriter, planner: SavePlanner, ranks: Ranks) -> Replicas | None:
    """Find what this rank holds, and others may too; None if nobody asks."""
    if ranks.size == 1 or not writer.checks.compare_replicas:
        return None
    values = getattr(planner, "state_dict", {})
    return Replicas(local.structure, values, lambda item: resolved_tensor(planner, item), ranks.size)


def _write(
    agreed: Agreed,
    writer: CheckpointWriter,
    planner: SavePlanner,
    first_rank: FirstRank,
    attempts: _Attempts,
    find_replicas: Callable[[], Replicas | None],
) -> Metadata:
    """Write this rank's items; the coordinator commits when all have."""
    replicas: Replicas | None = None

    def write() -> RankReceipt:
        nonlocal replicas
        replicas = find_replicas()
        plan = planner.finish_plan(SavePlan(agreed.items))
        (result,) = writer.write_items(plan, planner)
        receipt = result.storage_data
        assert isinstance(receipt, RankReceipt)
        return receipt if replicas is None else _with_replicas(receipt, replicas)

    receipt, failure = attempts.run(write)
    report = failure or receipt
    assert report is not None
    try:
        receipts = gather_receipts(first_rank, report, LAYOUTS)
    except Exception as lost_contact:
        if failure is None:
            raise
        raise failure from lost_contact  # the others hear it in the roll call
    committed: Metadata | None = None
    failures: Mapping[int, CheckpointError] = {}
    if receipts is not None:
        assert agreed.plan is not None
        differing_tensors, failures = _ask(receipts, replicas, first_rank, attempts)
        if not failures:
            committed, failures = _commit(agreed.plan, receipts, writer, attempts, differing_tensors)
    shared = first_rank.broadcast(failures if committed is None else share_metadata(committed))
    if isinstance(shared, _Question):
        first_rank.gather_bytes(_answer(replicas, shared, attempts))
        shared = first_rank.broadcast(shared)
    if isinstance(shared, bytes):
        return committed or shared_metadata(shared)
    raise StepFailed("write", shared, len(shared))


def _commit(
    plan: CentralPlan,
    receipts: Receipts | CheckpointError,
    writer: CheckpointWriter,
    attempts: _Attempts,
    differing_tensors: Sequence[Difference],
) -> tuple[Metadata | None, Mapping[int, CheckpointError]]:
    """Commit; return DCP's view of that, or the failures that keep it from being one."""
    if isinstance(receipts, CheckpointError):
        return None, {0: receipts}
    if receipts.failures:
        return None, receipts.failures
    reports = receipts.all()
    metadata, failure = attempts.run(lambda: writer.commit(plan, reports, len(reports), differing_tensors))
    return metadata, {} if failure is None else {0: failure}


@dataclass(frozen=True)
class _Question:
    """Of which tensors the coordinator wants to know more: in these sections ranks hold different values."""

    keys: frozenset[bytes]


def _ask(
    receipts: Receipts | CheckpointError,
    replicas: Replicas | None,
    first_rank: FirstRank,
    attempts: _Attempts,
) -> tuple[Sequence[Difference], Mapping[int, CheckpointError]]:
    """Find out, on the coordinator, of which tensors ranks hold different values. Only if some do, it asks.

    Returns failures of ranks too: whatever fails here, the others wait for an answer.
    """
    if isinstance(receipts, CheckpointError) or receipts.failures:
        return (), {}
    contents = receipts.contents
    keys, failure = attempts.run(lambda: differing([decode_content(each).replicas for each in contents]))
    if not keys:
        return (), {} if failure is None else {0: failure}
    question = first_rank.broadcast(_Question(keys))
    gathered = first_rank.gather_bytes(_answer(replicas, question, attempts)) or ()
    answers, failure = attempts.run(lambda: [_ANSWER.decode(answer) for answer in gathered])
    if answers is None:
        return (), {} if failure is None else {0: failure}
    failures = {
        rank: CheckpointError(f"its replicas could not be compared: {answer}", rank=rank)
        for rank, answer in enumerate(answers)
        if isinstance(answer, str)
    }
    if failures:
        return (), failures
    differing_tensors, failure = attempts.run(
        lambda: differences([answer for answer in answers if not isinstance(answer, str)])
    )
    return differing_tensors or (), {} if failure is None else {0: failure}


def _answer(replicas: Replicas | None, question: _Question, attempts: _Attempts) -> bytes:
    """Encode what this rank holds of the sections in question, or the text of an error."""
    details, failure = attempts.run(lambda: [] if replicas is None else replicas.details(question.keys))
    return msgspec.msgpack.encode(details if failure is None else failure.message)


def _with_replicas(receipt: RankReceipt, replicas: Replicas) -> RankReceipt:
    content = msgspec.structs.replace(decode_content(receipt.content), replicas=replicas.digests())
    return replace(receipt, content=encode_content(content))


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
