"""Seal statements with a signature: in-toto in DSSE, in the bundle that the tools of Sigstore read."""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

from ckpt.errors import FormatError, IntegrityError
from ckpt.provenance.keys import Signer, is_signature, pem_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

BUNDLE_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"


class _Signature(msgspec.Struct):
    sig: str
    keyid: str = ""


class _Envelope(msgspec.Struct):
    payload: str
    payloadType: str
    signatures: list[_Signature]


class _PublicKey(msgspec.Struct):
    hint: str = ""


class _Material(msgspec.Struct):
    publicKey: _PublicKey
    tlogEntries: list[Any] = []


class _Bundle(msgspec.Struct):
    mediaType: str
    verificationMaterial: _Material
    dsseEnvelope: _Envelope


_BUNDLE = msgspec.json.Decoder(_Bundle)  # made once, before there are threads


def hint_of(public_key: ec.EllipticCurvePublicKey) -> str:
    """Tell a key from others: the SHA-256 of its PEM, as bundles name it."""
    return hashlib.sha256(pem_of(public_key)).hexdigest()


def sealed(statement: object, signer: Signer) -> bytes:
    """Sign a statement, and encode both."""
    payload = msgspec.json.encode(statement)
    return _encoded(payload, signer.sign(_authenticated(payload)), signer.public_key)


def opened(bundle: bytes, public_key: ec.EllipticCurvePublicKey) -> bytes:
    """Return the statement that this key has signed, encoded.

    Raises FormatError if it is no bundle, IntegrityError if the key has not signed it.
    """
    try:
        envelope = _BUNDLE.decode(bundle).dsseEnvelope
        payload = base64.b64decode(envelope.payload, validate=True)
        signatures = [base64.b64decode(each.sig, validate=True) for each in envelope.signatures[:1]]
    except (ValueError, binascii.Error, RecursionError) as error:
        raise FormatError(f"not a signature that can be read: {error}") from None
    if envelope.payloadType != PAYLOAD_TYPE or len(envelope.signatures) != 1:
        raise FormatError("not a signature that can be read: not one signature of an in-toto statement")
    if not is_signature(public_key, signatures[0], _authenticated(payload)):
        raise IntegrityError("not signed by this key, or changed since")
    if bundle != _encoded(payload, signatures[0], public_key):
        raise IntegrityError("changed since it was signed, though not in what was signed")
    return payload


def _encoded(payload: bytes, signature: bytes, public_key: ec.EllipticCurvePublicKey) -> bytes:
    envelope = _Envelope(_text(payload), PAYLOAD_TYPE, [_Signature(_text(signature))])
    material = _Material(_PublicKey(hint_of(public_key)))
    return msgspec.json.encode(_Bundle(BUNDLE_TYPE, material, envelope)) + b"\n"


def _authenticated(payload: bytes) -> bytes:
    """Encode what is signed (DSSE's PAE)."""
    kind = PAYLOAD_TYPE.encode()
    return b" ".join((b"DSSEv1", b"%d" % len(kind), kind, b"%d" % len(payload), payload))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()
