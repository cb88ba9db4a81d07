"""Say which checks of content a save makes, and what becomes of a save that does not pass one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from ckpt.errors import ConfigurationError

Level = Literal["refuse", "warn", "off"]
_LEVELS = ("refuse", "warn", "off")


@dataclass(frozen=True)
class Checks:
    """What a save looks for in its content (`docs/content.md`): each `"refuse"`, `"warn"` or `"off"`.

    A save that is refused commits nothing, and fails on all ranks with `WrongContent`, which names tensor and rank.
    Most compare with the save before: the last one of the same series (`step-100`, `step-200`) that this process saved
    or loaded, or that which is replaced. Without one they have nothing to say.

    Args:
        stale: the step moved on, but bit by bit nothing has changed: in all of the state; in any part whose name begins
            with `opt`; or in the part `model` (`module`, `state_dict`) while the optimizer has.
        diverged: ranks that hold replicas of a DTensor hold different values.
        collided: ranks hold different values under one name, as if it were theirs alone: only one of them is saved.
        not_finite: tensors of a part in which all was finite have a NaN, or an infinity in the state of an optimizer. Any
            other infinity, such as a mask's or a bound's, is a warning and no more: it may be meant.
        zeroed: tensors that had values have only zeros (of an optimizer, a quarter of them).
        missing: a part is gone, or has fewer tensors or elements.
        went_back: the step moved on, but a count in the state is lower: of steps, epochs or samples, or the position of a
            loader while the epoch is the same.
        look_at: what `not_finite` and `zeroed` look at: a sample, in each save another one (in the first save of a process
            all bytes), or all bytes.

    Raises:
        ConfigurationError: another level.
    """

    stale: Level = "warn"
    diverged: Level = "refuse"
    collided: Level = "warn"
    not_finite: Level = "refuse"
    zeroed: Level = "warn"
    missing: Level = "warn"
    went_back: Level = "warn"
    look_at: Literal["sample", "all"] = "sample"

    def __post_init__(self) -> None:
        for name, level in self.levels().items():
            if level not in _LEVELS:
                raise ConfigurationError(
                    f'checks: {name} must be "refuse", "warn" or "off", not {level!r:.100}'
                )
        if self.look_at not in ("sample", "all"):
            raise ConfigurationError(f'checks: look_at must be "sample" or "all", not {self.look_at!r:.100}')

    def levels(self) -> dict[str, Level]:
        """Return the level of each check."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "look_at"}

    @property
    def are_off(self) -> bool:
        return set(self.levels().values()) == {"off"}

    @property
    def compare_replicas(self) -> bool:
        return (self.diverged, self.collided) != ("off", "off")

    @staticmethod
    def of(checks: Checks | Level | None) -> Checks:
        """Return what an argument means: None the defaults, a level all at that level. Raises ConfigurationError."""
        if checks is None:
            return Checks()
        if isinstance(checks, Checks):
            return checks
        if checks not in _LEVELS:
            raise ConfigurationError(
                f'checks must be a ckpt.Checks, "refuse", "warn" or "off", not {checks!r:.100}'
            )
        return Checks(checks, checks, checks, checks, checks, checks, checks)
