"""Begin a save or a load on all ranks, carry it out, and fail alike: what the calls of `ckpt.api` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any, TypeVar

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt.arguments import check_arguments
from ckpt.backends.options import redact_url
from ckpt.consistency.commit import proves_no_commit
from ckpt.errors import CheckpointError, CommitUnknown, ConfigurationError, LoadFailed, SaveFailed
from ckpt.format.names import last_segment
from ckpt.load_plans.together import load_planned
from ckpt.models.writer import ModelWriter, shard_bytes
from ckpt.options import LoadOptions, SaveOptions, check_options
from ckpt.ranks.failures import cause_of, failures_of, interrupts, load_error, same_failure, save_error
from ckpt.ranks.group import Ranks, check_group
from ckpt.ranks.lost_ranks import lost
from ckpt.reading.reader import CheckpointReader
from ckpt.references.request import References, with_base
from ckpt.references.writer import ReferringWriter
from ckpt.state.load_planner import StateLoadPlanner
from ckpt.state.rank_agreement import agree_on_values
from ckpt.state.resume_check import check_resumable
from ckpt.state.state_parts import Description, put_back, values_of, values_to_save
from ckpt.writing.background import Background
from ckpt.writing.column_save import save_planned
from ckpt.writing.stager import Stager
from ckpt.writing.writer import CheckpointWriter, described_options

Reader = TypeVar("Reader", bound=CheckpointReader)

background, stager = Background(), Stager()


def writer_for(
    format: str,
    max_shard_size: int | str | None,
    config_from: str | os.PathLike[str] | None,
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
        return ModelWriter(url, max_shard_bytes=shard_bytes(max_shard_size), config_from=config_from, **more)
    if format != "ckpt":
        raise ConfigurationError(f'format must be "ckpt" or "safetensors", not {format!r:.100}')
    for name, value in {"max_shard_size": max_shard_size, "config_from": config_from}.items():
        if value is not None:
            raise ConfigurationError(f'{name} is for format="safetensors"')
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
    copy: bool = False,
    options: SaveOptions | None = None,
    described: Description | None = None,
) -> tuple[CheckpointWriter, dict[str, Any]]:
    """Make the writer and resolve the state on every rank; DCP would wait for ranks that fail here.

    `described`: the state is resolved already, and this is what its values are.
    """

    def make() -> CheckpointWriter:
        check_group(ranks.is_meant_alone)
        check_arguments(state_dict, url, planner)
        if options is not None:
            check_options("options", options, SaveOptions)
        writer = make_writer()
        writer.use(ranks.progress)
        writer.trusted_objects = () if options is None else options.trusted_objects
        return writer

    def finish() -> dict[str, Any]:
        if is_checked:
            assert writer.described is not None  # it is resolved by now
            check_resumable(writer.described.parts, values, writer.trusted_objects)
        if writer.described is not None:
            writer.described.parts.clear()  # a copy that is saved later must not keep the models
        if isinstance(writer, ModelWriter):
            writer.take({key: values[key] for key in state_dict}, ranks)
        waits = isinstance(writer, ReferringWriter) and writer.wants_base
        return stager.stage(values) if copy and not waits else values

    place = place_of(url)
    call = f"save of {last_segment(place)}{with_base(base)}"
    with same_failure(SaveFailed, place, ranks), ExitStack() as stack:
        # Each step on all ranks before the next: where FSDP1 shards a model, they talk to each other in it.
        writer = ranks.together(call, make)
        stack.callback(writer.close)
        call += with_options(writer, planner, options)  # from here on ranks with others are in another call
        flattens = not isinstance(writer, ModelWriter) and getattr(planner, "flatten_state_dict", True)
        is_checked = described is None and options is not None and options.resume_check and flattens
        if described is None:
            per_rank = () if options is None else options.per_rank
            values, writer.described = ranks.together(
                call, lambda: values_to_save(state_dict, per_rank, flattens=flattens)
            )
            if getattr(planner, "places_values", False):  # values of one name are shards, which it knows
                writer.described.kinds = dict.fromkeys(writer.described.kinds, "per rank")
        else:
            values = dict(state_dict)
            writer.described = described
        values = ranks.together(call, finish)
        if isinstance(writer, ReferringWriter):
            referring = writer
            referring.unite(values, ranks)
            if referring.wants_base:
                referring.open_base(ranks)
                if copy:
                    values = ranks.together(
                        call, lambda: stager.stage_but(values, referring.unstaged(values))
                    )
        stack.pop_all()
        return writer, values


def with_options(writer: CheckpointWriter, planner: object, options: SaveOptions | None) -> str:
    """Describe the options that all ranks have to pass alike."""
    shared = dict(writer.shared_options)
    if not getattr(planner, "flatten_state_dict", True):
        shared["flatten_state_dict"] = False
    if options is not None and options.per_rank:
        shared["per_rank"] = sorted(options.per_rank)
    return described_options(shared)


def agreed_values(state_dict: Mapping[str, Any], place: str, ranks: Ranks) -> dict[str, Any]:
    """Resolve a state that DCP is going to save, and compare what one rank's stands for. Fails on all ranks alike."""
    with same_failure(SaveFailed, place, ranks):
        call = f"save of {last_segment(place)}"
        values, described = ranks.together(call, lambda: values_to_save(state_dict))
        return agree_on_values(values, described, ranks, place)


