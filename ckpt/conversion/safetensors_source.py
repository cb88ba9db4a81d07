"""Read safetensors models as a source of tensors: one file, or several with an index."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from concurrent.futures import Executor

from ckpt.conversion.source import FileSource, Location, TensorFacts
from ckpt.errors import FormatError
from ckpt.format.fqns import natural
from ckpt.stock.safetensors_files import check_index, model_files, read_header
from ckpt.transfer.threads import in_order

_FILES_AT_ONCE = 4


class SafetensorsSource(FileSource):
    """A model as a source; `key` names its file or index in the folder.

    Tensors of dtypes that torch lacks are read as bytes. Raises FormatError if a header or the index is not valid, or
    they disagree.
    """

    def __init__(self, location: Location, key: str, threads: Executor) -> None:
        store = location.folder
        files = model_files(store, key)
        super().__init__("safetensors", location, files.stats, threads, has_folder=location.key is None)
        read = functools.partial(read_header, store)
        headers = dict(
            zip(files.stats, in_order(threads, read, files.stats.values(), ahead=_FILES_AT_ONCE), strict=True)
        )
        for file, header in headers.items():
            # The index may assign a tensor to another file.
            named = [name for name in header.names if files.index is None or files.index.get(name) == file]
            for name in named:
                unreadable = header.unreadable.get(name)
                stored = header.tensors[name] if unreadable is None else unreadable.as_bytes()
                self.tensors[name] = TensorFacts(stored.dtype, stored.shape, unreadable=unreadable)
                self._stored[name] = (file, stored)
                self.paths[name] = (name,)
        check_index(files, headers, store.url)
        # The order in a file is that of dtypes, and says nothing.
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: natural(item[0])))

    def check_readable(self, names: Iterable[str]) -> None:
        for name in names:
            unreadable = self.tensors[name].unreadable
            if unreadable is not None:
                text = f"{unreadable.error_text(name)}: --exclude it, or convert to safetensors, which keeps its bytes"
                raise FormatError(text, url=self._store.url, key=self._stored[name][0])
