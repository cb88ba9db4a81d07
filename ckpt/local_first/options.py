"""Say how a run uses the disks of its nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import UnionType

from ckpt.backends.registry import normal_url
from ckpt.errors import ConfigurationError


@dataclass(frozen=True)
class LocalTier:
    """A folder on each node's own disk, or in its memory (`/dev/shm`), where every save goes first.

    Args:
        path: the folder; several runs may share it.
        keep: checkpoints to keep in it once they are durable: a restore needs no more than one.
        budget_bytes: of the run in this folder on each node; a save that has no room goes to the durable place.
        drain_timeout_s: how long `CheckpointManager.close` waits for what is not durable yet.
        copies: 1 keeps what each node has also on another node's disk, so that one lost node loses nothing.
        failure_domain: what fails together with this node, such as the name of its rack: the copies are in another one.
        answer_timeout_s: how long a restore waits for the durable place to tell what it has, where the nodes have a whole
            checkpoint.

    Raises:
        ConfigurationError: a number makes no sense.
    """

    path: str | os.PathLike[str]
    keep: int = 2
    budget_bytes: int | None = None
    drain_timeout_s: float = 600.0
    copies: int = 0
    failure_domain: str = ""
    answer_timeout_s: float = 15.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", normal_url(self.path))
        if not _is_number(self.keep, int) or self.keep < 1:
            raise ConfigurationError(f"LocalTier(keep=...) must be at least 1, not {self.keep!r}")
        if self.budget_bytes is not None and (
            not _is_number(self.budget_bytes, int | float) or self.budget_bytes <= 0
        ):
            raise ConfigurationError(
                f"LocalTier(budget_bytes=...) must be a positive number of bytes, not {self.budget_bytes!r}"
            )
        for name in ("drain_timeout_s", "answer_timeout_s"):
            seconds = getattr(self, name)
            if not _is_number(seconds, int | float) or not seconds >= 0:
                raise ConfigurationError(
                    f"LocalTier({name}=...) must be a number of seconds, not {seconds!r}"
                )
        if self.copies not in (0, 1):
            raise ConfigurationError(f"LocalTier(copies=...) is 0 or 1, not {self.copies!r}")
        if not isinstance(self.failure_domain, str):
            raise ConfigurationError(
                f"LocalTier(failure_domain=...) must be a str, not {self.failure_domain!r}"
            )


def _is_number(value: object, kind: type | UnionType) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
