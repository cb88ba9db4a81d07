"""Find, write and read `model.safetensors.index.json`, which maps the tensors of a model to its files.

That of a checkpoint of this library is made of its columns and sealed; others may be hostile.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ckpt.backends.base import Store, exists, is_key
from ckpt.consistency.seal import seal_json
from ckpt.errors import FormatError
from ckpt.format.columns import Columns, ObjectRow
from ckpt.format.dtypes import item_bytes
from ckpt.format.mistaken_files import mistaken_for
from ckpt.format.names import INDEX_SUFFIX, MODEL_INDEX_KEY, SINGLE_MODEL_KEY

SUFFIXES = (".safetensors", INDEX_SUFFIX)
MAX_INDEX_BYTES = 64 << 20

_PAGE_KEYS = 1000
_MAX_KEYS = 100_000
_MAX_TEXTS = 3 << 19
_MAX_VALUES = 4 << 20
"""Of a header or index. A text takes a dozen times as much memory as the few bytes it can have."""

_SPARE_BRACKETS = 100_000


def encode_model_index(files: Mapping[str, str], total_bytes: int, parameters: int) -> bytes:
    """Encode the index of a model in several files; `files` maps tensors to them."""
    metadata = {"total_parameters": parameters, "total_size": total_bytes}
    index = {"metadata": metadata, "weight_map": dict(sorted(files.items()))}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


def sealed_model_index(columns: Columns) -> bytes:
    """Make the index of a checkpoint whose files are those of a model, each tensor whole in one."""
    files: dict[str, str] = {}
    total_bytes = parameters = 0
    for fqn, entry in columns.entries.items():
        if isinstance(entry, ObjectRow) or entry.count != 1:
            raise FormatError(f"{fqn[:80]!r} is not a whole tensor, and a model has only those")
        files[fqn] = columns.files[int(entry.file[0])]
        elements = math.prod(entry.size)
        parameters += elements
        total_bytes += elements * item_bytes(entry.dtype)
    return seal_json(encode_model_index(files, total_bytes, parameters))


def parse_model_index(raw: bytes | bytearray, *, url: str, key: str) -> dict[str, str]:
    """Read the file of each tensor from an index. Raises FormatError, also for other folders."""
    try:
        files = strict_json(raw, brackets=0).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise ValueError("it has no weight_map")
        for file in files.values():
            if not isinstance(file, str) or "/" in file or not is_key(file):
                raise ValueError(
                    f"its weight_map names {str(file)[:80]!r}, which is not a name in this folder"
                )
    except ValueError as error:
        text = mistaken_for(raw) or f"not a valid index: {error}"
        raise FormatError(text, url=url, key=key) from None
    return files


def strict_json(raw: bytes | bytearray, brackets: int) -> dict[str, Any]:
    """Parse an object in which no name comes twice. Raises ValueError."""
    # An empty list takes thirty times as much memory as text.
    if raw.count(b"[") + raw.count(b"{") > brackets + _SPARE_BRACKETS:
        raise ValueError("JSON with far more lists and objects than it needs")
    if raw.count(b'"') > 2 * _MAX_TEXTS or raw.count(b",") > _MAX_VALUES:
        raise ValueError("JSON with more names and values than any model needs")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON ({error.msg} at character {error.pos})") from None
    if isinstance(value, dict):
        return value
    raise ValueError("not a JSON object")


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for name, value in pairs:
        if name in named:
            raise ValueError(f"{name[:200]!r} comes twice")
        named[name] = value
    return named


def find_models(store: Store) -> list[str]:
    """Find the file or the index that transformers takes, else the indices, else the files, in order."""
    for key in (SINGLE_MODEL_KEY, MODEL_INDEX_KEY):
        if exists(store, key):
            return [key]
    keys: list[str] = []
    for count, stat in enumerate(itertools.islice(store.list(), _MAX_KEYS)):
        if count == _PAGE_KEYS and not keys:  # a folder of very many checkpoints, say
            break
        if "/" not in stat.key and stat.key.endswith(SUFFIXES):
            keys.append(stat.key)
    keys.sort()
    return [key for key in keys if key.endswith(INDEX_SUFFIX)] or keys
