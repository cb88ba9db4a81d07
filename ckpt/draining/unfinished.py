"""Remember unfinished uploads beside the local checkpoints, for the process that carries after this one."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import time
from collections.abc import Collection, Iterator

from ckpt.writing.pins import GRACE_S

_logger = logging.getLogger(__name__)

_PREFIX = ".ckpt-upload-"
_MAX_BYTES = 1 << 16
_MAX_AGE_S = GRACE_S / 2
"""Older uploads are not gone on with: `ckpt gc` aborts those that are twice as old."""


class Note:
    """The note of one object's upload: a file, which one process at a time uses."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: int | None = None

    def read(self) -> bytes | None:
        try:
            self._file = self._locked(os.O_RDWR)
            if self._file is None or os.fstat(self._file).st_mtime < time.time() - _MAX_AGE_S:
                return None
            return os.pread(self._file, _MAX_BYTES, 0) or None
        except OSError:
            return None

    def write(self, data: bytes) -> None:
        try:
            if self._file is None:
                self._file = self._locked(os.O_RDWR | os.O_CREAT | os.O_EXCL)
            if self._file is not None:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, data, 0)
        except FileExistsError:
            return  # another process has noted its own
        except OSError as error:  # without a note, the next process sends the whole file
            _logger.warning("an unfinished upload cannot be noted: %s", error)

    def clear(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            self.close()

    def close(self) -> None:
        """Let another process use it."""
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def _locked(self, flags: int) -> int | None:
        if self._file is not None:
            return self._file
        file = os.open(self._path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # in use
            os.close(file)
            return None
        return file


class NoNote:
    """The note where none can be kept."""

    def read(self) -> None:
        return None

    def write(self, data: bytes) -> None:
        pass

    def clear(self) -> None:
        pass


class Unfinished:
    """The notes of a local folder.

    Args:
        directory: the folder that holds the checkpoints; None if it is no folder of this machine.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = directory

    @contextlib.contextmanager
    def note(self, folder: str, url: str, key: str) -> Iterator[Note | NoNote]:
        """Open the note of an object of the checkpoint in `folder`, on its way to `url`."""
        if self._directory is None:
            yield NoNote()
            return
        note = Note(os.path.join(self._directory, f"{_PREFIX}{_short(folder)}-{_short(f'{url}/{key}')}"))
        try:
            yield note
        finally:
            note.close()

    def forget_but(self, folders: Collection[str]) -> None:
        """Remove the notes of checkpoints that are not here any more."""
        if self._directory is None:
            return
        known = {_short(folder) for folder in folders}
        with contextlib.suppress(OSError):
            for name in os.listdir(self._directory):
                if name.startswith(_PREFIX) and name.removeprefix(_PREFIX).partition("-")[0] not in known:
                    os.unlink(os.path.join(self._directory, name))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
