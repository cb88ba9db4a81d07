"""Sign a folder of a model for others: the `model.sig` that OpenSSF's `model_signing` verifies."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt.errors import ConfigurationError, short_traceback
from ckpt.provenance.envelope import STATEMENT_TYPE, sealed
from ckpt.provenance.signers import open_signer

SIGNATURE_NAME = "model.sig"
_UNFINISHED = f"{SIGNATURE_NAME}.new"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"

_IGNORED = (".git", ".gitattributes", ".github", ".gitignore")
"""What `model_signing` ignores too."""

_MAX_FILES = 1 << 20
_THREADS = 8


@dataclass(frozen=True)
class SignedExport:
    """The result of `ckpt.sign_export`.

    Attributes:
        signature: the path of the signature.
        files: how many were signed.
        digest: over the digests of all files, as the signature names the folder.
    """

    folder: str
    signature: str
    files: int
    digest: str


@short_traceback
def sign_export(
    folder: str | os.PathLike[str], key: str | os.PathLike[str], *, password: str | None = None
) -> SignedExport:
    """Sign all files of a local folder, such as one that `ckpt convert --to safetensors` has made.

    The signature is the folder's `model.sig`, for `model_signing verify key`.

    Args:
        key, password: as for `ckpt.sign`.

    Raises ConfigurationError if the folder or the key cannot be used.
    """
    path = os.path.abspath(folder)
    if not os.path.isdir(path):
        raise ConfigurationError(
            f"{os.fspath(folder)} is no folder of this machine; sign an export where it was made"
        )
    signer = open_signer(key, password)
    names = sorted(_files(path))
    if not names:
        raise ConfigurationError(f"{os.fspath(folder)} has no files to be signed")
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1), "ckpt-sign") as threads:
        digests = list(threads.map(lambda name: _sha256(os.path.join(path, name)), names))
    root = hashlib.sha256(b"".join(digests)).hexdigest()
    serialization = {
        "method": "files",
        "hash_type": "sha256",
        "allow_symlinks": False,
        "ignore_paths": [*_IGNORED, SIGNATURE_NAME],
    }
    resources = [
        {"name": name, "algorithm": "sha256", "digest": digest.hex()}
        for name, digest in zip(names, digests, strict=True)
    ]
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": os.path.basename(path), "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {"serialization": serialization, "resources": resources},
    }
    target = os.path.join(path, SIGNATURE_NAME)
    _write(target, sealed(statement, signer))
    return SignedExport(path, target, len(names), f"sha256:{root}")


def _files(root: str) -> Iterator[str]:
    """List the files below a folder, relative and with `/`.

    Raises ConfigurationError for what cannot be signed, and for very many.
    """
    count = 0
    for folder, names, files in os.walk(root, onerror=_refuse):
        if folder == root:
            names[:] = [name for name in names if name not in _IGNORED]
            # What an interrupted signature has left is replaced by this one.
            files = [name for name in files if name not in (*_IGNORED, SIGNATURE_NAME, _UNFINISHED)]
        for name in [*names, *files]:
            path = os.path.join(folder, name)
            if os.path.islink(path):
                raise ConfigurationError(f"{path} is a link, which is not signed: copy what it names")
            if name.encode(errors="ignore") != os.fsencode(name):
                raise ConfigurationError(
                    f"{path!a} has a name that is not UTF-8, which no signature can hold"
                )
        for name in files:
            path = os.path.join(folder, name)
            if not os.path.isfile(path):
                raise ConfigurationError(f"{path} is no regular file, and cannot be signed; remove it")
        count += len(files)
        if count > _MAX_FILES:
            raise ConfigurationError(f"{root} has more than {_MAX_FILES:,} files")
        for name in files:
            yield os.path.relpath(os.path.join(folder, name), root).replace(os.sep, "/")


def _refuse(error: OSError) -> None:
    """Refuse a folder that cannot be listed: its files would be left out of what is signed."""
    raise ConfigurationError(f"{error.filename} cannot be read: {error.strerror or error}") from None


def _sha256(path: str) -> bytes:
    digest = hashlib.sha256()
    memory = memoryview(bytearray(1 << 20))
    try:
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(memory):
                digest.update(memory[:size])
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None
    return digest.digest()


def _write(path: str, data: bytes) -> None:
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{path}.new")
        with open(f"{path}.new", "xb") as file:  # no link that somebody has put there
            file.write(data)
        os.replace(f"{path}.new", path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from None
