"""Save and load as DCP does, with this library's storage and errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from functools import partial
from typing import Any, Literal, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt.arguments import check_arguments, put_back, values_of
from ckpt.backends.options import redact_url
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CommitUnknown, ConfigurationError, LoadFailed, SaveFailed
from ckpt.format.names import last_segment
from ckpt.load_plans.together import load_planned
from ckpt.models.writer import ModelWriter, shard_bytes
from ckpt.ranks.failures import cause_of, failures_of, interrupts, load_error, same_failure, save_error
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.ranks.lost_ranks import lost
from ckpt.reading.reader import CheckpointReader
from ckpt.references.request import References, with_base
from ckpt.references.writer import ReferringWriter
from ckpt.writing.background import Background
from ckpt.writing.column_save import save_planned
from ckpt.writing.stager import Stager
from ckpt.writing.stock_metadata import DEFAULT_MAX_BYTES
from ckpt.writing.writer import CheckpointWriter

__all__ = ["async_save", "load", "save"]

SaveFormat = Literal["ckpt", "safetensors"]
Reader = TypeVar("Reader", bound=CheckpointReader)

background, stager = Background(), Stager()


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
    max_bandwidth_bytes_per_s: float | None = None,
    tags: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    format: SaveFormat = "ckpt",
    max_shard_size: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    frozen: Collection[str] = (),
    digests: bool = False,
    stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
) -> Metadata:
    """Save `state_dict` from all ranks; when this returns, the checkpoint is committed and durable.

    `planner`, `process_group` and `no_dist` are those of `dcp.save`, the others those of
    `CheckpointWriter`. Without a `process_group` the ranks talk over a gloo group of this library's
    own.

    With `format="safetensors"`, `state_dict` is that of a model, and a folder results that transformers
    reads as it is (`docs/servable.md`): each tensor whole in one of the files, none with more than
    `max_shard_size` of tensors (bytes, or "2GB"; default 5 GB) unless one tensor is larger. It is a checkpoint like any
    other. There is no `planner` then.

    With a `base`, an earlier checkpoint in the same folder that was saved with `digests=True` or a base
    of its own, only what changed is written (`docs/only-what-changed.md`): tensors that equal those of
    the base are named where they are, by digests of their bytes. Tensors of `frozen`, names or
    patterns (`ckpt.frozen(model, "model.")`), are not even compared: you vouch for them.

    When a rank or its storage hangs, all ranks fail within `timeout_s` seconds, and their errors
    name the rank and what it was doing. A rank that is slow, but makes progress, is waited for.

    Raises:
        SaveFailed: on every rank, whichever failed; its `failures` are the errors by rank.
        ConfigurationError: an argument is wrong, also a base that others may not refer to.
        NotFound, NotCommitted, IntegrityError, ...: the base cannot be opened.
    """
    make_writer = partial(
        writer_for,
        format,
        max_shard_size,
        planner,
        (base, frozen, digests),
        url,
        storage_options=storage_options,
        overwrite=overwrite,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        max_bandwidth_bytes_per_s=max_bandwidth_bytes_per_s,
        tags=tags,
        timeout_s=timeout_s,
        stock_metadata_max_bytes=stock_metadata_max_bytes,
    )
    with closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
        writer, values = prepare_save(state_dict, url, planner, base, make_writer, ranks, copy=False)
        return save_values(values, writer, planner, ranks)


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
    max_bandwidth_bytes_per_s: float | None = None,
    tags: Mapping[str, str] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    format: SaveFormat = "ckpt",
    max_shard_size: int | str | None = None,
    base: str | os.PathLike[str] | None = None,
    frozen: Collection[str] = (),
    digests: bool = False,
    stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
) -> Future[Metadata]:
    """Copy the state to CPU memory, return, and save the copy in the background as `save` does.

    `format`, `max_shard_size`, `base`, `frozen` and `digests` are those of `save`; what is frozen and in the base
    is not copied. Later changes of the tensors do not reach the checkpoint. One save runs at a time: a call
    during an earlier one waits for that first. The checkpoint is committed when the future's `result()`
    returns; it raises what `save` would raise. A failure is also logged. A program that ends waits for it.
    """
    make_writer = partial(
        writer_for,
        format,
        max_shard_size,
        planner,
        (base, frozen, digests),
        url,
        storage_options=storage_options,
        overwrite=overwrite,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        max_bandwidth_bytes_per_s=max_bandwidth_bytes_per_s,
        tags=tags,
        timeout_s=timeout_s,
        stock_metadata_max_bytes=stock_metadata_max_bytes,
    )

    def prepare() -> Callable[[], Metadata]:
        # In the thread in which all ranks do the same things in the same order.
        ranks = Ranks(process_group, no_dist=no_dist, purpose="background", timeout_s=timeout_s)
        with ExitStack() as stack:
            stack.callback(ranks.close)
            writer, staged = prepare_save(state_dict, url, planner, base, make_writer, ranks, copy=True)
            stack.pop_all()
        return lambda: save_copy(staged, writer, planner or DefaultSavePlanner(), ranks)

    return background.start(prepare)


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
    timeout_s: float = DEFAULT_TIMEOUT_S,
    read_once: bool = True,
) -> None:
    """Load a checkpoint, or a folder of safetensors files, into `state_dict` in place, on any number of ranks.

    The first rank opens the checkpoint and tells the others, so that all load the same one or none
    does. With `read_once` ranks that want the same (replicas) read it once, and pass it on. When a rank
    makes no progress, the others fail within `timeout_s` seconds, and their errors name it. `planner`,
    `process_group` and `no_dist` are those of `dcp.load`, the others those of `CheckpointReader`.

    Raises:
        NotFound, NotCommitted, IntegrityError, UnsafeContent, ...: as the first failing rank met it.
        LoadFailed: anything else, such as a key that the checkpoint does not have.
    """

    def make_reader(ranks: Ranks) -> CheckpointReader:
        reader = CheckpointReader(
            url,
            storage_options=storage_options,
            verify=verify,
            visibility_timeout_s=visibility_timeout_s,
            threads=threads,
            memory_budget_bytes=memory_budget_bytes,
            trusted_objects=trusted_objects,
            timeout_s=timeout_s,
        )
        reader.use_ranks(ranks, read_once=read_once)
        return reader

    with closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
        load_by(state_dict, url, planner, make_reader, ranks)


def load_by(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    planner: LoadPlanner | None,
    make_reader: Callable[[Ranks], Reader],
    ranks: Ranks,
    open_together: Callable[[Reader, Ranks], bytes | None] | None = None,
) -> Reader:
    """Load by a reader of each rank, and return it, closed; `open_together` returns what all adopt."""
    place = place_of(url)
    call = f"load of {last_segment(place)}"

    def prepare() -> tuple[Reader, dict[str, Any]]:
        check_arguments(state_dict, url, planner)
        return make_reader(ranks), values_of(state_dict)

    with same_failure(LoadFailed, place, ranks):
        reader, values = ranks.together(call, prepare)
        with closing(reader):
            shared = (open_together or _open_together)(reader, ranks)

            def adopt() -> dict[str, Any]:
                if shared is not None and (ranks.rank != 0 or open_together is not None):
                    reader.adopt(shared)
                return reader.without_tied(values)

            values = ranks.together(call, adopt)
            try:
                with interrupts(reader, ranks):
                    load_planned(values, reader, planner, ranks, is_shared=shared is not None)
            except CheckpointException as error:
                raise load_error(error, place) from cause_of(error)
        ranks.together(call, lambda: put_back(state_dict, values))
    return reader


def writer_for(
    format: SaveFormat,
    max_shard_size: int | str | None,
    planner: object,
    wanted: tuple[Any, Any, Any],
    url: Any,
    **more: Any,
) -> CheckpointWriter:
    """Make the writer for a format. Raises ConfigurationError if an argument is wrong."""
    references = References.of(*wanted)
    if format == "safetensors":
        if references is not None:
            raise ConfigurationError(
                'format="safetensors" writes whole models; it takes no base and no digests'
            )
        if planner is not None:
            raise ConfigurationError('format="safetensors" has a layout of its own; it takes no planner')
        return ModelWriter(url, max_shard_bytes=shard_bytes(max_shard_size), **more)
    if format != "ckpt":
        raise ConfigurationError(f'format must be "ckpt" or "safetensors", not {format!r:.100}')
    if max_shard_size is not None:
        raise ConfigurationError('max_shard_size is for format="safetensors"')
    if references is not None:
        return ReferringWriter(url, references=references, planner=planner, **more)
    return CheckpointWriter(url, **more)


def prepare_save(
    state_dict: Mapping[str, Any],
    url: str | os.PathLike[str],
    planner: SavePlanner | None,
    base: object,
    make_writer: Callable[[], CheckpointWriter],
    ranks: Ranks,
    *,
    copy: bool,
) -> tuple[CheckpointWriter, dict[str, Any]]:
    """Make the writer and resolve the state on every rank; DCP would wait for ranks that fail here."""

    def prepare() -> tuple[CheckpointWriter, dict[str, Any]]:
        check_arguments(state_dict, url, planner)
        writer = make_writer()
        writer.use(ranks.progress)
        values = values_of(state_dict)
        if isinstance(writer, ModelWriter):
            writer.take({key: values[key] for key in state_dict}, ranks)
        waits = isinstance(writer, ReferringWriter) and writer.wants_base
        return writer, stager.stage(values) if copy and not waits else values

    place = place_of(url)
    call = f"save of {last_segment(place)}{with_base(base)}"
    with same_failure(SaveFailed, place, ranks), ExitStack() as stack:
        writer, values = ranks.together(call, prepare)
        if isinstance(writer, ReferringWriter) and writer.wants_base:
            referring = writer
            stack.callback(referring.close)
            referring.open_base(ranks)
            if copy:
                values = ranks.together(call, lambda: stager.stage_but(values, referring.unstaged(values)))
            stack.pop_all()
        return writer, values


def save_values(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner | None, ranks: Ranks
) -> Metadata:
    try:
        try:
            return _save_once(state_dict, writer, planner, ranks)
        except SaveFailed as error:  # all ranks have the same failures
            if not (isinstance(writer, ReferringWriter) and writer.goes_on_after(error.failures.values())):
                raise
            return _save_once(state_dict, writer, planner, ranks)
    finally:
        writer.close()


def _save_once(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner | None, ranks: Ranks
) -> Metadata:
    planner = planner or DefaultSavePlanner()
    if isinstance(writer, ReferringWriter):
        planner = writer.planner(planner, ranks)
    try:
        with interrupts(writer, ranks):
            return save_planned(state_dict, writer, planner, ranks)
    except CheckpointException as error:
        failures = failures_of(error)
        if all(proves_no_commit(failure) for failure in failures.values()):
            writer.discard()  # every rank comes to this conclusion
        raise save_error(failures, writer.checkpoint_id) from cause_of(error)
    except Exception as error:
        rank = ranks.rank
        message, failures = lost("save", ranks, error)
        why = failures[rank].args[0] if rank in failures else "this rank lost contact with the others"
        why += ", before it heard whether the save was committed; try to load it to find out"
        unknown = CommitUnknown(why, url=writer.checkpoint_id, rank=rank)
        message += "; whether it was committed is not known here, try to load it to find out"
        raise SaveFailed(message, url=writer.checkpoint_id, failures={**failures, rank: unknown}) from error


def save_copy(
    staged: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner, ranks: Ranks
) -> Metadata:
    """Save a copy, and free its memory even if someone still holds the dict."""
    try:
        with closing(ranks):
            return save_values(staged, writer, planner, ranks)
    finally:
        staged.clear()
        if isinstance(planner, DefaultSavePlanner):
            planner.state_dict = {}  # it would keep it until its next save


def place_of(url: str | os.PathLike[str]) -> str:
    """Make `url` fit for messages, even if it is not a valid one."""
    return redact_url(str(url)) if isinstance(url, str | os.PathLike) else f"<{type(url).__name__}>"


def _open_together(reader: CheckpointReader, ranks: Ranks) -> bytes | None:
    """Open the checkpoint on the first rank; return what the others adopt, or raise its error, on all ranks."""

    def open_and_share() -> bytes | None:
        ranks.progress.begin("opening")
        checkpoint = reader.open()
        return None if checkpoint is None else checkpoint.share()

    ranks.progress.wait_for("rank 0 to open the checkpoint")
    return ranks.from_first(open_and_share)
