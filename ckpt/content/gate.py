"""Let a save pass, warn of it or refuse it, by its content: on the coordinator, before the commit."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
from torch.distributed.checkpoint.metadata import Metadata

from ckpt.content.checks import Checks
from ckpt.content.judging import (
    Descriptions,
    Finding,
    Saved,
    content_of,
    follows,
    judge,
    sort_out,
    with_known,
)
from ckpt.content.memory import last_like, remember, saved_as
from ckpt.content.rank_content import decode_content
from ckpt.content.replicas import Difference
from ckpt.errors import CheckpointError, WrongContent
from ckpt.format.columns import Columns
from ckpt.format.records import CommitRecord, StoredCommit
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.receipt_messages import RankReceipt

_logger = logging.getLogger(__name__)

_DESCRIPTIONS = Descriptions()


class Gate:
    """Compares a save with the one before it.

    Attributes:
        warnings: why a save that has passed may still be wrong.
    """

    def __init__(self, checks: Checks, url: str, replaced: StoredCommit | None) -> None:
        """`url` is that of the save, `replaced` what is committed there."""
        self._checks, self._url, self._replaced = checks, url, replaced
        self._saved: Saved | None = None
        self.warnings: list[str] = []

    def passed(
        self,
        planned: Metadata | CentralPlan,
        columns: Columns,
        record: CommitRecord,
        receipts: Sequence[RankReceipt],
        differences: Sequence[Difference],
    ) -> CommitRecord:
        """Return the record of a save that may be committed, with what the next one is compared with.

        Raises WrongContent, which names the tensor and the rank, if a check refuses the save.
        """
        ranks = {receipt.rank: decode_content(receipt.content) for receipt in receipts if receipt.content}
        if self._checks.are_off or not ranks:
            return record
        number = planned.number if isinstance(planned, CentralPlan) and not record.owners else None
        parts = content_of(_DESCRIPTIONS.of(columns, number), ranks)
        now = Saved(self._url, record.step(self._url), parts, record.world_size, refers=bool(record.owners))
        before = self._before(now)
        refused, told = sort_out(judge(now, before, ranks, differences), self._checks)
        if refused:
            raise self._refusal(refused)
        self.warnings = [each.text for each in told]
        for text in self.warnings:
            _logger.warning("%s: %s", self._url, text)
        parts = with_known(parts, before, refers=now.refers)
        self._saved = replace(now, parts=parts)
        return msgspec.structs.replace(record, content=parts)

    def _before(self, now: Saved) -> Saved | None:
        """Return the save before: the last one of this process, unless that is of a later step; else what is replaced."""
        candidates = last_like(self._url), _saved_before(self._replaced)
        return next((each for each in candidates if each is not None and follows(now, each)), None)

    def keep(self) -> None:
        """Have later saves compared with this one, which was committed."""
        if self._saved is not None:
            remember(self._saved)

    def _refusal(self, findings: Sequence[Finding]) -> WrongContent:
        first, text = findings[0], "; ".join(each.text for each in findings)
        return WrongContent(
            f'nothing was committed: {text}; if this is meant, save with checks=ckpt.Checks({first.check}="warn")',
            check=first.check,
            tensors=first.tensors,
            rank=first.rank,
            url=self._url,
        )


def _saved_before(replaced: StoredCommit | None) -> Saved | None:
    """Return what is known of the checkpoint that is replaced; None of a damaged one."""
    try:
        return None if replaced is None else saved_as(replaced.url, replaced.record)
    except CheckpointError:
        return None
