"""Write checkpoints under DCP: `dcp.save(state, storage_writer=ckpt.CheckpointWriter(url))`.

Every rank writes under new names into its own directory, and tells the coordinator, which commits,
through DCP's collectives what it wrote. No rank depends on seeing what another one wrote.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ckpt.backends.base import Store
from ckpt.consistency import environment
from ckpt.consistency.block_digests import checked_algorithm
from ckpt.consistency.commit import proves_no_commit
from ckpt.content.checks import Checks, Level
from ckpt.content.counters import counter_of, number_of
from ckpt.content.gate import Gate
from ckpt.content.memory import is_new, note_written
from ckpt.content.parts import parts_of
from ckpt.content.replicas import Difference
from ckpt.dcp_storage import DcpStorage
from ckpt.errors import CheckpointError, CommitUnknown, ConfigurationError
from ckpt.format.columns import Columns
from ckpt.format.dcp_view import metadata_of
from ckpt.format.index import check_count
from ckpt.format.names import last_segment, rank_directory
from ckpt.format.records import CommitRecord
from ckpt.format.run_record import NO_STAMP
from ckpt.gc_pause import no_gc
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, lacks_group
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.packed import packed_plan
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.save_plans.validation import quick_validation
from ckpt.torch_private import replace_plan_validation
from ckpt.transfer.bandwidth import Pacer
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import (
    Chunk,
    Entry,
    pickled_entries,
    refuse_unstorable_by_dcp,
    spread,
    tensor_entries,
)
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import durations, records_of, timings_of
from ckpt.writing.refused_objects import RefusedObjects
from ckpt.writing.save_objects import SaveObjects
from ckpt.writing.stager import COMMON_MEMORY, CommonStager
from ckpt.writing.stock_metadata import DEFAULT_MAX_BYTES, checked_max_bytes, oversize_bytes

_logger = logging.getLogger(__name__)

_OBJECT_BATCH_BYTES = 32 << 20
_MAX_SHOWN = 3
_DEFAULTS: Mapping[str, Any] = {
    "overwrite": True,
    "stock_metadata_max_bytes": DEFAULT_MAX_BYTES,
    "checks": Checks(),
    "block_digests": None,
}
RECEIPT = MetadataIndex("ckpt.receipt")


@dataclass
class SaveMeta(StorageMeta):
    """Figures of a committed save, in the metadata that a save returns; they are not stored.

    Attributes:
        seconds: of the coordinator: `plan_s`, `write_s` (until all have written), `commit_s`.
        retries: requests to the storage that were sent again, by all ranks.
        warnings: of the checks of its content.
        digest: names the checkpoint: `ckpt.load(..., expect=digest)` loads this one or none.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    warnings: list[str] = field(default_factory=list)
    digest: str = ""


_NO_COLLECTIVES = (
    "use_collectives=False is not supported: without collectives no rank knows when all have finished, and the "
    "checkpoint could be torn"
)


