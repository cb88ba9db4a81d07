"""Run the process of a node that carries its checkpoints to the durable place, and outlives the trainer."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.child_processes import command_of
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.draining.carry import Share
from ckpt.draining.drain import Drained, State, drain
from ckpt.draining.ending import Grace
from ckpt.draining.marker import durable_of
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.records import read_commit
from ckpt.format.run_record import read_run
from ckpt.local_first.own_files import open_own
from ckpt.whole_files import write_whole

_logger = logging.getLogger(__name__)

STATUS, LOG = "ckpt-drain.json", "ckpt-drain.log"
_OWNER, _LOCK = ".ckpt-drain.owner", ".ckpt-drain.lock"
_MAX_LOG_BYTES = 16 << 20
_MAX_STATUS_BYTES = 4 << 20
_MAX_OWNER_BYTES = 64
_LOOK_S = 0.3
_POLL_S = 0.5
_GRACE_S = 25.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_IDLE_S = 300.0
"""How long a process without work waits for some; it takes memory, and starts again within seconds."""
_MAX_DEATHS = 3
"""How often in a row a process may die soon after its start until saves fail by that."""
_NICENESS = 10


class DrainState(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a local checkpoint: `state` and the others are those of `Drained`; `at_s` since 1970."""

    id: str
    state: str
    reason: str = ""
    sent_bytes: int = 0
    took_s: float = 0.0
    at_s: float = 0.0


class _Status(msgspec.Struct, frozen=True, kw_only=True):
    version: int = 1
    checkpoints: dict[str, DrainState] = {}
    problem: str = ""
    problem_began_s: float = 0.0
    """When the process was started that ended by the problem, since 1970, by the clock of the one that started it."""


_decoder = msgspec.json.Decoder(_Status)  # made once, before there are threads


def read_status(folder: str) -> dict[str, DrainState]:
    """Return what became of the checkpoints in a run's folder on this node, by their folders."""
    return dict(_status(folder).checkpoints)


def problem_since(folder: str, since_s: float) -> str:
    """Return why a process ended that was started since a time, in seconds since 1970; empty if none did."""
    status = _status(folder)
    return status.problem if status.problem_began_s >= since_s else ""


def _status(folder: str) -> _Status:
    try:
        with open(os.path.join(folder, STATUS), "rb") as file:
            return _decoder.decode(file.read(_MAX_STATUS_BYTES))
    except (OSError, ValueError):
        return _Status()


def current_status(folder: str) -> dict[str, DrainState]:
    """Return the same, without what was said of an earlier save in a folder that has been saved into again."""
    states = read_status(folder)
    with contextlib.suppress(CheckpointError), contextlib.closing(open_store(folder)) as store:
        for path, state in [*states.items()]:
            with contextlib.suppress(CheckpointError):
                commit = read_commit(PrefixStore(store, path))
                if commit is not None and commit.record.id != state.id:
                    del states[path]
    return states


def has_work(folder: str) -> bool:
    """Return whether a run's folder on this node holds a checkpoint, or a save under way, of which nothing is settled."""
    states = current_status(folder)
    try:
        with contextlib.closing(open_store(folder)) as store:
            record = read_run(store)
            settled = {path for path, state in states.items() if state.state != "waiting"}
            settled |= {old.path for old in record.checkpoints if old.superseded} if record else set()
            return not settled.issuperset(store.folders())
    except CheckpointError:
        return True


class _Lasting(subprocess.Popen[bytes]):
    """A process that may outlive what has started it."""

    def __del__(self) -> None:
        """Do nothing: Python's own warns of one that still runs, and that is what it is for."""


_started: list[_Lasting] = []
"""Those that run, as far as it is known: they are waited for here, and their pipes are let go of in a fork."""


