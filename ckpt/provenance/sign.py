"""Sign a checkpoint: `ckpt.sign`."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckpt.backends.base import Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency import environment
from ckpt.consistency.expected import checked_expect, commit_digest
from ckpt.errors import (
    CheckpointError,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    StorageError,
    short_traceback,
)
from ckpt.format.names import is_our_name, last_segment, owned_path, signature_key, step_of
from ckpt.format.records import CommitRecord, read_commit
from ckpt.format.run_record import new_run_id
from ckpt.provenance.envelope import hint_of, sealed
from ckpt.provenance.signers import open_signer
from ckpt.provenance.statement import Before, Signed, read_signed, state
from ckpt.reading.checkpoint import ReadSettings
from ckpt.reading.opening import open_checkpoint

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_MAX_SIBLINGS = 100_000


@dataclass(frozen=True)
class Signature:
    """The result of `ckpt.sign`.

    Attributes:
        key: where the signature stands, in the checkpoint's folder.
        digest: of the commit that was signed, `sha256:...`.
        key_hint: the SHA-256 of the public key's PEM.
        before: step and digest of the signed checkpoint before it in the run; None if there is none.
    """

    url: str
    key: str
    digest: str
    key_hint: str
    run: str
    step: int | None
    before: Before | None


@short_traceback
def sign(
    url: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    password: str | None = None,
    expect: str | None = None,
    run: str | None = None,
) -> Signature:
    """Sign the commit of the checkpoint at `url`, whose digests fix every byte; no data is read.

    The signature stands beside the index. It names the run, the step, and the checkpoint before this one in the folder
    above that the same key has signed. Where the commit names no run, it is that of the others in the folder; the first
    one draws an id. What it names of others must be signed there, by the same key.

    Args:
        key: the path of a private key, PEM, of P-256, P-384 or P-521; or a `pkcs11:` URI.
        storage_options: of the place, by name, as for a save there.
        password: of the PEM file.
        expect: the digest that the save returned; nothing else is signed.
        run: the id of the run, if you know it.

    Raises:
        ConfigurationError: the key cannot be used; or the checkpoint has no block digests, so that a signature would
            not cover its data; or it names bytes of one that this key has not signed.
        DigestMismatch: it is not the checkpoint that is expected.
        NotFound, NotCommitted, IntegrityError, FormatError: there is no checkpoint, or its records are damaged.
        CommitConflict: another save was committed there meanwhile.
    """
    signer = open_signer(key, password)
    with contextlib.closing(open_store(url, storage_options)) as store:
        settings = ReadSettings(expect=checked_expect(expect), digests=True)
        with contextlib.closing(open_checkpoint(store, settings)) as checkpoint:
            commit = checkpoint.stored_commit
        if commit is None:
            raise NotCommitted("no checkpoint of this library is committed here", url=store.url)
        if not commit.record.block_digests:
            raise ConfigurationError(
                'it has no digests of its blocks: save with block_digests="blake3" or "sha256"; checksums alone do not '
                "keep anybody from changing the data",
                url=store.url,
            )
        known = commit.record.run_id or run or ""
        if run not in (None, known):
            raise ConfigurationError(f"the commit names the run {known}, not {run}", url=store.url)
        _check_bases(store, commit.record, signer.public_key)
        step = commit.record.step(last_segment(store.url))
        before, found = _before(store, step, known, signer.public_key)
        known = known or found or new_run_id()
        bundle = sealed(state(commit, known, environment.now(), before), signer)
        name = signature_key(commit.record.described_by.path)
        if not is_our_name(name):
            raise FormatError("its index has a name that this library does not give", url=store.url)
        put_bytes(store, name, bundle)
        if read_commit(store) != commit:
            store.delete([name])
            raise CommitConflict("another save was committed here meanwhile; it is not signed", url=store.url)
        digest, hint = commit_digest(commit.raw), hint_of(signer.public_key)
        return Signature(store.url, name, digest, hint, known, step, before)


def _check_bases(store: Store, record: CommitRecord, public_key: ec.EllipticCurvePublicKey) -> None:
    """Check that what a commit names of others is what the key has signed there.

    A save believes the records of its base: who rewrote those before it has put bytes of their own into it.
    """
    for owner in record.owners:
        with contextlib.closing(store.parent()) as root:
            base = next(_signed(root, [owner], public_key), None)
        if base is None:
            raise ConfigurationError(
                f"it names bytes of ../{owner}, which this key has not signed: sign that one first, if you know that it "
                "is right, or save without base=",
                url=store.url,
            )
        signed = {owned_path(owner, ref.path): ref.digest for ref in base.commit.record.own_manifests}
        for ref in record.foreign_manifests:
            if ref.owner == owner and signed.get(ref.path) != ref.digest:
                raise IntegrityError(
                    f"it names other bytes of ../{owner} than are signed there: that one was rewritten before this one "
                    "was saved; save it without base=",
                    url=store.url,
                    key=ref.path,
                )


def _before(
    store: Store, step: int | None, run: str, public_key: ec.EllipticCurvePublicKey
) -> tuple[Before | None, str]:
    """Find the last checkpoint of a run before `step` that the key has signed, in the folder above; and its run.

    Without a `run`, all there are of one: then also a later one tells which, one without a step, or the signature that
    this one has.
    """
    own, last = last_segment(store.url), -1 if step is None else step
    with contextlib.closing(store.parent()) as root:
        names = [name for name in itertools.islice(root.folders(), _MAX_SIBLINGS) if name != own]
        steps = sorted((number, name) for name in names if (number := step_of(name)) is not None)
        earlier = [name for number, name in reversed(steps) if number < last]
        later = [name for number, name in steps if number > last and not run]
        others = [] if run else [*(name for name in names if step_of(name) is None), own]
        for signed in _signed(root, [*earlier, *later, *others], public_key):
            statement = signed.statement
            if run in ("", statement.predicate.run):
                before = statement.as_before
                is_before = before is not None and before.step < last
                return (before if is_before else None), statement.predicate.run
    return None, ""


def _signed(root: Store, names: list[str], public_key: ec.EllipticCurvePublicKey) -> Iterator[Signed]:
    for name in names:
        folder = PrefixStore(root, name)
        try:
            commit = read_commit(folder)
            if commit is not None:
                yield read_signed(folder, commit, public_key)
        except NotFound:
            continue  # not signed
        except StorageError:
            raise
        except CheckpointError:
            continue  # damaged, or signed by others