class CheckpointWriter(DcpStorage, StorageWriter, CommonStager):
    """Write checkpoints that are committed whole or not at all.

    It stages for `dcp.async_save` itself, as `ckpt.Stager` does, but for any number of saves at a time.

    Args:
        url: a path, `s3://bucket/key`, `cos://bucket/key`, or any fsspec URL.
        storage_options: credentials, endpoint and settings of the store, as with fsspec and pandas.
        overwrite: replace a checkpoint of this library at the same place, with the commit; else that is an error.
        threads: the most transfers at the same time; default that of `ckpt.toml` (docs/tuning.md), or by the cores, 8 to 16.
        memory_budget_bytes: memory this rank may use beyond the tensors (default 256 MiB).
        max_bandwidth_bytes_per_s: the most that this rank sends, on average; None is no cap.
        tags: short texts kept in the commit record.
        stock_metadata_max_bytes: a `.metadata` for stock PyTorch that would be larger is left out (default 256
            MiB, some 2 million chunks); 0 never writes one, None always. `ckpt convert --to dcp` makes one.
        checks: of what is saved (`ckpt.Checks`), or one level for all: `"refuse"`, `"warn"`, `"off"`.
        block_digests: keeps cryptographic digests of all bytes, `"blake3"` or `"sha256"` (docs/provenance.md).
        timeout_s: a storage operation of this rank that makes no progress for most of it is given up, so that all
            ranks fail within it; None waits as long as the store does. (`ckpt.save` watches the other ranks too.)

    Raises ConfigurationError if an argument is wrong.
    """

    takes_columns = True
    """Whether a plan may say less than DCP's: which items to write, and no more."""

    stamp = NO_STAMP  # of the run that it saves for
    trusted_objects: Collection[str] = ()  # names of which no warning is needed
    described: Any = None  # by `ckpt.save` and the manager: what the values of the state are
    has_written = False  # in the current save, on this rank: until then no commit can list its objects
    _own_memory = True
    _is_model = False

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        overwrite: bool = True,
        threads: int | None = None,
        memory_budget_bytes: int | None = None,
        max_bandwidth_bytes_per_s: float | None = None,
        tags: Mapping[str, str] | None = None,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
        checks: Checks | Level | None = None,
        block_digests: str | None = None,
    ) -> None:
        self.checks = Checks.of(checks)
        self.block_digests = checked_algorithm(block_digests)
        self._tags = _checked_tags(tags)
        self._overwrite = self._flag("overwrite", overwrite)
        self._stock_metadata_max_bytes = checked_max_bytes(stock_metadata_max_bytes)
        self.shared_options = _changed(overwrite, stock_metadata_max_bytes, self.checks, self.block_digests)
        self._pacer = None if max_bandwidth_bytes_per_s is None else Pacer(max_bandwidth_bytes_per_s)
        super().__init__(url, storage_options, threads, memory_budget_bytes, timeout_s)
        self._objects = SaveObjects()
        self._numbered = False
        self._began_at_s: dict[str, float] = {}
        self._retries_before = 0
        self._coordinator: Coordinator | None = None

    @property
    def save_id(self) -> str:
        """The id of the current or last save, as PyTorch's writer has it."""
        return self._objects.token

    # -- what DCP calls, in this order ---------------------------------------------------------------------

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise ConfigurationError(_NO_COLLECTIVES, url=self.checkpoint_id)
        self._rank, self._size = _rank_and_size(self.checkpoint_id, kwargs)
        self._numbered = kwargs.get("numbered", False)
        self._objects = SaveObjects(self._rank)
        self._coordinator = None
        self.has_written = False
        self._began_at_s = {"plan_s": environment.monotonic()}
        self._retries_before = self._store.retries
        self.progress.restart()
        self.progress.begin("planning")
        if is_coordinator:
            self.warn_of_bucket()
            replace_plan_validation(quick_validation)
            self._coordinator = Coordinator(self._store, self._objects, _confirm_s(self._limit_s))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        with self._errors_named():
            refuse_unstorable_by_dcp(plan.items)
        self.look()
        return replace(packed_plan(plan), storage_data=described_options(self.shared_options))

    def look(self) -> None:
        """Look at the place, on the coordinator, before anything is written; a plan is then waited for."""
        with self._errors_named():
            if self._coordinator is not None:
                self._coordinator.look(overwrite=self._overwrite, model=self._is_model)
                self._store.prepare(rank_directory(self._rank))
        self.progress.wait_for("the plans of all ranks")

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # With the same items: DCP's plan caching would give what is added to later saves.
        with self._errors_named():
            _check_plans(plans)
        return [replace(packed_plan(plan), storage_data=None) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return _done(self.write_items(plan, planner))
        except BaseException:
            self.discard()
            raise

    def write_items(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        """Write this rank's items. After an error the caller calls `discard`, once the other ranks have the error."""
        self.progress.begin("saving")
        self._began_at_s["write_s"] = environment.monotonic()
        with self._errors_named():
            try:
                self._wait_for_turn()
                if self._coordinator is None and not self._is_model:
                    # Not before the coordinator has looked: a save that it refuses leaves nothing.
                    self._store.prepare(rank_directory(self._rank))
                results = self._write(plan, planner)
                self.has_written = True
            finally:
                self.progress.wait_for("all ranks to have written")
        return _timed(results, self._began_at_s["write_s"])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        reports = [report.storage_data for rank in results for report in rank]
        receipts = [report for report in reports if isinstance(report, RankReceipt)]
        try:
            described = self.commit(metadata, receipts, len(results))
        except CheckpointError as error:
            if proves_no_commit(error):
                self.discard()
            raise
        # DCP sends this very object to all ranks and returns it to its caller.
        metadata.__dict__.update(described.__dict__)

    def close(self) -> None:
        """Release connections, threads and free staging memory. It can be used again."""
        super().close()
        COMMON_MEMORY.clear()

    # -- beyond DCP ----------------------------------------------------------------------------------------

    def commit(
        self,
        planned: Metadata | CentralPlan,
        receipts: Sequence[RankReceipt],
        world_size: int,
        differences: Sequence[Difference] = (),
    ) -> Metadata:
        """Commit what the ranks have written, on the coordinator; return DCP's view of it.

        `differences` are those between replicas. After a failure the caller may `discard`, once the others have it.
        """
        self.progress.begin("committing")
        self._began_at_s["commit_s"] = environment.monotonic()
        coordinator = self._coordinator
        with self._errors_named():
            if coordinator is None:
                raise CheckpointError("finish was called on a rank that is not the coordinator")
            try:
                with no_gc():
                    columns, record = self._records(planned, receipts, world_size)
                    gate = Gate(self.checks, self._store.url, coordinator.previous)
                    record = gate.passed(planned, columns, record, receipts, differences)
                    oversize = oversize_bytes(columns, record, self._stock_metadata_max_bytes)
                    if oversize is not None:
                        record = msgspec.structs.replace(record, stock_metadata=False)
                    described = metadata_of(columns)
                coordinator.commit(columns, record, timings=timings_of(self._began_at_s, receipts))
                gate.keep()
                if oversize is not None:
                    _tell_left_out(self.checkpoint_id, oversize, self._stock_metadata_max_bytes)
            except CheckpointError:
                raise
            except BaseException as error:  # proves nothing: no rank may delete its objects
                if not isinstance(error, Exception):
                    self.interrupt = error
                raise CommitUnknown(f"{type(error).__name__}: {error}") from error
            described.storage_meta = SaveMeta(
                self.checkpoint_id,
                self._objects.token,
                seconds=durations(self._began_at_s),
                retries=self._retries() + sum(r.retries for r in receipts if r.rank != self._rank),
                warnings=gate.warnings,
                digest=coordinator.digest,
            )
        return described

    def discard(self) -> None:
        """Delete this rank's objects of the current save, which must surely not be committed."""
        self.progress.clean_up()
        are_gone = self._objects.discard(self._store)  # storage that hangs must not take the time twice
        if are_gone and not self._is_model:  # there it tells of files that a rank left which died
            with contextlib.suppress(Exception):
                self._store.remove_empty(rank_directory(self._rank))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_coordinator": None}

    # -- writing -------------------------------------------------------------------------------------------

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        started_s = time.monotonic()
        _wait_for_the_device()
        pace = None if self._pacer is None else self._pacer.wait
        files = RankFiles(self._store, self._objects, self._pool, pace, numbered=self._numbered)
        with no_gc():
            tensors, others = tensor_entries(plan.items, planner, self._known_plain())
        objects = _put_pickled(files, others, planner, self.checkpoint_id, self.trusted_objects)
        first, *more = spread(tensors, self._files_per_rank or _files_for(self._store)) or [[]]
        files.digested, files.block_digests = self._digested(), self.block_digests
        if not self.checks.are_off:
            _look_at_content(files, planner, others, self.checks, self._store.url)
        if objects or first:
            files.put([[*objects, *first], *more])
        if files.parts_of is not None:
            note_written(self._store.url)
        receipt = replace(files.finish(last_segment(self._url)), retries=self._retries())
        nbytes, seconds = files.data_bytes, time.monotonic() - started_s
        _logger.info(
            "rank %d wrote %d bytes in %.2f s to %s", self._rank, nbytes, seconds, self.checkpoint_id
        )
        return [WriteResult(RECEIPT, nbytes, receipt)]

    def _known_plain(self) -> Collection[Chunk]:
        """Return tensors that were looked at already, and are plain."""
        return ()

    def _digested(self) -> Callable[[str], bool] | None:
        """Return what tells by their names which tensors later saves compare; None if none does."""
        return None

    def _records(
        self, planned: Metadata | CentralPlan, receipts: Sequence[RankReceipt], world_size: int
    ) -> tuple[Columns, CommitRecord]:
        """Make the columns and the commit record. Raises as `records_of`."""
        facts: dict[str, Any] = {"save_id": self._objects.token, "tags": self._tags, "stamp": self.stamp}
        return records_of(planned, receipts, world_size, block_digests=self.block_digests, **facts)

    def _retries(self) -> int:
        return self._store.retries - self._retries_before


def _done(results: list[WriteResult]) -> Future[list[WriteResult]]:
    """Return results as DCP takes them."""
    future: Future[list[WriteResult]] = Future()
    future.set_result(results)
    return future


def _rank_and_size(place: object, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Return this rank and the number of ranks; DCP gives no number, and does not say whether it is meant to be alone."""
    if "size" not in arguments and (text := lacks_group()):
        _logger.warning("%s: %s", place, text)
    return arguments.get("rank") or 0, arguments.get("size", 1)


def _wait_for_the_device() -> None:
    """Wait for the caller's stream, which may still compute the tensors that threads will copy."""
    if torch.accelerator.is_available():
        torch.accelerator.current_stream().synchronize()


def _files_for(store: Store) -> int:
    """Return how many files a rank writes at the same time."""
    return 1 if store.capabilities.parallel_parts else store.threads


def _look_at_content(
    files: RankFiles, planner: SavePlanner, objects: Sequence[WriteItem], checks: Checks, url: str
) -> None:
    """Have the files look at what they write: at all of it at first, else a sample meets an old infinity as a new one."""
    paths = paths_of(planner)
    files.parts_of = lambda fqns: parts_of(fqns, paths)
    files.looks_at_all = checks.look_at == "all" or is_new(url)
    indices = [item.index for item in objects if item.type == WriteItemType.BYTE_IO]
    inner: Any = getattr(planner, "inner", planner)
    for index, part in zip(indices, parts_of([index.fqn for index in indices], paths), strict=True):
        name = counter_of(index.fqn, part)
        if name is not None:
            # A planner of the caller's may have no such lookup, or know the object by another name.
            with contextlib.suppress(Exception):
                if (value := number_of(inner.lookup_object(index))) is not None:
                    files.counters.append((part, name, (value, index.fqn)))


def _timed(results: Sequence[WriteResult], began_at_s: float) -> list[WriteResult]:
    """Say in the receipts how long this rank took."""
    write_ms = round(1000 * (environment.monotonic() - began_at_s))
    return [replace(each, storage_data=replace(each.storage_data, write_ms=write_ms)) for each in results]


def _put_pickled(
    files: RankFiles, items: Sequence[WriteItem], planner: SavePlanner, url: str, trusted: Collection[str]
) -> list[Entry]:
    """Write pickled objects batch by batch, as they take memory of this library's; return the last batch, unwritten."""
    objects: list[Entry] = []
    objects_bytes = 0
    refused = RefusedObjects(url, trusted)
    for entry in pickled_entries(items, planner, refused.look):
        if objects and objects_bytes + entry.length > _OBJECT_BATCH_BYTES:
            files.put([objects])
            objects, objects_bytes = [], 0
        objects.append(entry)
        objects_bytes += entry.length
    refused.warn()
    return objects


def _confirm_s(limit_s: float | None) -> float:
    """Return how long to look for a commit: with all before it, less than the other ranks wait for this one."""
    return math.inf if limit_s is None else limit_s / 8


def described_options(options: Mapping[str, Any]) -> str:
    """Describe options for an error; empty without any."""
    return "".join(f" with {name}={value!r:.1000}" for name, value in options.items())


def _changed(*options: Any) -> dict[str, Any]:
    """Return the options that all ranks of a save have to pass alike, without those that are the default."""
    given = zip(_DEFAULTS.items(), options, strict=True)
    return {name: value for (name, default), value in given if value != default}


def _check_plans(plans: Sequence[SavePlan]) -> None:
    """Raise ConfigurationError for more items than an index holds, and for ranks with other options."""
    check_count(sum(len(plan.items) for plan in plans))
    ranks: dict[str, int] = {}
    for rank, plan in enumerate(plans):
        if isinstance(plan.storage_data, str):  # a planner may have dropped it
            ranks.setdefault(plan.storage_data, rank)
    if len(ranks) > 1:
        shown = ", ".join(f"rank {rank} saves{text}" for text, rank in [*ranks.items()][:_MAX_SHOWN])
        raise ConfigurationError(f"all ranks have to pass the same options to CheckpointWriter: {shown}")


def _tell_left_out(url: str, size_bytes: int, max_bytes: int | None) -> None:
    text = "%s has no .metadata for stock PyTorch: it would take about %s bytes, and stock_metadata_max_bytes is %s; "
    text += "`ckpt convert %s DST --to dcp` makes a checkpoint with one"
    _logger.warning(text, url, f"{size_bytes:,}", f"{max_bytes:,}", url)


def paths_of(planner: SavePlanner) -> Mapping[str, Any] | None:
    """Return where each entry is in nested containers; None if the planner does not flatten them."""
    inner = getattr(planner, "inner", planner)
    return getattr(inner, "mappings", None) if getattr(inner, "flatten_state_dict", False) else None


def _checked_tags(tags: Mapping[str, str] | None) -> dict[str, str]:
    if tags is not None and not isinstance(tags, Mapping):
        raise ConfigurationError(f"tags must be a dict, not a {type(tags).__name__}")
    checked = dict(tags or {})
    for name, value in checked.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(f"tags map str to str; the tag {name!r} does not")
        try:
            f"{name}{value}".encode()
        except UnicodeEncodeError as error:
            raise ConfigurationError(f"the tag {name!r} cannot be written as UTF-8: {error}") from None
    return checked
