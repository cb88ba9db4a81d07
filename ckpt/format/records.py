"""Encode and decode the records of a checkpoint: commit and manifests (`docs/format.md`)."""

from __future__ import annotations

import array
import functools
import operator
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from ckpt.backends.base import Store, is_key
from ckpt.consistency import block_digests
from ckpt.consistency.commit import COMMIT_KEY, read_commit_bytes
from ckpt.consistency.digests import DIGEST_BYTES, PROBE_BYTES
from ckpt.consistency.seal import is_sealed_json, seal_json, unseal_json
from ckpt.errors import FormatError
from ckpt.format.bounds import Amount, FileCount, Number, RankNumber, Token, WorldSize
from ckpt.format.figures import BlockDigests, PartContent, Timings
from ckpt.format.names import (
    ObjectName,
    data_key,
    is_config_name,
    is_path,
    is_sibling,
    model_key,
    split_path,
    step_of,
)

FORMAT_NAME = "ckpt-storage"
FORMAT_VERSION = 2
MODEL_VERSION = 3
"""Of the records of a model in safetensors files, which readers of version 2 do not know."""
REFERENCE_VERSION = 4
"""Of commit records of checkpoints that refer to others, or may be referred to: who deletes must know."""
MAX_METADATA_BYTES = 8 << 30
"""The largest `.metadata` or index that is read."""

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 1 << 16, 1 << 24
_MAX_BASES = 1 << 10
MAX_CONFIG_FILES = 1000
MAX_CONFIG_BYTES = 256 << 20
"""Of a model without its weights: its configuration, its tokenizer."""
_TOKEN = re.compile("[0-9a-f]{16}")


class ObjectRef(msgspec.Struct, frozen=True, kw_only=True):
    """An object that the commit names, with its checksum, and its digest in hexadecimal digits if all have one."""

    path: str
    size_bytes: Amount
    crc64nvme: str
    digest: str | msgspec.UnsetType = msgspec.UNSET


class ManifestRef(ObjectRef, frozen=True, kw_only=True):
    """One rank's manifest, and its totals, which are shown without opening it."""

    rank: RankNumber
    files: FileCount
    items: Amount
    data_bytes: Amount

    @property
    def owner(self) -> str:
        """The sibling folder in which it lies; empty for the checkpoint itself."""
        return split_path(self.path)[0]

    @property
    def stem(self) -> str:
        """The part of the path that its data files have too, except those of a model."""
        return self.path.removesuffix(".json")

    def data_key(self, number: int, *, of_model: bool) -> str | None:
        """Name a data file that it lists, from 0; None if its own name is not one of ours."""
        name = ObjectName.parse(split_path(self.path)[1])
        if name is None:
            return None
        return (
            model_key(name.token, number, self.files) if of_model else data_key(name.rank, name.token, number)
        )

    def data_keys(self, *, of_model: bool) -> Iterator[str] | None:
        """Name the data files that it lists, without reading it; None if its own name is not one of ours.

        A few bytes can claim any number of files: stop at the first name that is not stored.
        """
        if ObjectName.parse(split_path(self.path)[1]) is None:
            return None
        return (self.data_key(number, of_model=of_model) or "" for number in range(self.files))


class BaseRef(msgspec.Struct, frozen=True, kw_only=True):
    """An earlier checkpoint whose stored bytes a checkpoint names.

    Attributes:
        path, id: `../NAME`, its folder beside that of the checkpoint; that of its commit.
        data_bytes, carried_bytes: of its own data files; of those, of the items that are named.
    """

    path: str
    id: Token
    data_bytes: Amount
    carried_bytes: Amount

    @property
    def owner(self) -> str:
        """The name of its folder."""
        return self.path.removeprefix("../")


class CommitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """`commit.json`, which makes a save a checkpoint.

    `index` describes the contents; `metadata` did in format version 1. `layout` is "safetensors" for a model in files of
    that kind (version 3); else the data files hold `torch.save` items. `referable` and `bases` are of version 4: others
    may refer to it; what it refers to. Of a base, it lists the manifests whose items it names; `data_bytes` are those of
    its own files. `stock_metadata` is False if `.metadata` for stock readers was left out on purpose. `run` is the id of
    the run that saved it. `content` is what the next save is compared with, by the parts of the state. With
    `block_digests` all that it names has digests. `config_files` are those of a model that are no weights; the root of
    the digests leaves them out.
    """

    format: str = FORMAT_NAME
    version: Number = FORMAT_VERSION
    id: Token
    created_at: str
    library: str
    torch: str
    world_size: WorldSize
    data_bytes: Amount
    index: ObjectRef | msgspec.UnsetType = msgspec.UNSET
    metadata: ObjectRef | msgspec.UnsetType = msgspec.UNSET
    manifests: list[ManifestRef]
    tags: dict[str, str] = {}
    layout: str | msgspec.UnsetType = msgspec.UNSET
    referable: bool | msgspec.UnsetType = msgspec.UNSET
    bases: list[BaseRef] | msgspec.UnsetType = msgspec.UNSET
    stock_metadata: bool | msgspec.UnsetType = msgspec.UNSET
    timings: Timings | msgspec.UnsetType = msgspec.UNSET
    run: str | msgspec.UnsetType = msgspec.UNSET
    content: dict[str, PartContent] | msgspec.UnsetType = msgspec.UNSET
    block_digests: BlockDigests | msgspec.UnsetType = msgspec.UNSET
    config_files: list[ObjectRef] | msgspec.UnsetType = msgspec.UNSET

    @property
    def run_id(self) -> str:
        """The id of the run that saved it; empty if it names none."""
        return self.run or ""

    @property
    def is_for_stock(self) -> bool:
        """True if what readers of other programs look for belongs to it; else it was left out."""
        return self.is_model or self.stock_metadata is not False

    @property
    def is_referable(self) -> bool:
        """True if saves may name its bytes: whoever deletes it looks for them."""
        return self.referable is True

    @property
    def owners(self) -> dict[str, BaseRef]:
        """What it refers to, by the name of the folder."""
        return {base.owner: base for base in self.bases or ()}

    @property
    def own_manifests(self) -> list[ManifestRef]:
        """The manifests of its own data."""
        return [ref for ref in self.manifests if not ref.owner]

    @property
    def foreign_manifests(self) -> list[ManifestRef]:
        """The manifests of data of other checkpoints."""
        return [ref for ref in self.manifests if ref.owner]

    @property
    def carried_bytes(self) -> int:
        """How many bytes of other checkpoints it names."""
        return sum(base.carried_bytes for base in self.bases or ())

    @property
    def is_model(self) -> bool:
        """True for a model in safetensors files, which transformers reads."""
        return self.layout == "safetensors"

    @property
    def described_by(self) -> ObjectRef:
        """The object that describes the contents."""
        ref = self.index if self.has_index else self.metadata
        assert isinstance(ref, ObjectRef)  # checked when it was decoded
        return ref

    @property
    def refs(self) -> list[ObjectRef]:
        """The objects that it names: its index and all manifests, by paths of records (`format.names`)."""
        return [self.described_by, *self.manifests]

    @property
    def has_index(self) -> bool:
        return isinstance(self.index, ObjectRef)

    def step(self, path: str) -> int | None:
        """Return the step of a checkpoint: its tag, else the number in the name of its folder."""
        step = self.tags.get("step", "")
        return int(step) if step.isdecimal() and len(step) < 19 else step_of(path)


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A data file; `blocks` packs the CRC64NVME of each block as 8 bytes, little endian, `digests` 32 bytes of each."""

    path: str
    size_bytes: Amount
    blocks: bytes
    digests: bytes | msgspec.UnsetType = msgspec.UNSET

    def block_crcs(self) -> Sequence[int]:
        """Unpack `blocks`."""
        crcs = array.array("Q", self.blocks)
        if sys.byteorder == "big":
            crcs.byteswap()
        return crcs


class ItemRecord(msgspec.Struct, frozen=True, array_like=True):
    """A `torch.save` item in a data file.

    `payload_offset` is where a tensor's bytes (dense, row-major) start in the file; -1 for an item
    that is read as a whole: an object, or a tensor that is not plain.
    """

    fqn: str
    offsets: list[Amount] | None
    file: Amount
    offset: Amount
    length: Amount
    payload_offset: Number
    payload_bytes: Amount


class RankManifest(msgspec.Struct, frozen=True, kw_only=True):
    """`rank-NNNNN/<token>.json`: everything that a rank wrote in a save.

    `digests` packs the digest of the payload of each item as 16 bytes, big endian; zeros where
    there is none. So does `probes` with what tells from 8 bytes that two payloads differ.
    """

    format: str = FORMAT_NAME
    version: Number = FORMAT_VERSION
    rank: RankNumber
    token: str
    block_size_bytes: Amount
    files: list[FileRecord]
    items: list[ItemRecord]
    digests: bytes | msgspec.UnsetType = msgspec.UNSET
    probes: bytes | msgspec.UnsetType = msgspec.UNSET

    def digest(self, number: int) -> bytes:
        """Return the digest of an item's payload; empty if it has none."""
        packed = self.digests or b""
        digest = packed[DIGEST_BYTES * number : DIGEST_BYTES * (number + 1)]
        return digest if any(digest) else b""

    def probe(self, number: int) -> bytes:
        """Return the probe of an item's payload; empty if it has none."""
        return (self.probes or b"")[PROBE_BYTES * number : PROBE_BYTES * (number + 1)]


