"""Make what a checkpoint names in others its own, in a copy: manifests of what is needed, as of further ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import msgspec

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.consistency.digests import DIGEST_BYTES, PROBE_BYTES
from ckpt.errors import ConfigurationError, IntegrityError, NotFound
from ckpt.format.records import CommitRecord, ManifestRef, RankManifest
from ckpt.siblings.sibling_objects import SiblingObjects


def as_ranks(record: CommitRecord) -> Iterator[tuple[ManifestRef, int]]:
    """Yield each manifest, and the rank whose it is in a copy: those of others follow the checkpoint's own."""
    number = record.world_size
    for ref in record.manifests:
        if not ref.owner:
            yield ref, ref.rank
            continue
        yield ref, number
        number += 1


def needed(
    ref: ManifestRef, rank: int, manifest: RankManifest, offsets_in: Callable[[str], Collection[int]]
) -> tuple[ManifestRef, RankManifest]:
    """Return a manifest of the files and items that are needed, as that of `rank`.

    Args:
        offsets_in: returns the offsets in a file at which items are needed.
    """
    offsets = [offsets_in(file.path) for file in manifest.files]
    numbers = [number for number, places in enumerate(offsets) if places]
    new = {old: number for number, old in enumerate(numbers)}
    kept = [(n, item) for n, item in enumerate(manifest.items) if item.offset in offsets[item.file]]
    part = msgspec.structs.replace(
        manifest,
        files=[manifest.files[number] for number in numbers],
        items=[msgspec.structs.replace(item, file=new[item.file]) for _, item in kept],
        digests=_chosen(manifest.digests, DIGEST_BYTES, [n for n, _ in kept]),
        probes=_chosen(manifest.probes, PROBE_BYTES, [n for n, _ in kept]),
    )
    nbytes = sum(file.size_bytes for file in part.files)
    facts = {"rank": rank, "files": len(part.files), "items": len(part.items), "data_bytes": nbytes}
    return msgspec.structs.replace(ref, **facts), part


def _chosen(
    packed: bytes | msgspec.UnsetType, nbytes: int, positions: Sequence[int]
) -> bytes | msgspec.UnsetType:
    if not isinstance(packed, bytes):
        return packed
    return b"".join(packed[nbytes * each : nbytes * (each + 1)] for each in positions)


def check_beside(destination: Store, record: CommitRecord) -> None:
    """Raise ConfigurationError unless what a checkpoint names in others is beside the destination too."""
    beside = SiblingObjects(destination)
    try:
        for ref in record.manifests:
            if ref.owner and not _holds(beside, ref):
                raise ConfigurationError(
                    f"this checkpoint names bytes of ../{ref.owner}, which is not beside the destination: copy with "
                    "--materialise (materialise=True), so that the copy holds all of its bytes",
                    url=destination.url,
                )
    finally:
        beside.close()


def _holds(store: Store, ref: ManifestRef) -> bool:
    try:
        data = read_bytes(store, ref.path, size_bytes=ref.size_bytes)
    except (NotFound, IntegrityError):
        return False
    return crc_text(crc64nvme(data)) == ref.crc64nvme
