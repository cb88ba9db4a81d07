"""Files of a model that are no weights: its configuration, its tokenizer. A commit can list them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from ckpt.backends.base import ObjectStat, PutMode, Store, exists, put_bytes, read_bytes
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.errors import AlreadyExists, ConfigurationError, IntegrityError, NotFound, UnsafeContent
from ckpt.format.names import is_config_name
from ckpt.format.records import MAX_CONFIG_FILES, ObjectRef

CONFIG_KEY = "config.json"
"""A model's configuration, without which transformers does not load it."""

_MAX_FILE_BYTES = 256 << 20
_MAX_BYTES = 256 << 20
"""Of all that a save takes along, which it holds in memory."""


def list_config_files(folder: Store) -> Iterator[ObjectStat]:
    """List the small files directly in a model's folder that are not weights."""
    keys = [stat.key for stat in folder.list() if is_config_name(stat.key)]
    for key in sorted(keys)[:MAX_CONFIG_FILES]:
        stat = folder.stat(key)  # a listing describes a link, not its target
        if stat.size_bytes <= _MAX_FILE_BYTES:
            yield stat


def check_configuration(folder: Store) -> None:
    """Raise NotFound unless a folder has a model's configuration."""
    if not exists(folder, CONFIG_KEY):
        raise NotFound(f"there is no {CONFIG_KEY} here to take along", url=folder.url)


def read_config_files(folder: Store) -> dict[str, bytes]:
    """Read the files of a model's folder that are not weights, by key.

    Raises NotFound without a `config.json`, ConfigurationError if all of them are over 256 MiB.
    """
    check_configuration(folder)
    stats = list(list_config_files(folder))
    nbytes = sum(stat.size_bytes for stat in stats)
    if nbytes > _MAX_BYTES:
        text = f"its files that are not weights take {nbytes >> 20} MiB, and a save takes {_MAX_BYTES >> 20} MiB along"
        raise ConfigurationError(
            f"{text}: give a folder of the configuration and the tokenizer alone", url=folder.url
        )
    return {stat.key: bytes(read_bytes(folder, stat.key, size_bytes=stat.size_bytes)) for stat in stats}


def missing_config_files(store: Store, files: dict[str, bytes]) -> list[str]:
    """List the keys that a place lacks. Raises AlreadyExists if it has another file under one of the names."""
    missing = [key for key in files if not exists(store, key)]
    for key in files.keys() - set(missing):
        if fault(store, ref_of(key, files[key])) is not None:
            text = "another file of this name is here already: remove it, save to another place, or leave out config_from="
            raise AlreadyExists(text, url=store.url, key=key)
    return missing


def put_config_file(store: Store, key: str, data: bytes) -> None:
    """Store a file where none may be. Raises AlreadyExists."""
    mode = PutMode.CREATE if store.capabilities.conditional_create else PutMode.OVERWRITE
    put_bytes(store, key, data, mode=mode)


def ref_of(key: str, data: bytes, algorithm: str | None = None) -> ObjectRef:
    """Describe a file for the commit, with a digest by `algorithm`."""
    digest = digest_of(algorithm, data).hex() if algorithm else msgspec.UNSET
    return ObjectRef(path=key, size_bytes=len(data), crc64nvme=crc_text(crc64nvme(data)), digest=digest)


def read_listed(store: Store, ref: ObjectRef) -> bytes:
    """Read a file that a commit lists. Raises NotFound, IntegrityError unless it is what was saved."""
    data = bytes(read_bytes(store, ref.path, size_bytes=ref.size_bytes))
    if crc_text(crc64nvme(data)) != ref.crc64nvme:
        raise IntegrityError("is not what was saved", url=store.url, key=ref.path)
    return data


def fault(store: Store, ref: ObjectRef) -> NotFound | IntegrityError | UnsafeContent | None:
    """Return what is wrong with a file that a commit lists; None if it is what was saved."""
    try:
        read_listed(store, ref)
    except (NotFound, IntegrityError, UnsafeContent) as error:
        return error
    return None


def unchanged(store: Store, refs: Sequence[ObjectRef]) -> list[str]:
    """List the keys of those files that are what was saved; a changed one is another program's."""
    return [ref.path for ref in refs if fault(store, ref) is None]
