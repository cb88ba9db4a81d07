"""Sign with a key that never leaves its token: PKCS#11, named by a URI (RFC 7512)."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from ckpt.errors import ConfigurationError
from ckpt.provenance.keys import check_curve, hash_of

_MODULES = (
    "/usr/lib64/pkcs11",
    "/usr/lib/pkcs11",
    "/usr/lib/*/pkcs11",
    "/usr/lib/*",
    "/usr/lib",
    "/usr/lib/softhsm",
)
_MAX_PIN_BYTES = 1 << 12
_MAX_POINT_BYTES = 1 << 9
_CURVES: Mapping[bytes, ec.EllipticCurve] = {
    bytes.fromhex("06082a8648ce3d030107"): ec.SECP256R1(),
    bytes.fromhex("06052b81040022"): ec.SECP384R1(),
    bytes.fromhex("06052b81040023"): ec.SECP521R1(),
}
"""By the identifiers of RFC 5480, DER encoded."""


class TokenSigner:
    """A private key in a token."""

    def __init__(self, uri: str) -> None:
        """Open the session. Raises ConfigurationError if there is no such module, token or key."""
        try:
            import PyKCS11
        except ImportError:
            raise ConfigurationError(
                "keys in a token need the package PyKCS11: pip install './ckpt-storage[pkcs11]'"
            ) from None
        self._api: Any = PyKCS11
        self._path, self._query = _parsed(uri)
        try:
            self._library = PyKCS11.PyKCS11Lib()
            self._library.load(_module(self._query))
            self._session = self._library.openSession(self._slot(), PyKCS11.CKF_SERIAL_SESSION)
            pin = _pin(self._query)
            if pin is not None:
                self._session.login(pin)
            self._key = self._find(PyKCS11.CKO_PRIVATE_KEY, "private")
            self.public_key = self._public()
        except PyKCS11.PyKCS11Error as error:
            raise ConfigurationError(f"the token of {_shown(uri)} cannot be used: {error}") from None
        check_curve(self.public_key, _shown(uri))

    def sign(self, data: bytes) -> bytes:
        """Return the ECDSA signature of bytes, DER encoded."""
        digest = hashes.Hash(hash_of(self.public_key))
        digest.update(data)
        mechanism = self._api.Mechanism(self._api.CKM_ECDSA, None)
        try:
            raw = bytes(self._session.sign(self._key, digest.finalize(), mechanism))
        except self._api.PyKCS11Error as error:
            raise ConfigurationError(f"the token did not sign: {error}") from None
        half = len(raw) // 2
        return encode_dss_signature(int.from_bytes(raw[:half], "big"), int.from_bytes(raw[half:], "big"))

    def _slot(self) -> Any:
        for slot in self._library.getSlotList(tokenPresent=True):
            token = self._library.getTokenInfo(slot)
            facts = {"token": token.label, "serial": token.serialNumber, "model": token.model}
            if all(
                self._path.get(name, b"").decode() in ("", str(value).strip("\0 "))
                for name, value in facts.items()
            ):
                return slot
        raise ConfigurationError(
            "no token of that name is there; `softhsm2-util --show-slots` or your vendor's tool lists them"
        )

    def _find(self, kind: int, shown: str) -> Any:
        wanted: list[tuple[int, Any]] = [(self._api.CKA_CLASS, kind)]
        if label := self._path.get("object"):
            wanted.append((self._api.CKA_LABEL, label.decode()))
        if key_id := self._path.get("id"):
            wanted.append((self._api.CKA_ID, tuple(key_id)))
        if len(wanted) == 1:
            raise ConfigurationError("name the key in the token: pkcs11:token=...;object=LABEL, or id=%01")
        found = self._session.findObjects(wanted)
        if len(found) != 1:
            raise ConfigurationError(f"the token has {len(found)} {shown} keys of that name, not one")
        return found[0]

    def _public(self) -> ec.EllipticCurvePublicKey:
        key = self._find(self._api.CKO_PUBLIC_KEY, "public")
        names = [self._api.CKA_EC_PARAMS, self._api.CKA_EC_POINT]
        curve, point = map(bytes, self._session.getAttributeValue(key, names))
        kind = _CURVES.get(curve)
        if kind is None:
            raise ConfigurationError("the key in the token is of another curve than P-256, P-384 and P-521")
        return ec.EllipticCurvePublicKey.from_encoded_point(kind, _octets(point))


def _octets(der: bytes) -> bytes:
    """Take what an OCTET STRING holds; some tokens give it without the frame."""
    if der[:1] != b"\4" or len(der) > _MAX_POINT_BYTES:
        return der
    header = 3 if der[1:2] == b"\x81" else 2
    inner = der[header:]
    return inner if inner[:1] == b"\4" and der[header - 1] == len(inner) else der


def _parsed(uri: str) -> tuple[dict[str, bytes], dict[str, str]]:
    path, _, query = uri[len("pkcs11:") :].partition("?")
    pairs = (part.partition("=") for part in path.split(";") if part)
    attributes = {name: unquote_to_bytes(value) for name, _, value in pairs}
    for name, value in attributes.items():
        if name != "id" and not _is_text(value):
            raise ConfigurationError(f"{name} of {_shown(uri)} is not UTF-8")
    pairs = (part.partition("=") for part in query.split("&") if part)
    return attributes, {name: unquote(value) for name, _, value in pairs}


def _is_text(value: bytes) -> bool:
    try:
        value.decode()
        return True
    except UnicodeDecodeError:
        return False


def _module(query: dict[str, str]) -> str:
    """Find the library that talks to the token."""
    if path := query.get("module-path"):
        return path
    name = query.get("module-name") or os.environ.get("PKCS11_MODULE_PATH", "")
    if os.path.isabs(name):
        return name
    for folder in _MODULES if name else ():
        found = [
            *glob.glob(f"{folder}/{name}.so"),
            *glob.glob(f"{folder}/lib{name}.so"),
            *glob.glob(f"{folder}/*/lib{name}.so"),
        ]
        if found:
            return found[0]
    raise ConfigurationError(
        "name the token's library: pkcs11:...?module-path=/usr/lib/softhsm/libsofthsm2.so"
    )


def _pin(query: dict[str, str]) -> str | None:
    if "pin-value" in query:
        return query["pin-value"]
    source = query.get("pin-source")
    if source is None:
        return None
    path = source.removeprefix("file:").replace("//", "/", 1) if source.startswith("file:") else source
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(_MAX_PIN_BYTES).strip()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the PIN in {path} cannot be read: {error}") from None


def _shown(uri: str) -> str:
    """Write a URI without its query, which may hold the PIN."""
    return uri.partition("?")[0]
