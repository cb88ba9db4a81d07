"""Every error this library raises on purpose; one root, so that one `except` is enough.

CheckpointError
├── ConfigurationError        an argument, option or URL is wrong (also a ValueError)
├── StorageError              a storage operation failed
│   ├── NotFound              there is nothing under that name (also a FileNotFoundError)
│   ├── AlreadyExists         a create found something under that name
│   ├── AccessDenied          credentials are missing, wrong or expired
│   ├── StorageFull           disk full or quota reached
│   └── StorageUnavailable    no answer, or server errors, after all retries
├── IntegrityError            stored bytes are not the bytes that were saved
│   ├── Truncated             an object is shorter than it must be
│   └── DigestMismatch        it is not the checkpoint that is expected, by its digest
├── FormatError               a record cannot be understood (or a newer version wrote it)
├── UnsafeContent             reading it would run code from the checkpoint, or leave its place
├── NotCommitted              the place holds no committed checkpoint
├── NotVisible                a committed object did not become visible in time
├── CommitError               the commit record could not be written; the old checkpoint still loads
│   ├── BaseGone              what the save refers to was removed or replaced meanwhile
│   ├── CommitConflict        another save committed at this place meanwhile
│   └── CommitUnknown         the reply was lost: the commit may or may not have happened
├── WrongContent              a check of what is saved has refused the save
├── StillReferred             other checkpoints name its bytes: it was neither removed nor replaced
├── SaveFailed                a save failed on one rank or more (`failures`: rank -> error)
└── LoadFailed                a load failed on one rank or more (`failures`: rank -> error)

docs/troubleshooting.md says what to do about each.

Errors cross process boundaries, so they hold plain values only: `args` is the message, the context
are attributes (`url`, `key`, `rank`, `start`, `stop`), and pickling keeps them all.
"""

from __future__ import annotations

import errno
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, TypeVar

from ckpt.logs import keep_lines_plain
from ckpt.words import printable

if TYPE_CHECKING:
    from typing_extensions import ParamSpec, Unpack

    Arguments = ParamSpec("Arguments")

__all__ = [
    "CheckpointError",
    "ConfigurationError",
    "StorageError",
    "NotFound",
    "AlreadyExists",
    "AccessDenied",
    "StorageFull",
    "StorageUnavailable",
    "IntegrityError",
    "Truncated",
    "DigestMismatch",
    "FormatError",
    "UnsafeContent",
    "NotCommitted",
    "NotVisible",
    "CommitError",
    "BaseGone",
    "CommitConflict",
    "CommitUnknown",
    "WrongContent",
    "StillReferred",
    "SaveFailed",
    "LoadFailed",
]


Result = TypeVar("Result")

keep_lines_plain()  # here, as all that logs imports the errors, and `import ckpt` imports nothing


class _Context(TypedDict, total=False):
    """The context of any error, by keyword; `CheckpointError` explains it."""

    url: str | None
    key: str | None
    rank: int | None
    start: int | None
    stop: int | None


class CheckpointError(Exception):
    """Root of the tree. As text it has no control characters, whatever the names of a checkpoint hold.

    Attributes:
        url: the checkpoint or store, without credentials.
        key: the object inside it.
        rank: the rank that met the error.
        start, stop: the byte range concerned, half open.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        key: str | None = None,
        rank: int | None = None,
        start: int | None = None,
        stop: int | None = None,
    ) -> None:
        super().__init__(message)
        self.url, self.key, self.rank, self.start, self.stop = url, key, rank, start, stop

    @property
    def message(self) -> str:
        return str(self.args[0])

    def __str__(self) -> str:
        where = [] if self.rank is None else [f"rank {self.rank}"]
        if self.url is not None or self.key is not None:
            where.append("/".join(part for part in (self.url, self.key) if part))
        if self.start is not None and self.stop is not None:
            where.append(f"bytes {self.start}-{self.stop}")
        return printable(": ".join([*where, self.message]), keep="\n")


class ConfigurationError(CheckpointError, ValueError):
    """An argument, option or URL is wrong; the text says what to write instead."""


class StorageError(CheckpointError):
    """A storage operation failed.

    Attributes:
        settled: the operation surely was not carried out. Otherwise it may have been, and only its
            reply got lost, or it may still be on its way.
    """

    def __init__(self, message: str, *, settled: bool = False, **context: Unpack[_Context]) -> None:
        super().__init__(message, **context)
        self.settled = settled


class NotFound(StorageError, FileNotFoundError):
    """There is nothing under that name. Programs that catch Python's own error for that catch this one."""

    def __init__(self, message: str, *, settled: bool = False, **context: Unpack[_Context]) -> None:
        super().__init__(message, settled=settled, **context)
        self.errno = errno.ENOENT


class AlreadyExists(StorageError):
    """A create found something under that name."""


class AccessDenied(StorageError):
    """Credentials are missing, wrong or expired, or do not allow the operation."""


