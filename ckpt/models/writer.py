"""Write models as folders of safetensors files: `ckpt.save(..., format="safetensors")`."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from ckpt.backends.bodies import CheckedBody
from ckpt.backends.options import redact_url
from ckpt.backends.registry import normal_url, open_store
from ckpt.consistency.block_digests import FileBlockDigests
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.errors import CheckpointError, ConfigurationError
from ckpt.format.columns import Columns
from ckpt.format.config_files import (
    check_free,
    kept_config_files,
    listed_before,
    put_config_files,
    read_config_files,
)
from ckpt.format.names import last_segment, manifest_key
from ckpt.format.records import (
    MODEL_VERSION,
    CommitRecord,
    FileRecord,
    ItemRecord,
    ManifestRef,
    ObjectRef,
    RankManifest,
    encode,
)
from ckpt.models.exchange import ModelExchange
from ckpt.models.layout import (
    DEFAULT_MAX_SHARD_BYTES,
    ModelFile,
    ModelLayout,
    ModelTensor,
    TensorPart,
    agreed_ties,
    lay_out,
)
from ckpt.ranks.deadline_store import DeadlineStore
from ckpt.ranks.group import Ranks
from ckpt.ranks.messages import Messages
from ckpt.save_plans.central import CentralPlan
from ckpt.save_plans.receipt_messages import RankReceipt
from ckpt.stock.safetensors_format import METADATA, unfit_text
from ckpt.torch_private import changes_of
from ckpt.transfer.file_body import FileBody, changed_while_saved
from ckpt.transfer.tensor_memory import plain
from ckpt.transfer.threads import run_all, workers
from ckpt.transfer.tied_tensors import tied_names
from ckpt.writing.layout import resolved_tensor
from ckpt.writing.rank_files import block_digests_of, file_record, manifest_ref
from ckpt.writing.receipts import PlacedItem, pack_items, records_of
from ckpt.writing.writer import RECEIPT, CheckpointWriter

_logger = logging.getLogger(__name__)

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40,
}  # fmt: skip
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?) ?([KMGT]i?B|)", re.IGNORECASE)


@dataclass(frozen=True)
class _ModelReceipt(RankReceipt):
    """One rank's report: its files with their checksums, and the items in them by number of the file."""

    records: list[FileRecord] = field(default_factory=list)
    manifest_items: list[ItemRecord] = field(default_factory=list)


