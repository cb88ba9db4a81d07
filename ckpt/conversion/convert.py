"""`ckpt.convert`: checkpoints and models from one format into another, streamed.

A source gives any region of any tensor; a writer lays out its files, whose bytes are asked of the source when they are
due. So neither holds more than a few parts of files, whatever the size of the model or of one tensor.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from ckpt.backends.base import exists
from ckpt.backends.options import redact_url
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.conversion.checkpoint_source import CheckpointSource
from ckpt.conversion.checkpoint_target import write_checkpoint, write_stock_checkpoint
from ckpt.conversion.job import Job
from ckpt.conversion.locations import Guard, Place, file_name, open_file, open_source
from ckpt.conversion.safetensors_format import INDEX_SUFFIX
from ckpt.conversion.safetensors_source import SafetensorsSource, find_model
from ckpt.conversion.safetensors_target import write_safetensors
from ckpt.conversion.selection import Rules, choose, parse_dtype
from ckpt.conversion.source import Source
from ckpt.conversion.torch_source import TorchFileSource
from ckpt.conversion.torch_target import write_torch_file
from ckpt.errors import CheckpointError, ConfigurationError, FormatError, NotFound
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Ranks, RanksFailed, check_timeout
from ckpt.ranks.heartbeat import Limits
from ckpt.ranks.lost_ranks import lost
from ckpt.reading.checkpoint import is_rank_local

__all__ = ["Converted", "Format", "convert"]

Format = Literal["ckpt", "dcp", "torch", "safetensors"]

_FORMATS = ("ckpt", "dcp", "torch", "safetensors")
_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_DEFAULT_SHARD_BYTES = 5_000_000_000
_OLD_WEIGHTS = "pytorch_model.bin"
_ZIP = b"PK\x03\x04"


@dataclass
class Converted:
    """What a conversion did, on all ranks together.

    Attributes:
        source_format, format: `ckpt`, `dcp`, `torch` or `safetensors`.
        tensors, objects: how many were written.
        tensor_bytes: size of the tensors, in their new dtypes.
        files: data files written; `sent_bytes` is their size.
        dropped: what the new format cannot hold, and tensors that `weights_only` took for none; and why.
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
    """Convert a checkpoint of this library or of stock DCP, a `torch.save` file or a safetensors model into another.

    Memory stays under 1 GiB a process. With a process group, the ranks share the work of what has several files; one
    file is written by the first rank alone. The output appears when it is complete.

    Args:
        to: `ckpt`, `dcp`, `torch` (one file) or `safetensors` (a file of that ending, or a folder as transformers write
            it). By default what the ending of `destination` says; for a folder `ckpt`, unless the source is that already.
        dtype: of all weights that are floating-point numbers. Optimizer state keeps its own.
        include, exclude: globs over names.
        rename: regular expressions and replacements, one after the other, for every name.
        weights_only: without optimizer state and anything that is no weight, as far as names tell.
        max_shard_bytes: of one safetensors file in a folder.
        overwrite: replace a checkpoint of this library, or one file; else only what an interrupted conversion left.
        storage_options: of the source; of both, without `destination_options`.
        progress: called with the bytes that this rank has sent so far, and those in all.
        timeout_s: all ranks have failed within it when one makes no progress, and say which; nor does one wait longer
            for a storage that does not answer.

    Raises:
        NotFound, NotCommitted: there is nothing to convert at the source.
        IntegrityError, FormatError, UnsafeContent: the source is damaged, not understood, or not safe.
        AlreadyExists: something is at the destination.
        ConfigurationError: an argument is wrong, or the new format cannot hold a tensor.
        StorageError: a storage refused, or could not be reached.
    """
    if max_shard_bytes < 1:
        raise ConfigurationError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    wanted = parse_dtype(dtype) if isinstance(dtype, str) else dtype
    rules = Rules(tuple(include), tuple(exclude), tuple(rename), weights_only, wanted)
    to_options = storage_options if destination_options is None else destination_options
    ranks = Ranks(process_group, no_dist=no_dist, purpose="conversion", timeout_s=check_timeout(timeout_s))
    guard = functools.partial(DeadlineStore, progress=ranks.progress, limit_s=Limits(timeout_s).stall_s)
    places = _Places(source, storage_options, destination, to_options, to, threads, guard)
    with contextlib.closing(ranks), contextlib.ExitStack() as stack, _one_error(ranks):
        told = progress or (lambda done, total: None)
        call = f"conversion to {file_name(destination) or redact_url(os.fspath(destination))}"

        def begin() -> tuple[Job, Format]:
            opened, place, form = places.open(stack)
            choice = choose(opened, rules)
            opened.prepare(choice.sources)
            return Job(opened, choice, place, ranks, call, overwrite, max_shard_bytes, told), form

        job, form = ranks.together(call, begin)
        job.agree()
        _write(job, form, wanted)
        return _result(job, form)


