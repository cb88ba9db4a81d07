"""Compare what ranks hold under one name, of which a save takes one rank's, and unite the groups of their optimizers."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import xxhash
from torch.distributed.tensor import DTensor

from ckpt.errors import ConfigurationError, SaveFailed
from ckpt.format.fqns import STRUCTURE, Path
from ckpt.geometry import has_geometry
from ckpt.ranks.group import Ranks
from ckpt.state.state_parts import Description, texts_of
from ckpt.state.structure import Structure, leaves, name_of, structure_of
from ckpt.torch_private import ShardedTensor, create_chunk_list, local_tensor
from ckpt.transfer.tensor_memory import has_memory_view, memory_of

_logger = logging.getLogger(__name__)

_WHOLE_BYTES = 1 << 20
"""Smaller tensors are compared whole in each save."""
_PIECES, _PIECE_BYTES = 64, 4096
_SHOWN = 5
_GROUPS = "param_groups"
_noted_buffers: set[str] = set()


def agree_on_values(
    values: dict[str, Any], described: Description, ranks: Ranks, url: str, *, number: int | None = None
) -> dict[str, Any]:
    """Compare values on all ranks; return those to save, with the groups of all ranks' optimizers.

    `number`: of the save, from 1 on, the same on all ranks; default that of the call.

    Parameters, optimizer state and loaders that differ are refused. Of buffers rank 0's are saved, as DDP has them;
    other values that differ are warned of, by rank 0. `ckpt.per_rank` says that a part is each rank's own.

    Raises SaveFailed, on all ranks.
    """
    if ranks.size == 1:
        return values
    own = _Digests(ranks.call if number is None else number)
    groups: dict[str, int] = {}

    def look() -> int:
        for name, value in values.items():
            kind = described.kinds.get(name, "value")
            if kind != "per rank" and name != STRUCTURE:
                own.add(name, value, kind, described.buffers)
        groups.update((name, _digest(value)) for name, value in own.groups.items())
        return _digest([sorted(own.digests.items()), sorted(groups.items())])

    summary = ranks.together("comparison of values", look)
    is_same, _ = ranks.join((True, summary), _joined_summary)
    if is_same:
        return values
    found = ranks.join(_Compared(own.digests, {}), _Compared.join)
    if found.differing:
        _judge(own.names, found.differing, ranks, url)
    if any(ranks.most([bool(groups)])):
        values = _with_groups(values, own.groups, ranks, url)
    return values


def _joined_summary(some: tuple[bool, int], other: tuple[bool, int]) -> tuple[bool, int]:
    return some[0] and other[0] and some[1] == other[1], some[1]


@dataclass
class _Compared:
    """Digests by the number of a name, and the numbers of those that differ."""

    digests: dict[int, int]
    differing: dict[int, None]

    def join(self, other: _Compared) -> _Compared:
        differing = {**self.differing, **other.differing}
        for number in self.digests.keys() & other.digests.keys():
            if self.digests[number] != other.digests[number]:
                differing[number] = None
        return _Compared({**other.digests, **self.digests}, differing)


class _Digests:
    """The digests of a rank's values, by the number of their names.

    Args:
        call: the number of the save in this process, the same on all ranks: in the first one large tensors are
            compared whole, later ones by a sample that changes with it.
    """

    def __init__(self, call: int) -> None:
        self._call = call
        self.digests: dict[int, int] = {}
        self.names: dict[int, tuple[str, str]] = {}
        self.groups: dict[str, Any] = {}

    def add(self, part: str, value: Any, kind: str, buffers: set[str]) -> None:
        for path, leaf in leaves(value):
            if kind == "optimizer" and path[:1] == (_GROUPS,):
                continue
            name = name_of((part, *path))
            own_kind = "buffer" if name in buffers else kind
            for key, digest, is_sharded in self._of(name, leaf):
                number = xxhash.xxh3_64_intdigest(key.encode(errors="surrogatepass"))
                self.digests[number] = digest
                self.names[number] = name, "sharded" if is_sharded else own_kind
        if kind == "optimizer" and isinstance(value, Mapping):
            self.groups[part] = value.get(_GROUPS, [])

    def _of(self, name: str, value: Any) -> Iterator[tuple[str, int, bool]]:
        if not isinstance(value, torch.Tensor):
            if not isinstance(value, ShardedTensor) and not has_geometry(value):
                yield name, _digest(value), False
            return
        if isinstance(value, DTensor):
            mesh = value.device_mesh
            if mesh.size() == torch.distributed.get_world_size() or mesh.get_coordinate() is None:
                return
            local = local_tensor(value)
            if not has_geometry(local):
                chunk = create_chunk_list(value)[0]
                place = f"{name}@{tuple(value.shape)}{tuple(chunk.offsets)}"
                yield place, self._tensor(local), True
        elif not has_geometry(value):
            yield name, self._tensor(value), False

    def _tensor(self, tensor: torch.Tensor) -> int:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            if not hasattr(tensor, "__tensor_flatten__"):
                return 0
            names, _ = tensor.__tensor_flatten__()
            return _digest([self._tensor(getattr(tensor, name)) for name in names])
        facts = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
        if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_quantized or tensor.numel() == 0:
            return xxhash.xxh3_64_intdigest(facts)
        with torch.no_grad():
            tensor = tensor.detach()
            if tensor.nbytes >= _WHOLE_BYTES and self._call > 1:
                tensor = _sample(tensor, self._call)
            tensor = tensor.cpu()
            if not has_memory_view(tensor):
                tensor = tensor.resolve_conj().resolve_neg().contiguous()
        # Not by way of NumPy: a tensor that has shown its memory to it cannot be resized any more.
        return xxhash.xxh3_64_intdigest(memory_of(tensor), seed=xxhash.xxh32_intdigest(facts))


def _sample(tensor: torch.Tensor, call: int) -> torch.Tensor:
    """Return some pieces of a tensor, other ones in each save."""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.flatten()
    length = max(1, _PIECE_BYTES // tensor.element_size())
    last = max(1, flat.numel() - length)
    starts = [xxhash.xxh3_64_intdigest(b"%d.%d" % (call, number)) % last for number in range(_PIECES)]
    return torch.cat([flat[start : start + length] for start in starts])


def _digest(value: Any) -> int:
    """Return a number that equal values share, on all ranks."""
    return xxhash.xxh3_64_intdigest(_canonical(value))


def _canonical(value: Any) -> bytes:
    """Write a value such that equal ones are written alike, whatever the order of their keys."""
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return f"{type(value).__name__}:{value!r}".encode(errors="surrogatepass")
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.Tensor):
        return f"tensor:{_Digests(1)._tensor(value)}".encode()
    if isinstance(value, Mapping):
        members = sorted(_canonical(key) + b"=" + _canonical(item) for key, item in value.items())
    elif isinstance(value, list | tuple):
        members = [*map(_canonical, value)]
    elif isinstance(value, set | frozenset):
        members = sorted(map(_canonical, value))
    else:
        try:
            return f"{kind}:".encode() + pickle.dumps(value, protocol=4)
        except Exception:  # the save says so
            return kind.encode()
    return kind.encode() + b"(" + b",".join(b"%d:%s" % (len(member), member) for member in members) + b")"


# -- what differs ------------------------------------------------------------------------------------------


def _judge(
    names: Mapping[int, tuple[str, str]], differing: Mapping[int, None], ranks: Ranks, url: str
) -> None:
    """Refuse, or say, what differs; all ranks know alike."""
    own: Any = {names[number] for number in differing if number in names}
    shared: list[tuple[str, str]] = sorted(ranks.join(own, lambda some, others: {*some, *others}))
    by_kind: dict[str, list[str]] = {}
    for name, kind in shared:
        by_kind.setdefault(kind, []).append(name)
    texts = []
    if sharded := by_kind.get("sharded"):
        texts.append(
            f"groups of ranks hold other values of {_some(sharded)}, each on a mesh of its own, and one group's would "
            "stand for all: give experts names of their own, such as their number in the model, or one DTensor over "
            "the whole mesh, or save them with ckpt.per_rank"
        )
    if wrong := [*by_kind.get("model", ()), *by_kind.get("optimizer", ())]:
        texts.append(
            f"ranks hold other values of {_some(wrong)}, and one rank's would stand for all: parameters and optimizer "
            "state that are no shards of one tensor have to be equal on all ranks; if each rank has its own, save "
            "them with ckpt.per_rank, or under names of their own"
        )
    if loaders := by_kind.get("loader"):
        texts.append(
            f"ranks hold other values of {_some(loaders)}, and one rank's would stand for all: save the part with "
            f"ckpt.per_rank, as in {loaders[0].partition('.')[0]}=ckpt.per_rank(...), which gives each rank its own back"
        )
    if texts:
        raise SaveFailed("; ".join(texts), url=url, failures={ranks.rank: ConfigurationError(texts[0])})
    if ranks.rank == 0:
        if buffers := [name for name in by_kind.get("buffer", ()) if name not in _noted_buffers]:
            _noted_buffers.update(buffers)
            _logger.info("buffers differ between ranks, rank 0's are saved: %s", _some(buffers))
        if others := [*by_kind.get("part", ()), *by_kind.get("value", ())]:
            _logger.warning(
                "%s: ranks hold other values of %s; one rank's are saved for all. ckpt.per_rank(part) saves each rank's own",
                url,
                _some(others),
            )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(map(repr, names[:_SHOWN])) + more


# -- groups of optimizers ----------------------------------------------------------------------------------


@dataclass
class _Groups:
    """The groups of ranks whose optimizers differ, by the first rank that has them."""

    by_digest: dict[int, tuple[int, Any]] = field(default_factory=dict)

    def join(self, other: _Groups) -> _Groups:
        joined = dict(self.by_digest)
        for digest, (rank, groups) in other.by_digest.items():
            known = joined.get(digest)
            if known is None or rank < known[0]:
                joined[digest] = rank, groups
        return _Groups(joined)


def _with_groups(values: dict[str, Any], groups: Mapping[str, Any], ranks: Ranks, url: str) -> dict[str, Any]:
    """Return values in which each optimizer has the groups of all ranks, such as those of all stages of a pipeline."""
    own = _Groups(
        {_digest([name, value]): (ranks.rank, (name, _on_cpu(value))) for name, value in groups.items()}
    )
    joined = ranks.join(own, _Groups.join)
    united: dict[str, list[list[dict[str, Any]]]] = {}
    for _, (name, each) in sorted(joined.by_digest.values(), key=lambda item: item[0]):
        united.setdefault(name, []).append(each)
    result = dict(values)
    for name, all_groups in united.items():
        if name not in values or len(all_groups) == 1:
            continue
        merged = _merged(name, all_groups, url, ranks)
        result[name] = {**values[name], _GROUPS: merged}
        found: dict[Path, Structure] = {
            (_GROUPS, number): structure_of(group, name) for number, group in enumerate(merged)
        }
        found = {unit: structure for unit, structure in found.items() if structure}
        noted = dict(result.get(STRUCTURE, {}))
        if found or name in noted:
            of_part = {key: text for key, text in noted.get(name, {}).items() if key != _GROUPS}
            noted[name] = of_part | (texts_of(found) if found else {})
            result[STRUCTURE] = noted
    return result


def _merged(
    name: str, all_groups: Sequence[Sequence[Mapping[str, Any]]], url: str, ranks: Ranks
) -> list[dict[str, Any]]:
    """Unite groups of the same place and options; all others stay apart. Raises SaveFailed if a parameter is in two."""
    merged: list[tuple[int, int, dict[str, Any]]] = []
    homes: dict[Any, int] = {}
    for groups in all_groups:
        for place, group in enumerate(groups):
            options = _digest({key: value for key, value in group.items() if key != "params"})
            number = next(
                (at for at, (where, known, _) in enumerate(merged) if (where, known) == (place, options)),
                len(merged),
            )
            if number == len(merged):
                merged.append((place, options, {**group, "params": []}))
            params = merged[number][2]["params"]
            known_params = set(params)
            for param in group["params"]:
                if homes.setdefault(param, number) != number:
                    text = (
                        f"ranks have other options for parameter {param!r} of {name!r}, or it has one name and stands for "
                        "several: give optimizers the same groups on all ranks that hold a parameter, and save "
                        "optimizers of several models by training_state(model=..., optimizer=...)"
                    )
                    raise SaveFailed(text, url=url, failures={ranks.rank: ConfigurationError(text)})
                if param not in known_params:
                    params.append(param)
    return [group for _, _, group in merged]


def _on_cpu(groups: Any) -> Any:
    """Return groups whose tensors can be sent."""
    if isinstance(groups, torch.Tensor):
        return groups.detach().cpu().clone()
    if isinstance(groups, Mapping):
        return {key: _on_cpu(value) for key, value in groups.items()}
    return [*map(_on_cpu, groups)] if type(groups) is list else groups
