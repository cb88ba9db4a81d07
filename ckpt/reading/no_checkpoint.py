"""Say what stands at a place that holds no checkpoint, and what to give or to call instead."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Collection

from ckpt.backends.base import Store, exists, read_bytes
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.consistency.seal import is_sealed_json
from ckpt.errors import NotCommitted, NotFound, StorageError, UnsafeContent
from ckpt.format.model_index import MAX_INDEX_BYTES
from ckpt.format.names import (
    MODEL_INDEX_KEY,
    MODEL_PREFIX,
    is_our_name,
    is_rank_directory,
    last_segment,
    split_place,
)
from ckpt.format.run_record import RUN_KEY

_MAX_KEYS = 1000  # one page of a listing of S3
_NEWEST = 8
_SAFETENSORS = (".safetensors", ".safetensors.index.json")
_TORCH = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_CONVERT = "`ckpt convert` makes a checkpoint of it"
_BEGUN = "a save or copy was begun here, but is not committed: it did not finish, or is still running"
_UNFINISHED = (
    "no checkpoint is committed here: there are objects, but no commit.json; "
    "the save or copy did not finish, or is still running"
)

_UNVERIFIED = (
    "; to read the safetensors files here without a commit, unverified, name one of them, or their index, "
    "to `ckpt convert`"
)


def has_parts_of_save(store: Store) -> bool:
    """Tell whether a save left something at a place without a commit record."""
    return (
        exists(store, STOCK_METADATA_KEY)
        or any(map(is_rank_directory, store.folders()))
        or any(is_our_name(stat.key) for stat in store.list(MODEL_PREFIX))
        or _has_our_index(store)
    )


def no_checkpoint(store: Store) -> NotFound | NotCommitted:
    """Make the error for a place without a checkpoint, from one page of its listing."""
    keys = [stat.key for stat in itertools.islice(store.list(), _MAX_KEYS)]
    if keys:
        return NotCommitted(_about_folder(store, keys), url=store.url)
    if any(map(is_rank_directory, store.folders())):  # of files that are only begun, which no listing shows
        return NotCommitted(_BEGUN, url=store.url)
    text = (
        _about_file(store.url) if store.root_is_object() else f"there is nothing here{_hub_advice(store.url)}"
    )
    return NotFound(text, url=store.url)


def _hub_advice(url: str) -> str:
    """Say how to load a model of a hub, if a local path may be meant as the id of one: `owner/name`."""
    owner, name = os.path.split(url)
    try:
        here = os.getcwd()
    except OSError:  # it was removed
        return ""
    if os.path.dirname(owner) != here or os.path.exists(owner) or name.startswith("step"):
        return ""
    hub_id = f"{os.path.basename(owner)}/{name}"
    return (
        f"; ids of a hub are not resolved: if {hub_id} is one, load the folder that "
        f"huggingface_hub.snapshot_download({hub_id!r}) returns"
    )


def _about_file(url: str) -> str:
    """Describe the file that a caller took for a checkpoint."""
    name = last_segment(url)
    if (place := split_place(url)) is not None or name.endswith(".distcp"):
        folder = url.rpartition("/")[0] if place is None else place[0]
        return f"this is a file of a checkpoint; give its folder, {folder}"
    if name.endswith(_SAFETENSORS):
        return f"this is a file of a safetensors model, not a checkpoint; {_CONVERT}, and `ckpt.load` reads its folder"
    if name.endswith(_TORCH):
        return f"this is a file, by its name one of torch.save, not a checkpoint; {_CONVERT}"
    return "this is a file; a checkpoint is a folder"


def _about_folder(store: Store, keys: Collection[str]) -> str:
    """Describe the folder that holds the objects `keys`, or these and more."""
    files = {key for key in keys if "/" not in key}
    folders = {key.partition("/")[0] for key in keys} - files
    if is_rank_directory(last_segment(store.url)):
        return f"this is a folder in a checkpoint; give the one above, {store.url.rpartition('/')[0]}"
    has_our_index = MODEL_INDEX_KEY in files and _has_our_index(store)
    if has_our_index or any(map(is_rank_directory, folders)) or any(map(_is_of_save, files)):
        return _UNFINISHED + (_UNVERIFIED if any(name.endswith(_SAFETENSORS) for name in files) else "")
    if any(name.endswith(_SAFETENSORS) for name in files):
        return f"this is a safetensors model, not a checkpoint; `ckpt.load` reads it, and {_CONVERT}"
    if any(name.endswith(_TORCH) for name in files):
        return (
            "there is no checkpoint here, but files of torch.save; `ckpt convert` makes a checkpoint of one"
        )
    if "config.json" in files:
        return "this is the folder of a model, without weights and without a checkpoint"
    latest = _latest(store, keys, folders)
    if latest is not None:
        return (
            f"this is a folder of checkpoints, not one; its newest is {latest}: "
            f"give {store.url.rstrip('/')}/{latest}, or see in `ckpt ls` which is the latest that is whole"
        )
    if RUN_KEY in files:
        return "this is the folder of a run; none of its newest checkpoints is committed: see `ckpt ls`"
    if folders:
        return "there is no checkpoint here; `ckpt ls` lists those in the folders below"
    return "there is no checkpoint here, only other files"


def _is_of_save(name: str) -> bool:
    return name in (COMMIT_KEY, STOCK_METADATA_KEY) or name.endswith(".distcp") or is_our_name(name)


def _has_our_index(store: Store) -> bool:
    try:
        return is_sealed_json(read_bytes(store, MODEL_INDEX_KEY, max_bytes=MAX_INDEX_BYTES))
    except NotFound:
        return False


def _latest(store: Store, keys: Collection[str], folders: Collection[str]) -> str | None:
    """Find the folder with the highest numbers in its name, of the newest few, that holds a checkpoint."""
    if len(keys) == _MAX_KEYS:  # perhaps all of one folder
        folders = set(itertools.islice(store.folders(), _MAX_KEYS))
    for folder in sorted(folders, key=_numbers, reverse=True)[:_NEWEST]:
        try:
            if exists(store, f"{folder}/{COMMIT_KEY}"):
                return folder
            # Stock's `.metadata` is its commit; one of ours stands beside folders of ranks.
            if exists(store, f"{folder}/{STOCK_METADATA_KEY}") and not any(
                map(is_rank_directory, store.folders(f"{folder}/"))
            ):
                return folder
        except (StorageError, UnsafeContent):
            continue  # there is an error to raise already
    return None


def _numbers(name: str) -> tuple[list[int], str]:
    return [int(digits) for digits in re.findall(r"\d{1,18}", name)], name
