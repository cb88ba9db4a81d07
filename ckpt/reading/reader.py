"""Read checkpoints under DCP: `dcp.load(state, storage_reader=ckpt.CheckpointReader(url))`."""

from __future__ import annotations

import dataclasses
import os
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import Executor
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt.consistency.commit import COMMIT_KEY
from ckpt.consistency.expected import checked_expect
from ckpt.content.memory import note_loaded
from ckpt.dcp_storage import DcpStorage
from ckpt.errors import CheckpointError, CommitConflict, ConfigurationError
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.delivered import DeliveredDigests
from ckpt.reading.loader import Loader, SharedReads
from ckpt.reading.opening import open_checkpoint, open_loadable, open_rank_local
from ckpt.reading.read_once import MIN_BYTES, Replicas
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.threads import workers
from ckpt.transfer.tied_tensors import tied_names

_FEW_RANKS, _FEW_ITEMS, _FEW_FILES = 64, 64, 2
"""Of a load whose ranks may each read for themselves; items and files of a rank."""

_STEP_BYTES = 2 << 20


class CheckpointReader(DcpStorage, StorageReader):
    """Reads a committed checkpoint, or one of stock PyTorch, and runs no code from it unless told to.

    Args:
        url: the checkpoint's place, as for `CheckpointWriter`.
        storage_options: credentials, endpoint and settings of the store.
        verify: check every block that is read against its checksum, if there is one.
        visibility_timeout_s: how long to wait for a committed object that is not visible yet, and,
            on storage that may lag, for the commit. Default 60 s on such storage, else 5 s; for the
            commit 0 s where another program's model is and no trace of a save.
        threads: the most transfers at the same time; default that of `ckpt.toml` (docs/tuning.md), or by the number of
            cores, 8 to 16.
        memory_budget_bytes: memory this rank may use beyond the tensors (default 256 MiB).
        trusted_objects: names (FQNs, `*` allowed) of non-tensor objects that may be unpickled as
            they are, which runs code of whoever wrote the checkpoint. All others load with
            `weights_only=True`.
        timeout_s: for the storage operations of this rank, as for `CheckpointWriter`.
        expect: the digest of the checkpoint, `sha256:...`; anything else is refused with DigestMismatch.

    Raises:
        ConfigurationError: an argument is wrong.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, Any] | None = None,
        verify: bool = True,
        visibility_timeout_s: float | None = None,
        threads: int | None = None,
        memory_budget_bytes: int | None = None,
        trusted_objects: Collection[str] = (),
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        expect: str | None = None,
    ) -> None:
        if visibility_timeout_s is not None and not (
            isinstance(visibility_timeout_s, int | float) and visibility_timeout_s >= 0
        ):
            text = f"visibility_timeout_s must not be negative, but a number: {visibility_timeout_s!r:.100}"
            raise ConfigurationError(text)
        if expect is not None and not verify:
            raise ConfigurationError(
                "expect= is a check of all that is read: it does not go with verify=False"
            )
        self._settings = ReadSettings(
            self._flag("verify", verify), visibility_timeout_s, expect=checked_expect(expect)
        )
        self._trusted_objects = check_trusted(trusted_objects)
        super().__init__(url, storage_options, threads, memory_budget_bytes, timeout_s)
        # The rank whose part is open, of a checkpoint that was saved without collectives.
        self._part: int | None = None
        self.load_id = str(uuid.uuid4())
        self._checkpoint: Checkpoint | None = None
        self._next: Checkpoint | None = None
        self._failure: CheckpointError | None = None
        self._replicas: SharedReads | None = None
        self._delivered: DeliveredDigests | None = None
        self._request_bytes: int | None = None

    # -- what DCP calls, in this order ---------------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a load, from another place if one is given."""
        self._let_go()
        self._checkpoint = self._next = self._failure = None
        self.progress.restart()
        super().reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Open the checkpoint and return its metadata.

        DCP keeps only the text of an error that is raised here. So a typed error waits until
        `set_up_storage_reader`, which DCP calls next, and the metadata returned meanwhile is empty.
        """
        self._checkpoint, self._next = self._next, None
        self._failure = self._part = None  # DCP need not call `reset` between two loads
        self.progress.begin("opening")
        try:
            metadata = (self._checkpoint or self._open_any(kwargs.get("rank"))).metadata
        except CheckpointError as error:
            self._failure = error
            return Metadata({}, storage_data={}, storage_meta=StorageMeta())
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        self.load_id = metadata.storage_meta.load_id = str(uuid.uuid4())
        metadata.storage_meta.checkpoint_id = self.checkpoint_id
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._rank = kwargs.get("rank") or 0
        self.progress.begin("planning")
        with self._errors_named():
            if self._part not in (None, self._rank):
                self._failure, self._part = None, self._rank
                self._checkpoint = open_rank_local(self._store, self._settings, self._rank)
                vars(metadata).update(vars(self._checkpoint.metadata))
            if self._failure is not None:
                raise self._failure
            if self._checkpoint is None:
                self._checkpoint = self._next or open_checkpoint(self._store, self._settings)
                self._next = None

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Note in the plan which checkpoint this rank opened."""
        self.progress.wait_for("the plans of all ranks")
        if self._checkpoint is None:
            return plan
        return dataclasses.replace(plan, storage_data=self._checkpoint.identity)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Check that all ranks opened the same checkpoint: a save may just have replaced it."""
        with self._errors_named():
            self.check_identities({p.storage_data for p in plans if isinstance(p.storage_data, str)})
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self.progress.begin("loading")
        with self._errors_named():
            try:
                self._wait_for_turn()
                self._read(plan, planner)
            finally:
                if self._replicas is not None:
                    self._replicas.leave()
                self.progress.wait_for("all ranks to have read")
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def close(self) -> None:
        """Release connections and threads. It can be used again; it then opens new ones."""
        self._let_go()
        super().close()

    # -- beyond DCP ----------------------------------------------------------------------------------------

    def open(self) -> Checkpoint | None:
        """Open the checkpoint now; the next load uses it.

        Returns None for a stock checkpoint that was saved with `use_collectives=False`: each rank
        opens its own part later. Raises NotFound, NotCommitted, IntegrityError, FormatError,
        UnsafeContent or NotVisible.
        """
        self._next = open_loadable(self._store, self._settings)
        return self._next

    def opened(self) -> Checkpoint:
        """Return the checkpoint that the next load uses; there is one after `open` or `adopt`."""
        return self._next  # type: ignore[return-value]

    def read_objects(self, names: Collection[str]) -> dict[str, Any]:
        """Read some objects of the checkpoint that is open. Raises as a load."""
        with workers(self._store.threads, "ckpt-read") as threads, self._errors_named():
            return _objects(self.opened(), names, self._pool, threads)

    def adopt(self, shared: bytes) -> None:
        """Use the checkpoint that another rank encoded with `open().share()`."""
        self._next = Checkpoint.adopt(self._store, self._settings, shared)

    def use_ranks(self, ranks: Ranks, *, read_once: bool) -> None:
        """Report to the ranks of a load; with `read_once`, those that want the same read it once."""
        self.use(ranks.progress)
        self._size = ranks.size
        is_local = "://" not in self.checkpoint_id
        self._replicas = Replicas(ranks, is_local=is_local) if self._flag("read_once", read_once) else None

    def without_tied(self, values: dict[str, Any]) -> dict[str, Any]:
        """Leave out tensors that a model's folder holds under another name of the same memory, as head and embedding."""
        checkpoint = self._next
        if checkpoint is None or not checkpoint.is_model:
            return values
        stored = checkpoint.columns.entries
        known = {name: value for name, value in values.items() if name in stored}
        tied = tied_names({**known, **values})
        return {
            name: value for name, value in values.items() if name in stored or tied.get(name) not in stored
        }

    def wants_little(self, plan: LoadPlan) -> bool:
        """Tell whether a plan reads so little, from so few files, that asking who wants the same takes longer."""
        checkpoint = self._checkpoint
        if checkpoint is None or checkpoint.commit is None or self._size > _FEW_RANKS:
            return False
        return _is_little(checkpoint, plan)

    def read_alone(self) -> None:
        """Ask no other rank who wants the same; all ranks call it, if all want little."""
        if isinstance(self._replicas, Replicas):
            self._replicas.turn_off()

    def record_delivered(self, delivered: DeliveredDigests | None = None) -> DeliveredDigests:
        """Note digests of all that the next loads deliver, in `delivered` or a new one, and return that."""
        self._delivered = delivered or self._delivered or DeliveredDigests()
        return self._delivered

    def keep_nothing(self) -> None:
        """Read files in small steps, for loads into tensors without memory: the scratch then stays in a cache."""
        self._request_bytes = None if "://" in self.checkpoint_id else _STEP_BYTES

    def check_identities(self, identities: Collection[str]) -> None:
        """Raise CommitConflict if the ranks opened several checkpoints."""
        if len(identities) > 1:
            raise CommitConflict(
                "the ranks opened different checkpoints: another save replaced this one meanwhile; load again",
                url=self.checkpoint_id,
                key=COMMIT_KEY,
            )

    def rewind(self) -> None:
        """Let the next load use the checkpoint that is open, as if none had begun."""
        self._next = self._checkpoint

    def _let_go(self) -> None:
        for checkpoint in (self._checkpoint, self._next):
            if checkpoint is not None:
                checkpoint.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checkpoint": None, "_next": None, "_replicas": None}

    def _open_any(self, rank: int | None) -> Checkpoint:
        """Open the checkpoint, or this rank's part if stock saved with `use_collectives=False`.

        DCP tells the rank only if parts are loaded its own way, in which a rank that fails leaves the
        others waiting. So it is guessed, and corrected in `set_up_storage_reader`.
        """
        self._checkpoint = open_loadable(self._store, self._settings)
        if self._checkpoint is None:
            if rank is None:
                rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            self._part = rank
            self._checkpoint = open_rank_local(self._store, self._settings, self._part)
        return self._checkpoint

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        checkpoint = self._checkpoint
        if checkpoint is None:
            raise CheckpointError("read_data was called before set_up_storage_reader")
        delivered = self._delivered
        if delivered is not None:
            delivered.begin(checkpoint.store.url, checkpoint.identity, checkpoint.metadata)
        with workers(self._store.threads, "ckpt-read") as threads:
            options = self._trusted_objects, self._replicas, delivered, self._request_bytes
            Loader(checkpoint, planner, self._pool, threads, *options).run(plan.items)
        note_loaded(checkpoint.store.url, checkpoint.commit)
        if torch.accelerator.is_available():
            # Other threads have queued copies.
            torch.accelerator.synchronize()


def _objects(
    checkpoint: Checkpoint, names: Collection[str], pool: StagingPool, threads: Executor
) -> dict[str, Any]:
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict.fromkeys(names), checkpoint.metadata, is_coordinator=True)
    Loader(checkpoint, planner, pool, threads, ()).run(planner.create_local_plan().items)
    return planner.state_dict


def _is_little(checkpoint: Checkpoint, plan: LoadPlan) -> bool:
    """Tell whether a plan reads few items, and few bytes, from few files."""
    if len(plan.items) > _FEW_ITEMS:
        return False
    infos = [checkpoint.metadata.storage_data.get(item.storage_index) for item in plan.items]
    known = [info for info in infos if info is not None]
    files = {info.relative_path for info in known}
    return (
        len(known) == len(infos)
        and len(files) <= _FEW_FILES
        and sum(info.length for info in known) < MIN_BYTES
    )


def check_trusted(names: Collection[str]) -> tuple[str, ...]:
    """Return `trusted_objects` for keeping. Raises ConfigurationError for anything but names."""
    if isinstance(names, str):
        raise ConfigurationError("trusted_objects must be a list of names, not a single str")
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise ConfigurationError(f"trusted_objects must be a list of names, not {names!r:.100}")
    return tuple(names)
