"""What is in an open checkpoint, in one form whoever wrote it: columns, and the ranks and parts they belong to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from ckpt.backends.base import Store
from ckpt.errors import FormatError, NotCommitted, NotFound
from ckpt.format.columns import Columns, ObjectRow, StorageTable, TensorColumns, packed
from ckpt.reading.checkpoint import Checkpoint, ReadSettings, is_rank_local, open_checkpoint, open_rank_local

__all__ = ["Path", "columns_of", "has_model", "open_parts", "part_of", "paths_of", "rank_of"]

Path = tuple[str | int, ...]
"""Where a value is in nested dicts (texts) and lists (numbers)."""

_MAX_RANKS = 1 << 20

_RANK_OF_FILE = re.compile(r"rank-(\d{5,})/[^/]*|__(\d+)_\d+\.distcp")

_OPTIMIZER = re.compile(
    r"(^|\.)(optim|optims|opt|optimizer|optimizers|optim_state|optimizer_state|optimizer_states)\."
    r"|\.(exp_avg|exp_avg_sq|max_exp_avg_sq|exp_inf|momentum_buffer|square_avg|acc_delta|grad_avg)$"
)
_MODEL = re.compile(
    r"(app\.)?(model|models|module|modules|network|net|weights|params|parameters|state_dict)\."
)
_OTHER = re.compile(
    r"(lr_scheduler|lr_schedulers|scheduler|schedulers|rng|rng_state|random|dataloader|data_loader|loader|dataset"
    r"|sampler|train_state|trainer|progress|metrics|extra|extra_state|app|step|epoch|iteration|ema)(\.|$)"
)


def open_parts(store: Store, settings: ReadSettings) -> list[Checkpoint]:
    """What stands at a place: one checkpoint, or a part per rank where stock saved with `use_collectives=False`.

    Raises:
        NotFound, NotCommitted, IntegrityError, FormatError, UnsafeContent, NotVisible: as `open_checkpoint`.
    """
    try:
        return [open_checkpoint(store, settings)]
    except (NotFound, NotCommitted):
        if not is_rank_local(store):
            raise
    parts = [open_rank_local(store, settings, 0)]
    while len(parts) < _MAX_RANKS:
        try:
            parts.append(open_rank_local(store, settings, len(parts)))
        except NotFound:
            break
    return parts


def columns_of(metadata: Metadata, *, url: str) -> Columns:
    """The columns of any metadata.

    Raises:
        FormatError: an item is listed without its place, or the other way round.
    """
    if isinstance(metadata.storage_data, StorageTable):
        return metadata.storage_data.columns
    found = Columns(planner_data=metadata.planner_data, version=metadata.version)
    files: dict[str, int] = {}
    places = _places(metadata.storage_data)
    for fqn, described in metadata.state_dict_metadata.items():
        infos = places.pop(fqn, {})
        if isinstance(described, TensorStorageMetadata):
            found.entries[fqn] = _tensor(fqn, described, infos, files, url)
            continue
        if list(infos) != [None]:
            raise FormatError(f"the metadata do not say where {fqn!r} is", url=url)
        info = infos[None]
        row = files.setdefault(info.relative_path, len(files))
        found.entries[fqn] = ObjectRow(row, info.offset, info.length)
    if places:
        raise FormatError(f"the metadata say where {next(iter(places))!r} is, but not what", url=url)
    found.files = list(files)
    return found


def _places(
    storage_data: Mapping[MetadataIndex, _StorageInfo],
) -> dict[str, dict[bytes | None, _StorageInfo]]:
    places: dict[str, dict[bytes | None, _StorageInfo]] = defaultdict(dict)
    for index, info in storage_data.items():
        places[index.fqn][None if index.offset is None else packed(index.offset)] = info
    return places


def _tensor(
    fqn: str,
    described: TensorStorageMetadata,
    infos: dict[bytes | None, _StorageInfo],
    files: dict[str, int],
    url: str,
) -> TensorColumns:
    rows = []
    for chunk in described.chunks:
        info = infos.pop(packed(chunk.offsets), None)
        if info is None:
            raise FormatError(
                f"the metadata do not say where {fqn!r} at {tuple(chunk.offsets)} is, or list it twice",
                url=url,
            )
        rows.append((files.setdefault(info.relative_path, len(files)), info.offset, info.length))
    if infos:
        raise FormatError(f"the metadata say where a chunk of {fqn!r} is that they do not list", url=url)
    shape = (len(rows), len(described.size))
    offsets = np.array([tuple(chunk.offsets) for chunk in described.chunks], dtype=np.int64).reshape(shape)
    sizes = np.array([tuple(chunk.sizes) for chunk in described.chunks], dtype=np.int64).reshape(shape)
    file, offset, length = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    properties = described.properties
    return TensorColumns(
        properties.dtype,
        tuple(described.size),
        properties.requires_grad,
        offsets,
        sizes,
        file,
        offset,
        length,
    )


def rank_of(file: str) -> int | None:
    """The rank that wrote a data file, by its name; None where the name does not tell."""
    found = _RANK_OF_FILE.fullmatch(file)
    return None if found is None else int(found[1] or found[2])


def part_of(fqn: str, *, is_tensor: bool, has_model: bool) -> str:
    """Whether an entry is part of the `weights`, the `optimizer`, or `other`: a guess by its name.

    Args:
        has_model: a tensor beside those that are named like a model's is no weight.
    """
    if _OPTIMIZER.search(fqn):
        return "optimizer"
    if is_tensor and _MODEL.match(fqn):
        return "weights"
    return "other" if not is_tensor or has_model or _OTHER.match(fqn) else "weights"


def has_model(paths: Iterable[Path]) -> bool:
    """Whether a dict that is named like a model holds other values.

    Names alone do not tell: in the flat state of a model, `lm_head.weight` is a weight beside `model.norm.weight`.
    """
    return any(len(path) > 1 and _MODEL.match(".".join([*map(str, path[:-1]), ""])) for path in paths)


def paths_of(planner_data: Any) -> dict[str, Path]:
    """What DCP's planner keeps: where each name is in the nested state. Other planners keep what they like."""
    if not isinstance(planner_data, dict):
        return {}
    return {
        name: path
        for name, path in planner_data.items()
        if isinstance(name, str)
        and isinstance(path, tuple)
        and path
        and all(type(part) in (str, int) for part in path)
    }
