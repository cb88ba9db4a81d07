"""State which commit a signature is of, its place in the run, and the signed checkpoint before it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from ckpt.backends.base import Store, read_bytes
from ckpt.consistency.expected import checked_expect, commit_digest
from ckpt.errors import CheckpointError, ConfigurationError, FormatError, IntegrityError, NotFound
from ckpt.format.bounds import Number, Seconds
from ckpt.format.names import last_segment, signature_key
from ckpt.format.records import StoredCommit
from ckpt.provenance.envelope import STATEMENT_TYPE, opened

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

PREDICATE_TYPE = "https://github.com/ckpt-storage/ckpt-storage/blob/main/docs/provenance.md#v1"
MAX_SIGNATURE_BYTES = 1 << 20


class Before(msgspec.Struct, frozen=True):
    """The signed checkpoint before one in its run: its step, and its digest (`sha256:...`)."""

    step: Number
    digest: str


class _Subject(msgspec.Struct, frozen=True):
    name: str
    digest: dict[str, str]


class Predicate(msgspec.Struct, frozen=True, kw_only=True):
    """What is said of a checkpoint.

    Attributes:
        id, step: of its commit; without a step null.
        run: of its commit; else drawn by who signed the first one of the folder.
        signed_at_s: seconds since 1970, by the clock of who signed.
    """

    id: str
    run: str
    step: Number | None
    signed_at_s: Seconds
    before: Before | None = None


class Statement(msgspec.Struct, frozen=True, kw_only=True):
    """An in-toto statement about a checkpoint."""

    type: str = msgspec.field(name="_type", default=STATEMENT_TYPE)
    subject: list[_Subject]
    predicateType: str = PREDICATE_TYPE
    predicate: Predicate

    @property
    def digest(self) -> str:
        """The digest of the commit record."""
        return f"sha256:{self.subject[0].digest['sha256']}"

    @property
    def name(self) -> str:
        """The name of the folder in which the commit was signed."""
        return self.subject[0].name

    @property
    def as_before(self) -> Before | None:
        """How a later statement names this one; None without a step."""
        step = self.predicate.step
        return None if step is None else Before(step, self.digest)


class Signed(NamedTuple):
    """A commit, and the statement about it that the key has signed."""

    commit: StoredCommit
    statement: Statement


_STATEMENT = msgspec.json.Decoder(Statement)  # made once, before there are threads


def state(commit: StoredCommit, run: str, signed_at_s: float, before: Before | None) -> Statement:
    """Make the statement about a commit."""
    name, digest = last_segment(commit.url), commit_digest(commit.raw).partition(":")[2]
    record = commit.record
    step = record.step(name)
    predicate = Predicate(id=record.id, run=run, step=step, signed_at_s=signed_at_s, before=before)
    return Statement(subject=[_Subject(name, {"sha256": digest})], predicate=predicate)


def read_signed(store: Store, commit: StoredCommit, public_key: ec.EllipticCurvePublicKey) -> Signed:
    """Read the signature of a commit, and check that it is of this one.

    Raises:
        NotFound: there is none.
        IntegrityError, FormatError: another key made it, it was changed, or it is of another commit.
    """
    key = signature_key(commit.record.described_by.path)
    try:
        data = bytes(read_bytes(store, key, max_bytes=MAX_SIGNATURE_BYTES))
        statement = _decoded(opened(data, public_key))
        found = commit_digest(commit.raw)
        if statement.digest != found:
            raise IntegrityError(
                f"the signature is of another commit: of {statement.digest}, and this is {found}; the commit record was "
                "replaced after it was signed, or the signature is that of another checkpoint"
            )
        return Signed(commit, statement)
    except NotFound:
        raise NotFound(
            "it is not signed; sign it with `ckpt sign`, if you know that it is right", url=store.url, key=key
        ) from None
    except CheckpointError as error:
        error.url, error.key = store.url, key
        raise


def _decoded(payload: bytes) -> Statement:
    try:
        statement = _STATEMENT.decode(payload)
        checked_expect(statement.digest)
        before = statement.predicate.before
        checked_expect(before.digest if before is not None else None)
    except (ValueError, KeyError, IndexError, RecursionError, ConfigurationError) as error:
        raise FormatError(f"not a statement about a checkpoint: {error}") from None
    if statement.type != STATEMENT_TYPE or statement.predicateType != PREDICATE_TYPE:
        raise FormatError(f"a statement of another kind: {statement.predicateType[:100]!r}")
    return statement
