"""Open a folder of safetensors files, by whatever program, so that a load reads it like a checkpoint."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from ckpt.backends.base import ObjectStat, Store
from ckpt.consistency.checksums import crc64nvme, crc_text
from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.columns import Columns, ObjectRow, TensorColumns
from ckpt.format.dtypes import dtype_name
from ckpt.format.elements import StoredTensor
from ckpt.format.fqns import natural
from ckpt.format.index import check_columns, encode_index
from ckpt.format.names import INDEX_SUFFIX
from ckpt.reading.checkpoint import Checkpoint, ReadSettings
from ckpt.reading.no_checkpoint import has_parts_of_save
from ckpt.stock.safetensors_files import ModelFiles, check_index, model_files, read_header
from ckpt.stock.safetensors_format import Header
from ckpt.transfer.threads import in_order, workers

_FILES_AT_ONCE = 4

_Chunk = tuple[str, tuple[int, ...], StoredTensor]
"""A file, where in the whole tensor the stored one begins, and that."""


def check_models(store: Store, keys: Sequence[str]) -> bool:
    """Tell whether the models that `find_models` found are those of another program.

    They are not beside what a save of this library left: that may be what was to replace them.
    A model is one file, or several with an index, or those that ranks wrote with DCP's
    HuggingFaceStorageWriter: each with parts of tensors.

    Raises ConfigurationError if there are several models.
    """
    if has_parts_of_save(store):
        return False
    if len(keys) > 1 and keys[0].endswith(INDEX_SUFFIX):
        raise ConfigurationError(f"there are {len(keys)} models here, each with an index", url=store.url)
    return True


def open_model(store: Store, settings: ReadSettings, keys: Sequence[str]) -> Checkpoint | None:
    """Open the model of which `find_models` found these keys; None if it is not another program's.

    Raises:
        NotFound: the index names a file that is not there.
        FormatError: a header or the index is not valid, or they disagree.
        ConfigurationError: there are several models.
    """
    if not check_models(store, keys):
        return None
    files = model_files(store, keys[0])
    if len(keys) > 1:
        files = ModelFiles({key: store.stat(key) for key in keys})
    with workers(store.threads, "ckpt-read") as threads:
        read = functools.partial(read_header, store)
        all_headers = in_order(threads, read, files.stats.values(), ahead=_FILES_AT_ONCE)
        headers = dict(zip(files.stats, all_headers, strict=True))
    check_index(files, headers, store.url)
    columns = describe_model(files, headers, url=store.url, key=keys[0])
    return Checkpoint(store, settings, None, keys[0], encode_index(columns), is_shared=True)


def describe_model(files: ModelFiles, headers: Mapping[str, Header], *, url: str, key: str) -> Columns:
    """Describe the tensors of all files. Raises FormatError if two of them contradict each other."""
    try:
        columns = _columns(files, headers)
        check_columns(columns)
    except (ValueError, FormatError) as error:
        text = error.message if isinstance(error, FormatError) else str(error)
        raise FormatError(f"not a valid model: {text}", url=url, key=key) from None
    return columns


def unreadable_error(store: Store, name: str, file: str) -> FormatError:
    """Make the error for a tensor that was asked for, and that is a row without dtype in the columns."""
    unreadable = read_header(store, store.stat(file)).unreadable.get(name)
    text = f"{name[:200]!r} was changed meanwhile" if unreadable is None else unreadable.error_text(name)
    return FormatError(text, url=store.url, key=file)


def _columns(files: ModelFiles, headers: Mapping[str, Header]) -> Columns:
    """Describe the tensors of all files; those of dtypes that torch lacks as if they were objects.

    So a load plans to read one only if it is asked for. Raises ValueError if two files contradict each other.
    """
    chunks: dict[str, list[_Chunk]] = {}
    for file, header in headers.items():
        begins = header.chunk_offsets()
        for name, stored in header.tensors.items():
            if files.index is not None and files.index.get(name) != file:
                continue  # the index assigns it to another file
            of_tensor = chunks.setdefault(name, [])
            if of_tensor and begins is None:
                raise ValueError(
                    f"{name[:200]!r} is in {of_tensor[0][0]!r} and in {file!r}, and no index says which counts"
                )
            of_tensor.append((file, (0,) * len(stored.shape) if begins is None else begins[name], stored))
    numbers = {file: number for number, file in enumerate(headers)}
    columns = Columns(list(headers), save_id=_version(files.stats))
    for name in sorted(chunks, key=natural):
        columns.entries[name] = _tensor(name, chunks[name], numbers)
    for file, header in headers.items():
        for name, unreadable in header.unreadable.items():
            if files.index is not None and files.index.get(name) != file:
                continue
            if name in columns.entries and header.chunk_offsets() is None:
                raise ValueError(f"{name[:200]!r} is in several files, and no index says which counts")
            columns.entries[name] = ObjectRow(numbers[file], unreadable.first_byte, unreadable.payload_bytes)
    columns.planner_data = {name: (name,) for name in columns.entries}
    return columns


def _tensor(name: str, chunks: list[_Chunk], numbers: Mapping[str, int]) -> TensorColumns:
    first = chunks[0][2]
    if any((c.dtype, len(c.shape)) != (first.dtype, len(first.shape)) for _, _, c in chunks):
        raise ValueError(f"the parts of {name[:200]!r} are of different dtypes or dimensions")
    shape = (len(chunks), len(first.shape))
    offsets = np.array([begin for _, begin, _ in chunks], dtype=np.int64).reshape(shape)
    sizes = np.array([stored.shape for _, _, stored in chunks], dtype=np.int64).reshape(shape)
    places = [(numbers[file], stored.first_byte, stored.payload_bytes) for file, _, stored in chunks]
    whole = tuple((offsets + sizes).max(axis=0).tolist()) if shape[1] else ()
    file, offset, length = np.array(places, dtype=np.int64).T
    return TensorColumns(dtype_name(first.dtype), whole, False, offsets, sizes, file, offset, length)


def _version(stats: Mapping[str, ObjectStat]) -> str:
    """Tell these files from others of the same headers, where the storage does."""
    facts = sorted((stat.key, stat.size_bytes, stat.version or "") for stat in stats.values())
    return crc_text(crc64nvme(repr(facts).encode()))
