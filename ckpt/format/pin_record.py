"""Encode and decode pins: who refers to the checkpoint in whose folder they stand (`docs/format.md`)."""

from __future__ import annotations

import msgspec

from ckpt.consistency.seal import seal_json, unseal_json
from ckpt.errors import FormatError
from ckpt.format.bounds import Number, Token
from ckpt.format.names import ObjectName, is_sibling

MAX_PIN_BYTES = 64 << 20
_FORMAT, _VERSION = "ckpt-storage pin", 1


class PinRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A pin.

    Attributes:
        referrer: `../NAME`, the folder of the checkpoint that refers to this one.
        id: that of its commit.
        manifests: the keys of the manifests here whose files it names.
    """

    format: str = _FORMAT
    version: Number = _VERSION
    referrer: str
    id: Token
    manifests: list[str]

    @property
    def name(self) -> str:
        """The name of the referrer's folder."""
        return self.referrer.removeprefix("../")

    @property
    def stems(self) -> set[str]:
        """What the names of the objects begin with that it holds."""
        return {key.removesuffix(".json") for key in self.manifests}


_decoder = msgspec.json.Decoder(PinRecord)  # made once, before there are threads


def encode_pin(pin: PinRecord) -> bytes:
    """Encode a pin, sealed with its checksum."""
    return seal_json(msgspec.json.encode(pin))


def decode_pin(data: bytes | bytearray, *, url: str, key: str) -> PinRecord:
    """Decode a pin. Raises IntegrityError (damaged), FormatError (not understood)."""
    body = unseal_json(data, url=url, key=key)
    try:
        pin = _decoder.decode(body)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not a pin: {error}", url=url, key=key) from error
    if pin.format != _FORMAT or pin.version != _VERSION:
        raise FormatError("a newer version of this library wrote it; update this one", url=url, key=key)
    names = map(ObjectName.parse, pin.manifests)
    if not (
        pin.referrer.startswith("../")
        and is_sibling(pin.name)
        and all(name is not None and name.kind == "json" for name in names)
    ):
        raise FormatError("not a pin: it names impossible objects", url=url, key=key)
    return pin
