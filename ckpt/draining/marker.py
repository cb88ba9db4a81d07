"""Read and write the marker of a run's folder on a node: whose checkpoints these are."""

from __future__ import annotations

import json
import os
from typing import NamedTuple

from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, FormatError, IntegrityError
from ckpt.format.run_record import read_run
from ckpt.whole_files import write_whole

MARKER = "ckpt-local.json"
_FORMAT = "ckpt-storage-local"
_MAX_BYTES = 1 << 16


def identity_of(durable: str | os.PathLike[str]) -> str:
    """Return the URL by which a run is known: that of its durable place."""
    store = open_store(durable)
    store.close()
    return store.url


class Marker(NamedTuple):
    """What a run's folder on a node says of itself.

    Attributes:
        durable: the URL of the run's durable place.
        run: the id of the run; empty if it was not known yet.
    """

    durable: str
    run: str = ""


def marker_of(folder: str) -> Marker | None:
    """Read the marker of a run's local folder; None if it has none, or no sound one."""
    try:
        with open(os.path.join(folder, MARKER), encoding="utf-8") as file:
            marker = json.loads(file.read(_MAX_BYTES))
        run = str(marker.get("run", ""))
        return Marker(str(marker["durable"]), run) if marker["format"] == _FORMAT else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def durable_of(folder: str) -> str | None:
    """Return the durable place of the run whose local folder this is; None if it is none."""
    marker = marker_of(folder)
    return None if marker is None else marker.durable


def mark(folder: str, durable: str, run: str = "") -> None:
    """Note whose folder this is. Raises ConfigurationError if it is that of another durable place, OSError."""
    known = marker_of(folder)
    if known is not None and known.durable != durable:
        raise ConfigurationError(f"{folder} holds checkpoints of another run, {known.durable}: move it away")
    if known is None or known.run != (run or known.run):
        marker = {"format": _FORMAT, "version": 1, "durable": durable, "run": run}
        write_whole(os.path.join(folder, MARKER), json.dumps(marker).encode())


def runs_of(store: Store) -> frozenset[str]:
    """List the runs that a node's folder names as its own, in its marker and record; "" alone if that cannot be told."""
    marker = None if store.directory is None else marker_of(store.directory)
    named, is_damaged = {"" if marker is None else marker.run}, False
    try:
        record = read_run(store)
        named.add("" if record is None else record.run)
    except (IntegrityError, FormatError):
        is_damaged = True
    return frozenset(named - {""} or ({""} if is_damaged else ()))


def check_owner(folder: str | None, durable: str | os.PathLike[str]) -> None:
    """Raise ConfigurationError if a folder is of a run whose durable place is another one."""
    known = None if folder is None else durable_of(folder)
    if known is not None and known.rstrip("/") != (wanted := identity_of(durable)).rstrip("/"):
        raise ConfigurationError(
            f"{folder} holds checkpoints of the run {known}, not of {wanted}: drain it to its own root; any_root=True "
            "(--any-root) carries them to this one all the same",
            url=wanted,
        )
