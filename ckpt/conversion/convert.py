"""`ckpt.convert`: convert checkpoints and models from one format into another, streamed.

A source reads any region of any tensor. A writer lays out its files, and asks the source for their
bytes when they are due. So memory holds a few parts of files, whatever the size of the model or of
one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.backends.options import redact_url
from ckpt.backends.registry import open_store
from ckpt.conversion.formats import WRITERS, Format, format_of, open_tensors
from ckpt.conversion.job import ConversionJob
from ckpt.conversion.locations import Guard, Location, file_name, open_file
from ckpt.conversion.selection import Rules, parse_dtype, select
from ckpt.conversion.source import TensorSource
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks, RanksFailed, check_timeout
from ckpt.ranks.heartbeat import Limits
from ckpt.ranks.lost_ranks import lost

_DEFAULT_SHARD_BYTES = 5_000_000_000


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
    max_shard_bytes: int = _DEFAULT_SHARD_BYTES,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    destination_options: Mapping[str, Any] | None = None,
    process_group: Any = None,
    no_dist: bool = False,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Converted:
    """Convert a checkpoint (of this library or stock DCP), `torch.save` file or safetensors model.

    Memory stays under 1 GiB a process. With a process group, the ranks share the files; a single
    file is written by the first rank alone. The output appears when it is complete.

    Args:
        to: `ckpt`, `dcp`, `torch` (one file) or `safetensors` (a file of that ending, or a folder
            as transformers write it). Default: by the name of `destination`; `ckpt` for a folder.
        dtype: of all weights that are floating-point numbers. Optimizer state keeps its own.
        include, exclude: globs over names.
        rename: regular expressions and replacements, one after the other, for every name.
        weights_only: leave out optimizer state, and anything else that by its name is not a weight.
        max_shard_bytes: of one safetensors file in a folder.
        overwrite: replace a checkpoint of this library, one file, or, in other formats, the files
            of an interrupted conversion.
        storage_options: of the source; of both, without `destination_options`.
        progress: called with the bytes that this rank has sent so far, and will send in all.
        timeout_s: all ranks fail within it, and say why, if a rank or a storage stops.

    Raises:
        NotFound, NotCommitted: there is nothing to convert at the source.
        IntegrityError, FormatError, UnsafeContent: the source is damaged, unknown, or not safe.
        AlreadyExists: the destination exists.
        ConfigurationError: an argument is wrong, or the new format cannot hold a tensor.
        StorageError: a storage refused, or could not be reached.
    """
    if max_shard_bytes < 1:
        raise ConfigurationError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    weights_dtype = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    rules = Rules(tuple(include), tuple(exclude), tuple(rename), weights_only, weights_dtype)
    to_options = storage_options if destination_options is None else destination_options
    ranks = Ranks(process_group, no_dist=no_dist, purpose="conversion", timeout_s=check_timeout(timeout_s))
    guard = functools.partial(DeadlineStore, progress=ranks.progress, limit_s=Limits(timeout_s).stall_s)
    ends = _Ends(source, storage_options, destination, to_options, to, threads, guard)
    call = f"conversion to {file_name(destination) or redact_url(os.fspath(destination))}"
    with contextlib.closing(ranks), contextlib.ExitStack() as stack, _one_error(ranks):

        def begin() -> tuple[ConversionJob, Format]:
            tensors, location, form = ends.open(stack)
            selection = select(tensors, rules)
            tensors.prepare(selection.sources)
            job = ConversionJob(
                tensors, selection, rules, location, ranks, call, overwrite, max_shard_bytes, progress
            )
            return job, form

        job, form = ranks.together(call, begin)
        job.agree()
        WRITERS[form](job)
        return _result(job, form)


@dataclass
class _Ends:
    """The source and the destination, as the caller names them."""

    source: str | os.PathLike[str]
    source_options: Mapping[str, Any] | None
    destination: str | os.PathLike[str]
    destination_options: Mapping[str, Any] | None
    to: str | None
    threads: int | None
    guard: Guard

    def open(self, stack: contextlib.ExitStack) -> tuple[TensorSource, Location, Format]:
        """Open both, and choose the format of the destination; `stack` closes them."""
        tensors = open_tensors(self.source, self.source_options, self.guard)
        stack.callback(tensors.close)
        form = format_of(self.destination, self.to, tensors.format)
        location = self._open_destination(form)
        stack.callback(location.close)
        if tensors.format == form and os.path.realpath(tensors.url) == os.path.realpath(location.url):
            raise ConfigurationError("source and destination are the same", url=location.url)
        if location.key is not None and tensors.holds(location.url):
            raise ConfigurationError("the destination is a file of the source", url=location.url)
        return tensors, location, form

    def _open_destination(self, form: Format) -> Location:
        url, options = self.destination, self.destination_options
        if form == "torch" or (form == "safetensors" and file_name(url).endswith(".safetensors")):
            return open_file(url, options, threads=self.threads, guard=self.guard)
        return Location(self.guard(open_store(url, options, threads=self.threads)))


def _result(job: ConversionJob, form: Format) -> Converted:
    wrote = job.ranks.gather((job.files, job.sent_bytes))
    return Converted(
        job.source.url,
        job.destination.url,
        job.source.format,
        form,
        tensors=len(job.selection.tensors),
        objects=len(job.selection.objects),
        tensor_bytes=job.selection.nbytes,
        files=sum(files for files, _ in wrote),
        sent_bytes=sum(nbytes for _, nbytes in wrote),
        dropped=job.selection.dropped,
    )


@contextlib.contextmanager
def _one_error(ranks: Ranks) -> Iterator[None]:
    """Raise one of several ranks' errors: this rank's own, or the first; or name a lost rank."""
    failures: dict[int, CheckpointError] = {}
    try:
        yield
    except RanksFailed as failed:
        failures = failed.failures
    except CheckpointError:
        raise
    except Exception as broken:
        if ranks.size == 1:
            raise
        raise CheckpointError(lost("conversion", ranks, broken)[0], rank=ranks.rank) from broken
    if failures:
        error = failures.get(ranks.rank, failures[min(failures)])
        if ranks.size == 1:
            error.rank = None
        raise error