def save_values(
    state_dict: dict[str, Any], writer: CheckpointWriter, planner: SavePlanner | None, ranks: Ranks
) -> Metadata:
    try:
        if writer.described is not None:
            state_dict = _agreed(state_dict, writer, ranks)
        try:
            return _save_once(state_dict, writer, planner, ranks)
        except SaveFailed as error:  # all ranks have the same failures
            if not (isinstance(writer, ReferringWriter) and writer.goes_on_after(error.failures.values())):
                raise
            return _save_once(state_dict, writer, planner, ranks)
    finally:
        writer.close()


def _agreed(state_dict: dict[str, Any], writer: CheckpointWriter, ranks: Ranks) -> dict[str, Any]:
    """Compare values that one rank's stand for; return those to save. Raises SaveFailed on all ranks."""
    place = writer.checkpoint_id
    with same_failure(SaveFailed, place, ranks):
        return agree_on_values(state_dict, writer.described, ranks, place)


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
        raise save_error(error, writer.checkpoint_id, is_alone=ranks.size == 1) from cause_of(error)
    except Exception as error:
        rank = ranks.rank
        message, failures = lost("save", ranks, error)
        if not writer.has_written:
            writer.discard()
        why = failures[rank].args[0] if rank in failures else "this rank lost contact with the others"
        why += ", before it heard whether the save was committed; try to load it to find out"
        unknown = CommitUnknown(why, url=writer.checkpoint_id, rank=rank)
        message += "; whether it was committed is not known here, try to load it to find out"
        raise SaveFailed(message, url=writer.checkpoint_id, failures={**failures, rank: unknown}) from error
    except BaseException:  # an interrupt of this rank
        if not writer.has_written:
            writer.discard()
        raise


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


def load_by(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    planner: LoadPlanner | None,
    make_reader: Callable[[Ranks], Reader],
    ranks: Ranks,
    open_together: Callable[[Reader, Ranks], bytes | None] | None = None,
    options: LoadOptions | None = None,
) -> Reader:
    """Load by a reader of each rank, and return it, closed; `open_together` returns what all adopt."""
    place = place_of(url)
    call = f"load of {last_segment(place)}"

    def prepare() -> Reader:
        check_arguments(state_dict, url, planner)
        if options is not None:
            check_options("options", options, LoadOptions)
        return make_reader(ranks)

    with same_failure(LoadFailed, place, ranks):
        reader = ranks.together(call, prepare)
        with closing(reader):
            shared = (open_together or _open_together)(reader, ranks)
            by_parts = planner if isinstance(planner, StateLoadPlanner) else None
            if planner is None and shared is not None:
                by_parts = StateLoadPlanner(options)

            def targets(texts: Mapping[str, Any]) -> dict[str, Any]:
                if by_parts is None:
                    return reader.without_tied(values_of(state_dict))
                if shared is None:
                    raise LoadFailed(
                        "each rank has saved a part of its own: only ckpt.load loads such a checkpoint"
                    )
                with _named_by_rank():
                    return by_parts.targets_for(state_dict, reader.opened().metadata, texts)

            def adopt() -> tuple[list[str], dict[str, Any]]:
                if shared is not None and (ranks.rank != 0 or open_together is not None):
                    reader.adopt(shared)
                is_noted = by_parts is not None and shared is not None
                names = by_parts.read_before(reader.opened().metadata) if by_parts and is_noted else []
                return names, {} if names else targets({})

            if by_parts is not None and by_parts.records:
                by_parts.delivered = reader.record_delivered()
            names, values = ranks.together(call, adopt)
            if names:  # what flattening lost; most checkpoints have nothing of it
                texts = ranks.from_first(lambda: reader.read_objects(names))
                values = ranks.together(call, lambda: targets(texts))
            try:
                with interrupts(reader, ranks):
                    load_planned(values, reader, by_parts or planner, ranks, is_shared=shared is not None)
            except CheckpointException as error:
                raise load_error(error, place, is_alone=ranks.size == 1) from cause_of(error)

        if by_parts is None:
            ranks.together(call, _named_by_rank()(lambda: put_back(state_dict, values)))
        else:  # what one rank refuses is given to the parts on no rank: in these ranks may talk to each other
            ranks.together(call, _named_by_rank()(by_parts.copy_casts))
            ranks.together(call, _named_by_rank()(by_parts.put_back))
    return reader


@contextmanager
def _named_by_rank() -> Iterator[None]:
    """Let errors of this rank's state name the rank, which LoadFailed, of several ranks, does not."""
    try:
        yield
    except LoadFailed as error:
        raise CheckpointError(error.message) from error


def _open_together(reader: CheckpointReader, ranks: Ranks) -> bytes | None:
    """Open the checkpoint on the first rank; return what the others adopt, or raise its error, on all ranks."""

    def open_and_share() -> bytes | None:
        ranks.progress.begin("opening")
        checkpoint = reader.open()
        return None if checkpoint is None else checkpoint.share()

    ranks.progress.wait_for("rank 0 to open the checkpoint")
    return ranks.from_first(open_and_share)