def _let_go_in_child() -> None:
    """Close the pipes: while a worker of the data loader has one, the process does not hear that the trainer ended."""
    for process in _started:
        if process.stdin is not None:
            process.stdin.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class DrainProcess:
    """Starts the process for a run's folder, and starts it again when it has died, or is needed again.

    It reads `config`, the arguments of `ckpt.drain`, through a pipe: while that is open it looks for
    new checkpoints; when the trainer closes it, or dies, it carries what is there, and ends. The pipe is closed
    also when the folder has held nothing to carry for `_IDLE_S`.
    """

    def __init__(self, folder: str, config: Mapping[str, Any]) -> None:
        self._folder, self._arguments = folder, dict(config)
        try:
            self._config = pickle.dumps(self._arguments)
        except Exception as error:
            text = f"local= passes storage_options to another process, and they cannot be pickled: {error}"
            raise ConfigurationError(text) from None
        self._process: _Lasting | None = None
        _started[:] = [process for process in _started if process.poll() is None]
        self._lock = threading.Lock()
        self._began_at_s = 0.0
        self._began_s = 0.0
        self._pause_s = _FIRST_PAUSE_S
        self._needed_s = 0.0
        self._rests = False
        self._deaths = 0

    def carry_only(self, share: Share) -> None:
        """Have it carry its share of what is here; call it before the first `look`."""
        self._config = pickle.dumps({**self._arguments, "share": share})

    def look(self) -> str | None:
        """Start it if it does not run and is needed; end it if it is not. Return why it had ended, when that is news."""
        with self._lock:
            process = self._process
            now_s = time.monotonic()
            if process is None:
                self._start()
                return None
            is_idle = now_s - self._needed_s > _IDLE_S
            if process.poll() is None and not (is_idle or self._rests):
                return None
            is_needed = has_work(self._folder)
            if is_needed:
                self._needed_s = now_s
            if process.poll() is None:
                self._rests = self._rests or not is_needed
                if self._rests:
                    self.finish()
                return None
            news = None if self._rests else self._news(process.returncode)
            if (self._rests and not is_needed) or (news and now_s - self._began_s < self._pause_s):
                return None
            if news:
                self._count(now_s - self._began_s, process.returncode, news)
            self._start()
            return news

    def wake(self) -> None:
        """Start it again if it was ended for want of work: what is local outlives this process from its first moment on."""
        with self._lock:
            self._needed_s = time.monotonic()
            if self._rests:
                self._start()

    @property
    def log(self) -> str:
        """Where it says what it does."""
        return os.path.join(self._folder, LOG)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def finish(self) -> None:
        """Have it carry what is there, and end."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def _news(self, code: int) -> str:
        return f"the process that carries checkpoints ended with {code}: see {self.log}"

    def _count(self, lived_s: float, code: int, news: str) -> None:
        """Wait longer after each early death; note as a problem, by which saves fail, that it dies again and again."""
        is_early = lived_s <= _LONGEST_PAUSE_S
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S) if is_early else _FIRST_PAUSE_S
        self._deaths = self._deaths + 1 if is_early and code else 0
        if self._deaths >= _MAX_DEATHS and not problem_since(self._folder, self._began_at_s):
            status = _Status(
                checkpoints=read_status(self._folder), problem=news, problem_began_s=self._began_at_s
            )
            with contextlib.suppress(OSError):
                write_whole(os.path.join(self._folder, STATUS), msgspec.json.encode(status))

    def _start(self) -> None:
        self.finish()
        environ = os.environ | {
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start one for each core, which the trainer has use for
        }
        with contextlib.suppress(OSError):
            if os.path.getsize(self.log) > _MAX_LOG_BYTES:
                os.replace(self.log, f"{self.log}.1")
        with open(open_own(self._folder, LOG, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as log:
            # Its own clock would tell when it was ready: later than a save that came after its start.
            self._began_at_s = time.time()
            self._process = _Lasting(
                command_of(__name__, "main", repr(self._began_at_s), self._folder),
                stdin=subprocess.PIPE,
                bufsize=0,  # a child of a fork closes it, and has no lock to wait for
                stdout=log,
                stderr=log,
                env=environ,
                start_new_session=True,  # what ends the trainer by its process group does not end it
            )
        _started.append(self._process)
        with contextlib.suppress(OSError):  # already while it starts
            os.setpriority(os.PRIO_PROCESS, self._process.pid, _NICENESS)
        self._began_s = self._needed_s = time.monotonic()
        self._rests = False
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the next look tells
            left = len(self._config).to_bytes(8, "little") + self._config
            while left:
                left = left[self._process.stdin.write(left) :]


def main(began: str, folder: str) -> None:
    """Carry what is in a folder, by the arguments on standard input; `began` is when the process was started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    config = pickle.loads(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little")))
    grace = Grace(_GRACE_S, lambda: _say_what_is_left(folder))
    finish, stop = grace.finish, grace.stop
    signal.signal(signal.SIGTERM, lambda *_: grace.begin())
    owner, status = _File(os.path.join(folder, _OWNER)), _File(os.path.join(folder, STATUS))
    before, token = owner.read(), secrets.token_hex(8).encode()
    owner.write(token)
    threading.Thread(target=_wait_for_end, args=[finish], daemon=True).start()
    threading.Thread(target=_look, args=[owner, {b"", before, token}, stop, status], daemon=True).start()
    with open(open_own(folder, _LOCK, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as lock:
        while not stop.is_set():
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:  # the one before is told to end
                stop.wait(_LOOK_S)
        else:
            return  # nothing is this process's to say
        try:
            _carry(folder, config, finish, stop, status)
        except CheckpointError as error:
            _logger.error("%s", error)
            failed = _Status(
                checkpoints=read_status(folder), problem=str(error), problem_began_s=float(began)
            )
            status.write(msgspec.json.encode(failed))
            sys.exit(1)
        finally:
            grace.end()


def _say_what_is_left(folder: str) -> None:
    """Log which checkpoints are not durable: the process is ended while it waits for an answer."""
    states = read_status(folder)
    left = [
        entry.name
        for entry in os.scandir(folder)
        if os.path.exists(os.path.join(entry.path, COMMIT_KEY))
        and (entry.name not in states or states[entry.name].state == "waiting")
    ]
    text = "ended while the durable place gave no answer; not durable yet: %s"
    _logger.warning(text, ", ".join(sorted(left)) or "nothing")


def _carry(
    folder: str, config: Mapping[str, Any], finish: threading.Event, stop: threading.Event, status: _File
) -> None:
    known = read_status(folder)  # of the processes before this one
    _logger.info("carrying %s to %s", folder, durable_of(folder))
    settled: dict[str, tuple[str, State]] = {}
    for name, was in known.items():
        if was.state == "durable":
            settled[name] = was.id, "durable"
    for drained in drain(
        folder, follow=True, poll_s=_POLL_S, settled=settled, finish=finish, stop=stop, **config
    ):
        _logger.info("%s: %s %s", drained.path, drained.state, drained.reason)
        known[drained.path] = _state(drained)
        there = {name for name in known if os.path.isdir(os.path.join(folder, name))}
        known = {name: state for name, state in known.items() if name in there}
        status.write(msgspec.json.encode(_Status(checkpoints=known)))
    status.try_again()


def _state(drained: Drained) -> DrainState:
    return DrainState(
        id=drained.id,
        state=drained.state,
        reason=drained.reason,
        sent_bytes=drained.sent_bytes,
        took_s=drained.took_s,
        at_s=time.time(),
    )


def _wait_for_end(finish: threading.Event) -> None:
    """Wait until the trainer closes the pipe, or is gone."""
    with contextlib.suppress(OSError):
        while os.read(
            sys.stdin.fileno(), 1
        ):  # a reader with a buffer has a lock, for which Python aborts at the end
            pass
    finish.set()


def _look(owner: _File, known: set[bytes], stop: threading.Event, status: _File) -> None:
    """Stop when a later process takes over: a trainer that was started again has its own."""
    while not stop.is_set():
        time.sleep(_LOOK_S)
        status.try_again()
        if owner.read() not in known:
            stop.set()


class _File:
    """A small file on a disk that may be full, which is no reason to end: what is carried makes room on it."""

    def __init__(self, path: str) -> None:
        self._path, self._unwritten = path, b""
        self._lock = threading.Lock()

    def read(self) -> bytes:
        with contextlib.suppress(OSError), open(self._path, "rb") as file:
            return file.read(_MAX_OWNER_BYTES)
        return b""

    def write(self, data: bytes) -> None:
        """Write it, now or when `try_again` is called."""
        with self._lock:
            self._unwritten = data
            try:
                self._replace()
            except OSError as error:
                _logger.warning("%s cannot be written yet: %s", self._path, error)

    def try_again(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            self._replace()

    def _replace(self) -> None:
        if self._unwritten:
            write_whole(self._path, self._unwritten)
            self._unwritten = b""
