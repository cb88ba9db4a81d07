"""Add what is carried to the records of a save."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from ckpt.errors import CheckpointError
from ckpt.format.columns import Columns, ObjectRow
from ckpt.format.names import ObjectName, manifest_key, owned_path, split_path
from ckpt.format.records import REFERENCE_VERSION, BaseRef, CommitRecord, ManifestRef
from ckpt.references.base import Base
from ckpt.references.owners import sum_by_owner


def referable(record: CommitRecord) -> CommitRecord:
    """Make the record of a checkpoint that others may refer to."""
    return msgspec.structs.replace(record, version=REFERENCE_VERSION, referable=True)


def carry(
    columns: Columns, record: CommitRecord, base: Base, carried: Mapping[str, bool | None]
) -> tuple[Columns, CommitRecord]:
    """Add entries of a base to those of a save; references stay flat, each names the first owner.

    `carried` says of each whether it requires a gradient; None as in the base.
    """
    files = list(columns.files)
    numbers: dict[int, int] = {}

    def number(file: int) -> int:
        if file not in numbers:
            numbers[file] = len(files)
            files.append(base.path(file))
        return numbers[file]

    entries, table = dict(columns.entries), np.zeros(len(base.columns.files), dtype=np.int64)
    for fqn, requires_grad in carried.items():
        if fqn in entries:
            raise CheckpointError(f"{fqn!r} was both carried and written")
        entry = base.columns.entries[fqn]
        if isinstance(entry, ObjectRow):
            entries[fqn] = dataclasses.replace(entry, file=number(entry.file))
            continue
        for file in entry.file[np.sort(np.unique(entry.file, return_index=True)[1])].tolist():
            table[file] = number(file)
        grad = entry.requires_grad if requires_grad is None else requires_grad
        entries[fqn] = entry.renumbered(table, grad)
    total = sum_by_owner(base.bytes_by_owner(fqn) for fqn in carried)
    ids = {base.name: base.record.id} | {owner: ref.id for owner, ref in base.record.owners.items()}
    data_bytes = base.data_bytes
    bases = [
        BaseRef(path=f"../{owner}", id=ids[owner], data_bytes=data_bytes[owner], carried_bytes=nbytes)
        for owner, nbytes in sorted(total.items())
    ]
    manifests = [*record.manifests, *_manifests(base, numbers)]
    planner_data = _planner_data(columns.planner_data, base.columns.planner_data, carried)
    both = dataclasses.replace(columns, files=files, entries=entries, planner_data=planner_data)
    return both, msgspec.structs.replace(referable(record), manifests=manifests, bases=bases or msgspec.UNSET)


def _manifests(base: Base, files: Mapping[int, int]) -> list[ManifestRef]:
    """List the manifests that describe some files of a base, as a checkpoint beside it names them."""
    known = {
        owned_path(ref.owner or base.name, split_path(ref.path)[1]): ref for ref in base.record.manifests
    }
    paths = set()
    for file in files:
        owner, key = split_path(base.path(file))
        name = ObjectName.parse(key)
        assert name is not None  # the index was checked
        paths.add(owned_path(owner, manifest_key(name.rank, name.token)))
    return [msgspec.structs.replace(known[path], path=path) for path in sorted(paths)]


def _planner_data(own: Any, others: Any, carried: Mapping[str, bool | None]) -> Any:
    """Add what the planner noted of carried entries; DCP notes the place of each in nested containers."""
    if not isinstance(own, dict) or not isinstance(others, dict):
        return own
    return own | {fqn: others[fqn] for fqn in carried if fqn in others and fqn not in own}
