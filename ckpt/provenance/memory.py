"""Remember which signed checkpoints were seen, outside of the storage, which somebody may have put back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from ckpt.errors import ConfigurationError, FormatError
from ckpt.whole_files import write_whole

_FORMAT = "ckpt-storage memory"
_MAX_BYTES = 16 << 20
_MAX_STEPS = 1 << 14
_MAX_FOLDERS = 1 << 14


class Seen(msgspec.Struct, frozen=True):
    """A signed checkpoint that was seen: its digest, and when it was signed."""

    digest: str
    signed_at_s: float


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of one run, by step, and by the name of the folder; of very many the newest.

    `format` has no default: a file of something else is not taken for an empty memory, and overwritten.
    """

    format: str
    version: int
    run: str = ""
    steps: dict[int, Seen] = {}
    folders: dict[str, Seen] = {}

    @staticmethod
    def empty() -> Memory:
        """Make one that has seen nothing."""
        return Memory(format=_FORMAT, version=1)

    @property
    def newest(self) -> int | None:
        """The highest step."""
        return max(self.steps, default=None)

    def with_seen(self, run: str, steps: Mapping[int, Seen], folders: Mapping[str, Seen]) -> Memory:
        """Add what was seen now; of two of one step, or in one folder, the one that was signed later stays."""
        both, places = _later(self.steps, steps), _later(self.folders, folders)
        newest = sorted(places, key=lambda name: places[name].signed_at_s)[-_MAX_FOLDERS:]
        return msgspec.structs.replace(
            self,
            run=run,
            steps={step: both[step] for step in sorted(both)[-_MAX_STEPS:]},
            folders={name: places[name] for name in sorted(newest)},
        )


K = TypeVar("K")


def _later(before: Mapping[K, Seen], now: Mapping[K, Seen]) -> dict[K, Seen]:
    newer = {
        key: seen
        for key, seen in now.items()
        if key not in before or seen.signed_at_s >= before[key].signed_at_s
    }
    return {**before, **newer}


_MEMORY = msgspec.json.Decoder(Memory)  # made once, before there are threads


def read_memory(path: str | os.PathLike[str]) -> Memory:
    """Read the file; an empty memory if there is none, but can be. Raises FormatError, ConfigurationError."""
    try:
        with open(path, "rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        folder = os.path.dirname(os.path.abspath(path))
        if not os.access(folder, os.W_OK):  # said before everything is read, not after it
            raise ConfigurationError(
                f"{os.fspath(path)} cannot be written: {folder} is no folder that you may write to"
            ) from None
        return Memory.empty()
    except OSError as error:
        raise ConfigurationError(f"{os.fspath(path)} cannot be read: {error.strerror or error}") from None
    try:
        memory = _MEMORY.decode(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{os.fspath(path)} is not a memory of signed checkpoints: {error}; name another file, or put this one back "
            "from a backup: a new one has seen nothing"
        ) from None
    if len(data) > _MAX_BYTES or (memory.format, memory.version) != (_FORMAT, 1):
        raise FormatError(f"{os.fspath(path)} is not a memory of signed checkpoints of this version")
    return memory


def write_memory(path: str | os.PathLike[str], memory: Memory) -> None:
    """Write the file in one step: it is the old one or the new one. Raises ConfigurationError if it cannot be."""
    try:
        write_whole(path, msgspec.json.encode(memory), durable=True, private=True)
    except OSError as error:
        raise ConfigurationError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from None
