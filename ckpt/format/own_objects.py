"""List the objects that a commit owns and that are stored, for those who delete them."""

from __future__ import annotations

from ckpt.backends.base import Store
from ckpt.format.names import ObjectName, is_our_name
from ckpt.format.records import CommitRecord


def own_objects(store: Store, record: CommitRecord) -> dict[str, int]:
    """Return the keys and sizes in bytes of a checkpoint's objects, data first; not of the commit record.

    Data files come from a listing: a record of a few bytes can claim any number of them. One that the listing shows
    late is left for `ckpt gc`. Of the other objects only names that this library gives are returned.
    """
    stems = {ref.stem for ref in record.own_manifests}
    found: dict[ObjectName, tuple[str, int]] = {}
    for stat in store.list():
        name = ObjectName.parse(stat.key)
        if name is not None and name.is_data and name.stem in stems:
            found[name] = stat.key, stat.size_bytes
    records = ((ref.path, ref.size_bytes) for ref in (*record.own_manifests, record.described_by))
    data = (found[name] for name in sorted(found, key=lambda name: (name.rank, name.token, name.number or 0)))
    return dict([*data, *((key, size) for key, size in records if is_our_name(key))])
