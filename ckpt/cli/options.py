"""Declare the options that commands share, and parse their values."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from ckpt.errors import ConfigurationError

SHARED = "Storage and output"
"""The group of `--help` for options that most commands have."""


def storage_options_of(storage: str, name: str = "--storage-options") -> Any:
    """Declare the option for the storage options of one argument."""
    text = f"Option of {storage}. Repeat it, or give a JSON object."
    return typer.Option(name, metavar="KEY=VALUE", help=text, rich_help_panel=SHARED)


def url_of(place: str) -> Any:
    """Declare the argument for a URL."""
    return typer.Argument(metavar="URL", help=f"{place}: a path, s3://bucket/key or another URL.")


Url = Annotated[str, url_of("The checkpoint")]
Urls = Annotated[
    list[str],
    typer.Argument(metavar="URL...", help="One checkpoint or more: a path, s3://bucket/key or another URL."),
]
Root = Annotated[str, typer.Argument(metavar="ROOT", help="A folder of checkpoints: a path or URL.")]
Depth = Annotated[
    int, typer.Option(metavar="N", min=0, max=8, help="Levels of folders below ROOT to search.")
]
Threads = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Parallel transfers; by default twice the cores, 8 to 16.",
        rich_help_panel=SHARED,
    ),
]
StorageOptions = Annotated[list[str] | None, storage_options_of("the storage")]
SourceOptions = Annotated[
    list[str] | None, storage_options_of("SRC's storage, and of DST's unless it has its own")
]
DestinationOptions = Annotated[list[str] | None, storage_options_of("DST's storage", "--dst-storage-options")]
Expect = Annotated[
    str | None,
    typer.Option(
        metavar="DIGEST",
        help="The checkpoint's digest, sha256:...; anything else is refused (docs/provenance.md).",
    ),
]


def check_expect(expect: str | None, urls: Sequence[str]) -> None:
    """Raise ConfigurationError if one digest is expected of several checkpoints."""
    if expect is not None and len(urls) > 1:
        raise ConfigurationError(f"--expect is the digest of one checkpoint, and here are {len(urls)} URLs")


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print one JSON object, of several URLs one in a line each; docs/cli.md lists its fields.",
        rich_help_panel=SHARED,
    ),
]
JsonLines = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object a checkpoint, in a line.", rich_help_panel=SHARED),
]


def parse_storage_options(
    given: Sequence[str] | None, option: str = "--storage-options"
) -> dict[str, Any] | None:
    """Merge options written as `KEY=VALUE` or JSON objects; None if there are none. The last one wins.

    A value that is JSON is decoded (`true`, `8388608`); any other value stays a str. Messages show
    no value, as it may be a secret.
    """
    if not given:
        return None
    options: dict[str, Any] = {}
    for text in given:
        if text.lstrip().startswith("{"):
            decoded = _decoded(text)
            if not isinstance(decoded, dict):
                raise ConfigurationError(f"{option}: this JSON object is not valid")
            options |= decoded
            continue
        name, separator, value = text.partition("=")
        if not separator or not name:
            raise ConfigurationError(f"{option}: write KEY=VALUE or a JSON object")
        options[name] = _decoded(value)
    return options


def _decoded(text: str) -> Any:
    """Decode JSON; any other text stays as it is."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


TIME_UNITS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
"""For `parse_quantity`: seconds."""

SIZE_UNITS = {
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
"""For `parse_quantity`: bytes."""

RATE_UNITS = {f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()}
"""For `parse_quantity`: bytes in a second."""


def parse_quantity(option: str, text: str, units: Mapping[str, float], examples: str) -> float:
    """Parse a number with one of `units`, in lower case. Raises ConfigurationError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z/%]*)", text.strip().lower())
    if match is None or match[2] not in units:
        raise ConfigurationError(f"{option}: {text!r} is not understood; write {examples}")
    return float(match[1]) * units[match[2]]
