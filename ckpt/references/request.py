"""Say what a save shall refer to."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from ckpt.backends.options import redact_url
from ckpt.backends.registry import normal_url
from ckpt.errors import ConfigurationError
from ckpt.format.names import last_segment
from ckpt.references.frozen import Patterns


@dataclass(frozen=True)
class References:
    """What a save takes over from a base.

    Attributes:
        base: the place of the base; None for a save that others may refer to.
        frozen: tensors that need not be compared.
        carried: beginnings of the names of entries that the state does not hold, and the checkpoint shall, as
            the base does; those of all ranks together.
        undigested: the beginning of names of tensors that are new in every save, for which no digest is stored.
        required: a base that cannot be used is an error; else everything is saved.
    """

    base: str | os.PathLike[str] | None
    frozen: Patterns
    carried: frozenset[str] = frozenset()
    undigested: str | None = None
    required: bool = True

    def declares(self, fqn: str) -> bool:
        """Tell whether the caller vouches for a tensor; nobody can for those that are new in every save."""
        is_new = self.undigested is not None and fqn.startswith(self.undigested)
        return not is_new and self.frozen.match(fqn)

    @staticmethod
    def of(
        base: str | os.PathLike[str] | References | None, frozen: Collection[str], digests: bool
    ) -> References | None:
        """Make the request of a call; None if it wants neither. Raises ConfigurationError."""
        if isinstance(base, References):
            return base
        if base is not None and (not isinstance(base, str | os.PathLike) or not os.fspath(base)):
            raise ConfigurationError(f"base must be the place of a checkpoint, not {base!r:.100}")
        if not isinstance(digests, bool):
            raise ConfigurationError(f"digests must be True or False, not {digests!r:.100}")
        patterns = Patterns(frozen)
        if patterns and base is None and not digests:
            raise ConfigurationError(
                "frozen= says what a save takes over from its base: give base=, or digests=True for the first save"
            )
        base = None if base is None else normal_url(base)
        return References(base, patterns) if base is not None or digests else None


def with_base(base: object) -> str:
    """Say with which base a save is called, on all ranks or on none: they open it together."""
    place = base.base if isinstance(base, References) else base
    return "" if place is None else f" with base {last_segment(redact_url(str(place)))}"
