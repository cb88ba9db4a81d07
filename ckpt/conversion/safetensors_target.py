"""Write safetensors: each rank some files; the index, which makes them a model, comes last."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from ckpt.backends.base import exists, read_bytes
from ckpt.backends.bodies import Body
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY
from ckpt.conversion.selection import ChosenTensor
from ckpt.conversion.source import TensorFacts
from ckpt.conversion.target import FileTarget, Written, end_to_end
from ckpt.errors import ConfigurationError, StorageError
from ckpt.format.config_files import CONFIG_KEY
from ckpt.format.dtypes import dtype_name
from ckpt.format.model_index import encode_model_index
from ckpt.format.names import MODEL_INDEX_KEY, SINGLE_MODEL_KEY
from ckpt.stock.safetensors_format import METADATA, DescribedTensor, encode_header, unfit_text
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.layout import pack

_MAX_CONFIG_BYTES = 16 << 20


class SafetensorsTarget(FileTarget):
    """A file, or a folder as `save_pretrained` writes it: files, and an index of several."""

    def __post_init__(self) -> None:
        self._drop()
        tensors, key = self.selection.tensors, self.destination.key
        self._shards = _shards(tensors, self.max_shard_bytes) if key is None else {key: tensors}
        files = [(name, self._body(shard)) for name, shard in self._shards.items()]
        shares = pack([body.nbytes for _, body in files], self.ranks.size)
        self._own = dict(files[number] for number in shares[self.ranks.rank])
        self.total_bytes = sum(body.nbytes for body in self._own.values())

    def _drop(self) -> None:
        """Drop objects, and all but one of tied tensors. Raises ConfigurationError for a dtype."""
        selection = self.selection
        kept: dict[str, ChosenTensor] = {}
        for tensor in selection.tensors:
            if tensor.name == METADATA:
                raise ConfigurationError(
                    f"safetensors files cannot hold a tensor named {METADATA!r}; --rename it"
                )
            if (unfit := unfit_text(tensor.facts.dtype, tensor.facts.shape)) is not None:
                raise ConfigurationError(
                    f"{tensor.name[:200]!r} {unfit}; --exclude it, or convert to ckpt, dcp or torch"
                )
            # The first name is kept: `save_pretrained` keeps the embedding, not the tied head.
            first = kept.setdefault(self.source.aliases.get(tensor.source, tensor.source), tensor)
            if first is not tensor:
                selection.dropped[tensor.name] = f"it shares the memory of {first.name!r}, which is kept"
        selection.tensors = [*kept.values()]
        for chosen in selection.objects:
            selection.dropped[chosen.name] = "not a tensor; safetensors files hold tensors only"
        selection.objects = []
        if not selection.tensors:
            raise ConfigurationError("the selection has no tensor, and safetensors files hold tensors only")

    def _body(self, tensors: Sequence[ChosenTensor]) -> Body:
        """Lay out a file: wide elements first, so that all are aligned."""
        ordered = sorted(tensors, key=lambda tensor: (-tensor.facts.dtype.itemsize, tensor.name))
        header = encode_header({tensor.name: _described(tensor.facts) for tensor in ordered})
        items = end_to_end([BytesPayload(header), *map(self.whole, ordered)])
        return self.body(items, check_source=len(self._shards) == 1)  # then the file is the model

    def begin(self) -> None:
        """Check, on the first rank, that no output exists, and copy other files of the model."""
        if self.ranks.rank != 0:
            return
        if self.destination.key is not None:
            self.refuse_existing_file()
            return
        store = self.destination.folder
        store.prepare("")
        self.refuse_existing(
            (MODEL_INDEX_KEY, SINGLE_MODEL_KEY, COMMIT_KEY, STOCK_METADATA_KEY),
            "there is a model or checkpoint here already; choose another place, or remove it first",
        )
        if not self.overwrite:
            self.refuse_existing(
                self._shards,
                "an interrupted conversion has left this file; remove it, or pass --overwrite to replace it",
            )
        for folder, stat in self.source.other_files():
            if not exists(store, stat.key):  # else it is somebody's own, and stays
                data = read_bytes(folder, stat.key, size_bytes=stat.size_bytes)
                is_config = stat.key == CONFIG_KEY
                self.put_bytes(stat.key, _with_dtype(data, self.selection.rules.dtype) if is_config else data)

    @property
    def lacks_config(self) -> bool:
        with contextlib.suppress(StorageError):  # the conversion is done, whatever this look says
            return self.destination.key is None and not exists(self.destination.folder, CONFIG_KEY)
        return False

    def write(self) -> Written:
        self.put_all(self._own)
        if len(self._shards) > 1:
            self.source.check_unchanged()
        return Written(len(self._own), self.total_bytes)

    def publish(self, written: Sequence[Written]) -> None:
        if len(self._shards) > 1:
            tensors = self.selection.tensors
            files = {tensor.name: name for name, shard in self._shards.items() for tensor in shard}
            elements = sum(tensor.elements for tensor in tensors)
            self.put_bytes(MODEL_INDEX_KEY, encode_model_index(files, self.selection.nbytes, elements))


def _described(facts: TensorFacts) -> DescribedTensor:
    if facts.unreadable is not None:
        return facts.unreadable.described()
    return DescribedTensor.of(facts.dtype, facts.shape)


def _shards(tensors: Sequence[ChosenTensor], max_bytes: int) -> dict[str, list[ChosenTensor]]:
    """Assign tensors to files, by their names: in order, as many as fit."""
    shards: list[list[ChosenTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        return {SINGLE_MODEL_KEY: shards[0]}
    return {f"model-{n:05d}-of-{len(shards):05d}.safetensors": shard for n, shard in enumerate(shards, 1)}


def _with_dtype(data: bytearray, dtype: torch.dtype | None) -> bytearray | bytes:
    """Set the dtype in a model's configuration to that of the converted weights."""
    if dtype is None or len(data) > _MAX_CONFIG_BYTES:
        return data
    try:
        config: Any = json.loads(data)
    except (ValueError, RecursionError):
        return data
    names = {"dtype", "torch_dtype"} & set(config) if isinstance(config, dict) else set()
    if not names:
        return data
    config |= dict.fromkeys(names, dtype_name(dtype))
    return (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
