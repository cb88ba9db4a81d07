"""Open the source and the destination of a conversion, and recognise their formats."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

from ckpt.backends.base import Store, exists, is_key
from ckpt.backends.registry import open_store
from ckpt.consistency.commit import COMMIT_KEY
from ckpt.conversion.checkpoint_source import CheckpointSource
from ckpt.conversion.formats import Format, check_format
from ckpt.conversion.safetensors_source import SafetensorsSource
from ckpt.conversion.source import Location, TensorSource
from ckpt.conversion.torch_source import TorchFileSource
from ckpt.errors import AccessDenied, ConfigurationError, FormatError, NotFound
from ckpt.format.config_files import check_configuration
from ckpt.format.mistaken_files import mistaken_file
from ckpt.format.model_index import SUFFIXES
from ckpt.reading.no_checkpoint import has_parts_of_save
from ckpt.reading.opening import is_rank_local
from ckpt.reading.slices import OpenCheckpoint
from ckpt.stock.safetensors_files import find_model
from ckpt.transfer.threads import thread_pool

_TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")
_OLD_WEIGHTS = "pytorch_model.bin"
_ZIP = b"PK\x03\x04"
_ENDING = re.compile(r"(?<=.)\.[A-Za-z]\w{0,15}$")
"""Of a file's name; folders are named `step-1.5` and `Llama-3.1-8B`."""


@dataclass(frozen=True)
class Endpoint:
    """A file or folder that the caller names.

    Attributes:
        guard: wraps each store; closing the wrapper closes the store.
        stack: closes all that was opened.
        expect: the digest of the checkpoint that is read; anything else is refused.
    """

    url: str = field(repr=False)  # it may carry a password
    options: Mapping[str, Any] | None = field(repr=False)
    guard: Callable[[Store], Store]
    stack: contextlib.ExitStack
    threads: int | None = None
    expect: str | None = None

    @property
    def name(self) -> str:
        """The last segment of the URL; empty if it ends in a slash."""
        return self.url.rpartition("/")[2]

    def open_folder(self, url: str) -> Store:
        store = self.guard(open_store(url, self.options, threads=self.threads))
        self.stack.callback(store.close)
        return store

    def open_parent(self, url: str) -> tuple[Store, str]:
        """Open the folder of a file, and return its key. Raises ConfigurationError for no name."""
        parent, slash, name = url.rpartition("/")
        if not is_key(name) or (slash and parent.endswith(":/")):
            raise ConfigurationError(f"{url!r} does not name a file")
        if not slash:
            parent = "."
        elif not parent or parent.endswith("://"):  # the root of a file system
            parent += "/"
        return self.open_folder(parent), name

    def open_existing(self) -> Location:
        """Open the file or folder for reading.

        A link that the caller names is followed. The store refuses links out of a folder.
        """
        url = self.url
        if "://" not in url and os.path.isfile(url):
            url = os.path.realpath(url)
        # Without permission to list, a missing file is refused.
        with (
            contextlib.suppress(ConfigurationError, NotFound, AccessDenied),
            contextlib.ExitStack() as looking,
        ):
            folder, key = dataclasses.replace(self, stack=looking).open_parent(url)
            location = Location(folder, key, folder.stat(key))
            self.stack.push(looking.pop_all())
            return location
        return Location(self.open_folder(url))


def open_source(endpoint: Endpoint) -> TensorSource:
    """Open a source of any format. Raises FormatError if it has none of them."""
    with contextlib.ExitStack() as looking:
        location = dataclasses.replace(endpoint, stack=looking).open_existing()
        threads = looking.enter_context(thread_pool(location.folder.threads, "ckpt-read"))
        model = None if endpoint.expect else _open_model(location, threads)
        if model is not None:
            endpoint.stack.push(looking.pop_all())
            return model
    # Where nothing is, this says best what is missing.
    checkpoint = OpenCheckpoint(endpoint.url, endpoint.options, guard=endpoint.guard, expect=endpoint.expect)
    return CheckpointSource(endpoint.stack.enter_context(checkpoint))


def _open_model(location: Location, threads: Executor) -> TensorSource | None:
    """Open a file or a model's folder; None if a checkpoint is there, or nothing."""
    folder, key, stat = location.folder, location.key, location.stat
    if key is None or stat is None:
        return _open_folder(folder, threads)
    head = bytearray(min(stat.size_bytes, len(_ZIP)))
    folder.read_into(key, 0, [memoryview(head)])
    if key.endswith(SUFFIXES):
        return SafetensorsSource(location, key, threads)
    if head == _ZIP or key.endswith(_TORCH_SUFFIXES):
        return TorchFileSource(folder, stat, threads)
    text = mistaken_file(folder, stat) or "is not a torch.save archive, nor, by its name, a safetensors file"
    raise FormatError(text, url=folder.url, key=key)


def _open_folder(folder: Store, threads: Executor) -> TensorSource | None:
    if exists(folder, COMMIT_KEY) or is_rank_local(folder) or has_parts_of_save(folder):
        return None
    key = find_model(folder)
    if key is not None:
        return SafetensorsSource(Location(folder), key, threads)
    with contextlib.suppress(NotFound):
        return TorchFileSource(folder, folder.stat(_OLD_WEIGHTS), threads, has_folder=True)
    if exists(folder, f"{_OLD_WEIGHTS}.index.json"):
        raise FormatError(
            "is an old model in several pickles; load it with transformers, and save it with save_pretrained",
            url=folder.url,
        )
    return None


def open_configuration(endpoint: Endpoint, destination: Location, form: Format) -> Store:
    """Open the folder of a model's configuration.

    Raises NotFound if there is none in it, ConfigurationError if the destination needs none.
    """
    if form != "safetensors" or destination.key is not None:
        raise ConfigurationError("--config-from is for a folder of safetensors", url=destination.url)
    location = endpoint.open_existing()
    if location.key is not None:
        raise NotFound("--config-from is a folder, and this is a file", url=location.url)
    check_configuration(location.folder)
    return location.folder


def open_destination(endpoint: Endpoint, to: str | None, source: TensorSource) -> tuple[Location, Format]:
    """Open the destination in the format `to`, or that of its name.

    Raises ConfigurationError if the format is unknown, or the destination a part of the source.
    """
    form = _format_of(endpoint.name, to, source.format)
    if form == "torch" or (form == "safetensors" and endpoint.name.endswith(".safetensors")):
        location = Location(*endpoint.open_parent(endpoint.url))
    else:
        location = Location(endpoint.open_folder(endpoint.url))
    if source.format == form and os.path.realpath(source.url) == os.path.realpath(location.url):
        raise ConfigurationError("source and destination are the same", url=location.url)
    if location.key is not None and source.holds(location.url):
        raise ConfigurationError("the destination is a file of the source", url=location.url)
    return location, form


def _format_of(name: str, to: str | None, source_format: str) -> Format:
    if to is not None:
        return check_format(to)
    if name.endswith(".safetensors"):
        return "safetensors"
    if name.endswith(_TORCH_SUFFIXES):
        return "torch"
    if (ending := _ENDING.search(name)) is not None:
        endings = ", ".join((".safetensors", *_TORCH_SUFFIXES))
        raise ConfigurationError(
            f"the ending {ending[0]!r} is not that of a format ({endings}); pass --to, or, for a folder of "
            "that name, end it in a slash"
        )
    if source_format != "ckpt":
        return "ckpt"
    raise ConfigurationError(
        "the destination's name does not tell its format; pass --to dcp, torch, safetensors or ckpt"
    )
