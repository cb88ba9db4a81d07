"""Say what each row of a checkpoint must tell of its updates, from the log of clicks alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.embeddings import Tables, TableShard
from ckpt.options import LoadOptions
from examples.recommender.checkpoints import url_of
from examples.recommender.click_log import TABLES, ClickLog
from examples.recommender.hash_rows import HashRows
from examples.recommender.options import Options

Entry = list[int]
"""Number of samples, the sums of their batches' numbers and of the squares of these, the last batch."""

_MOST_NAMED = 5


class LedgerWrong(Exception):
    """Rows that have lost an update, or have one twice, or one from after the cut."""


class Ledger:
    """The ledger of every row after a step: no code of the training is used, only the log.

    A row is there from its first update on. It goes, ledger and all, at the first checkpoint `evict_after` steps
    after its last one.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._log = options, ClickLog(options.seed)
        self.step = 0
        self.rows: dict[str, dict[int, Entry]] = {table: {} for table in TABLES}
        self.dense = [0, 0, 0]

    def advance(self, step: int) -> None:
        """Go on to a later step."""
        while self.step < step:
            self.step += 1
            self._add(self.step)
            if self._options.is_eviction(self.step):
                self._evict(self.step - self._options.evict_after)

    def _add(self, step: int) -> None:
        self.dense = [self.dense[0] + 1, self.dense[1] + step, self.dense[2] + step * step]
        for table, ids in self._log.batch(step).ids.items():
            rows = self.rows[table]
            for id in ids.tolist():
                count, batches, squares, _ = rows.get(id, (0, 0, 0, 0))
                rows[id] = [count + 1, batches + step, squares + step * step, step]

    def _evict(self, batch: int) -> None:
        for table, rows in self.rows.items():
            self.rows[table] = {id: entry for id, entry in rows.items() if entry[3] > batch}

    def check_rows(self, step: int, tables: Mapping[str, HashRows], where: str) -> None:
        """Compare all rows of some shards. Raises LedgerWrong."""
        self.advance(step)
        for table, rows in tables.items():
            expected = self.rows[table]
            ids = np.fromiter(expected, dtype=np.int64, count=len(expected))
            own = ids[rows.owns(ids)].tolist()
            have = rows.ids()
            entries = rows.read(have, ["ledger"])["ledger"].tolist()
            self._compare(
                {id: expected[id] for id in own},
                dict(zip(have.tolist(), entries, strict=True)),
                f"{where}, {table}",
            )

    def _compare(self, expected: Mapping[int, Entry], actual: Mapping[int, Entry], where: str) -> None:
        wrong: dict[str, list[str]] = defaultdict(list)
        for id in sorted(expected.keys() | actual.keys()):
            want, have = expected.get(id), actual.get(id)
            if want == have:
                continue
            if have is None:
                kind = "is missing"
            elif want is None:
                kind = "should not be there"
            elif have[3] > self.step:
                kind = "has an update from after the cut"
            else:
                kind = "has lost an update" if have[0] < want[0] else "has an update twice"
            wrong[kind].append(f"{id}: {have} instead of {want}")
        if wrong:
            texts = [
                f"{len(rows)} rows: {kind} (row {'; row '.join(rows[:_MOST_NAMED])})"
                for kind, rows in wrong.items()
            ]
            raise LedgerWrong(f"{where}, step {self.step}: " + "; ".join(texts))

    def check_checkpoint(self, step: int) -> dict[str, int]:
        """Read a whole checkpoint in this process, and compare. Returns the number of rows by table.

        Raises LedgerWrong.
        """
        self.advance(step)
        options = self._options
        url, storage_options = url_of(options, step), options.storage_options
        rows = {table: HashRows(options.width) for table in TABLES}
        Tables(*(TableShard(table, each) for table, each in rows.items())).restore(
            url, storage_options=storage_options
        )
        self.check_rows(step, rows, "the checkpoint")
        dense: dict[str, Any] = {
            "model": {"ledger": torch.zeros(3, dtype=torch.int64)},
            "log": {"step": 0},
        }
        part = LoadOptions(strict=False)  # the rest of the model is not looked at
        ckpt.load(dense, url, storage_options=storage_options, no_dist=True, options=part)
        if dense["log"]["step"] != step or dense["model"]["ledger"].tolist() != self.dense:
            raise LedgerWrong(
                f"step {step}: the log stands at {dense['log']['step']}, and the dense part has "
                f"{dense['model']['ledger'].tolist()} instead of {self.dense}"
            )
        return {table: len(each) for table, each in rows.items()}
