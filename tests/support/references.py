"""Save checkpoints that name bytes of others, by the coordinator alone: no model, no torch, a few requests."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from ckpt.backends.base import Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.commit import COMMIT_KEY, proves_no_commit
from ckpt.errors import CheckpointError, NotCommitted, NotFound
from ckpt.format.columns import Columns, ObjectRow
from ckpt.format.index import decode_index
from ckpt.format.names import data_key, manifest_key, owned_path, split_path
from ckpt.format.records import (
    REFERENCE_VERSION,
    BaseRef,
    CommitRecord,
    FileRecord,
    ItemRecord,
    ManifestRef,
    RankManifest,
    decode_commit,
    decode_manifest,
    encode,
    read_commit,
)
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.save_objects import SaveObjects

_BLOCK_BYTES = 1 << 19


@dataclass(frozen=True)
class Carried:
    """What a save takes over from a checkpoint that it has opened."""

    name: str
    record: CommitRecord
    columns: Columns


def open_base(beside: Store, name: str) -> Carried:
    """Open a checkpoint to refer to. Raises NotCommitted."""
    with contextlib.closing(beside.parent()) as root:
        store = PrefixStore(root, name)
        commit = read_commit(store)
        if commit is None:
            raise NotCommitted("there is no base", url=store.url)
        index = commit.record.described_by
        data = bytes(read_bytes(store, index.path, size_bytes=index.size_bytes))
        return Carried(name, commit.record, decode_index(data, url=store.url, key=index.path))


def save(url: str, bases: Sequence[str] = (), *, between: Callable[[], object] = lambda: None) -> str:
    """Save one new object, and all that the checkpoints `bases` beside it hold; return the id.

    `between` is called when all is written but the index.
    """
    with contextlib.closing(open_store(url)) as store:
        objects = SaveObjects()
        coordinator = Coordinator(store, objects)
        coordinator.look(overwrite=True)
        carried = [open_base(store, base) for base in bases]
        store.prepare("rank-00000")
        try:
            own = _write(store, objects)
            between()
            columns, record = _describe(own, objects.token, carried)
            coordinator.commit(columns, record)
        except CheckpointError as error:
            if proves_no_commit(error):
                objects.discard(store)
            raise
        return objects.token


def _write(store: Store, objects: SaveObjects) -> ManifestRef:
    data, token = objects.token.encode(), objects.token
    files = [FileRecord(path=data_key(0, token, 0), size_bytes=len(data), blocks=_crc(data))]
    items = [ItemRecord(f"of {token}", None, 0, 0, len(data), -1, 0)]
    manifest = RankManifest(rank=0, token=token, block_size_bytes=_BLOCK_BYTES, files=files, items=items)
    stored = encode(manifest)
    for key, body in ((data_key(0, token, 0), data), (manifest_key(0, token), stored)):
        objects.add(key)
        put_bytes(store, key, body)
    return ManifestRef(
        path=manifest_key(0, token),
        size_bytes=len(stored),
        crc64nvme=crc_text(crc64nvme(stored)),
        rank=0,
        files=1,
        items=1,
        data_bytes=len(data),
    )


def _crc(data: bytes) -> bytes:
    return crc64nvme(data).to_bytes(8, "little")


def _describe(own: ManifestRef, token: str, carried: Sequence[Carried]) -> tuple[Columns, CommitRecord]:
    columns = Columns([data_key(0, token, 0)], {f"of {token}": ObjectRow(0, 0, len(token))}, save_id=token)
    manifests, bases = [own], dict[str, BaseRef]()
    for base in carried:
        for fqn, row in base.columns.entries.items():
            assert isinstance(row, ObjectRow)
            if fqn in columns.entries:
                continue
            owner, key = split_path(base.columns.files[row.file])
            owner = owner or base.name
            columns.files.append(owned_path(owner, key))
            columns.entries[fqn] = ObjectRow(len(columns.files) - 1, row.offset, row.length)
            stem = key.rpartition("-")[0]
            for ref in base.record.manifests:
                if split_path(ref.path)[1] == f"{stem}.json":
                    path = owned_path(owner, f"{stem}.json")
                    manifests.append(msgspec.structs.replace(ref, path=path))
            old = base.record.owners.get(owner)
            own_id = base.record.id if old is None else old.id
            if owner in bases and bases[owner].id != own_id:
                raise NotFound(f"the bases name {owner} as it was before and after it was replaced")
            size = row.length + (bases[owner].carried_bytes if owner in bases else 0)
            bases[owner] = BaseRef(path=f"../{owner}", id=own_id, data_bytes=size, carried_bytes=size)
    record = CommitRecord(
        version=REFERENCE_VERSION,
        id=token,
        created_at="2026-01-01T00:00:00+00:00",
        library="",
        torch="",
        world_size=1,
        data_bytes=own.data_bytes,
        manifests=manifests,
        referable=True,
        bases=list(bases.values()),
    )
    return columns, record


def named_objects(
    place: str, commit: bytes, truth: Callable[[str], bytes | None]
) -> Iterator[tuple[str, bytes]]:
    """Yield the name and bytes of all objects that a commit at `place` names, also those of others.

    Raises AssertionError where one is missing or another one than the commit says. `truth` returns what
    a name (`PLACE/KEY`) holds.
    """
    record = decode_commit(commit, url=place, key=COMMIT_KEY)

    def look(path: str) -> tuple[str, bytes]:
        owner, key = split_path(path)
        name = f"{owner or place}/{key}"
        data = truth(name)
        assert data is not None, f"the commit at {place} names {name}, which is not there"
        return name, data

    for ref in record.refs:
        name, data = look(ref.path)
        assert crc_text(crc64nvme(data)) == ref.crc64nvme, f"the commit at {place} names another {name}"
        yield name, data
        if not isinstance(ref, ManifestRef):
            continue
        for file in decode_manifest(data, url=place, key=name).files:
            name, data = look(owned_path(ref.owner, file.path))
            assert [crc64nvme(data)] == list(file.block_crcs()), f"the commit at {place} names another {name}"
            yield name, data
