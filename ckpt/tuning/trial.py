"""Save and load a state with given settings and time both; end a trial that is hopeless, and remove what it wrote."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

from ckpt.backends.base import PutMode, Store
from ckpt.backends.bodies import Body, Part
from ckpt.backends.options import redact_url
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore, WrappedStore
from ckpt.consistency import environment
from ckpt.errors import CheckpointError, NotCommitted, NotFound
from ckpt.format.names import is_our_name
from ckpt.ranks.failures import failures_of, interrupts
from ckpt.ranks.group import Ranks
from ckpt.reading.reader import CheckpointReader
from ckpt.settings import Settings, override
from ckpt.tools.remove import remove, remove_folders
from ckpt.torch_private import load_state_dict
from ckpt.writing.column_save import save_planned
from ckpt.writing.writer import CheckpointWriter

_TENSORS = 16
_COPIED = 4
"""One of so many tensors is a view whose bytes have to be copied, as shards of other dimensions are."""
_COLUMNS = 1024
_ELEMENT_BYTES = 4
_MAX_RECORD_BYTES = 1 << 20
"""What is larger, is data. Once the commit is on its way, the save had better end."""

_logger = logging.getLogger(__name__)

IsHopeless = Callable[["Times"], bool]


@dataclass(frozen=True)
class Times:
    """How long a save and a load took."""

    save_s: float
    load_s: float


class Hopeless(Exception):
    """Ends a trial that had taken `times` when it was given up."""

    def __init__(self, times: Times) -> None:
        super().__init__("given up")
        self.times = times


class Trials:
    """Saves and loads of one state in a folder of their own below `url`, which is removed at the end.

    Args:
        moved: called with bytes when they have been written or read.
    """

    def __init__(
        self,
        url: str | os.PathLike[str],
        storage_options: Mapping[str, Any],
        nbytes: int,
        moved: Callable[[int], None],
    ) -> None:
        self._options, self._moved = storage_options, moved
        self.folder = f"{os.fspath(url).rstrip('/')}/ckpt-tune-{environment.token()}"
        self._count, self._needs_sweep = 0, False
        self._new_directories = self._missing_directories()
        self.state, self._target = made_state(nbytes), made_state(nbytes, empty=True)

    def run(self, settings: Settings, is_hopeless: IsHopeless | None = None) -> Times:
        """Save, load, and remove the checkpoint.

        Raises:
            Hopeless: `is_hopeless` said so. What had been written is removed.
            CheckpointError: the save, the load or the removal failed.
        """
        self._count += 1
        place = f"{self.folder}/{self._count}"
        clock = _Clock(is_hopeless, self._moved)
        try:
            times = self._timed(place, settings, clock)
            remove(place, storage_options=self._options)
        except BaseException:
            self._needs_sweep = self._needs_sweep or clock.has_put
            raise
        return times

    def _timed(self, place: str, settings: Settings, clock: _Clock) -> Times:
        with override(settings):
            clock.begin()
            try:
                self._save(place, clock)
                save_s = clock.begin(clock.elapsed_s)
                self._leave_page_cache(place)
                clock.begin(save_s)
                self._load(place, clock)
            except (CheckpointError, CheckpointException) as error:
                if clock.hopeless_at is None:
                    raise _plain(error) from None
                with contextlib.suppress(NotFound, NotCommitted):
                    remove(place, storage_options=self._options)
                raise Hopeless(clock.hopeless_at) from None
            return Times(save_s, clock.elapsed_s)

    def close(self) -> None:
        """Remove what trials that failed have left, and the folder. What cannot be removed is logged."""
        try:
            with contextlib.closing(open_store(self.folder, self._options)) as store:
                if self._needs_sweep:
                    self._sweep(store)
                store.remove_empty()
        except CheckpointError as error:
            message = "what the trials wrote to %s could not all be removed (`ckpt gc` can): %s"
            _logger.warning(message, redact_url(self.folder), error)
        for path in self._new_directories:
            with contextlib.suppress(OSError):
                os.rmdir(path)

    def _save(self, place: str, clock: _Clock) -> None:
        with contextlib.closing(Ranks(None, no_dist=True)) as ranks:
            writer = CheckpointWriter(place, storage_options=self._options, overwrite=False)
            with contextlib.closing(writer):
                writer.use(ranks.progress, wrap=clock.around)
                with interrupts(writer, ranks):
                    save_planned(dict(self.state), writer, DefaultSavePlanner(), ranks)

    def _load(self, place: str, clock: _Clock) -> None:
        with contextlib.closing(Ranks(None, no_dist=True)) as ranks:
            reader = CheckpointReader(place, storage_options=self._options)
            with contextlib.closing(reader):
                reader.use(ranks.progress, wrap=clock.around)
                reader.open()
                with interrupts(reader, ranks):
                    load_state_dict(
                        dict(self._target), storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True
                    )

    def _leave_page_cache(self, place: str) -> None:
        """Let the kernel forget the files of a mount: a run that resumes finds none of them in memory."""
        with contextlib.closing(open_store(place, self._options)) as store:
            root = store.directory
        for folder, _, names in os.walk(root) if root is not None else ():
            for name in names:
                with contextlib.suppress(OSError), open(os.path.join(folder, name), "rb") as file:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _sweep(self, store: Store) -> None:
        for name in [*store.folders()]:
            if not name.isdecimal():
                continue
            with contextlib.suppress(NotFound, NotCommitted):
                remove(f"{self.folder}/{name}", storage_options=self._options)
            trial = PrefixStore(store, name)
            trial.abandon()
            trial.delete([stat.key for stat in trial.list() if is_our_name(stat.key)])
            remove_folders(trial)
        store.abandon()  # of places that hold nothing else yet

    def _missing_directories(self) -> Sequence[str]:
        """List the directories that the first save will make, the deepest first."""
        with contextlib.closing(open_store(self.folder, self._options)) as store:
            path = store.directory
        missing = []
        while path is not None and not os.path.lexists(path):
            missing.append(path)
            path = os.path.dirname(path)
        return missing


def made_state(nbytes: int, *, empty: bool = False) -> dict[str, torch.Tensor]:
    """Make a state of about so many bytes: random, so that nothing on the way can compress it."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rows = max(1, nbytes // (_TENSORS * _COLUMNS * _ELEMENT_BYTES))
    state = {}
    for number in range(_TENSORS):
        is_copied = number % _COPIED == 0
        base = torch.empty((rows, _COLUMNS * (2 if is_copied else 1)), dtype=torch.int32, device=device)
        if not empty:
            base.random_()
        state[f"layers.{number}.weight"] = base.view(torch.float32)[:, :_COLUMNS]
    return state


