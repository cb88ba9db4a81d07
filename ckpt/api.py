"""Save and load as DCP does, with this library's storage and errors."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack, closing
from functools import partial
from types import ModuleType
from typing import Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt.collective import background, load_by, prepare_save, save_copy, save_values, writer_for
from ckpt.content.checks import Checks, Level
from ckpt.errors import ConfigurationError, short_traceback
from ckpt.gc_pause import rare_gc
from ckpt.local_first.options import LocalTier
from ckpt.options import LoadOptions, SaveOptions
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks
from ckpt.reading.reader import CheckpointReader
from ckpt.writing.background import SaveFuture
from ckpt.writing.stock_metadata import DEFAULT_MAX_BYTES

__all__ = ["async_save", "load", "save"]

SaveFormat = Literal["ckpt", "safetensors"]


@short_traceback
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
    config_from: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    frozen: Collection[str] = (),
    digests: bool = False,
    stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
    checks: Checks | Level | None = None,
    block_digests: str | None = None,
    options: SaveOptions | None = None,
) -> Metadata:
    """Save `state_dict` from all ranks; when this returns, the checkpoint is committed and durable.

    `planner`, `process_group` and `no_dist` are those of `dcp.save`, `options` a `ckpt.options.SaveOptions`, the others
    those of `CheckpointWriter`. Without a `process_group` the ranks talk over a gloo group of this library's own.

    With `format="safetensors"`, `state_dict` is that of a model, and a folder results that transformers reads as it is
    (`docs/servable.md`): each tensor whole in one of the files, none with more than `max_shard_size` of tensors (bytes,
    or "2GB"; default 5 GB) unless one tensor is larger. It is a checkpoint like any other. There is no `planner` then.
    `config_from`, a model's folder: its `config.json`, tokenizer and the like lie in the new one at the commit.

    With a `base`, an earlier checkpoint in the same folder that was saved with `digests=True` or a base of its own, only
    what changed is written (`docs/only-what-changed.md`): tensors that equal those of the base are named where they
    are. Tensors of `frozen`, names or patterns (`ckpt.frozen(model, "model.")`), are not even compared.

    `checks` compare what is saved with the save before it, and replicas with one another (`docs/content.md`): a save
    that cannot be right is refused, and one that is probably wrong is warned of. `block_digests`, `"blake3"` or
    `"sha256"`, are cryptographic: the `storage_meta.digest` of what this returns fixes every byte (`docs/provenance.md`).

    When a rank or its storage hangs, all ranks fail within `timeout_s` seconds, and their errors name the rank and what
    it was doing. A rank that is slow, but makes progress, is waited for.

    Raises:
        SaveFailed: on every rank, whichever failed; its `failures` are the errors by rank.
        ConfigurationError: an argument is wrong, also a base that others may not refer to.
        NotFound, NotCommitted, IntegrityError, ...: the base cannot be opened.
    """
    make = partial(writer_for, format, max_shard_size, config_from, planner, (base, frozen, digests), url)
    make_writer = partial(
        make,
        storage_options=storage_options,
        overwrite=overwrite,
        threads=threads,
        memory_budget_bytes=memory_budget_bytes,
        max_bandwidth_bytes_per_s=max_bandwidth_bytes_per_s,
        tags=tags,
        timeout_s=timeout_s,
        stock_metadata_max_bytes=stock_metadata_max_bytes,
        checks=checks,
        block_digests=block_digests,
    )
    with rare_gc(), closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
        writer, values = prepare_save(state_dict, url, planner, base, make_writer, ranks, options=options)
        return save_values(values, writer, planner, ranks)


@short_traceback
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
    config_from: str | os.PathLike[str] | None = None,
    base: str | os.PathLike[str] | None = None,
    frozen: Collection[str] = (),
    digests: bool = False,
    stock_metadata_max_bytes: int | None = DEFAULT_MAX_BYTES,
    checks: Checks | Level | None = None,
    block_digests: str | None = None,
    local: str | os.PathLike[str] | LocalTier | None = None,
    options: SaveOptions | None = None,
) -> SaveFuture:
    """Copy the state to CPU memory, return, and save the copy in the background as `save` does.

    All arguments but `local` are those of `save`. One save runs at a time: a call during an earlier one waits for that
    first. It is committed when the future's `result()` returns, which raises as `save`; a program that ends waits for it.

    With `local`, a folder of the node's own disk or a `ckpt.LocalTier`, the checkpoint is committed on the nodes' disks
    first (the future's `local`); the next call waits for no more. A process on each node carries it to `url`, also when
    this program is killed (`docs/local-first.md`); one that ends waits at most `drain_timeout_s` seconds. Raises SaveFailed.
    """
    settings: dict[str, Any] = {
        "storage_options": storage_options,
        "overwrite": overwrite,
        "threads": threads,
        "memory_budget_bytes": memory_budget_bytes,
        "max_bandwidth_bytes_per_s": max_bandwidth_bytes_per_s,
        "tags": tags,
        "timeout_s": timeout_s,
        "stock_metadata_max_bytes": stock_metadata_max_bytes,
        "checks": checks,
        "block_digests": block_digests,
    }
    if local is not None:
        _check_local(format, base, frozen, digests, not overwrite, max_shard_size, config_from)
        settings |= {"process_group": process_group, "no_dist": no_dist, "save_options": options}
        near: SaveFuture = _near().async_save_near(state_dict, url, local, planner=planner, **settings)
        return near
    make = partial(writer_for, format, max_shard_size, config_from, planner, (base, frozen, digests), url)
    make_writer = partial(make, **settings)

    def prepare() -> Callable[[], Metadata]:
        # In the thread in which all ranks do the same things in the same order.
        ranks = Ranks(process_group, no_dist=no_dist, purpose="background", timeout_s=timeout_s)
        with rare_gc(), ExitStack() as stack:
            stack.callback(ranks.close)
            writer, staged = prepare_save(
                state_dict, url, planner, base, make_writer, ranks, copy=True, options=options
            )
            stack.pop_all()
        return lambda: save_copy(staged, writer, planner or DefaultSavePlanner(), ranks)

    save = SaveFuture()
    background.start(prepare, save)
    return save


def _check_local(format: str, *others: object) -> None:
    if format != "ckpt" or any(others):
        text = "local= goes with none of format= and its options, base=, frozen=, digests= and overwrite="
        raise ConfigurationError(text)


@short_traceback
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
    local: str | os.PathLike[str] | LocalTier | None = None,
    expect: str | None = None,
    options: LoadOptions | None = None,
) -> None:
    """Load a checkpoint, or a folder of safetensors files, into `state_dict` in place, on any number of ranks.

    The first rank opens the checkpoint and tells the others, so that all load the same one or none
    does. With `read_once` ranks that want the same (replicas) read it once, and pass it on. When a rank
    makes no progress, the others fail within `timeout_s` seconds, and their errors name it. `planner`,
    `process_group` and `no_dist` are those of `dcp.load`, the others those of `CheckpointReader`.

    With `local`, the folder that `async_save` was given, each rank reads from its node's disk, then from other nodes',
    then from `url`, as long as what the nodes have is not older than what is durable.

    The checkpoint says what there is: all keys below the names of `state_dict` are taken, and a key that is missing or
    left over is an error (`docs/trainer.md`). `options`, a `ckpt.options.LoadOptions`, are less or more strict.

    With `expect`, the digest that the save returned or `ckpt inspect` shows (`sha256:...`), this checkpoint is loaded or
    none. All bytes are held against its block digests, if it was saved with `block_digests`.

    Raises:
        DigestMismatch: it is not the checkpoint that is expected.
        NotFound, NotCommitted, IntegrityError, UnsafeContent, ...: as the first failing rank met it.
        LoadFailed: anything else, such as a key that the checkpoint does not have.
    """

    settings: dict[str, Any] = {
        "storage_options": storage_options,
        "verify": verify,
        "threads": threads,
        "memory_budget_bytes": memory_budget_bytes,
        "trusted_objects": trusted_objects,
        "timeout_s": timeout_s,
        "expect": expect,
    }
    if local is not None:
        if expect is not None:
            raise ConfigurationError("expect= names what is durable; it does not go with local=")
        del settings["expect"]
        group = {"process_group": process_group, "no_dist": no_dist}
        with rare_gc():
            if _near().load_nearest(
                state_dict, url, local, planner=planner, options=options, **group, **settings
            ):
                return

    def make_reader(ranks: Ranks) -> CheckpointReader:
        reader = CheckpointReader(url, visibility_timeout_s=visibility_timeout_s, **settings)
        reader.use_ranks(ranks, read_once=read_once)
        return reader

    with rare_gc(), closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:
        load_by(state_dict, url, planner, make_reader, ranks, options=options)


def _near() -> ModuleType:
    """Import what saves and loads by way of the nodes' disks, which most programs do not need."""
    from ckpt.local_first import calls

    return calls
