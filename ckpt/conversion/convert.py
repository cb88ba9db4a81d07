"""`ckpt.convert`: convert checkpoints and models from one format into another, streamed.

A source reads any region of any tensor. A target lays out its files, and asks the source for their
bytes when they are due. So memory holds a few parts of files, whatever the size of one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.backends.options import redact_url
from ckpt.backends.registry import normal_url
from ckpt.consistency.expected import checked_expect
from ckpt.conversion.checkpoint_target import CheckpointTarget, StockCheckpointTarget
from ckpt.conversion.endpoints import Endpoint, open_configuration, open_destination, open_source
from ckpt.conversion.formats import Format
from ckpt.conversion.safetensors_target import SafetensorsTarget
from ckpt.conversion.selection import Rules, globs_of, select, weight_dtype
from ckpt.conversion.target import Target, Written
from ckpt.conversion.torch_target import TorchTarget
from ckpt.errors import CheckpointError, ConfigurationError, short_traceback
from ckpt.format.fqns import STRUCTURE
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks, RanksFailed, check_timeout
from ckpt.ranks.heartbeat import Limits
from ckpt.ranks.lost_ranks import lost
from ckpt.transfer.reports import ReportBytes, no_report

_TARGETS: Mapping[Format, type[Target]] = {
    "ckpt": CheckpointTarget,
    "dcp": StockCheckpointTarget,
    "torch": TorchTarget,
    "safetensors": SafetensorsTarget,
}


@dataclass
class Converted:
    """The outcome of a conversion, on all ranks together.

    Attributes:
        source_format, format: `ckpt`, `dcp`, `torch` or `safetensors`.
        tensors, objects: the numbers written.
        tensor_bytes: size of the tensors, in their new dtypes.
        files: data files written; `sent_bytes` is their size.
        dropped: names that the new format cannot hold, or that `weights_only` left out, with
            reasons.
        lacks_config: a folder of safetensors got no `config.json`, which transformers needs.
    """

    source: str
    destination: str
    source_format: str
    format: str
    tensors: int = 0
    objects: int = 0
    tensor_bytes: int = 0
    files: int = 0
    sent_bytes: int = 0
    dropped: dict[str, str] = field(default_factory=dict)
    lacks_config: bool = False


@short_traceback
def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Format | None = None,
    dtype: str | torch.dtype | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    rename: Sequence[tuple[str, str]] = (),
    weights_only: bool = False,
    config_from: str | os.PathLike[str] | None = None,
    max_shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    expect: str | None = None,
) -> Converted:
    """Convert a checkpoint (of this library or stock DCP), `torch.save` file or safetensors model.

    Memory stays under 1 GiB a process. With a process group, the ranks share the files; a single file is written by the
    first rank alone. The output appears when it is complete.

    Args:
        to: `ckpt`, `dcp`, `torch` (one file) or `safetensors` (a file of that ending, or a folder as transformers write
            it). Default: by the name of `destination`; `ckpt` for a folder.
        dtype: of all weights that are floating-point numbers. Optimizer state keeps its own.
        include, exclude: globs over names.
        rename: regular expressions and replacements, one after the other, for every name.
        weights_only: leave out optimizer state, and anything else that by its name is not a weight.
        config_from: a model's folder, whose small files (`config.json`, the tokenizer) a folder of safetensors gets;
            default: those in the source's own folder. With the source's options.
        max_shard_bytes: of a safetensors file in a folder.
        overwrite: replace a checkpoint of this library, one file, or the files of an interrupted conversion.
        storage_options: of the source; of both, without `destination_options`.
        threads, progress: parallel transfers of this rank; called with the bytes it has sent so far, and will send.
        timeout_s: all ranks fail within it, and say why, if a rank or a storage stops.
        expect: the digest of the source, a checkpoint, `sha256:...`; anything else is refused.

    Raises:
        NotFound, NotCommitted: there is nothing to convert at the source.
        IntegrityError, FormatError, UnsafeContent: the source is damaged, unknown, not safe, or not as expected.
        AlreadyExists: the destination exists.
        ConfigurationError: an argument is wrong, or the new format cannot hold a tensor.
        StorageError: a storage refused, or could not be reached.
    """
    if max_shard_bytes < 1:
        raise ConfigurationError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    included, excluded = globs_of("include", include), globs_of("exclude", exclude)
    new_dtype = None if dtype is None else weight_dtype(dtype)
    rules = Rules(included, excluded, tuple(rename), weights_only, new_dtype)
    ranks = Ranks(process_group, no_dist=no_dist, purpose="conversion", timeout_s=check_timeout(timeout_s))
    guard = functools.partial(DeadlineStore, progress=ranks.progress, limit_s=Limits(timeout_s).stall_s)
    stack = contextlib.ExitStack()
    to_options = storage_options if destination_options is None else destination_options
    ends = _Ends(
        Endpoint(normal_url(source), storage_options, guard, stack, expect=checked_expect(expect)),
        Endpoint(normal_url(destination), to_options, guard, stack, threads),
        None if config_from is None else Endpoint(normal_url(config_from), storage_options, guard, stack),
    )
    call = f"conversion to {ends.destination.name or redact_url(ends.destination.url)}"
    more = overwrite, max_shard_bytes, progress or no_report
    prepare = functools.partial(_target, ends, to, rules, ranks, call, *more)
    with contextlib.closing(ranks), stack, _one_error(ranks):
        target = ranks.together(call, prepare)
        return _result(target, target.run())


@dataclass(frozen=True)
class _Ends:
    source: Endpoint
    destination: Endpoint
    configuration: Endpoint | None


def _target(ends: _Ends, to: Format | None, rules: Rules, *more: Any) -> Target:
    """Open both ends, and lay out the output."""
    tensors = open_source(ends.source)
    location, form = open_destination(ends.destination, to, tensors)
    if ends.configuration is not None:
        tensors.model_folder = open_configuration(ends.configuration, location, form)
    selection = select(tensors, rules)
    if form in ("ckpt", "dcp"):
        selection.objects += selection.structures
    if form != "safetensors":
        tensors.check_readable(chosen.source for chosen in selection.tensors)
    tensors.prepare({chosen.source for chosen in selection.everything})
    return _TARGETS[form](form, tensors, selection, location, *more)


def _result(target: Target, written: Sequence[Written]) -> Converted:
    return Converted(
        target.source.url,
        target.destination.url,
        target.source.format,
        target.format,
        tensors=len(target.selection.tensors),
        objects=len([each for each in target.selection.objects if each.path[0] != STRUCTURE]),
        tensor_bytes=target.selection.nbytes,
        files=sum(rank.files for rank in written),
        sent_bytes=sum(rank.nbytes for rank in written),
        dropped=target.selection.dropped,
        lacks_config=target.lacks_config,
    )


@contextlib.contextmanager
def _one_error(ranks: Ranks) -> Iterator[None]:
    """Raise one of several ranks' errors: this rank's own, or the first; or name a lost rank."""
    error: CheckpointError | None = None
    try:
        yield
    except RanksFailed as failed:
        error = failed.own or failed.failures[min(failed.failures)]
    except CheckpointError:
        raise
    except Exception as broken:
        if ranks.size == 1:
            raise
        raise CheckpointError(lost("conversion", ranks, broken)[0], rank=ranks.rank) from broken
    if error is not None:
        if ranks.size == 1:
            error.rank = None
        raise error