class _Clock:
    """The time of a trial so far. Stores around which it stands fail once it is hopeless."""

    def __init__(self, is_hopeless: IsHopeless | None, moved: Callable[[int], None]) -> None:
        self._is_hopeless, self._moved = is_hopeless, moved
        self._save_s: float | None = None
        self.has_put = False
        self.hopeless_at: Times | None = None

    def begin(self, save_s: float | None = None) -> float:
        """Begin with the save, or with the load after a save that took so long."""
        self._save_s, self._began_at_s = save_s, time.perf_counter()
        return save_s or 0.0

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._began_at_s

    def around(self, store: Store) -> Store:
        return _ClockedStore(store, self)

    def check(self, nbytes: int = 0) -> None:
        """Note bytes that were moved. Raises CheckpointError once the trial is hopeless."""
        if nbytes:
            self._moved(nbytes)
        elapsed_s = self.elapsed_s
        times = Times(elapsed_s, 0.0) if self._save_s is None else Times(self._save_s, elapsed_s)
        if self.hopeless_at is None and self._is_hopeless is not None and self._is_hopeless(times):
            self.hopeless_at = times
        if self.hopeless_at is not None:
            raise CheckpointError("this trial is clearly slower than the best")


class _ClockedStore(WrappedStore):
    def __init__(self, inner: Store, clock: _Clock) -> None:
        super().__init__(inner)
        self._clock = clock

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        self._clock.has_put = True
        is_data = body.nbytes > _MAX_RECORD_BYTES
        super().put(key, _ClockedBody(body, self._clock) if is_data else body, mode=mode)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        super().read_into(key, offset, buffers)
        nbytes = sum(buffer.nbytes for buffer in buffers)
        self._check(nbytes)

    def read_whole(self, key: str, check: Callable[[int], None]) -> bytearray:
        data = super().read_whole(key, check)
        self._check(len(data))
        return data

    def _check(self, nbytes: int) -> None:
        if nbytes > _MAX_RECORD_BYTES:
            self._clock.check(nbytes)


class _ClockedBody:
    def __init__(self, body: Body, clock: _Clock) -> None:
        self._body, self._clock = body, clock
        self.nbytes, self.has_checksums = body.nbytes, body.has_checksums

    @contextlib.contextmanager
    def part(self, start: int, stop: int) -> Iterator[Part]:
        self._clock.check()
        with self._body.part(start, stop) as part:
            yield part
        self._clock.check(stop - start)

    def crc64nvme(self) -> int | None:
        return self._body.crc64nvme()


def _plain(error: CheckpointError | CheckpointException) -> BaseException:
    """Return the error of this one rank."""
    if isinstance(error, CheckpointException):
        return next(iter(failures_of(error).values()), error)
    return error
