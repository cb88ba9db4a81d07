"""Save at a URL by way of the nodes' disks, and load from the nearest: `ckpt.async_save` and `ckpt.load` with `local=`."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, SavePlanner

from ckpt.backends.options import options_dict
from ckpt.backends.registry import normal_url, open_store
from ckpt.collective import place_of
from ckpt.errors import CheckpointError, ConfigurationError, NotCommitted, NotFound, SaveFailed, StorageError
from ckpt.format.records import read_commit
from ckpt.format.run_clock import RunClock
from ckpt.format.run_record import RunStamp
from ckpt.local_first.drain_process import current_status, problem_since
from ckpt.local_first.far_place import Asked, FarPlace
from ckpt.local_first.folder import RunFolder
from ckpt.local_first.holdings import Holding, completed_by, holdings_of
from ckpt.local_first.loading import load_near
from ckpt.local_first.node_tier import NodeTier
from ckpt.local_first.options import LocalTier
from ckpt.local_first.saving import Place, Saved, save_to_first
from ckpt.local_first.watch import Watch
from ckpt.options import LoadOptions, SaveOptions
from ckpt.ranks.failures import same_outcome
from ckpt.ranks.group import Ranks, check_group
from ckpt.reading.latest import Candidate, created_at_s, examine
from ckpt.writing.background import SaveFuture
from ckpt.writing.writer import CheckpointWriter

_logger = logging.getLogger(__name__)

_LOOK_S = 0.2

Local = str | os.PathLike[str] | LocalTier


@dataclass(frozen=True)
class _Pending:
    """A save that is committed on the nodes, since a time by this node's clock, and not durable yet."""

    path: str
    save: SaveFuture
    metadata: Metadata
    since_s: float


class CallTier(NodeTier):
    """The tier of all saves of this process below one URL; it is held until the process ends."""

    def __init__(
        self, options: LocalTier, root: str, job: str, ranks: Ranks, config: Mapping[str, Any]
    ) -> None:
        super().__init__(options, root, job, ranks.rank, is_local=True, config=config)
        self.job, self._config = job, dict(config)
        self._lock, self._pending = threading.Lock(), list[_Pending]()

    def use(self, config: Mapping[str, Any]) -> None:
        """Carry with other options from now on: a new process takes over from the one before."""
        with self._lock:  # else the one before could be started again, and take over from the new one
            if config != self._config and self._process is not None:
                before, self._process = self._process, self._process_with(config)
                before.finish()
                self._start()
            self._config = dict(config)
        self.begin()

    def look_after(self) -> None:
        """Begin to keep the process running, and to tell the saves what becomes of them."""
        if self._watch is None:
            self._start()
            self._watch = Watch(self._look)

    def _start(self) -> None:
        """Start the process before a save is local: what is local outlives this process from its first moment on."""
        if self._process is not None:
            self._process.look()

    def follow(self, path: str, save: SaveFuture, metadata: Metadata) -> None:
        """Complete a save once that its checkpoint is durable."""
        with self._lock:
            self._pending.append(_Pending(path, save, metadata, time.time()))
        self.begin()

    def waiting(self) -> list[str]:
        """List the folders of the saves that are not durable yet."""
        with self._lock:
            return [pending.path for pending in self._pending]

    def _look(self) -> None:
        with self._lock:
            news = None if self._process is None else self._process.look()
            pending = [*self._pending]
        if news is not None:
            _logger.warning("%s", news)
        if not pending:
            return
        # Seen first: what is removed from the node has been durable.
        is_here = {each.path: os.path.isdir(self.folder.url(each.path)) for each in pending}
        states = current_status(self.folder.path)
        for each in pending:
            state = states.get(each.path)
            problem = problem_since(self.folder.path, each.since_s)
            if state is not None and state.state in ("failed", "left out"):
                problem = state.reason
            is_durable = not is_here[each.path] if state is None else state.state == "durable"
            if not is_durable and not problem:
                continue
            with self._lock:
                self._pending.remove(each)
            if is_durable:
                each.save.set_result(each.metadata)
            else:
                url = place_of(f"{self._root}/{each.path}")
                text = (
                    f"committed on the nodes' disks ({self.folder.url(each.path)}), but not here: {problem}"
                )
                failure = SaveFailed(text, url=url)
                _logger.error("%s", failure)  # nobody may ask the future
                each.save.set_exception(failure)

    def end(self, deadline_s: float) -> None:
        """Wait until all is durable, until a time of `time.monotonic`; the process goes on by itself."""
        while self.waiting() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        left = self.waiting()
        self.finish()
        while not left and not self.ended() and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        if left:
            _logger.warning(
                "%s: not durable yet. A process on each node goes on carrying; after a crash of the node's own do "
                "`ckpt drain %s %s`",
                ", ".join(left[:5]),
                self.folder.path,
                place_of(self._root),
            )
        self.close()


