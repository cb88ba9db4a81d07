"""Files of a model that are no weights: its configuration, its tokenizer. A commit can list them.

They have no names of their own as other objects have, so one that was there before is not this library's: it is
neither listed nor replaced nor removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from ckpt.backends.base import ObjectStat, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.errors import (
    AlreadyExists,
    CheckpointError,
    ConfigurationError,
    IntegrityError,
    NotFound,
    UnsafeContent,
)
from ckpt.format.names import is_config_name
from ckpt.format.records import MAX_CONFIG_BYTES, MAX_CONFIG_FILES, ObjectRef, StoredCommit

CONFIG_KEY = "config.json"
"""A model's configuration, without which transformers does not load it."""


def list_config_files(folder: Store) -> Iterator[ObjectStat]:
    """List the files directly in a model's folder that are not weights, `config.json` first."""
    keys = [stat.key for stat in folder.list() if is_config_name(stat.key)]
    for key in sorted(keys, key=lambda key: (key != CONFIG_KEY, key)):
        try:
            yield folder.stat(key)  # a listing describes a link, not its target
        except NotFound:
            continue  # a link to nothing or to a folder, a pipe


def check_configuration(folder: Store) -> None:
    """Raise NotFound unless a folder has a model's configuration."""
    if not exists(folder, CONFIG_KEY):
        raise NotFound(f"there is no {CONFIG_KEY} here to take along", url=folder.url)


def read_config_files(folder: Store) -> dict[str, bytes]:
    """Read the files of a model's folder that are not weights, by key.

    Raises NotFound without a `config.json`, ConfigurationError if they are too many, too large, or links elsewhere.
    """
    advice = "give a folder of the configuration and the tokenizer alone"
    try:
        check_configuration(folder)
        stats = list(list_config_files(folder))
    except UnsafeContent as error:
        text = f"{error.key} is a link that leads out of this folder: {advice}, as files"
        raise ConfigurationError(text, url=folder.url) from None
    nbytes = sum(stat.size_bytes for stat in stats)
    if len(stats) > MAX_CONFIG_FILES or nbytes > MAX_CONFIG_BYTES:
        text = (
            f"{len(stats):,} files here are not weights, with {nbytes >> 20} MiB; a save takes {MAX_CONFIG_FILES:,} files "
            f"and {MAX_CONFIG_BYTES >> 20} MiB along: {advice}"
        )
        raise ConfigurationError(text, url=folder.url)
    return {stat.key: bytes(read_bytes(folder, stat.key, size_bytes=stat.size_bytes)) for stat in stats}


def listed_before(previous: StoredCommit | None) -> list[ObjectRef]:
    """Return the files that the commit to be replaced lists; none of a damaged one, which may be replaced too."""
    try:
        return [] if previous is None else list(previous.record.config_files or ())
    except CheckpointError:
        return []


def check_free(store: Store, files: Mapping[str, bytes]) -> None:
    """Raise AlreadyExists if a place has another file under one of the names."""
    for key, data in files.items():
        if exists(store, key) and not _is_same(store, key, data):
            raise _another(store, key)


def put_config_files(
    store: Store, files: Mapping[str, bytes], owned: Iterable[ObjectRef], algorithm: str | None
) -> list[ObjectRef]:
    """Put those that are not there; return what the commit lists: these, and those of `owned`, which the last one listed.

    A save that fails leaves them: another save may have found them here, and count on them. Raises AlreadyExists.
    """
    known = {ref.path for ref in owned}
    listed: list[ObjectRef] = []
    mode = PutMode.CREATE if store.capabilities.conditional_create else PutMode.OVERWRITE
    for key, data in files.items():
        is_own = key in known
        if not exists(store, key):
            try:
                put_bytes(store, key, data, mode=mode)
                is_own = True
            except AlreadyExists:  # put by another program at this moment
                is_own = False
        if not _is_same(store, key, data):
            raise _another(store, key)
        if is_own:
            listed.append(_ref_of(key, data, algorithm))
    return listed


def kept_config_files(store: Store, refs: Iterable[ObjectRef], algorithm: str | None) -> list[ObjectRef]:
    """List again those files of an earlier commit that are what was saved."""
    kept: list[ObjectRef] = []
    for ref in refs:
        data = _read(store, ref)
        if data is not None:
            kept.append(_ref_of(ref.path, data, algorithm))
    return kept


def unchanged(store: Store, refs: Iterable[ObjectRef]) -> list[str]:
    """List the keys of those files that are what was saved; a changed one is another program's."""
    return [ref.path for ref in refs if _read(store, ref) is not None]


def _another(store: Store, key: str) -> AlreadyExists:
    text = (
        "another file of this name is here already: remove it or the checkpoint here, or take another place"
    )
    return AlreadyExists(text, url=store.url, key=key, settled=True)


def _is_same(store: Store, key: str, data: bytes) -> bool:
    return _read(store, _ref_of(key, data)) is not None


def _ref_of(key: str, data: bytes, algorithm: str | None = None) -> ObjectRef:
    digest = digest_of(algorithm, data).hex() if algorithm else msgspec.UNSET
    return ObjectRef(path=key, size_bytes=len(data), crc64nvme=crc_text(crc64nvme(data)), digest=digest)


def _read(store: Store, ref: ObjectRef) -> bytes | None:
    """Read a file; None if it is not what the record says."""
    try:
        data = bytes(read_bytes(store, ref.path, size_bytes=ref.size_bytes))
    except (NotFound, IntegrityError, UnsafeContent):
        return None
    return data if crc_text(crc64nvme(data)) == ref.crc64nvme else None