class _Header(msgspec.Struct):
    format: str
    version: Number


Record = TypeVar("Record", CommitRecord, RankManifest)

# Made before there are threads: two that show msgspec one class at the same time can crash the process.
_HEADER = msgspec.json.Decoder(_Header)
_COMMIT = msgspec.json.Decoder(CommitRecord)
_MANIFEST = msgspec.json.Decoder(RankManifest)


def is_run_id(text: str) -> bool:
    """Tell whether a text can be the id of a run."""
    return _TOKEN.fullmatch(text) is not None


def encode(record: CommitRecord | RankManifest) -> bytes:
    """Encode a record, sealed with its checksum."""
    return seal_json(msgspec.json.encode(record))


def decode_commit(data: bytes | bytearray, *, url: str, key: str) -> CommitRecord:
    """Decode a commit record. Raises IntegrityError (damaged), FormatError (not understood)."""
    return _decode(_COMMIT, _check_commit, data, url, key)


def decode_manifest(data: bytes | bytearray, *, url: str, key: str) -> RankManifest:
    """Decode a manifest. Raises IntegrityError (damaged), FormatError (not understood)."""
    return _decode(_MANIFEST, _check_manifest, data, url, key)


@dataclass(frozen=True)
class StoredCommit:
    """A commit record as it was read at `url`: two are equal when their bytes, unchecked, are."""

    raw: bytes
    url: str = field(compare=False)

    @property
    def is_ours(self) -> bool:
        """Tell whether this library wrote it, damaged or not."""
        return is_sealed_json(self.raw)

    @functools.cached_property
    def record(self) -> CommitRecord:
        """Decode it, once. Raises as `decode_commit`."""
        return decode_commit(self.raw, url=self.url, key=COMMIT_KEY)


def read_commit(store: Store) -> StoredCommit | None:
    """Read the commit record at the store's root; None if there is none."""
    raw = read_commit_bytes(store)
    return None if raw is None else StoredCommit(raw, store.url)


def _decode(
    decoder: msgspec.json.Decoder[Record],
    check: Callable[[Record], None],
    data: bytes | bytearray,
    url: str,
    key: str,
) -> Record:
    body = unseal_json(data, url=url, key=key)
    try:
        header = _HEADER.decode(body)
        _require(header.format == FORMAT_NAME, f"another format ({header.format[:40]!r})")
        if header.version > REFERENCE_VERSION:
            raise FormatError(
                f"written in format version {header.version}; this library reads up to {REFERENCE_VERSION}, update it"
            )
        record = decoder.decode(body)
        check(record)
        return record
    except FormatError as error:
        raise FormatError(error.message, url=url, key=key) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a valid record: {error}", url=url, key=key) from error


