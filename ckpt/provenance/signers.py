"""Open the private key of signatures, wherever it is."""

from __future__ import annotations

import os

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ckpt.errors import ConfigurationError
from ckpt.provenance.keys import ADVICE, KeySigner, Signer, check_curve, read_key


def open_signer(key: str | os.PathLike[str], password: str | None = None) -> Signer:
    """Open a private key: the path of a PEM file, or a `pkcs11:` URI (RFC 7512).

    Args:
        password: of an encrypted PEM file; of a token it is the PIN in the URI (`pin-value`, `pin-source`).

    Raises ConfigurationError if there is no such key, or it is of another kind.
    """
    text = os.fspath(key)
    if text[:7].lower() == "pkcs11:":
        from ckpt.provenance.pkcs11 import TokenSigner

        return TokenSigner(text)
    data = read_key(text)
    try:
        private = serialization.load_pem_private_key(data, None if password is None else password.encode())
    except TypeError as error:  # a password without need, or none
        advice = "it is that in CKPT_KEY_PASSWORD, or password="
        raise ConfigurationError(f"{text}: {str(error).rstrip('.').lower()}; {advice}") from None
    except ValueError as error:
        raise ConfigurationError(f"{text} is not a private key that can be read: {error}") from None
    except UnsupportedAlgorithm as error:
        raise ConfigurationError(f"{text} is a key of a kind that is not supported: {error}") from None
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"{text} is no key of an elliptic curve; {ADVICE}")
    check_curve(private.public_key(), text)
    return KeySigner(private)
