"""Check that an adapter knows the framework that is installed; find checkpoints, also those of a framework."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from typing import Any

from ckpt.errors import ConfigurationError, NotFound
from ckpt.ranks.group import Ranks
from ckpt.tools.ls import list_checkpoints

__all__ = ["newest_checkpoint", "require_host"]


def require_host(distribution: str, *, oldest: str, before: str, module: str | None = None) -> str:
    """Return the version of an installed framework if its adapter knows it.

    Args:
        distribution: its name on PyPI.
        oldest: the first version that the adapter works with.
        before: the first version that it does not know.
        module: the name to import, if it is not that of the distribution.

    Raises:
        ConfigurationError: it is missing, too old or too new; the text says which version to
            install.
    """
    wanted = f"pip install '{distribution}>={oldest},<{before}'"
    name = module or distribution.replace("-", "_")
    try:
        version = importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version is None or importlib.util.find_spec(name.partition(".")[0]) is None:
        raise ConfigurationError(f"{distribution} is not installed: {wanted}")
    if not _numbers(oldest) <= _numbers(version) < _numbers(before):
        age = "older" if _numbers(version) < _numbers(oldest) else "newer"
        raise ConfigurationError(
            f"{distribution} {version} is {age} than this adapter knows ({oldest} to below {before}): {wanted}"
        )
    return version


def newest_checkpoint(
    root: str, is_whole: Callable[[str, str], bool], storage_options: Mapping[str, Any] | None
) -> str | None:
    """Choose the checkpoint of the highest step, at or below `root`; the first rank looks, and tells the others.

    Args:
        root: a path or URL; it need not exist.
        is_whole: tells of a place and its `ListedCheckpoint.state` whether a run can go on from it.
        storage_options: of URLs, as for `ckpt.save`.
    """

    def choose() -> str | None:
        with contextlib.suppress(NotFound):
            for listed in reversed(list_checkpoints(root, storage_options=storage_options, depth=1)):
                place = f"{root.rstrip('/')}/{listed.path}".rstrip("/")
                if is_whole(place, listed.state):
                    return place
        return None

    with contextlib.closing(Ranks(None, no_dist=False)) as ranks:
        return ranks.from_first(choose)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version; that of a release candidate is that of its release."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
