"""Find where the payload of a large tensor lies in an item that stock PyTorch wrote.

Such items are whole zip archives. Only their frame is read, page by page as torch's own parser asks
for it; the payload then is read like one of ours, in ranges and straight into the destination.
"""

from __future__ import annotations

from concurrent.futures import Executor
from typing import Any

import torch

from ckpt.errors import FormatError
from ckpt.format.elements import StoredTensor
from ckpt.stock.item_archive import check_archive, is_stored_as_it_is
from ckpt.stock.item_files import PagedFile, ReadAt
from ckpt.torch_private import checkpoint_offset, unchecked_sparse_tensors


def locate_payload(read_at: ReadAt, item_offset: int, item_bytes: int) -> StoredTensor | None:
    """Find the dense tensor in an item at `item_offset` of its file; None if it has to be read whole.

    Storage errors of `read_at` pass through.
    """
    file = PagedFile(read_at, item_bytes)
    try:
        return _dense(load_meta(check_archive(file), file), item_offset, item_bytes)
    except Exception as error:
        if file.failure is not None:
            raise file.failure from error
        return None  # whatever it is, reading it whole will tell


def load_meta(reader: Any, file: PagedFile, threads: Executor | None = None) -> Any:
    """Load an archive with tensors on the meta device, which know their `checkpoint_offset` in it.

    `reader` is that of the file, from `check_archive`. With `threads`, the headers of all storages
    are fetched at the same time; torch reads them one by one. Raises FormatError if a storage's
    bytes are not in the archive as they would be in memory, and any error of `torch.load`.
    """
    storages = [name for name in reader.get_all_records() if name.startswith("data/")]
    if threads is not None:
        file.prefetch([reader.get_record_header_offset(name) for name in storages], threads)
    if not all(is_stored_as_it_is(reader, file, name) for name in storages):
        raise FormatError("has another byte order, or compressed records; save it again with torch.save")
    file.seek(0)
    with unchecked_sparse_tensors():
        return torch.load(file, map_location="meta", weights_only=True)  # type: ignore[arg-type]


def is_plain_tensor(value: Any) -> bool:
    """Tell whether a loaded value is a tensor, and not one of a class with a content of its own."""
    return type(value) in (torch.Tensor, torch.nn.Parameter)


def _dense(tensor: Any, item_offset: int, item_bytes: int) -> StoredTensor | None:
    """Describe a meta tensor if it is dense, in any order of dimensions, and inside of its item."""
    offset = checkpoint_offset(tensor) if is_plain_tensor(tensor) else None
    if offset is None or tensor.is_conj() or tensor.is_neg():
        return None
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    expected = 1
    for stride, size in sorted((step, n) for step, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return None
        expected *= size
    begin = offset + tensor.storage_offset() * tensor.dtype.itemsize
    stored = StoredTensor(item_offset + begin, tensor.dtype, shape, strides)
    limit = min(item_bytes, offset + tensor.untyped_storage().nbytes())
    return stored if offset >= 0 and begin + stored.payload_bytes <= limit else None
