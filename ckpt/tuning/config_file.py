"""Write a section of `ckpt.toml`, and leave the others as they are."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from ckpt.backends.options import redact_url
from ckpt.errors import ConfigurationError
from ckpt.settings import MAX_FILE_BYTES, Settings, parse, prefix_of
from ckpt.whole_files import write_whole

_HEADER = re.compile(r"\s*\[")


def check_writable(path: str, url: str) -> None:
    """Raise ConfigurationError if a section for `url` could not be written to the file later."""
    if redact_url(url) != url:
        raise ConfigurationError(
            "this URL holds a password, or what could be one: it is not written to a file; "
            "give credentials as storage options"
        )
    folder = os.path.dirname(os.path.abspath(path))
    target = path if os.path.exists(path) else folder
    if not os.access(target, os.W_OK) or not os.access(folder, os.W_OK):
        raise ConfigurationError(f"{path} cannot be written: no permission, or no such folder")
    _read(path)


def write_section(path: str, url: str, settings: Settings, comments: Sequence[str]) -> None:
    """Write the section for `url`, in the place of an older one. The file changes in one step.

    Raises ConfigurationError if the file is not one of settings, or cannot be written.
    """
    prefix = prefix_of(url)
    title = f"[{json.dumps(prefix, ensure_ascii=False)}]"  # a basic string of TOML is one of JSON
    lines = [title, *(f"# {comment}" for comment in comments)]
    lines += [f"{name} = {value}" for name, value in settings.given().items()]
    kept = _without(_read(path), title)
    text = "\n".join([*kept, *([""] if kept else []), *lines, ""])
    if parse(text.encode(), path).get(prefix) != settings:
        raise ConfigurationError(
            f"{path}: the section for {prefix} could not be written; write it yourself: {text!r:.2000}"
        )
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from None


def _read(path: str) -> list[str]:
    """Return the lines of a file of settings; none if there is no file."""
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    parse(text, path)
    return text.decode().splitlines()


def _without(lines: Sequence[str], title: str) -> list[str]:
    """Leave out a section."""
    kept: list[str] = []
    is_in_it = False
    for line in lines:
        if _HEADER.match(line):
            is_in_it = line.strip() == title
        if not is_in_it:
            kept.append(line)
    while kept and not kept[-1].strip():
        kept.pop()
    return kept
