"""Read safetensors models as a source of tensors: one file, or several with an index."""

from __future__ import annotations

import functools
from concurrent.futures import Executor

from ckpt.conversion.source import FileSource, Location, TensorFacts
from ckpt.errors import FormatError
from ckpt.format.fqns import natural
from ckpt.stock.safetensors_files import check_index, model_files, read_header
from ckpt.transfer.threads import in_order

_FILES_AT_ONCE = 4


class SafetensorsSource(FileSource):
    """A model as a source; `key` names its file or index in the folder.

    Raises FormatError if a header or the index is not valid, they disagree, or torch lacks a dtype: a conversion
    that left a tensor out would make another model.
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
            for name, unreadable in header.unreadable.items():
                if files.index is None or files.index.get(name) == file:
                    raise FormatError(unreadable.error_text(name), url=store.url, key=file)
            for name, stored in header.tensors.items():
                # The index may assign it to another file.
                if files.index is None or files.index.get(name) == file:
                    self.tensors[name] = TensorFacts(stored.dtype, stored.shape)
                    self._stored[name] = (file, stored)
                    self.paths[name] = (name,)
        check_index(files, headers, store.url)
        # The order in a file is that of dtypes, and says nothing.
        self.tensors = dict(sorted(self.tensors.items(), key=lambda item: natural(item[0])))
