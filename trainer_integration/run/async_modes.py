"""Ways of saving while training goes on: in a thread, in a process, or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as processes
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt.api import async_save, save, values_of
from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed
from ckpt.format.names import last_segment
from ckpt.ranks.group import Ranks, RanksFailed
from ckpt.writing.stager import Stager
from ckpt.writing.writer import CheckpointWriter

__all__ = ["AsyncMode", "Uploads"]

AsyncMode = Literal["thread", "process", "off"]


@dataclass
class Uploads:
    """Begins saves.

    Attributes:
        mode: `thread` shares the interpreter with the trainer, `process` costs memory for a second one and shares
            nothing, `off` returns when the checkpoint is durable.
        process_group: the ranks that save together.
        options: of `CheckpointWriter`.
    """

    mode: AsyncMode
    process_group: Any
    options: Mapping[str, Any]
    _stager: Stager = field(default_factory=lambda: Stager(shared_memory=True))
    _last: Future[Metadata] | None = None

    def __post_init__(self) -> None:
        if self.mode not in ("thread", "process", "off"):
            raise ConfigurationError(f"async_mode must be 'thread', 'process' or 'off', not {self.mode!r}")
        if self.mode == "process" and not (dist.is_available() and dist.is_initialized()):
            raise ConfigurationError("async_mode='process' needs torch.distributed.init_process_group first")

    def begin(
        self, state: dict[str, Any], url: str, tags: Mapping[str, str], ranks: Ranks
    ) -> Future[Metadata]:
        """Save `state`; when this returns, later changes of it do not matter any more.

        The future ends when the checkpoint is durable, or in SaveFailed.

        Args:
            ranks: those of `process_group`.

        Raises:
            SaveFailed, ConfigurationError: on every rank, whichever could not begin.
        """
        if self.mode == "process":
            return self._in_process(state, url, tags, ranks)
        if self.mode == "thread":
            return async_save(state, url, tags=tags, process_group=self.process_group, **self.options)
        future: Future[Metadata] = Future()
        future.set_result(save(state, url, tags=tags, process_group=self.process_group, **self.options))
        return future

    def close(self) -> None:
        self._stager.close()

    def _in_process(
        self, state: dict[str, Any], url: str, tags: Mapping[str, str], ranks: Ranks
    ) -> Future[Metadata]:
        """DCP's process, which has the same ranks in a world of its own."""
        writer, staged = self._staged(state, url, tags, ranks)
        self._renew_process(ranks)
        begun = dcp.async_save(
            staged,
            storage_writer=writer,
            process_group=ranks.group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=_AsItIs(),
        )
        assert isinstance(begun, Future)  # the other answer is for stagers that stage in the background
        self._last = begun
        translated: Future[Metadata] = Future()
        begun.add_done_callback(lambda done: _translate(done, url, translated))
        return translated

    def _staged(
        self, state: dict[str, Any], url: str, tags: Mapping[str, str], ranks: Ranks
    ) -> tuple[CheckpointWriter, dict[str, Any]]:
        """A writer and a copy of the state on every rank, or an error on every rank: DCP waits for those that fail here."""
        try:
            return ranks.together(
                f"save of {last_segment(url)}",
                lambda: (
                    CheckpointWriter(url, tags=tags, **self.options),
                    self._stager.stage(values_of(state)),
                ),
            )
        except RanksFailed as failed:
            failures: dict[int, BaseException] = {**failed.failures}
            raise SaveFailed(
                f"the save failed: {failures[min(failures)]}", url=url, failures=failures
            ) from None

    def _renew_process(self, ranks: Ranks) -> None:
        """Let all ranks have new processes if any of them has none: those of a failed save have lost each other."""
        process = processes._CHECKPOINT_PROCESS
        failed = self._last is not None and self._last.exception() is not None
        (needed,) = ranks.most([process is None or failed or not process._save_process.is_alive()])
        if needed:
            processes._CHECKPOINT_PROCESS = None


class _AsItIs(AsyncStager):
    """For a state that has been staged."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        return


def _translate(done: Future[Metadata], url: str, translated: Future[Metadata]) -> None:
    error = done.exception()
    if error is None:
        translated.set_result(done.result())
    else:
        translated.set_exception(_save_failed(error, url))


def _save_failed(error: BaseException, url: str) -> SaveFailed:
    if isinstance(error, CheckpointException):
        failures: dict[int, BaseException] = {rank: found[0] for rank, found in error.failures.items()}
        return SaveFailed(f"the save failed: {failures[min(failures)]}", url=url, failures=failures)
    cause = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
    return SaveFailed(f"the save failed: {cause}; whether it was committed, a load will tell", url=url)
