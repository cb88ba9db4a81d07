"""Find a record of a checkpoint in a second place: the same bytes, or what a copy by `ckpt cp` tells of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import msgspec

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency.block_digests import digest_of
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.errors import CheckpointError
from ckpt.format.index import encode_index
from ckpt.format.names import ObjectName
from ckpt.format.records import CommitRecord, ManifestRef, ObjectRef, StoredCommit, encode
from ckpt.reading.checkpoint import ReadSettings
from ckpt.reading.opening import open_checkpoint
from ckpt.tools.record_checks import checkable, read_manifest

AT_ONCE = ReadSettings(visibility_timeout_s=0.0)


def find_record(ref: ObjectRef, commit: CommitRecord, store: Store, theirs: StoredCommit) -> bytes | None:
    """Return the bytes of a record of `commit`, found in `store`, where `theirs` is; None if they are not there.

    A copy has names of its own, in its records too. With the names of `commit` those become its records; whether they
    are the same bytes, their checksum tells, and their digest.
    """
    algorithm = checkable(commit, must=False)
    for made in (_same(ref, store), _renamed(ref, commit, store, theirs)):
        for data in made:
            fits = len(data) == ref.size_bytes and crc_text(crc64nvme(data)) == ref.crc64nvme
            if fits and (algorithm is None or digest_of(algorithm, data).hex() == ref.digest):
                return data
    return None


def same_rank(ref: ManifestRef, theirs: StoredCommit) -> ManifestRef | None:
    """Return the manifest of the same rank."""
    return next((each for each in theirs.record.own_manifests if each.rank == ref.rank), None)


def _same(ref: ObjectRef, store: Store) -> Iterator[bytes]:
    try:
        yield bytes(read_bytes(store, ref.path, size_bytes=ref.size_bytes))
    except CheckpointError:
        return


def _renamed(ref: ObjectRef, commit: CommitRecord, store: Store, theirs: StoredCommit) -> Iterator[bytes]:
    if not isinstance(ref, ManifestRef):
        if commit.has_index:
            yield _renamed_index(commit, store, theirs)
        return
    other, name = same_rank(ref, theirs), ObjectName.parse(ref.path)
    paths = ref.data_keys(of_model=commit.is_model)
    if other is None or name is None or paths is None:
        return
    manifest = read_manifest(store, AT_ONCE, theirs, other)
    if len(manifest.files) == ref.files:
        files = [
            msgspec.structs.replace(file, path=path) for file, path in zip(manifest.files, paths, strict=True)
        ]
        yield encode(msgspec.structs.replace(manifest, rank=ref.rank, token=name.token, files=files))


def _renamed_index(commit: CommitRecord, store: Store, theirs: StoredCommit) -> bytes:
    ranks = {ref.rank: ref for ref in commit.own_manifests}
    ours = {other.stem: ranks[other.rank] for other in theirs.record.own_manifests if other.rank in ranks}
    columns = open_checkpoint(store, AT_ONCE).columns
    files = [_renamed_file(path, ours, of_model=commit.is_model) for path in columns.files]
    return encode_index(dataclasses.replace(columns, files=files, save_id=commit.id))


def _renamed_file(path: str, ours: Mapping[str, ManifestRef], *, of_model: bool) -> str:
    """Name a data file as `ours` do, which are by the stems of the others; one of another checkpoint stays."""
    name = ObjectName.parse(path)
    ref = None if name is None or not name.is_data else ours.get(name.stem)
    key = None if ref is None or name is None else ref.data_key(name.number or 0, of_model=of_model)
    return key or path
