"""Open the keys of signatures: elliptic curves, from PEM files, or in a token by a PKCS#11 URI."""

from __future__ import annotations

import os
from typing import Protocol

from ckpt.errors import ConfigurationError

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError:
    raise ConfigurationError(
        "signatures need the package cryptography: pip install './ckpt-storage[sign]'"
    ) from None

_CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_KEY_BYTES = 1 << 16
ADVICE = "make one with `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`"


class Signer(Protocol):
    """A private key."""

    @property
    def public_key(self) -> ec.EllipticCurvePublicKey: ...

    def sign(self, data: bytes) -> bytes:
        """Return the ECDSA signature of bytes, DER encoded."""


class KeySigner:
    """A private key in memory."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key, self.public_key = key, key.public_key()

    def sign(self, data: bytes) -> bytes:
        return self._key.sign(data, ec.ECDSA(hash_of(self.public_key)))


def open_public_key(key: str | os.PathLike[str]) -> ec.EllipticCurvePublicKey:
    """Open a public key, the path of a PEM file. Raises ConfigurationError as `open_signer`."""
    text = os.fspath(key)
    data = read_key(text)
    if b"PRIVATE KEY" in data:
        raise ConfigurationError(
            f"{text} is a private key; to check signatures give the public one, which `openssl pkey -in {text} "
            "-pubout` prints"
        )
    try:
        public = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigurationError(f"{text} is not a public key that can be read: {error}") from None
    if not isinstance(public, ec.EllipticCurvePublicKey):
        raise ConfigurationError(f"{text} is no key of an elliptic curve; {ADVICE}")
    check_curve(public, text)
    return public


def is_signature(public_key: ec.EllipticCurvePublicKey, signature: bytes, data: bytes) -> bool:
    """Tell whether this is the signature of these bytes by that key."""
    try:
        public_key.verify(signature, data, ec.ECDSA(hash_of(public_key)))
        return True
    except InvalidSignature:
        return False


def pem_of(public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Encode a public key as PEM."""
    return public_key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def hash_of(public_key: ec.EllipticCurvePublicKey) -> hashes.HashAlgorithm:
    """Return the hash that goes with a curve."""
    size = public_key.curve.key_size
    return hashes.SHA256() if size <= 256 else hashes.SHA384() if size <= 384 else hashes.SHA512()


def check_curve(public_key: ec.EllipticCurvePublicKey, shown: str) -> None:
    """Raise ConfigurationError if signatures by this curve are not made."""
    if public_key.curve.name not in _CURVES:
        raise ConfigurationError(f"{shown} is a key of the curve {public_key.curve.name}; {ADVICE}")


def read_key(path: str) -> bytes:
    """Read the file of a key. Raises ConfigurationError."""
    try:
        with open(path, "rb") as file:
            return file.read(_MAX_KEY_BYTES)
    except OSError as error:
        raise ConfigurationError(f"the key {path} cannot be read: {error.strerror or error}") from None