def async_save_near(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    local: Local,
    *,
    planner: SavePlanner | None,
    process_group: Any,
    no_dist: bool,
    timeout_s: float,
    save_options: SaveOptions | None = None,
    **options: Any,
) -> SaveFuture:
    """Save to the nodes' disks behind the trainer, and have the checkpoint carried to `url`.

    `options` are those of `CheckpointWriter`. Raises as `ckpt.async_save`, whose future this returns.
    """
    save, chosen = SaveFuture(Future()), list[tuple[CallTier, str]]()
    save.set_running_or_notify_cancel()

    def choose(ranks: Ranks) -> list[Place]:
        def check() -> tuple[str, str, str]:
            check_group(ranks.is_meant_alone)
            parts = _split(url)
            options["storage_options"] = options_dict(options["storage_options"])
            CheckpointWriter(
                url, **{**options, "timeout_s": timeout_s}
            ).close()  # what is wrong with `url` is wrong now
            return parts

        place, root, path = same_outcome(ranks, "save with local=", check)
        config = {key: options[key] for key in ("storage_options", "threads", "max_bandwidth_bytes_per_s")}
        tier = _tier(local, root, ranks, config)
        chosen.append((tier, path))
        _see_replaced(tier, root, path)
        (is_full,) = ranks.most([not tier.has_room()])
        if is_full:
            _logger.warning("%s: a node has no room for it, it is saved there directly", place_of(url))
        writer_options = {**options, "timeout_s": timeout_s}
        places = tier.places(path, place, writer_options, has_room=not is_full)
        return [replace(place, stamp=RunStamp(clock=_clock(root))) for place in places]

    saved = save_to_first(
        state_dict,
        choose,
        process_group=process_group,
        no_dist=no_dist,
        is_async=True,
        planner=planner,
        timeout_s=timeout_s,
        options=save_options,
    )
    _last[:] = [save]
    saved.add_done_callback(lambda done: _follow(done, save, *chosen[0]))
    return save


def _follow(done: Future[Saved], save: SaveFuture, tier: CallTier, path: str) -> None:
    if (error := done.exception()) is not None:
        save.local.set_exception(error)
        save.set_exception(error)
        return
    saved = done.result()
    if saved.copied is not None and saved.copied.failure:
        _logger.warning("%s: another node has no copy: %s", path, saved.copied.failure)
    if saved.place.on_nodes:
        tier.follow(path, save, saved.metadata)
    save.local.set_result(saved.metadata)
    if not saved.place.on_nodes:
        save.set_result(saved.metadata)


def _split(url: str | os.PathLike[str]) -> tuple[str, str, str]:
    """Return a checkpoint's normal URL, its folder, which is the run, and its name in that."""
    text = normal_url(url)
    scheme, separator, path = text.rpartition("://")
    if scheme == "memory":
        raise ConfigurationError("local= needs a place that other processes see", url=place_of(url))
    root, slash, name = path.rstrip("/").rpartition("/")
    if not slash or not name or "::" in text or "?" in text:
        raise ConfigurationError("with local= a checkpoint has a folder above it", url=place_of(url))
    return text, f"{scheme}{separator}{root}" or "/", name


def _options(local: Local) -> LocalTier:
    return local if isinstance(local, LocalTier) else LocalTier(local)


# -- the tiers of this process -----------------------------------------------------------------------------

_tiers: dict[tuple[str, str], CallTier] = {}
_clocks: dict[str, RunClock] = {}
_last: list[SaveFuture] = []


def _tier(local: Local, root: str, ranks: Ranks, config: Mapping[str, Any]) -> CallTier:
    """Return the tier of the saves below `root`. All ranks call it."""
    call = "save with local="
    options = same_outcome(ranks, call, lambda: _options(local))
    key = os.path.abspath(os.fspath(options.path)), root
    known = _tiers.get(key)
    job = ranks.from_first(lambda: secrets.token_hex(8) if known is None else known.job)

    def make() -> CallTier:
        if known is None:
            return CallTier(options, root, job, ranks, config)
        if known.job != job:
            raise ConfigurationError(
                "ranks save below this URL with local= in several process groups: use one for all of them",
                url=place_of(root),
            )
        known.use(config)
        return known

    made: list[CallTier] = []
    try:
        tier = same_outcome(ranks, call, lambda: made.append(make()) or made[0])  # type: ignore[func-returns-value]
    except BaseException:
        for each in made:
            if each is not known:
                each.close()
        raise
    if any(ranks.most([known is None])):
        if problem := tier.share_copies(ranks):
            _logger.warning("copies would be lost with what they are copies of: %s", problem)
        tier.look_after()
        _tiers[key] = tier
    return tier


