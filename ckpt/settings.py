"""Read `ckpt.toml`: how this library moves bytes to and from each storage, where nothing else is said."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from typing import Any

from ckpt.errors import ConfigurationError

FILE_NAME = "ckpt.toml"
VARIABLE = "CKPT_CONFIG"

MAX_FILE_BYTES = 1 << 20
LIMITS: Mapping[str, tuple[int, int]] = {
    "threads": (1, 4096),
    "part_size_bytes": (1 << 20, 5 << 30),
    "files_per_rank": (1, 1024),
    "memory_budget_bytes": (128 << 20, 1 << 50),
}
"""The least and the most of each setting."""


@dataclass(frozen=True)
class Settings:
    """Settings of one place; None stands for the default, and what a caller gives wins over both.

    Attributes:
        threads: the most transfers at the same time.
        part_size_bytes: how much one transfer moves.
        files_per_rank: the most data files that a rank writes.
        memory_budget_bytes: memory that a rank may use beyond the tensors.
    """

    threads: int | None = None
    part_size_bytes: int | None = None
    files_per_rank: int | None = None
    memory_budget_bytes: int | None = None

    def given(self) -> dict[str, int]:
        """Return those that are not the default."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if value is not None}


_override: ContextVar[Settings | None] = ContextVar("ckpt_settings", default=None)


@contextlib.contextmanager
def override(settings: Settings) -> Iterator[None]:
    """Let `settings` hold for every place in this block, and no file be read."""
    token = _override.set(settings)
    try:
        yield
    finally:
        _override.reset(token)


def settings_for(url: str | os.PathLike[str]) -> Settings:
    """Find the settings for a place in the file; of two sections, the longer prefix wins key by key.

    The file is that of `CKPT_CONFIG`, or else `ckpt.toml` in the working directory, if there is one.

    Raises:
        ConfigurationError: the file cannot be read, or holds an unknown key or a wrong value.
    """
    forced = _override.get()
    if forced is not None:
        return forced
    settings = Settings()
    sections = _sections()
    place = prefix_of(os.fspath(url)) if sections else ""
    for prefix, section in sections.items():  # the shortest first
        if place == prefix or place.startswith(f"{prefix}/"):
            settings = replace(settings, **section.given())
    return settings


def settings_path() -> str | None:
    """Return the path of the file that is read; None if there is none, or `CKPT_CONFIG` is empty."""
    path = os.environ.get(VARIABLE)
    if path is not None:
        return path or None
    return FILE_NAME if os.path.exists(FILE_NAME) else None


def prefix_of(url: str) -> str:
    """Write a place so that it can be compared: the scheme in lower case, paths absolute, no slash at the end."""
    scheme, separator, rest = url.partition("://")
    if separator and scheme.lower() != "file":
        return f"{scheme.lower()}://{rest}".rstrip("/")
    return os.path.abspath(os.path.expanduser(rest if separator else url)).rstrip("/")


def parse(text: bytes, path: str) -> dict[str, Settings]:
    """Parse the text of a file: the settings by prefix, the shortest first.

    Raises:
        ConfigurationError: it names the file, and the section and key that is wrong.
    """
    import msgspec

    try:
        sections = msgspec.toml.decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise ConfigurationError(f"{path}: not valid TOML: {error}") from None
    parsed: dict[str, Settings] = {}
    for title, section in sections.items():
        where = f"{path}: [{title[:200]!r}]"
        if not isinstance(section, Mapping):
            raise ConfigurationError(f'{where} stands in no section; write ["s3://bucket/prefix"] above it')
        if "://" not in title and not title.startswith(("/", "~")):
            raise ConfigurationError(f"{where}: a section is named by a URL or an absolute path")
        prefix = prefix_of(title)
        if prefix in parsed:
            raise ConfigurationError(f"{where}: there are two sections for this place")
        parsed[prefix] = Settings(**{key: _checked(where, key, section[key]) for key in section})
    return dict(sorted(parsed.items(), key=lambda item: len(item[0])))


def _checked(where: str, key: str, value: Any) -> int:
    if key not in LIMITS:
        raise ConfigurationError(f"{where}: unknown key {key[:100]!r}; known are {', '.join(LIMITS)}")
    least, most = LIMITS[key]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        is_long = isinstance(value, int) and value.bit_length() > 64  # Python refuses to write very long ones
        given = "one of so many digits" if is_long else f"{value!r:.100}"
        raise ConfigurationError(
            f"{where}: {key} must be a whole number from {least:,} to {most:,}, not {given}"
        )
    return value


def _sections() -> Mapping[str, Settings]:
    path = settings_path()
    if path is None:
        return {}
    try:
        facts = os.stat(path)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size > MAX_FILE_BYTES:
            raise ConfigurationError(
                f"{path}: not a file of settings: it is no regular file, or larger than 1 MiB"
            )
        return _read(os.path.abspath(path), facts.st_mtime_ns, facts.st_size)
    except OSError as error:
        origin = f" ({VARIABLE} names it)" if VARIABLE in os.environ else ""
        raise ConfigurationError(f"{path}{origin} cannot be read: {error.strerror}") from None


@functools.lru_cache(maxsize=4)
def _read(path: str, _modified_at_ns: int, _size_bytes: int) -> Mapping[str, Settings]:
    with open(path, "rb") as file:
        return parse(file.read(MAX_FILE_BYTES), path)