def _check_commit(commit: CommitRecord) -> None:
    _require(commit.has_index or isinstance(commit.metadata, ObjectRef), "no index")
    if commit.layout is not msgspec.UNSET and not (commit.is_model and commit.version == MODEL_VERSION):
        raise FormatError(
            f"its data files have the layout {commit.layout[:40]!r}, which this library does not know"
        )
    _check_key(commit.described_by.path)
    _require(not commit.run or is_run_id(commit.run), "an impossible run")
    _check_config_files(commit)
    ranks = [(ref.owner, ref.rank) for ref in commit.manifests]
    _require(len(set(ranks)) == len(ranks), "a rank listed twice")
    for ref in commit.manifests:
        if not ref.path.startswith("../"):
            _check_key(ref.path)
            _require(ref.rank < commit.world_size, "a rank outside of the world")
            continue
        name = ObjectName.parse(split_path(ref.path)[1])
        is_manifest = name is not None and (name.kind, name.rank) == ("json", ref.rank)
        _require(is_path(ref.path) and is_manifest, f"a manifest of another checkpoint at {ref.path[:80]!r}")
    _check_bases(commit, {owner for owner, _ in ranks if owner})


def _check_config_files(commit: CommitRecord) -> None:
    refs = commit.config_files or []
    paths = [ref.path for ref in refs]
    _require(commit.is_model or not refs, "files of a configuration, and no model")
    _require(
        sum(ref.size_bytes for ref in refs) <= MAX_CONFIG_BYTES, "files of a configuration of an absurd size"
    )
    _require(len(paths) <= MAX_CONFIG_FILES, f"{len(paths):,} files of a configuration")
    _require(len(set(paths)) == len(paths), "a file of a configuration listed twice")
    for path in paths:
        _require(is_key(path) and is_config_name(path), f"{path[:80]!r} as a file of a configuration")


def _check_bases(commit: CommitRecord, owners: set[str]) -> None:
    """Check what is of version 4; `owners` are those of the manifests."""
    is_new = commit.referable is not msgspec.UNSET or commit.bases is not msgspec.UNSET
    _require(is_new == (commit.version == REFERENCE_VERSION), "members of another version than its own")
    bases = commit.bases or []
    _require(len(bases) <= _MAX_BASES, f"{len(bases):,} bases")
    for base in bases:
        is_safe = base.path.startswith("../") and is_sibling(base.owner)
        _require(is_safe, f"a base that is no folder beside it: {base.path[:80]!r}")
        _require(base.carried_bytes <= base.data_bytes, "a base with an absurd size")
    _require(len({base.path for base in bases}) == len(bases), "a base listed twice")
    _require({base.owner for base in bases} == owners, "bases that are not those of its manifests")


def _check_manifest(manifest: RankManifest) -> None:
    block = manifest.block_size_bytes
    _require(_MIN_BLOCK_BYTES <= block <= _MAX_BLOCK_BYTES, f"a block size of {block} bytes")
    _require(len({file.path for file in manifest.files}) == len(manifest.files), "a file listed twice")
    for packed, size in ((manifest.digests, DIGEST_BYTES), (manifest.probes, PROBE_BYTES)):
        is_whole = packed is msgspec.UNSET or len(packed) == size * len(manifest.items)
        _require(is_whole, "a wrong number of digests")
    for file in manifest.files:
        _check_key(file.path)
        blocks = -(-file.size_bytes // block)
        _require(len(file.blocks) == 8 * blocks, "a wrong number of blocks")
        digests = file.digests is msgspec.UNSET or len(file.digests) == block_digests.DIGEST_BYTES * blocks
        _require(digests, "a wrong number of block digests")
    ends = [0] * len(manifest.files)
    for item in sorted(manifest.items, key=operator.attrgetter("offset")):
        _require(item.file < len(manifest.files), "an item in no file")
        end, size = item.offset + item.length, manifest.files[item.file].size_bytes
        _require(end <= size, f"an item outside of its file ({item.fqn!r})")
        if item.offset < ends[item.file]:
            raise FormatError(f"not a valid record: it has two items in the same bytes ({item.fqn!r})")
        ends[item.file] = end
        if item.payload_offset != -1:
            payload_end = item.payload_offset + item.payload_bytes
            inside = item.offset <= item.payload_offset <= payload_end <= end
            _require(inside, f"a payload outside of its item ({item.fqn!r})")


def _check_key(path: str) -> None:
    if not is_key(path):
        raise FormatError(f"names an object outside of the checkpoint: {path[:80]!r}")


def _require(condition: bool, fault: str) -> None:
    if not condition:
        raise FormatError(f"not a valid record: it has {fault}")
