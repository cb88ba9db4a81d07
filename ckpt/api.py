"""`ckpt.save`, `ckpt.load` and `ckpt.async_save`: DCP's functions with this library's storage and errors."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful

from ckpt.errors import CheckpointError, CommitUnknown, LoadFailed, SaveFailed
from ckpt.ranks import Ranks
from ckpt.reader import CheckpointReader
from ckpt.writer import CheckpointWriter

__all__ = ["async_save", "load", "save"]

_logger = logging.getLogger(__name__)


def save(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = True,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    memory_budget_bytes: int | None = None,
    tags: Mapping[str, str] | None = None,
) -> Metadata:
    """Save `state_dict` from all ranks; when this returns, the checkpoint is committed and durable.

    `planner`, `process_group` and `no_dist` are those of `dcp.save`, the others those of `CheckpointWriter`.
    Without a `process_group` the ranks talk over a gloo group of this library's own.

    Raises:
        SaveFailed: on every rank, whichever failed; its `failures` say which and why.
        ConfigurationError: an argument is wrong.
    """
    writer = CheckpointWriter(
        url,
        storage_options=storage_options,
        overwrite=overwrite,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        tags=tags,
    )
    return _save(state_dict, writer, planner, Ranks(process_group, no_dist=no_dist))


def async_save(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    overwrite: bool = True,
    planner: SavePlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    memory_budget_bytes: int | None = None,
    tags: Mapping[str, str] | None = None,
) -> Future[Metadata]:
    """Like `save`, but returns once the state is copied to CPU memory, and saves the copy in the background.

    What happens to the tensors afterwards does not reach the checkpoint. One save runs at a time: a call
    during an earlier one waits for it first. Only when the future's `result()` returns is the checkpoint
    committed; it raises what `save` would raise.
    """
    writer = CheckpointWriter(
        url,
        storage_options=storage_options,
        overwrite=overwrite,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        tags=tags,
    )
    # Made here, in the thread in which all ranks do the same things in the same order.
    ranks = Ranks(process_group, no_dist=no_dist, purpose="background")
    return _background.start(state_dict, writer, planner, ranks)


def load(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    verify: bool = True,
    visibility_timeout_s: float | None = None,
    planner: LoadPlanner | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    memory_budget_bytes: int | None = None,
    trusted_objects: Collection[str] = (),
) -> None:
    """Load a checkpoint into `state_dict` in place, on any number of ranks.

    The first rank opens the checkpoint and tells the others, so all load the same one or none does.
    `planner`, `process_group` and `no_dist` are those of `dcp.load`, the others those of `CheckpointReader`.

    Raises:
        NotFound, NotCommitted, IntegrityError, UnsafeContent, ...: as the first failing rank met it.
        LoadFailed: anything else, such as a key that the checkpoint does not have.
    """
    reader = CheckpointReader(
        url,
        storage_options=storage_options,
        verify=verify,
        visibility_timeout_s=visibility_timeout_s,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        trusted_objects=trusted_objects,
    )
    ranks = Ranks(process_group, no_dist=no_dist)
    try:
        _open_together(reader, ranks)
        with _no_dist_is_meant():
            dcp_load(
                state_dict,
                storage_reader=reader,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.no_dist,
            )
    except CheckpointException as error:
        raise _load_error(reader, error) from error
    except CheckpointError:
        raise
    except Exception as error:
        message, failures = _lost("load", ranks, error)
        raise LoadFailed(message, url=reader.checkpoint_id, failures=failures) from error
    finally:
        reader.close()


def _save(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner | None, ranks: Ranks
) -> Metadata:
    try:
        with _no_dist_is_meant():
            metadata: Metadata = dcp_save(
                state_dict,
                storage_writer=writer,
                planner=planner,
                process_group=ranks.group,
                no_dist=ranks.no_dist,
            )
        return metadata
    except CheckpointException as error:
        failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
        if all(_proves_no_commit(failure) for failure in failures.values()):
            # On all ranks alike: what each wrote is of no use to anyone.
            writer.discard()
        raise SaveFailed(_summary("save", failures), url=writer.checkpoint_id, failures=failures) from error
    except CheckpointError:
        raise
    except Exception as error:
        message, failures = _lost("save", ranks, error)
        message += "; whether it was committed is not known here, a load will tell"
        raise SaveFailed(message, url=writer.checkpoint_id, failures=failures) from error
    finally:
        writer.close()


def _proves_no_commit(failure: BaseException) -> bool:
    """Whether a save that failed so was surely not committed. Anything unexpected proves nothing."""
    return isinstance(failure, CheckpointError) and not isinstance(failure, CommitUnknown)


def _open_together(reader: CheckpointReader, ranks: Ranks) -> None:
    """Open the checkpoint on the first rank; all ranks then hold it, or raise the same error."""
    answer: bytes | CheckpointError | None = None
    if ranks.rank == 0:
        try:
            checkpoint = reader.open()
            answer = checkpoint.share() if checkpoint is not None else None
        except CheckpointError as error:
            answer = error
    answer = ranks.broadcast(answer)
    if isinstance(answer, CheckpointError):
        raise answer
    if answer is not None and ranks.rank != 0:
        reader.adopt(answer)


def _load_error(reader: CheckpointReader, error: CheckpointException) -> CheckpointError:
    failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
    first = failures[min(failures)]
    if isinstance(first, CheckpointError):
        return first
    return LoadFailed(_summary("load", failures), url=reader.checkpoint_id, failures=failures)


def _summary(what: str, failures: Mapping[int, BaseException]) -> str:
    first = min(failures)
    cause = failures[first]
    text = (
        str(cause) if isinstance(cause, CheckpointError) else f"rank {first}: {type(cause).__name__}: {cause}"
    )
    others = [rank for rank in sorted(failures) if rank != first]
    more = f" (also failed: rank {', '.join(map(str, others[:10]))}{', ...' if len(others) > 10 else ''})"
    return f"the {what} failed: {text}{more if others else ''}"


def _lost(what: str, ranks: Ranks, error: Exception) -> tuple[str, dict[int, BaseException]]:
    """A collective broke: find out who is gone."""
    cause = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    silent = [] if ranks.no_dist else ranks.silent()
    if silent is None:
        return f"the {what} failed: the rank that holds the rendezvous store is gone ({cause})", {}
    if not silent:
        return f"the {what} failed: {cause}", {}
    failures: dict[int, BaseException] = {
        rank: CheckpointError("does not answer: killed, crashed, or stuck", rank=rank) for rank in silent
    }
    names = ", ".join(map(str, silent))
    return f"the {what} failed: rank {names} does not answer: killed, crashed, or stuck ({cause})", failures


@contextmanager
def _no_dist_is_meant() -> Iterator[None]:
    """DCP warns about a missing process group in case it was forgotten; a single process is fine here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


class _Background:
    """The one save that may run in the background."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Future[Metadata] | None = None
        self._executor: ThreadPoolExecutor | None = None

    def start(
        self, state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner | None, ranks: Ranks
    ) -> Future[Metadata]:
        with self._lock:
            self._wait_for_the_last()
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="ckpt-async-save")
            staged = _stage(state_dict)
            self._running = self._executor.submit(_save, staged, writer, planner, ranks)
            return self._running

    def _wait_for_the_last(self) -> None:
        if self._running is None or self._running.done():
            return
        started_s = time.monotonic()
        # Its outcome belongs to whoever holds its future.
        self._running.exception()
        waited_s = time.monotonic() - started_s
        _logger.warning(
            "async_save waited %.1f s for the save before it; save less often or faster", waited_s
        )


_background = _Background()


def _stage(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A copy of the state in CPU memory that nothing else refers to."""
    values = {
        key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()
    }
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        staged = stager.stage(values)
    finally:
        stager.close()
    assert isinstance(staged, dict)
    return staged