class ModelWriter(CheckpointWriter):
    """Write a model as a folder that transformers reads, and that is a checkpoint of this library.

    `max_shard_bytes` is the most of tensors in one file, unless a single tensor is larger. `config_from` is a model's
    folder, whose configuration and tokenizer the new one gets before the commit, which lists them.
    """

    takes_columns = False

    def __init__(
        self,
        *args: Any,
        max_shard_bytes: int,
        config_from: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._config_from = None if config_from is None else normal_url(config_from)
        # Options of the place are those of a folder on the same kind of storage.
        is_same = self._config_from is not None and _scheme(self._config_from) == _scheme(
            normal_url(self._url)
        )
        self._config_options = kwargs.get("storage_options") if is_same else None
        self._config_files: dict[str, bytes] = {}
        self._max_shard_bytes = max_shard_bytes
        self.shared_options |= {"format": "safetensors", "max_shard_size": max_shard_bytes}
        if self._config_from is not None:
            self.shared_options["config_from"] = redact_url(self._config_from)
        self._ranks: Ranks | None = None
        self._messages: Messages | None = None
        self._file_digests: dict[int, FileBlockDigests | None] = {}
        self._tied: dict[str, str] = {}
        self._layout = ModelLayout((), {})

    def take(self, values: Mapping[str, Any], ranks: Ranks) -> None:
        """Look at the state that will be saved; of tied tensors the first is kept. Raises ConfigurationError for all that no model has."""
        for name, value in values.items():
            _check_tensor(name, value)
        if not values:
            raise ConfigurationError("the state dict is empty; a model has at least one tensor")
        self._tied, self._ranks, self._messages = tied_names(values), ranks, Messages(ranks)

    # -- what DCP calls ------------------------------------------------------------------------------------

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        plan = super().prepare_local_plan(plan)
        if torch.accelerator.is_available():
            # The caller's stream may still compute the tensors that threads will copy. A fault of the device shows
            # here, where DCP tells all ranks of it; once parts are asked for, they would wait for this one.
            torch.accelerator.current_stream().synchronize()
        return replace(plan, storage_data=(self._tied, self._objects.token))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        with self._errors_named():
            tied = agreed_ties([plan.storage_data[0] for plan in plans])
            self._layout = lay_out(plans, tied, plans[0].storage_data[1], self._max_shard_bytes)
            self._read_config_files()
        for name, other in tied.items():
            _logger.info("%r is not written: it shares the memory of %r", name, other)
        # DCP pickles each plan by itself, so that one layout in all would take ranks^2 times its tensors.
        return [replace(plan, storage_data=None) for plan in plans]

    def _read_config_files(self) -> None:
        """Read the configuration, before any data are written. Raises as `read_config_files`, `check_free`."""
        self._config_files = {}
        if self._config_from is not None:
            folder = open_store(self._config_from, self._config_options)
            with closing(DeadlineStore(folder, self.progress, self._limit_s, own_memory=True)) as folder:
                self._config_files = read_config_files(folder)
            check_free(self._store, self._config_files)

    # -- writing -------------------------------------------------------------------------------------------

    _is_model = True

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assert self._ranks is not None
        assert self._messages is not None
        # All ranks are here, and none may fail before: the others would wait for it.
        self._layout = self._ranks.broadcast(self._layout)
        started_s = time.monotonic()
        parts = _OwnParts(plan.items, planner)
        exchange = ModelExchange(self._layout, self._messages, parts.tensor, self.progress)
        try:
            bodies = self._put_files(exchange)
        except BaseException:
            self.progress.wait_for("the other ranks to stop")
            exchange.end(failed=True)
            raise
        self.progress.wait_for("all ranks to have written")
        exchange.end(failed=False)
        parts.check()
        receipt = self._receipt(bodies)
        nbytes, seconds = sum(body.nbytes for body in bodies.values()), time.monotonic() - started_s
        _logger.info(
            "rank %d wrote %d bytes in %.2f s to %s", self._rank, nbytes, seconds, self.checkpoint_id
        )
        return [WriteResult(RECEIPT, nbytes, receipt)]

    def _put_files(self, exchange: ModelExchange) -> dict[int, FileBody]:
        """Put the files that this rank owns, as many at a time as the store gains from."""
        pace = None if self._pacer is None else self._pacer.wait
        own = [n for n, file in enumerate(self._layout.files) if file.rank == self._rank]
        items = {n: exchange.items(n) for n in own}
        self._file_digests = {n: block_digests_of(self.block_digests, items[n]) for n in own}
        sees = {n: None if digests is None else digests.see for n, digests in self._file_digests.items()}
        bodies = {n: FileBody(items[n], self._pool, exchange.check, pace, sees[n]) for n in own}
        self._objects.add(*(self._layout.files[number].key for number in own))

        def put(number: int) -> None:
            self._store.put(self._layout.files[number].key, bodies[number])

        at_once = 1 if self._store.capabilities.parallel_parts else min(len(own), self._store.threads)
        with workers(max(at_once, 1), "ckpt-file") as threads:
            run_all(threads, put, own)
        return bodies

    def _receipt(self, bodies: Mapping[int, FileBody]) -> _ModelReceipt:
        records: list[FileRecord] = []
        items: list[ItemRecord] = []
        for number, body in bodies.items():
            file = self._layout.files[number]
            items += _items_of(file, len(records))
            records.append(file_record(file.key, body, self._file_digests[number]))
        placed = [PlacedItem(i.fqn, tuple(i.offsets or ()), 0, i.file, i.offset, i.length) for i in items]
        names = [record.path for record in records]
        packed, place = pack_items(placed), last_segment(self._url)
        return _ModelReceipt(
            self._rank, place, None, names, packed, self._retries(), records=records, manifest_items=items
        )

    def _records(
        self, planned: Metadata | CentralPlan, receipts: Sequence[RankReceipt], world_size: int
    ) -> tuple[Columns, CommitRecord]:
        """Describe whole tensors, and put the one manifest of all files."""
        facts: dict[str, Any] = {"save_id": self._objects.token, "tags": self._tags}
        columns, record = records_of(
            self._described(), receipts, world_size, block_digests=self.block_digests, **facts
        )
        ref = self._put_manifest([receipt for receipt in receipts if isinstance(receipt, _ModelReceipt)])
        new: dict[str, Any] = {"version": MODEL_VERSION, "layout": "safetensors", "manifests": [ref]}
        if config_files := self._put_config_files():
            new["config_files"] = config_files
        return columns, msgspec.structs.replace(record, data_bytes=ref.data_bytes, **new)

    def _put_config_files(self) -> list[ObjectRef]:
        """Put the configuration, and return what the commit lists: without `config_from`, what the last one here did."""
        before = listed_before(None if self._coordinator is None else self._coordinator.previous)
        if self._config_from is None:
            return kept_config_files(self._store, before, self.block_digests)
        return put_config_files(self._store, self._config_files, before, self.block_digests)

    def _described(self) -> Metadata:
        described: dict[str, Any] = {}
        for file in self._layout.files:
            for tensor in file.tensors:
                chunk = ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), torch.Size(tensor.shape))
                described[tensor.name] = TensorStorageMetadata(
                    TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape), [chunk]
                )
        return Metadata(described, planner_data={name: (name,) for name in described})

    def _put_manifest(self, receipts: Sequence[_ModelReceipt]) -> ManifestRef:
        files: list[FileRecord] = []
        items: list[ItemRecord] = []
        for receipt in receipts:
            items += [msgspec.structs.replace(i, file=i.file + len(files)) for i in receipt.manifest_items]
            files += receipt.records
        manifest = RankManifest(
            version=MODEL_VERSION,
            rank=self._rank,
            token=self._objects.token,
            block_size_bytes=BLOCK_SIZE_BYTES,
            files=files,
            items=items,
        )
        key = manifest_key(self._rank, self._objects.token)
        encoded = encode(manifest)
        self._objects.add(key)
        self._store.put(key, CheckedBody(encoded))
        return manifest_ref(key, encoded, manifest, self.block_digests)


