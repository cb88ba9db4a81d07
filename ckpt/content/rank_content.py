"""Say what one rank has seen of what it wrote, and of what it holds together with others."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np

from ckpt.content.counters import Seen, keep_highest
from ckpt.content.looks import FileLook
from ckpt.content.parts import MAX_PARTS

_MAX_NAMED = 4
_DIGEST_BYTES = 8


class PartSeen(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has seen of a part of the state.

    Attributes:
        values: a digest of what it wrote.
        looked_at: how many chunks of tensors of floats it has looked at.
        zero, not_finite, infinite: how many of them had only zeros, a NaN (or an infinity among an optimizer's moments),
            any other infinity.
        zero_names, not_finite_names, infinite_names: some of them.
        counters: by name, with an FQN.
    """

    values: bytes
    zero: int
    not_finite: int
    zero_names: list[str]
    not_finite_names: list[str]
    looked_at: int = 0
    counters: dict[str, Seen] = {}
    infinite: int = 0
    infinite_names: list[str] = []


class RankContent(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells the coordinator with its receipt.

    Attributes:
        parts: by name, those of which it wrote something.
        replicas: pairs of digests: of which tensors others hold too, and of a sample of their bytes here.
    """

    parts: dict[str, PartSeen]
    replicas: list[tuple[bytes, bytes]] = []


_CONTENT = msgspec.msgpack.Decoder(RankContent)  # made once, before there are threads
NOTHING = RankContent({})


def decode_content(data: bytes) -> RankContent:
    """Decode what a rank has told; nothing if it looked at nothing."""
    return _CONTENT.decode(data) if data else NOTHING


def encode_content(content: RankContent) -> bytes:
    return msgspec.msgpack.encode(content)


def seen_in(
    files: Iterable[tuple[FileLook, Sequence[int]]], objects: Iterable[tuple[str, str, Seen]] = ()
) -> dict[str, PartSeen]:
    """Sum up what was seen in files, with the checksums of each one's blocks, and counters that are objects."""
    crcs: dict[str, list[int]] = {}
    not_finite: list[tuple[str, str]] = []
    infinite: list[tuple[str, str]] = []
    zero: list[tuple[str, str]] = []
    looked_at: Counter[str] = Counter()
    counters: dict[str, dict[str, Seen]] = {}
    for part, name, seen in objects:
        keep_highest(counters.setdefault(part, {}), [(name, seen)])
    for look, blocks in files:
        for part, values in look.parts(blocks).items():
            crcs.setdefault(part, []).extend(values)
        not_finite += look.not_finite()
        infinite += look.infinite()
        zero += look.zero()
        looked_at.update(look.looked_at())
        for part, found in look.counters.items():
            keep_highest(counters.setdefault(part, {}), found.items())
    bad, endless, empty = (_by_part(found) for found in (not_finite, infinite, zero))
    parts = {
        part: PartSeen(
            _digest(crcs.get(part, [])),
            len(empty.get(part, ())),
            len(bad.get(part, ())),
            empty.get(part, [])[:_MAX_NAMED],
            bad.get(part, [])[:_MAX_NAMED],
            looked_at[part],
            counters.get(part, {}),
            len(endless.get(part, ())),
            endless.get(part, [])[:_MAX_NAMED],
        )
        for part in sorted({*crcs, *bad, *endless, *empty, *looked_at})
    }
    if len(parts) > MAX_PARTS:
        parts = as_one_part(parts)
        counters = {part: found for part, found in counters.items() if not part}
    # Parts without tensors do not count: those of all others would be one.
    more = sorted(counters.keys() - parts.keys())[:MAX_PARTS]
    return parts | {part: PartSeen(b"", 0, 0, [], [], 0, counters[part]) for part in more}


def as_one_part(parts: Mapping[str, PartSeen]) -> dict[str, PartSeen]:
    """Sum up the parts as one without a name; of counters those that stand beside the parts are kept."""
    if parts.keys() <= {""}:
        return dict(parts)
    seen = [each for _, each in sorted(parts.items())]
    values = b"".join(each.values for each in seen)
    top = parts.get("")
    return {
        "": PartSeen(
            hashlib.blake2b(values, digest_size=_DIGEST_BYTES).digest() if values else b"",
            sum(each.zero for each in seen),
            sum(each.not_finite for each in seen),
            [name for each in seen for name in each.zero_names][:_MAX_NAMED],
            [name for each in seen for name in each.not_finite_names][:_MAX_NAMED],
            sum(each.looked_at for each in seen),
            {} if top is None else top.counters,
            sum(each.infinite for each in seen),
            [name for each in seen for name in each.infinite_names][:_MAX_NAMED],
        )
    }


def _by_part(tensors: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for part, name in tensors:
        names.setdefault(part, []).append(name)
    return names


def _digest(crcs: Sequence[int]) -> bytes:
    packed = np.array(crcs, dtype="<u8").tobytes()
    return hashlib.blake2b(packed, digest_size=_DIGEST_BYTES).digest() if crcs else b""
