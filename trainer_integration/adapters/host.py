"""Check that the framework that an adapter is for is installed, in a version that it knows."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re

from ckpt.errors import ConfigurationError

__all__ = ["require_host"]


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


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release of a version; that of a release candidate is that of its release."""
    release = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()
