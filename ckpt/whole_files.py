"""Write files that appear whole, or take the place of older ones whole."""

from __future__ import annotations

import contextlib
import os
import secrets

_MAX_NAME_BYTES = 60


def write_whole(
    path: str | os.PathLike[str], data: bytes, *, durable: bool = False, private: bool = False
) -> None:
    """Write a file in one step: until then there is the older one, or none. Raises OSError.

    `durable`: its bytes are on the disk before it has its name. `private`: nobody but its owner may read or change it.
    """
    folder, name = os.path.split(os.fspath(path))
    shown = os.fsdecode(os.fsencode(name)[:_MAX_NAME_BYTES])
    temporary = os.path.join(folder, f".{shown}.{secrets.token_hex(8)}.tmp")
    # Made anew, never followed: somebody may have put a link there.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
