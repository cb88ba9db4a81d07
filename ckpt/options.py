"""Option dataclasses of the public calls. Importing them loads neither torch nor any SDK."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ckpt.errors import ConfigurationError

__all__ = ["DataOptions", "LoadOptions", "ManagerOptions", "SaveOptions"]


@dataclass(frozen=True)
class SaveOptions:
    """Options of a save.

    Attributes:
        per_rank: names, `*` allowed, of values that are each rank's own: `["loader", "metrics.*"]`. Each rank
            gets its own back on the same number of ranks. `ckpt.per_rank` says the same of one part.
        resume_check: plan the save back before it begins, as a `CheckpointManager` does with its first one.
        trusted_objects: names, `*` allowed, of objects that need to be unpickled as they were stored, and that your
            loads trust. Others that a load refuses are an error of a save that is planned back, and a
            warning of any other. A manager's restore takes them from here too.
    """

    per_rank: Collection[str] = ()
    resume_check: bool = False
    trusted_objects: Collection[str] = ()

    def __post_init__(self) -> None:
        for option in ("per_rank", "trusted_objects"):
            given = getattr(self, option)
            is_list = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
            names = (*given,) if is_list else (None,)
            if not all(isinstance(name, str) for name in names):
                raise ConfigurationError(f"{option} must be a list of names, not {given!r:.100}")
            object.__setattr__(self, option, names)  # a generator gives its names once
        check_choice("resume_check", self.resume_check, True, False)


@dataclass(frozen=True)
class LoadOptions:
    """Options of a load and of a restore.

    Attributes:
        strict: None takes all that the checkpoint has below the names that were asked for; a name that only the
            program has, or that has no place in the program, is an error that lists all of them. True wants the
            stored keys in dicts of plain values too; what has a `state_dict` gets what was saved in any case. False loads what both have, and warns of the rest.
        rename: from names in the checkpoint to names in the program: a function, or a mapping of prefixes,
            such as `{"model.module.": "model."}`.
        on_shape: a tensor has another shape in the program: an `error`, or `resize`: their common part is
            loaded, from index 0 on, and the rest keeps the program's values.
        allow_casts: accept casts that change values beyond rounding: integers that wrap around, numbers that
            become infinite, NaN that becomes an integer.
    """

    strict: bool | None = None
    rename: Callable[[str], str] | Mapping[str, str] | None = None
    on_shape: Literal["error", "resize"] = "error"
    allow_casts: bool = False

    def __post_init__(self) -> None:
        check_choice("strict", self.strict, None, True, False)
        check_choice("on_shape", self.on_shape, "error", "resize")
        check_choice("allow_casts", self.allow_casts, True, False)
        rename = self.rename
        texts = (*rename.keys(), *rename.values()) if isinstance(rename, Mapping) else ()
        is_one = rename is None or callable(rename) or isinstance(rename, Mapping)
        if not is_one or not all(isinstance(text, str) for text in texts):
            raise ConfigurationError(
                f"rename must be a function, or a mapping of prefixes to prefixes, not {self.rename!r:.100}"
            )


@dataclass(frozen=True)
class ManagerOptions:
    """Options of a `CheckpointManager`.

    Attributes:
        on_existing: a run does not begin above the steps that its root holds, and has restored none of them: an
            `error` before the first save, or a `new-run`, which gives the old checkpoints up: they stay, and neither
            a restore nor a rule for keeping counts them any more.
        resume_check: plan a save back before it is acknowledged, without reading a byte: the `first` of this
            manager, `every`, or `off`. What could not be restored refuses the save, and is named.
        save_options: of each save.
    """

    on_existing: Literal["error", "new-run"] = "error"
    resume_check: Literal["first", "every", "off"] = "first"
    save_options: SaveOptions = field(default_factory=SaveOptions)

    def __post_init__(self) -> None:
        check_choice("on_existing", self.on_existing, "error", "new-run")
        check_choice("resume_check", self.resume_check, "first", "every", "off")
        check_options("save_options", self.save_options, SaveOptions)


@dataclass(frozen=True)
class DataOptions:
    """Options of a `ShardedDataset`, and of the `RescalableLoader` of it.

    Attributes:
        on_exhausted: with `epochs=`, at the end of a source: `drop` it and read the others, `stop`, or `repeat` it
            until the last one ends.
        turns: where the lengths of documents are not known, shards take turns by the `share` of them that was read,
            so that each document is read once before any is read twice; or by `count`, so that the global batch of a
            step is the same on any number of ranks that divides `shards` (with one source).
        allow_other_data: continue with other documents than the state was saved for; the log names them.
        skip_bad_documents: documents that each process that reads may skip because they cannot be read; each is
            logged. Where lengths are known `pad_token` takes their place, so no rank makes fewer steps.
        positions: batches of a `RescalableLoader` are dicts of `tokens`, `shard` and `position`, and the state
            follows `loader.record(batch)`, not what was handed out.
    """

    on_exhausted: Literal["drop", "stop", "repeat"] = "drop"
    turns: Literal["share", "count"] = "share"
    allow_other_data: bool = False
    skip_bad_documents: int = 0
    positions: bool = False

    def __post_init__(self) -> None:
        check_choice("on_exhausted", self.on_exhausted, "drop", "stop", "repeat")
        check_choice("turns", self.turns, "share", "count")
        check_choice("allow_other_data", self.allow_other_data, True, False)
        check_choice("positions", self.positions, True, False)
        skipped = self.skip_bad_documents
        if isinstance(skipped, bool) or not isinstance(skipped, int) or skipped < 0:
            raise ConfigurationError(
                f"skip_bad_documents must be a number of documents, not {skipped!r:.100}"
            )


def check_options(name: str, value: object, kind: type) -> None:
    """Raise ConfigurationError if `value` is no options of a kind."""
    if not isinstance(value, kind):
        raise ConfigurationError(f"{name} must be ckpt.options.{kind.__name__}(...), not {value!r:.100}")


def check_choice(name: str, value: object, *choices: object) -> None:
    """Raise ConfigurationError if `value` is none of `choices`."""
    if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
        raise ConfigurationError(f"{name} must be {', '.join(map(repr, choices))}, not {value!r:.100}")
