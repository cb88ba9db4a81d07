"""Save while training goes on, in a thread or in a process; or wait for each save."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from ckpt.api import async_save, save
from ckpt.collective import place_of, stager, with_options
from ckpt.embeddings.saving import Tables
from ckpt.errors import CheckpointError, ConfigurationError, SaveFailed
from ckpt.format.names import last_segment
from ckpt.local_first.saving import Place, Saved, save_to_first
from ckpt.options import SaveOptions
from ckpt.ranks.failures import same_failure
from ckpt.ranks.group import Ranks, check_group
from ckpt.ranks.lost_ranks import summary
from ckpt.ranks.many_failures import some_of
from ckpt.references.frozen import Patterns
from ckpt.references.request import References
from ckpt.state.rank_agreement import agree_on_values
from ckpt.state.resume_check import check_resumable
from ckpt.state.state_parts import values_to_save
from ckpt.torch_private import async_save_process_is_alive, forget_async_save_process, has_cpu_backend
from ckpt.trainer_integration.run.main_guard import check_main_guard
from ckpt.writing.stager import Space, Stager
from ckpt.writing.writer import CheckpointWriter

AsyncMode = Literal["thread", "process", "off"]


@dataclass
class Uploads:
    """Begin saves in a mode, with `options` of `CheckpointWriter`.

    `frozen`: each save refers to the one before it, and need not compare these; None: all is written.
    `tables`: what is saved with each state, by what changed.
    `save_options`: of each save; `resume_check`: which of them are planned back before they are acknowledged.
    `expected`: what the copy of a state takes on this rank, as far as that is known before the first save.
    """

    mode: AsyncMode
    ranks: Ranks
    process_group: Any
    options: Mapping[str, Any] = field(repr=False)  # credentials may be among them
    frozen: Patterns | None = None
    tables: Tables | None = None
    no_dist: bool = False
    expected: Space | None = None
    save_options: SaveOptions = field(default_factory=SaveOptions)
    resume_check: Literal["first", "every", "off"] = "first"
    _is_checked: bool = False
    _saves: int = 0
    _stager: Stager = field(default_factory=lambda: Stager(shared_memory=True))
    _last: Future[Metadata] | None = None

    def __post_init__(self) -> None:
        check_group(self.no_dist)
        if self.mode not in ("thread", "process", "off"):
            raise ConfigurationError(f"async_mode must be 'thread', 'process' or 'off', not {self.mode!r}")
        if self.mode == "process" and self.ranks.no_dist:
            raise ConfigurationError(
                "async_mode='process' needs torch.distributed.init_process_group first, and no no_dist=True"
            )
        is_alone = (
            self.mode == "process" and self.ranks.size == 1
        )  # several ranks get a gloo group of their own
        if is_alone and not has_cpu_backend(self.ranks.group):
            raise ConfigurationError(
                "async_mode='process' needs a backend for the CPU beside that of the GPU: "
                "init_process_group('cpu:gloo,cuda:nccl')"
            )
        if self.mode == "process" and (self.frozen is not None or self.tables is not None):
            wanted = "references=True" if self.tables is None else "tables="
            raise ConfigurationError(f"{wanted} needs async_mode='thread' or 'off'")
        if self.mode == "process":
            check_main_guard()

    def trust(self, names: Collection[str]) -> Collection[str]:
        """Return the names of objects that a restore trusts: these, or those of the options; later saves know of them."""
        if names:
            self.save_options = replace(self.save_options, trusted_objects=names)
        return self.save_options.trusted_objects

    def provide(self) -> None:
        """Make memory ready for the first copy, while training goes on; nothing if no restore has told its size."""
        own = self._stager if self.mode == "process" else stager
        space, self.expected = self.expected, None
        if space is None:
            own.lock_provided()
        elif self.mode != "off" and self.frozen is None:  # with these little of it is copied, perhaps
            own.provide(space)

    def begin(
        self, state: dict[str, Any], url: str, tags: Mapping[str, str], base: str | None = None
    ) -> Future[Metadata]:
        """Stage `state` and begin its upload; the future ends when it is durable, or in SaveFailed.

        `base` is the checkpoint to refer to, if there is one that can be referred to.
        Raises SaveFailed or ConfigurationError on every rank if any could not begin.
        """
        if self.mode == "process":
            return self._in_process(state, url, tags)
        options: dict[str, Any] = {**self.options, "tags": tags, "process_group": self.process_group}
        options["no_dist"] = self.no_dist
        options["options"] = self._options_of_save()
        begin: Callable[..., Future[Metadata]] = async_save
        wait_for: Callable[..., Metadata] = save
        if self.tables is not None:  # they know what they refer to
            begin, wait_for = self.tables.async_save, self.tables.save
            options["frozen"] = self.frozen.names if self.frozen else ()
        elif self.frozen is not None:
            options["base"] = References(base, self.frozen, required=False)
        future: Future[Metadata] = Future()
        if self.mode == "thread":
            future = begin(state, url, **options)
        else:
            future.set_result(wait_for(state, url, **options))
        self._is_checked = True
        return future

    def _options_of_save(self) -> SaveOptions:
        """Return the options of the next save: the first of a manager is planned back, or each."""
        is_due = self.resume_check == "every" or (self.resume_check == "first" and not self._is_checked)
        return replace(self.save_options, resume_check=is_due or self.save_options.resume_check)

    def begin_at(self, state: dict[str, Any], places: list[Place], tags: Mapping[str, str]) -> Future[Saved]:
        """Stage `state` and begin its upload to the first of `places` that takes it. Raises as `begin`."""
        tagged = [replace(place, options={**place.options, "tags": tags}) for place in places]
        is_async = self.mode == "thread"
        options = self._options_of_save()
        group = {"process_group": self.process_group, "no_dist": self.no_dist}
        begun = save_to_first(state, lambda _: tagged, is_async=is_async, options=options, **group)
        self._is_checked = True
        return begun

    def close(self) -> None:
        self._stager.close()
        stager.forget_provided()

    def _in_process(self, state: dict[str, Any], url: str, tags: Mapping[str, str]) -> Future[Metadata]:
        """Save in DCP's process, which has the same ranks in a world of its own."""
        options, place, call = self._options_of_save(), place_of(url), f"save of {last_segment(url)}"
        self._saves += 1

        def prepare() -> tuple[CheckpointWriter, dict[str, Any]]:
            writer = CheckpointWriter(url, tags=tags, **self.options)
            values, writer.described = values_to_save(state, options.per_rank)
            writer.trusted_objects = options.trusted_objects
            if options.resume_check:
                check_resumable(writer.described.parts, values, options.trusted_objects)
            return writer, values

        with same_failure(SaveFailed, place, self.ranks):  # on all ranks or none: DCP waits for all
            writer, values = self.ranks.together(call, prepare)
            call += with_options(writer, None, options)
            values = agree_on_values(values, writer.described, self.ranks, place, number=self._saves)
            writer.described = None  # it holds the models
            staged = self.ranks.together(call, lambda: self._stager.stage(values))
        self._is_checked = True
        last_failed = self._last is not None and self._last.exception() is not None
        (needs_process,) = self.ranks.most([last_failed or not async_save_process_is_alive()])
        if needs_process:
            forget_async_save_process()
        begun = dcp.async_save(
            staged,
            storage_writer=writer,
            process_group=self.ranks.group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=_AsItIs(staged),
        )
        assert isinstance(begun, Future)  # stagers that stage in the background get another type
        self._last = begun
        translated: Future[Metadata] = Future()
        begun.add_done_callback(lambda done: _translate(done, place_of(url), translated))
        return translated


class _AsItIs(AsyncStager):
    """Pass on a state that has been staged already: as it was staged, and not DCP's copy of the dict."""

    _synchronize_after_execute = False

    def __init__(self, staged: dict[str, Any]) -> None:
        self._staged = staged

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return self._staged

    def synchronize_staging(self) -> None:
        return

    def close(self) -> None:
        return


def _translate(done: Future[Metadata], url: str, translated: Future[Metadata]) -> None:
    error = done.exception()
    if error is None:
        translated.set_result(done.result())
    elif isinstance(error, CheckpointException):
        failures = {rank: failure[0] for rank, failure in error.failures.items()}
        translated.set_exception(_ranks_failed(failures, url))
    else:
        cause = str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
        text = (
            f"the save failed: {cause} (the process that saves reports its own errors on standard error); "
            "it may still have been committed: try to load it"
        )
        translated.set_exception(SaveFailed(text, url=url))


def _ranks_failed(failures: Mapping[int, BaseException], url: str, count: int | None = None) -> SaveFailed:
    count = len(failures) if count is None else count
    return SaveFailed(
        summary("save", failures, count=count), url=url, failures=some_of(failures), failed_ranks=count
    )