def _clock(root: str) -> RunClock:
    """Return the clock of the saves below `root`."""
    return _clocks.setdefault(root, RunClock())


def _see_replaced(tier: CallTier, root: str, path: str) -> None:
    """Take note of when this node's checkpoint was made that a save replaces: another process may have made it."""
    with contextlib.suppress(CheckpointError), contextlib.closing(open_store(tier.folder.url(path))) as store:
        before = read_commit(store)
        if before is not None:
            _clock(root).saw(created_at_s(before.record) or 0.0)


def _end_all() -> None:
    """Wait, when the program ends, for what is not durable yet; not if it ends by an error."""
    for save in _last:
        with contextlib.suppress(BaseException):
            save.local.exception()
    is_error = hasattr(sys, "last_value")
    began_s = time.monotonic()
    for tier in [*_tiers.values()]:
        tier.end(began_s + (0.0 if is_error else tier.drain_timeout_s))


def _forget() -> None:
    """Start afresh in a forked child, which has none of the threads."""
    _tiers.clear()
    _last.clear()


threading._register_atexit(_end_all)  # type: ignore[attr-defined]
os.register_at_fork(after_in_child=_forget)


# -- loads -------------------------------------------------------------------------------------------------


def load_nearest(
    state_dict: dict[str, Any],
    url: str | os.PathLike[str],
    local: Local,
    *,
    storage_options: Mapping[str, Any] | None,
    planner: LoadPlanner | None,
    process_group: Any,
    no_dist: bool,
    timeout_s: float,
    options: LoadOptions | None = None,
    **settings: Any,
) -> bool:
    """Load a checkpoint from wherever it is nearest; return False, on all ranks, if `url` has to be read alone.

    `settings` are those of `CheckpointReader`. Raises as `ckpt.load`.
    """
    with contextlib.closing(Ranks(process_group, no_dist=no_dist, timeout_s=timeout_s)) as ranks:

        def prepare() -> tuple[LocalTier, RunFolder, str, str]:
            chosen = _options(local)
            place, root, path = _split(url)
            return chosen, RunFolder(chosen.path, root), place, path

        tier, folder, place, path = same_outcome(ranks, "load with local=", prepare)
        far = FarPlace(place_of(url), tier.answer_timeout_s)
        clock = _clock(_split(place)[1])
        holding, is_durable = _choose(folder, path, place, storage_options, far, ranks, clock)
    if holding is None:
        return False
    load_near(
        state_dict,
        holding,
        folder.path,
        place if is_durable else None,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        timeout_s=timeout_s,
        storage_options=storage_options,
        options=options,
        **settings,
    )
    return True


def _choose(
    folder: RunFolder,
    path: str,
    url: str,
    storage_options: Any,
    far: FarPlace,
    ranks: Ranks,
    clock: RunClock,
) -> tuple[Holding | None, bool]:
    """Return, on all ranks, what to read from the nodes, and whether `url` has the rest of it; `clock` sees all of them."""

    def look() -> Candidate:
        with contextlib.closing(open_store(url, storage_options)) as store:
            return examine(store)

    asked = Asked(look) if ranks.rank == 0 else None  # while the nodes tell what they have
    found = holdings_of(folder.path, path, ranks)
    for each in found:
        clock.saw(each.created_at_s)
    whole = next((each for each in found if each.is_whole), None)

    def decide() -> tuple[Holding | None, bool]:
        assert asked is not None
        try:
            durable = asked.answer() if whole is None else far.wait(asked)
        except (NotFound, NotCommitted):
            return whole, False
        except StorageError as error:
            if whole is None:
                raise
            _logger.warning("the durable place cannot be asked, what the nodes have is taken: %s", error)
            return whole, False
        clock.saw(durable.created_at_s or 0.0)
        same = next((each for each in found if each.id == durable.id), None)
        if same is not None and durable.fault is None:
            return same, True
        if whole is not None and (
            durable.fault is not None or whole.created_at_s >= (durable.created_at_s or 0.0)
        ):
            return whole, False
        return None, True

    chosen, is_durable = ranks.from_first(decide)
    if chosen is None and not is_durable and found:
        newest = found[0]
        if completed_by(newest, folder.path, url, storage_options, ranks, ask=lambda question: question()):
            return newest, True
        text = "the nodes have %d of the %d parts of %s, and it is not durable"
        _logger.warning(text, newest.here.bit_count(), newest.wanted, place_of(url))
    return chosen, is_durable
