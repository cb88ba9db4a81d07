"""Write files that appear whole, or take the place of older ones whole."""

from __future__ import annotations

import contextlib
import os
import secrets

_MAX_NAME = 60


def write_whole(path: str | os.PathLike[str], data: bytes, *, durable: bool = False) -> None:
    """Write a file in one step: until then there is the older one, or none. Raises OSError.

    `durable`: its bytes are on the disk before it has its name.
    """
    folder, name = os.path.split(os.fspath(path))
    # Made anew, never followed: somebody may have put a link there.
    temporary = os.path.join(folder, f".{name[:_MAX_NAME]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
