"""Save to the nodes' disks: what all ranks have written is committed on each of them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner

from ckpt.backends.registry import open_store
from ckpt.collective import background, place_of, prepare_save, save_values
from ckpt.draining.folder_lock import held
from ckpt.errors import ConfigurationError, SaveFailed, StorageError
from ckpt.format.run_record import NO_STAMP, RunStamp
from ckpt.gc_pause import rare_gc
from ckpt.local_first.holdings import shared
from ckpt.local_first.partners import Copied, copy_from_partners
from ckpt.options import SaveOptions
from ckpt.ranks.failures import same_failure
from ckpt.ranks.group import DEFAULT_TIMEOUT_S, Purpose, Ranks
from ckpt.writing.writer import CheckpointWriter

_logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0
"""For one that is being removed; that takes a moment."""

_FALLS_BACK = (StorageError,)
"""Errors of a place after which the next place is tried; any other would come again there."""


@dataclass(frozen=True)
class Place:
    """A place where a save may be committed.

    Attributes:
        options: of `CheckpointWriter`.
        on_nodes: each node has a folder of this name of its own.
        holds: it is a folder of this node, which this rank holds meanwhile, so that nobody removes what was there before.
        sources: the ranks of which this one keeps copies, on another node than theirs; None: no rank keeps any.
        stamp: of the run.
    """

    url: str = field(repr=False)  # it may carry a password
    options: Mapping[str, Any] = field(repr=False)
    on_nodes: bool = False
    holds: bool = False
    sources: tuple[int, ...] | None = None
    stamp: RunStamp = NO_STAMP


@dataclass(frozen=True)
class Saved:
    """A save that was committed.

    Attributes:
        place: where, of those that were given.
        failures: why not in those before it.
        copied: what became of the copies, if some were wanted.
    """

    metadata: Metadata
    place: Place
    failures: tuple[SaveFailed, ...] = ()
    copied: Copied | None = None


def save_to_first(
    state_dict: dict[str, Any],
    choose: Callable[[Ranks], list[Place]],
    *,
    process_group: Any,
    is_async: bool,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    options: SaveOptions | None = None,
) -> Future[Saved]:
    """Save to the first place that takes it; with `is_async` copy the state, and save behind the trainer.

    All ranks try the same places: the next one when storage refused one of them on any rank, and it is sure that
    nothing was committed there.

    Args:
        choose: returns the places, when the save before this one has ended; all ranks call it.

    Raises as `ckpt.save`; the future as that.
    """

    def prepare() -> Callable[[], Saved]:
        purpose: Purpose = "background" if is_async else "foreground"
        ranks = Ranks(process_group, no_dist=no_dist, purpose=purpose, timeout_s=timeout_s)
        with rare_gc(), contextlib.ExitStack() as stack:
            stack.callback(ranks.close)
            places = choose(ranks)
            first = places[0]
            writer, values = prepare_save(
                state_dict,
                first.url,
                planner,
                None,
                lambda: _writer(first),
                ranks,
                copy=is_async,
                options=options,
            )
            stack.pop_all()
        return lambda: _save(values, writer, places, planner or DefaultSavePlanner(), ranks, is_copy=is_async)

    if is_async:
        return background.start(prepare)
    future: Future[Saved] = Future()
    with rare_gc():
        future.set_result(prepare()())
    return future


def _copied(place: Place, ranks: Ranks) -> Copied | None:
    return None if place.sources is None else copy_from_partners(place.url, place.sources, ranks)


def _writer(place: Place) -> CheckpointWriter:
    writer = CheckpointWriter(place.url, **place.options)
    writer.stamp = place.stamp
    return writer


def _save(
    values: dict[str, Any],
    writer: CheckpointWriter,
    places: list[Place],
    planner: SavePlanner,
    ranks: Ranks,
    *,
    is_copy: bool,
) -> Saved:
    failures: list[SaveFailed] = []
    try:
        with contextlib.closing(ranks):
            for number, place in enumerate(places):
                try:
                    metadata = _save_to(place, writer, values, planner, ranks)
                except SaveFailed as error:
                    if number + 1 == len(places) or not _falls_back(error):
                        raise
                    failures.append(error)
                    _logger.warning("saving to %s instead: %s", place_of(places[number + 1].url), error)
                else:
                    _let_go(values if is_copy else {}, planner)
                    return Saved(metadata, place, tuple(failures), _copied(place, ranks))
                writer = _next_writer(places[number + 1], ranks)
            raise ConfigurationError("there is no place to save to")
    finally:
        _let_go(values if is_copy else {}, planner)


def _let_go(values: dict[str, Any], planner: SavePlanner) -> None:
    """Free the copy of a state."""
    values.clear()
    if isinstance(planner, DefaultSavePlanner):
        planner.state_dict = {}  # it would keep the copy until its next save


def _save_to(
    place: Place, writer: CheckpointWriter, values: dict[str, Any], planner: SavePlanner, ranks: Ranks
) -> Metadata:
    with held(place.url, _PATIENCE_S) if place.holds else contextlib.nullcontext(True) as is_free:
        if not is_free:
            _logger.warning("%s is held by another process for more than %g s", place.url, _PATIENCE_S)
        metadata = save_values(values, writer, planner, ranks)
        if place.on_nodes:
            with same_failure(SaveFailed, writer.checkpoint_id, ranks):
                share_commit(place, ranks)
        return metadata


def _next_writer(place: Place, ranks: Ranks) -> CheckpointWriter:
    def make() -> CheckpointWriter:
        writer = _writer(place)
        writer.use(ranks.progress)
        return writer

    with same_failure(SaveFailed, place_of(place.url), ranks):
        return ranks.together("save to another place", make)


def _falls_back(error: SaveFailed) -> bool:
    """Tell whether storage refused the save, and nothing was committed."""
    failures = [*error.failures.values()]
    return bool(failures) and all(isinstance(each, _FALLS_BACK) for each in failures)


def share_commit(place: Place, ranks: Ranks) -> None:
    """Commit on each node what the first rank's node has committed. All ranks call it; raises on all."""
    with contextlib.closing(open_store(place.url)) as store:
        records = shared(ranks, 0, store)
        ranks.together("commit on each node", lambda: records.keep(store))
