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
from ckpt.draining.carry import Share
from ckpt.draining.drain import NOT_SENT, Drained, State, drain
from ckpt.draining.ending import Grace
from ckpt.draining.marker import durable_of
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.records import read_commit
from ckpt.whole_files import write_whole

_logger = logging.getLogger(__name__)

STATUS, LOG = "ckpt-drain.json", "ckpt-drain.log"
_OWNER, _LOCK = ".ckpt-drain.owner", ".ckpt-drain.lock"
_MAX_LOG_BYTES = 16 << 20
_MAX_STATUS_BYTES = 64 << 20
_MAX_OWNER_BYTES = 64
_LOOK_S = 0.3
_POLL_S = 0.5
_GRACE_S = 25.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
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
    """Starts the process for a run's folder, and starts it again when it has died.

    It reads `config`, the arguments of `ckpt.drain`, through a pipe: while that is open it looks for
    new checkpoints; when the trainer closes it, or dies, it carries what is there, and ends.
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
        self._began_s, self._pause_s = 0.0, _FIRST_PAUSE_S

    def carry_only(self, share: Share) -> None:
        """Have it carry its share of what is here; call it before the first `look`."""
        self._config = pickle.dumps({**self._arguments, "share": share})

    def look(self) -> str | None:
        """Start it if it does not run; return why it had ended, when that is news."""
        process, now_s = self._process, time.monotonic()
        if process is not None and process.poll() is None:
            return None
        if process is not None and now_s - self._began_s < self._pause_s:
            return None
        news = None
        if process is not None:
            news = f"the process that carries checkpoints ended with {process.returncode}: see {self.log}"
            lived_s = now_s - self._began_s
            self._pause_s = (
                _FIRST_PAUSE_S if lived_s > _LONGEST_PAUSE_S else min(2 * self._pause_s, _LONGEST_PAUSE_S)
            )
        self._start()
        return news

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

    def _start(self) -> None:
        self.finish()
        environ = os.environ | {
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OPENBLAS_NUM_THREADS": "1",  # numpy would start one for each core, which the trainer has use for
        }
        with contextlib.suppress(OSError):
            if os.path.getsize(self.log) > _MAX_LOG_BYTES:
                os.replace(self.log, f"{self.log}.1")
        with open(self.log, "ab") as log:
            # Its own clock would tell when it was ready: later than a save that came after its start.
            began = repr(time.time())
            self._process = _Lasting(
                [sys.executable, "-m", "ckpt.local_first.drain_process", began, self._folder],
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
        self._began_s = time.monotonic()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended: the next look tells
            left = len(self._config).to_bytes(8, "little") + self._config
            while left:
                left = left[self._process.stdin.write(left) :]


def main() -> None:
    """Carry what is in a folder, by the arguments on standard input; the command line has it and the time of the start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    began_s, folder = float(sys.argv[1]), sys.argv[2]
    config = pickle.loads(sys.stdin.buffer.read(int.from_bytes(sys.stdin.buffer.read(8), "little")))
    grace = Grace(_GRACE_S, lambda: _logger.warning("ended while the durable place gave no answer"))
    finish, stop = grace.finish, grace.stop
    signal.signal(signal.SIGTERM, lambda *_: grace.begin())
    owner, status = _File(os.path.join(folder, _OWNER)), _File(os.path.join(folder, STATUS))
    before, token = owner.read(), secrets.token_hex(8).encode()
    owner.write(token)
    threading.Thread(target=_wait_for_end, args=[finish], daemon=True).start()
    threading.Thread(target=_look, args=[owner, {b"", before, token}, stop, status], daemon=True).start()
    with open(os.path.join(folder, _LOCK), "ab") as lock:
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
            told = _Status(checkpoints=read_status(folder), problem=str(error), problem_began_s=began_s)
            status.write(msgspec.json.encode(told))
            sys.exit(1)
        finally:
            grace.end()


def _carry(
    folder: str, config: Mapping[str, Any], finish: threading.Event, stop: threading.Event, status: _File
) -> None:
    known = read_status(folder)  # of the processes before this one
    _logger.info("carrying %s to %s", folder, durable_of(folder))
    settled: dict[str, tuple[str, State]] = {}
    for name, was in known.items():
        # With a share this process may have to send what the one before had not to.
        has_sent = was.state == "waiting" and was.reason not in NOT_SENT and config.get("share") is None
        if was.state == "durable" or has_sent:
            settled[name] = was.id, "durable" if was.state == "durable" else "waiting"
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


if __name__ == "__main__":
    main()
