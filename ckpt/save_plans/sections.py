"""Describe what ranks hold in sections that do not depend on the rank."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from ckpt.save_plans.rules import Rule

_DIGEST_BYTES = 16
_LEVEL = 1
_MEAN_ITEMS = 64

Path = tuple[str | int, ...]


class Held(msgspec.Struct, frozen=True, array_like=True):
    """What a rank holds under a name.

    Attributes:
        dtype: by its name; None for an object.
        shape: of the whole tensor.
        rule: how the rank's chunk follows from its coordinates; None if it is told apart, as a row.
    """

    dtype: str | None
    shape: tuple[int, ...] = ()
    requires_grad: bool = False
    rule: Rule | None = None


OBJECT = Held(None)


class Section(msgspec.Struct, frozen=True, array_like=True, eq=False):
    """Some items of a rank that follow one another.

    Attributes:
        kinds: what is held, each kind once; `kind` is the number of each item's.
        paths: where each item is in nested containers; None if the planner does not flatten them.
    """

    names: list[str]
    kinds: list[Held]
    kind: list[int]
    paths: list[Path] | None

    def items(self) -> Iterator[tuple[str, Held]]:
        for name, kind in zip(self.names, self.kind, strict=True):
            yield name, self.kinds[kind]

    @property
    def cells(self) -> int:
        """Numbers that a rank tells apart: offsets and sizes of its rows."""
        return sum(2 * len(held.shape) for _, held in self.items() if is_row(held))


def is_row(held: Held) -> bool:
    """Tell whether a rank tells its chunk apart."""
    return held.dtype is not None and held.rule is None


_SECTION = msgspec.msgpack.Decoder(Section)  # made once, before there are threads


def encode_section(section: Section) -> tuple[bytes, bytes]:
    """Return a digest of a section, and its content."""
    encoded = msgspec.msgpack.encode(section)
    return digest_of([encoded]), zlib.compress(encoded, _LEVEL)


def decode_section(content: bytes) -> Section:
    return _SECTION.decode(zlib.decompress(content))


def digest_of(parts: Iterable[bytes]) -> bytes:
    """Digest parts, with the length of each."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.digest()


def split_digests(digests: bytes) -> list[bytes]:
    return [digests[at : at + _DIGEST_BYTES] for at in range(0, len(digests), _DIGEST_BYTES)]


def make_sections(
    names: Sequence[str], helds: Sequence[Held], paths: Sequence[Path] | None
) -> Iterator[Section]:
    """Cut items into sections, after names that say so: what is inserted changes one section, not all that follow."""
    begin = 0
    for end, name in enumerate(names, 1):
        is_cut = zlib.crc32(name.encode(errors="surrogatepass")) % _MEAN_ITEMS == 0
        if is_cut or end == len(names):
            kinds: dict[Held, int] = {}
            kind = [kinds.setdefault(held, len(kinds)) for held in helds[begin:end]]
            part = None if paths is None else list(paths[begin:end])
            yield Section(list(names[begin:end]), list(kinds), kind, part)
            begin = end
