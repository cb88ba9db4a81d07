"""Read and write `ckpt-run.json` at a run's root: the checkpoints that the run has committed.

It saves a listing, and is not the truth: whether a folder holds a checkpoint, its commit record
says.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ckpt.backends.base import Store, is_key, put_bytes
from ckpt.consistency import environment
from ckpt.consistency.commit import read_record_bytes
from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import FormatError
from ckpt.format.bounds import Amount, Number, Seconds
from ckpt.format.records import is_run_id
from ckpt.format.run_clock import RunClock

RUN_KEY = "ckpt-run.json"
_FORMAT = "ckpt-storage-run"
_MAX_BYTES = 64 << 20


class RunCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that the run has committed.

    Attributes:
        path: its folder, directly below the root.
        saved_at_s: when its save began, in seconds since 1970.
        metrics: by name; None if a metric was not a number.
        pinned: it is never removed.
        superseded: the run went on from an earlier step; this one belongs to a past that was given
            up.
    """

    step: Amount
    path: str
    saved_at_s: Seconds
    metrics: dict[str, float | None] = {}
    pinned: bool = False
    superseded: bool = False


class RunStart(msgspec.Struct, frozen=True, kw_only=True):
    """A start of the run, and when its last checkpoint was committed, both in seconds since 1970."""

    at_s: Seconds
    durable_at_s: Seconds


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The content of `ckpt-run.json`: checkpoints by step, starts by time.

    `run` is the id of the run, if it has one; `removed` the ids of the last commits that were removed.
    """

    format: str = _FORMAT
    version: Number = 1
    checkpoints: list[RunCheckpoint] = []
    starts: list[RunStart] = []
    run: str = ""
    removed: list[str] = []


@dataclass(frozen=True)
class RunStamp:
    """How a save of a run is marked.

    Attributes:
        run: the id of the run, which tells its checkpoints from those of others; empty: it is not known.
        clock: says when it was made; None: the machine's.
    """

    run: str = ""
    clock: RunClock | None = None

    def now(self) -> float:
        """Return when a save that is committed now was made, in seconds since 1970."""
        return environment.now() if self.clock is None else self.clock.now()


NO_STAMP = RunStamp()


def new_run_id() -> str:
    """Draw the id of a run."""
    return environment.token()


_decoder = msgspec.json.Decoder(RunRecord)  # made once, before there are threads


def read_run(store: Store) -> RunRecord | None:
    """Read the record at the store's root; None if there is none.

    Raises IntegrityError (damaged), FormatError (not understood), StorageError.
    """
    data = read_record_bytes(store, RUN_KEY, max_bytes=_MAX_BYTES)
    if data is None:
        return None
    text = unseal_json(data, url=store.url, key=RUN_KEY)
    try:
        record = _decoder.decode(text)
    except (ValueError, RecursionError) as error:  # as all of msgspec's are
        raise FormatError(f"not a run's record: {error}", url=store.url, key=RUN_KEY) from error
    if record.format != _FORMAT or record.version != 1:
        advice = "a newer version of this library wrote it; upgrade this one"
        raise FormatError(advice, url=store.url, key=RUN_KEY)
    if record.run and not is_run_id(record.run):
        raise FormatError("names an impossible run", url=store.url, key=RUN_KEY)
    for checkpoint in record.checkpoints:
        path = checkpoint.path
        if "/" in path or not is_key(path):
            raise FormatError(f"names an impossible checkpoint: {path!r}", url=store.url, key=RUN_KEY)
    return record


def write_run(store: Store, record: RunRecord) -> None:
    """Replace the record at the store's root."""
    put_bytes(store, RUN_KEY, seal_json(msgspec.json.encode(record)))
