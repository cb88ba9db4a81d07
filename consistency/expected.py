"""Name a checkpoint by its digest, and refuse another one in its place."""

from __future__ import annotations

import hashlib

from ckpt.consistency.commit import COMMIT_KEY
from ckpt.errors import ConfigurationError, DigestMismatch

_PREFIX = "sha256:"
_DIGITS = 64


def commit_digest(record: bytes) -> str:
    """Name a checkpoint by the digest of its commit record's bytes: `sha256:` and 64 hexadecimal digits."""
    return _PREFIX + hashlib.sha256(record).hexdigest()


def checked_expect(expect: str | None) -> str | None:
    """Return the argument `expect`. Raises ConfigurationError if it cannot be a digest."""
    if expect is None:
        return None
    digits = expect.removeprefix(_PREFIX) if isinstance(expect, str) else ""
    if len(digits) != _DIGITS or digits == expect or set(digits) - set("0123456789abcdef"):
        raise ConfigurationError(
            f"expect must be the digest of a checkpoint, sha256: and {_DIGITS} hexadecimal digits, as a save returns "
            f"it and `ckpt inspect` shows it, not {expect!r:.100}"
        )
    return expect


def check_expected(expect: str, record: bytes | None, url: str) -> None:
    """Raise DigestMismatch unless the commit record at `url` is the one expected; None if there is none."""
    found = "" if record is None else commit_digest(record)
    if found == expect:
        return
    what = f"this is {found}" if found else "this has no commit record, and so no digest"
    raise DigestMismatch(
        f"another checkpoint than the one expected: {what}, not {expect}; load from where that one is, or find out "
        "who replaced it",
        url=url,
        key=COMMIT_KEY,
        expected=expect,
        found=found,
    )