@dataclass
class _Places:
    """Where from and where to, as the caller says it."""

    source: str | os.PathLike[str]
    source_options: Mapping[str, Any] | None
    destination: str | os.PathLike[str]
    destination_options: Mapping[str, Any] | None
    to: str | None
    threads: int | None
    guard: Guard

    def open(self, stack: contextlib.ExitStack) -> tuple[Source, Place, Format]:
        """Both, and the format of the destination; `stack` closes them."""
        opened = _open(self.source, self.source_options, self.guard)
        stack.callback(opened.close)
        form = _format(opened, self.destination, self.to)
        place = self._place(form)
        stack.callback(place.close)
        if opened.format == form and os.path.realpath(opened.url) == os.path.realpath(place.url):
            raise ConfigurationError("source and destination are the same place", url=place.url)
        if place.key is not None and opened.holds(place.url):
            raise ConfigurationError("the destination is a file of the source", url=place.url)
        return opened, place, form

    def _place(self, form: Format) -> Place:
        url, options = self.destination, self.destination_options
        if form == "torch" or (form == "safetensors" and file_name(url).endswith(".safetensors")):
            return open_file(url, options, threads=self.threads, guard=self.guard)
        return Place(self.guard(open_store(url, options, threads=self.threads)))


def _result(job: Job, form: Format) -> Converted:
    wrote = job.ranks.gather((job.files, job.sent_bytes))
    return Converted(
        job.source.url,
        job.place.url,
        job.source.format,
        form,
        tensors=len(job.choice.tensors),
        objects=len(job.choice.objects),
        tensor_bytes=job.choice.nbytes,
        files=sum(files for files, _ in wrote),
        sent_bytes=sum(nbytes for _, nbytes in wrote),
        dropped=job.choice.dropped,
    )


def _write(job: Job, form: str, dtype: torch.dtype | None) -> None:
    if form == "ckpt":
        write_checkpoint(job)
    elif form == "dcp":
        write_stock_checkpoint(job)
    elif form == "torch":
        write_torch_file(job)
    else:
        write_safetensors(job, dtype)


@contextlib.contextmanager
def _one_error(ranks: Ranks) -> Iterator[None]:
    """Of what several ranks report: this rank's own error, or the first. Or who is gone."""
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


def _open(url: str | os.PathLike[str], options: Mapping[str, Any] | None, guard: Guard) -> Source:
    """The source at a URL, of whatever format it is. Raises FormatError where it is none."""
    place = open_source(url, options, guard=guard)
    try:
        if place.key is None:
            return _open_folder(url, place, options, guard)
        assert place.stat is not None
        head = bytearray(min(place.stat.size_bytes, len(_ZIP)))
        place.folder.read_into(place.key, 0, [memoryview(head)])
        if place.key.endswith(INDEX_SUFFIX) or place.key.endswith(".safetensors"):
            return SafetensorsSource(place)
        if head == _ZIP or place.key.endswith(_TORCH_SUFFIXES):
            return TorchFileSource(place)
        raise FormatError(
            "is no torch.save archive, and no safetensors file by its name",
            url=place.folder.url,
            key=place.key,
        )
    except BaseException:
        place.close()
        raise


def _open_folder(
    url: str | os.PathLike[str], place: Place, options: Mapping[str, Any] | None, guard: Guard
) -> Source:
    if not _is_checkpoint(place):
        key = find_model(place.folder)
        if key is not None:
            return SafetensorsSource(place, key)
        with contextlib.suppress(NotFound):
            stat = place.folder.stat(_OLD_WEIGHTS)
            return TorchFileSource(Place(place.folder, stat.key, stat, place.base), has_folder=True)
        if exists(place.folder, f"{_OLD_WEIGHTS}.index.json"):
            raise FormatError(
                "is an old model in several pickles; load it with transformers, and save_pretrained it",
                url=place.url,
            )
    place.close()
    return CheckpointSource(
        url, options, guard
    )  # which also says best what is missing where there is nothing


def _is_checkpoint(place: Place) -> bool:
    for key in (COMMIT_KEY, STOCK_METADATA_KEY):
        with contextlib.suppress(NotFound):
            place.folder.stat(key)
            return True
    return is_rank_local(place.folder)


def _format(source: Source, destination: str | os.PathLike[str], to: str | None) -> Format:
    name = file_name(destination)
    if to is not None:
        if to not in _FORMATS:
            raise ConfigurationError(f"{to!r} is no format; write one of {', '.join(_FORMATS)}")
        return cast(Format, to)
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(_TORCH_SUFFIXES):
        return "torch"
    if source.format != "ckpt":
        return "ckpt"
    raise ConfigurationError(
        "say which format the destination is to have: --to dcp, torch, safetensors, or ckpt again"
    )