class StorageFull(StorageError):
    """The disk is full or a quota is reached."""


class StorageUnavailable(StorageError):
    """No answer, or server errors, after all retries."""


class IntegrityError(CheckpointError):
    """Stored bytes are not the bytes that were saved."""


class Truncated(IntegrityError):
    """An object is shorter than it must be."""


class DigestMismatch(IntegrityError):
    """A checkpoint is not the one that is expected.

    Attributes:
        expected, found: digests of commit records, `sha256:...`; `found` is empty where there is no such record.
    """

    def __init__(
        self, message: str, *, expected: str = "", found: str = "", **context: Unpack[_Context]
    ) -> None:
        super().__init__(message, **context)
        self.expected, self.found = expected, found


class FormatError(CheckpointError):
    """A record cannot be understood, or a newer version of the format wrote it."""


class UnsafeContent(CheckpointError):
    """Reading it would run code that the checkpoint brings along, or touch files outside of it.

    Attributes:
        fault: the message without advice on what to do.
    """

    def __init__(self, fault: str, *, advice: str = "", **context: Unpack[_Context]) -> None:
        super().__init__(f"{fault}; {advice}" if advice else fault, **context)
        self.fault = fault


class NotCommitted(CheckpointError):
    """The place holds no committed checkpoint."""


class NotVisible(CheckpointError):
    """A committed object did not become visible in time."""


class CommitError(CheckpointError):
    """The commit record could not be written; what was committed before still loads."""


class BaseGone(CommitError):
    """A checkpoint whose bytes the save names was removed or replaced meanwhile. Nothing was committed."""


class CommitConflict(CommitError):
    """Another save was committed at this place during this save or load."""


class CommitUnknown(CommitError):
    """The commit may or may not have happened, or not for stock readers. Its data stays."""


class WrongContent(CheckpointError):
    """A check of what is saved has refused the save. What was committed before still loads.

    Attributes:
        check: its name, as in `ckpt.Checks`.
        tensors: some of those concerned.
    """

    def __init__(
        self, message: str, *, check: str = "", tensors: Sequence[str] = (), **context: Unpack[_Context]
    ) -> None:
        super().__init__(message, **context)
        self.check, self.tensors = check, tuple(tensors)


class StillReferred(CheckpointError):
    """Other checkpoints name bytes of this one: it was neither removed nor replaced.

    Attributes:
        referrers: their folders, relative to this one (`../step-300`).
    """

    def __init__(self, message: str, *, referrers: Sequence[str] = (), **context: Unpack[_Context]) -> None:
        super().__init__(message, **context)
        self.referrers = tuple(referrers)


class _RankFailures(CheckpointError):
    """The errors of several ranks.

    Attributes:
        failures: maps failing ranks to their errors. Of more than 16 ranks, those are there that say
            something new, and the first ones.
        failed_ranks: how many ranks failed.
    """

    def __init__(
        self,
        message: str,
        *,
        url: str | None = None,
        failures: Mapping[int, BaseException] | None = None,
        failed_ranks: int | None = None,
    ) -> None:
        super().__init__(message, url=url)
        self.failures: Mapping[int, BaseException] = dict(failures or {})
        self.failed_ranks = len(self.failures) if failed_ranks is None else failed_ranks

    def __str__(self) -> str:
        return printable(self.message, keep="\n")  # it names rank, place and object already


class SaveFailed(_RankFailures):
    """A save failed on one rank or more.

    Nothing was committed unless a `CommitUnknown` is among `failures`.
    """


class LoadFailed(_RankFailures):
    """A load failed on one rank or more. The state dict may be partly filled: do not use it."""


def short_traceback(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let errors of this library leave a function of the public API without the frames inside it.

    Their texts say what happened, to which object. A cause that is no error of this library stays, as it may be of the
    caller's own code. With `CKPT_DEBUG=1` in the environment tracebacks are whole. An argument that the function does not
    have is a TypeError, as ever, which suggests the one that may be meant.
    """
    code = call.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_any = bool(code.co_flags & inspect.CO_VARKEYWORDS)

    @functools.wraps(call)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        for name in kwargs:
            if name not in names and not takes_any:
                raise TypeError(
                    f"{call.__qualname__.removesuffix('.__init__')} has no argument {name!r}{_meant(name, names)}"
                )
        try:
            return call(*args, **kwargs)
        except CheckpointError as error:
            if os.environ.get("CKPT_DEBUG"):
                raise
            cause = None if isinstance(error.__cause__, CheckpointError) else error.__cause__
            raise error.with_traceback(None) from cause

    return checked


def _meant(name: str, known: Sequence[str]) -> str:
    """Suggest the known name that another one may stand for; empty if there is none."""
    import difflib  # only where something is wrong

    near = [each for each in known if name.startswith(f"{each}_")] or difflib.get_close_matches(
        name, known, n=1
    )
    return f": did you mean {near[0]}=?" if near else ""
