"""Combinations of wrapper, optimizer, parts and the rest: which make sense, and few that cover all pairs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields

SHARDED = ("fsdp2", "fsdp2_tp", "hsdp", "meta_fsdp2")
FLAT = ("fsdp1_flat", "fsdp1_orig")
SCHEDULERS = ("step_lr", "multi_step_lr", "one_cycle", "plateau", "sequential")

DIMENSIONS: Mapping[str, tuple[str, ...]] = {
    "wrapper": (
        "plain", "ddp", *FLAT, *SHARDED, "compiled", "ac", "ac_compiled", "shared", "tied", "adapters",
        "pipeline", "meta",
    ),
    "optimizer": (
        "sgd", "sgd_momentum", "adam", "adamw_foreach", "adamw_fused", "adam_amsgrad", "nadam", "radam", "asgd",
        "rprop", "adagrad", "adadelta", "adamax", "rmsprop", "adafactor", "muon", "lbfgs", "sparse_adam",
        "shampoo", "counting", "low_bit", "several", "wrapping", "tensor_lr",
    ),
    "groups": ("one", "two", "empty"),
    "part": (
        "none", *SCHEDULERS, "ema", "metrics", "lists", "none_becomes", "collections", "keys", "grad_scaler",
        "disc", "loader", "per_rank",
    ),
    "phase": ("start", "window", "steps", "frozen"),
    "saved": ("1", "2", "4"),
    "resumed": ("1", "2", "4"),
    "way": ("off", "thread", "process", "local", "references", "state", "raw", "installed"),
}  # fmt: skip
"""The values of each dimension. `saved` and `resumed` are numbers of ranks."""

MIN_COMBINATIONS = 400
SAMPLE = 40


@dataclass(frozen=True)
class Rule:
    """A set of combinations, by some of their dimensions, and the reason why they are set apart."""

    reason: str
    values: Mapping[str, tuple[str, ...]]

    def holds(self, values: Mapping[str, str]) -> bool:
        """Return whether these values, not necessarily of all dimensions, are in the set."""
        return all(_value(values, name) in allowed for name, allowed in self.values.items())


def rule(reason: str, **values: Sequence[str]) -> Rule:
    return Rule(reason, {name: tuple(allowed) for name, allowed in values.items()})


def _value(values: Mapping[str, str], name: str) -> str | None:
    """Return the value of a dimension; `ranks` is `same` or `moved`, if both numbers are known."""
    if name != "ranks":
        return values.get(name)
    if "saved" not in values or "resumed" not in values:
        return None
    return "same" if values["saved"] == values["resumed"] else "moved"


INFEASIBLE = (
    rule("LBFGS joins whole parameters to one vector", optimizer=["lbfgs"], wrapper=[*SHARDED, *FLAT]),
    rule("LBFGS takes one group", optimizer=["lbfgs"], groups=["two", "empty"]),
    rule("LBFGS computes gradients in its closure", optimizer=["lbfgs"], phase=["window"]),
    rule(
        "the vectors of LBFGS belong to one stage's parameters",
        optimizer=["lbfgs"], wrapper=["pipeline"], ranks=["moved"],
    ),
    rule("FSDP keeps no sparse gradients", optimizer=["sparse_adam"], wrapper=[*SHARDED, *FLAT]),
    rule("one parameter with sparse gradients", optimizer=["sparse_adam"], groups=["two"]),
    rule(
        "no embedding of its own with sparse gradients",
        optimizer=["sparse_adam"], wrapper=["tied", "adapters", "pipeline"],
    ),
    rule("flat shards have one dimension", optimizer=["muon", "shampoo"], wrapper=FLAT),
    rule("torch cannot step it on DTensors", optimizer=["rprop", "adafactor"], wrapper=SHARDED),
    rule("FSDP1 gathers plain tensors only", optimizer=["low_bit"], wrapper=FLAT),
    rule(
        "Adafactor factors whole matrices, not flat shards",
        optimizer=["adafactor"], wrapper=FLAT, ranks=["moved"],
    ),
    rule("FSDP1 fixes requires_grad when it wraps", phase=["frozen"], wrapper=FLAT),
    rule("FSDP1 shows the shards of parameters as plain tensors", part=["ema"], wrapper=FLAT),
    rule("stages have other names in one part; that needs per_rank", part=["ema"], wrapper=["pipeline"]),
    rule("a loader is past the batches of a window", part=["loader"], phase=["window"]),
    rule(
        "a raw optimizer numbers its parameters: FSDP1's shards, and those of one stage",
        way=["raw"], wrapper=[*FLAT, "pipeline"], ranks=["moved"],
    ),
)  # fmt: skip
"""Combinations that no trainer has, or that torch itself cannot train."""

REFUSABLE = (
    (
        rule("a tensor class of the program cannot be made from stored bytes alone", optimizer=["low_bit"]),
        ("low_bit", "LowBit", "exp_avg"),
    ),
    (
        rule("a raw optimizer of FSDP1 holds shards, and does not tell of what", way=["raw"], wrapper=FLAT),
        ("FSDP1",),
    ),
    (
        rule("raw optimizers of stages have the same numbers", way=["raw"], wrapper=["pipeline"]),
        ("ckpt.per_rank", "training_state"),
    ),
)
"""Combinations whose save may raise one clear error, with words of which one has to be in it."""


@dataclass(frozen=True)
class Combination:
    """One value of each dimension."""

    wrapper: str
    optimizer: str
    groups: str
    part: str
    phase: str
    saved: str
    resumed: str
    way: str

    @property
    def moves(self) -> bool:
        """Return whether another number of ranks resumes."""
        return self.saved != self.resumed

    @property
    def text(self) -> str:
        return "-".join(asdict(self).values())

    @classmethod
    def of(cls, text: str) -> Combination:
        """Parse `text`. Raises ValueError if it is not one of a combination that makes sense."""
        values = dict(zip(DIMENSIONS, text.split("-"), strict=True))
        unknown = [value for name, value in values.items() if value not in DIMENSIONS[name]]
        reason = reason_against(values)
        if unknown or reason:
            raise ValueError(f"{text}: {f'unknown {unknown}' if unknown else reason}")
        return cls(**values)


assert tuple(field.name for field in fields(Combination)) == tuple(DIMENSIONS)


def reason_against(values: Mapping[str, str]) -> str | None:
    """Return why no combination has these values; None if one may have them."""
    return next((each.reason for each in INFEASIBLE if each.holds(values)), None)


def may_be_refused(combination: Combination) -> tuple[str, tuple[str, ...]] | None:
    """Return why a save may be refused, and words that name the cause; None if it must not be."""
    values = asdict(combination)
    return next(((each.reason, words) for each, words in REFUSABLE if each.holds(values)), None)


Pair = frozenset[tuple[str, str]]


def pairs() -> Iterator[Pair]:
    """List all pairs of values of two dimensions."""
    for (one, values), (other, others) in itertools.combinations(DIMENSIONS.items(), 2):
        for value, another in itertools.product(values, others):
            yield frozenset({(one, value), (other, another)})


def pairs_of(values: Mapping[str, str]) -> Iterator[Pair]:
    return map(frozenset, itertools.combinations(values.items(), 2))


def completed(values: Mapping[str, str], rng: random.Random, wanted: set[Pair]) -> dict[str, str] | None:
    """Give every other dimension a value, one that makes many `wanted` pairs; None if that is impossible."""
    if reason_against(values):
        return None
    left = [name for name in DIMENSIONS if name not in values]
    if not left:
        return dict(values)
    name = max(left, key=lambda each: (len(DIMENSIONS[each]) > 3, rng.random()))

    def gain(value: str) -> int:
        return sum(frozenset({(name, value), other}) in wanted for other in values.items())

    ordered = sorted(DIMENSIONS[name], key=lambda value: (-gain(value), rng.random()))
    for value in ordered:
        if (found := completed({**values, name: value}, rng, wanted)) is not None:
            return found
    return None


def feasible_pairs() -> set[Pair]:
    """Collect the pairs that some combination has."""
    rng = random.Random(0)
    return {pair for pair in pairs() if completed(dict(pair), rng, set()) is not None}


def drawn(seed: int) -> Iterator[Combination]:
    """Draw combinations: soon every value of every dimension is in one, and at the end every feasible pair."""
    rng = random.Random(seed)
    wanted = {*pairs()}
    singles = [frozenset({(name, value)}) for name, values in DIMENSIONS.items() for value in values]
    both = sorted(wanted, key=sorted)
    rng.shuffle(singles)
    rng.shuffle(both)
    seen: set[tuple[str, str]] = set()
    for part in [*singles, *both]:
        if part in wanted or (len(part) == 1 and not part <= seen):
            tries = [completed(dict(part), rng, wanted) for _ in range(3)]
            found = [values for values in tries if values is not None]
            if found:
                values = max(found, key=lambda each: len(wanted.intersection(pairs_of(each))))
                wanted.difference_update(pairs_of(values))
                seen.update(values.items())
                yield Combination(**values)


def covering(seed: int, at_least: int = MIN_COMBINATIONS) -> list[Combination]:
    """Draw combinations that have all feasible pairs; random ones fill up to `at_least`."""
    found = dict.fromkeys(drawn(seed))
    rng = random.Random(seed)
    while len(found) < at_least:
        values = {name: rng.choice(of_one) for name, of_one in DIMENSIONS.items()}
        if reason_against(values) is None:
            found[Combination(**values)] = None
    return list(found)


def sample(seed: int, count: int = SAMPLE) -> list[Combination]:
    """Draw some of those combinations, which have every value of every dimension."""
    return list(itertools.islice(drawn(seed), count))
