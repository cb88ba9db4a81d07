"""Encode and decode the records of a checkpoint: commit and manifests (`docs/format.md` is the specification)."""

from __future__ import annotations

import array
import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from ckpt.backends.base import Store, check_key
from ckpt.consistency.checksums import combine_blocks
from ckpt.consistency.commit import COMMIT_KEY, read_commit_bytes
from ckpt.consistency.seal import is_sealed_json, seal_json, unseal_json
from ckpt.errors import ConfigurationError, FormatError

FORMAT_NAME = "ckpt-storage"
FORMAT_VERSION = 2

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 16, 1 << 24


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True):
    """An object as the commit vouches for it."""

    path: str
    size_bytes: int
    crc64nvme: str


class ManifestRef(ObjectRef, frozen=True, kw_only=True):
    """One rank's manifest, with what a look at the whole needs without opening it."""

    rank: int
    files: int
    items: int
    data_bytes: int


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`commit.json`: what makes a save a checkpoint.

    `index` describes what is in it; `metadata` did in format version 1.
    """

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    id: str
    created_at: str
    library: str
    torch: str
    world_size: int
    data_bytes: int
    index: ObjectRef | msgspec.UnsetType = msgspec.UNSET
    metadata: ObjectRef | msgspec.UnsetType = msgspec.UNSET
    manifests: list[ManifestRef]
    tags: dict[str, str] = {}

    @property
    def described_by(self) -> ObjectRef:
        ref = self.index if self.has_index else self.metadata
        assert isinstance(ref, ObjectRef)  # checked when it was decoded
        return ref

    @property
    def refs(self) -> list[ObjectRef]:
        """The objects that it names: its index and all manifests."""
        return [self.described_by, *self.manifests]

    @property
    def has_index(self) -> bool:
        return isinstance(self.index, ObjectRef)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A data file; `blocks` packs the CRC64NVME of each block as 8 bytes, little endian."""

    path: str
    size_bytes: int
    blocks: bytes

    def block_crcs(self) -> Sequence[int]:
        crcs = array.array("Q")
        crcs.frombytes(self.blocks)
        if sys.byteorder == "big":
            crcs.byteswap()
        return crcs

    def crc64nvme(self, block_size_bytes: int) -> int:
        return combine_blocks(self.block_crcs(), self.size_bytes, block_size_bytes)


class ItemRecord(msgspec.Struct, frozen=True, array_like=True):
    """One `torch.save` item in a data file.

    `payload_offset` is where the tensor's bytes (dense, row-major) start in the file. It is -1 for an item
    that is only to be read as a whole: an object, or a tensor that is not a plain one.
    """

    fqn: str
    offsets: list[int] | None
    file: int
    offset: int
    length: int
    payload_offset: int
    payload_bytes: int


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`rank-NNNNN/<token>.json`: everything one rank wrote in one save."""

    format: str = FORMAT_NAME
    version: int = FORMAT_VERSION
    rank: int
    token: str
    block_size_bytes: int
    files: list[FileRecord]
    items: list[ItemRecord]


class _Header(msgspec.Struct):
    format: str
    version: int


Record = TypeVar("Record", CommitRecord, RankManifest)

# Made here and not by the first that need them: two threads that make msgspec look at one class at the same
# time can crash the process.
_HEADER = msgspec.json.Decoder(_Header)
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (CommitRecord, RankManifest)
}


def encode(record: CommitRecord | RankManifest) -> bytes:
    return seal_json(msgspec.json.encode(record))


def decode_commit(data: bytes | bytearray, *, url: str, key: str) -> CommitRecord:
    """Raises IntegrityError (damaged), FormatError (not understood)."""
    commit = _decode(CommitRecord, data, url, key)
    _require(commit.has_index or isinstance(commit.metadata, ObjectRef), "no index", url, key)
    for ref in commit.refs:
        _check_path(ref.path, url, key)
        _require(ref.size_bytes >= 0, "a negative size", url, key)
    ranks = [ref.rank for ref in commit.manifests]
    _require(len(set(ranks)) == len(ranks), "a rank listed twice", url, key)
    _require(all(0 <= rank < commit.world_size for rank in ranks), "a rank outside of the world", url, key)
    return commit


@dataclass(frozen=True)
class StoredCommit:
    """A commit record as it was read: two are equal when their bytes are.

    Attributes:
        raw: the bytes of `commit.json`, unchecked.
        url: where it was read.
    """

    raw: bytes
    url: str = field(compare=False)

    @property
    def is_ours(self) -> bool:
        """Tell whether this library wrote it, damaged or not."""
        return is_sealed_json(self.raw)

    @functools.cached_property
    def record(self) -> CommitRecord:
        """Decode it, once.

        Raises:
            IntegrityError: it is damaged.
            FormatError: it is not a commit record, or of a version that this library does not know.
        """
        return decode_commit(self.raw, url=self.url, key=COMMIT_KEY)


def read_commit(store: Store) -> StoredCommit | None:
    """Read the commit record at the store's root; None if there is none."""
    raw = read_commit_bytes(store)
    return None if raw is None else StoredCommit(raw, store.url)


def decode_manifest(data: bytes | bytearray, *, url: str, key: str) -> RankManifest:
    """Raises IntegrityError (damaged), FormatError (not understood)."""
    manifest = _decode(RankManifest, data, url, key)
    block = manifest.block_size_bytes
    _require(_MIN_BLOCK_BYTES <= block <= _MAX_BLOCK_BYTES, f"a block size of {block} bytes", url, key)
    for file in manifest.files:
        _check_path(file.path, url, key)
        blocks = -(-file.size_bytes // block)
        _require(
            file.size_bytes >= 0 and len(file.blocks) == 8 * blocks, "a wrong number of blocks", url, key
        )
    for item in manifest.items:
        _require(0 <= item.file < len(manifest.files), "an item in no file", url, key)
        end, size = item.offset + item.length, manifest.files[item.file].size_bytes
        _require(0 <= item.offset <= end <= size, f"an item outside of its file ({item.fqn!r})", url, key)
        if item.payload_offset != -1:
            payload_end = item.payload_offset + item.payload_bytes
            inside = item.offset <= item.payload_offset <= payload_end <= end
            _require(inside, f"a payload outside of its item ({item.fqn!r})", url, key)
    return manifest


def _decode(kind: type[Record], data: bytes | bytearray, url: str, key: str) -> Record:
    body = unseal_json(data, url=url, key=key)
    try:
        header = _HEADER.decode(body)
        _require(header.format == FORMAT_NAME, f"another format ({header.format[:40]!r})", url, key)
        if header.version > FORMAT_VERSION:
            raise FormatError(
                f"written in format version {header.version}; this library reads up to {FORMAT_VERSION}, update it",
                url=url,
                key=key,
            )
        found: Record = _DECODERS[kind].decode(body)
        return found
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(f"not a valid record: {error}", url=url, key=key) from error


def _check_path(path: str, url: str, key: str) -> None:
    try:
        check_key(path)
    except ConfigurationError as error:
        raise FormatError(
            f"names an object outside of the checkpoint: {path[:80]!r}", url=url, key=key
        ) from error


def _require(condition: bool, what: str, url: str, key: str) -> None:
    if not condition:
        raise FormatError(f"not a valid record: it has {what}", url=url, key=key)