def _scheme(url: str) -> str:
    return url.partition("://")[0] if "://" in url else "file"


def shard_bytes(size: int | str | None) -> int:
    """Return `max_shard_size` in bytes: a number, or a text as "5GB". Raises ConfigurationError."""
    if size is None:
        return DEFAULT_MAX_SHARD_BYTES
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    nbytes = int(float(match[1]) * _UNITS[match[2].upper()]) if match else size
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1:
        raise ConfigurationError(f'max_shard_size is a number of bytes or a text as "5GB", not {size!r:.100}')
    return nbytes


class _OwnParts:
    """The parts of tensors that this rank holds."""

    def __init__(self, items: Sequence[WriteItem], planner: SavePlanner) -> None:
        self._planner = planner
        self._versions: dict[tuple[str, tuple[int, ...]], int] = {}
        self._items: dict[tuple[str, tuple[int, ...]], WriteItem] = {}
        for item in items:
            if item.tensor_data is not None:
                self._items[item.index.fqn, tuple(item.tensor_data.chunk.offsets)] = item

    def tensor(self, tensor: ModelTensor, part: TensorPart) -> torch.Tensor:
        """Return a part. Raises CheckpointError if it is not what was planned, or has changed meanwhile."""
        return self._part(tensor.name, part.offsets)

    def check(self) -> None:
        """Raise CheckpointError if a part has changed since it was first used: files may have some of both."""
        for name, offsets in self._versions:
            self._part(name, offsets)

    def _part(self, name: str, offsets: tuple[int, ...]) -> torch.Tensor:
        tensor = resolved_tensor(self._planner, self._items[name, offsets])
        if tensor is None:
            raise CheckpointError(f"{name!r} has no plain elements")
        if not tensor.is_inference():  # which does not count its changes
            version = changes_of(tensor)
            if self._versions.setdefault((name, offsets), version) != version:
                raise changed_while_saved(name)
        return tensor


def _items_of(file: ModelFile, number: int) -> list[ItemRecord]:
    items: list[ItemRecord] = []
    empty = 0
    for tensor, begin in zip(file.tensors, file.offsets, strict=False):
        offset = begin
        if tensor.nbytes == 0:
            # Items are told apart by where they begin; those without bytes may do so anywhere.
            offset, empty = empty, empty + 1
        offsets = [0] * len(tensor.shape)
        items.append(ItemRecord(tensor.name, offsets, number, offset, tensor.nbytes, offset, tensor.nbytes))
    return items


def _unencodable(name: str) -> str | None:
    """Return why a name cannot be stored as UTF-8, as headers store it; None if it can."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        return error.reason
    return None


def _check_tensor(name: str, value: object) -> None:
    advice = 'format="safetensors" takes the state dict of a model: names and tensors, as model.state_dict()'
    if isinstance(value, Mapping):
        raise ConfigurationError(f"{name!r} is a dict; {advice}, not one that has it under a name")
    if not isinstance(value, torch.Tensor):
        raise ConfigurationError(f"{name!r} is a {type(value).__name__}, not a tensor; {advice}")
    if name == METADATA:
        raise ConfigurationError(f"a tensor of a model cannot be named {METADATA!r}")
    if (fault := _unencodable(name)) is not None:
        raise ConfigurationError(f"a tensor of a model cannot be named {name[:100]!r}: {fault}")
    if value.is_nested or value.layout is not torch.strided:
        kind = (
            f"nested tensor of layout {value.layout}"
            if value.is_nested
            else f"tensor of layout {value.layout}"
        )
        raise ConfigurationError(
            f"{name!r} is a {kind}, which safetensors files cannot hold; make it a dense tensor"
        )
    if (unfit := unfit_text(value.dtype, value.shape)) is not None:
        raise ConfigurationError(f"{name!r} {unfit}; cast it, or leave it out")
    if value.device.type == "meta":
        raise ConfigurationError(f"{name!r} is on the meta device and has no values to save")
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    try:
        is_plain = plain(local) is not None
    except ValueError as error:
        raise ConfigurationError(f"{name!r} cannot be saved: {error}") from None
    if not is_plain:
        raise ConfigurationError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout}, which safetensors files cannot hold; "
            "make it a dense tensor"
        )
