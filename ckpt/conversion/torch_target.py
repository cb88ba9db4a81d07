"""Conversions to one file as `torch.save` writes it.

torch itself writes it, with tensors over memory that nobody ever touched, into a sink that keeps everything but their
bytes. What is kept is the frame; the bytes are streamed into it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt.conversion.job import Job
from ckpt.conversion.output_files import OutputFile, OutputFiles
from ckpt.conversion.selection import Choice
from ckpt.conversion.source import Source
from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.planner_data import check_planner_data
from ckpt.stock.item_frame import save_without_crc32, untouched_memory
from ckpt.torch_private import unflatten_state_dict
from ckpt.transfer.file_body import BytesPayload, FileItem

__all__ = ["write_torch_file"]

_STEP_BYTES = 64


def write_torch_file(job: Job) -> None:
    """Write the state of `job`. One file cannot be written by many: the first rank does it, the others wait."""
    assert job.place.key is not None
    first = job.ranks.rank == 0
    file = job.ranks.together(job.call, lambda: _file(job) if first else None)
    counter = job.counter(file.nbytes if file is not None else 0)
    output = OutputFiles(job.place.folder, job.pool, replace=job.overwrite, pace=counter.add)

    def work() -> None:
        if file is not None:
            output.put_all([file], vouch=job.source.check_unchanged)
            job.wrote(1, file.nbytes)

    with job.discarding(output.discard if not job.replaces_file else lambda: None):
        job.ranks.together(job.call, work)


def _file(job: Job) -> OutputFile:
    assert job.place.key is not None
    job.refuse_existing_file()
    choice, stream = job.choice, job.stream
    frame = _Frame(choice)
    choice.check_paths()
    state = _nested(job.source, choice, frame.tensors | _objects(job))
    try:
        save_without_crc32(state, frame)
    except KeyError as error:
        raise ConfigurationError(f"torch cannot save one of the dtypes: {error}") from None
    items: list[FileItem] = []
    end = 0
    for part in frame.finish():
        if isinstance(part, bytes):
            items.append(FileItem(end, b"", BytesPayload(part), b""))
        else:
            tensor = choice.tensors[part]
            piece = stream.whole(tensor.source, tensor.facts.shape, tensor.facts.dtype)
            items.append(FileItem(end, b"", piece, b""))
        end += items[-1].length
    return OutputFile(job.place.key, items)


def _objects(job: Job) -> dict[str, Any]:
    return {found.name: job.source.load_object(found.source) for found in job.choice.objects}


def _nested(source: Source, choice: Choice, values: Mapping[str, Any]) -> dict[str, Any]:
    """The state as it was before it was flattened. Raises FormatError where paths contradict each other."""
    if not choice.renamed:
        found: dict[str, Any] | None = source.nested(values)
        if found is not None:
            return found
    try:
        check_planner_data(choice.paths)
        nested: dict[str, Any] = unflatten_state_dict(dict(values), choice.paths)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        raise FormatError(f"the state cannot be put together: {error}", url=source.url) from None
    return nested


class _Frame:
    """A sink for `torch.save` that keeps all but the bytes of `tensors`.

    They share one piece of memory, a step apart: torch tells storages by where they begin.
    """

    def __init__(self, choice: Choice) -> None:
        largest = max((tensor.nbytes for tensor in choice.tensors), default=0)
        memory = untouched_memory(largest + _STEP_BYTES * len(choice.tensors) + 1)
        self._begin = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        self._end = self._begin + _STEP_BYTES * len(choice.tensors)
        self._sizes = [tensor.nbytes for tensor in choice.tensors]
        self.tensors: dict[str, Any] = {}
        for number, chosen in enumerate(choice.tensors):
            dtype, shape = chosen.facts.dtype, torch.Size(chosen.facts.shape)
            if chosen.nbytes:
                flat = torch.frombuffer(
                    memory, dtype=torch.uint8, count=chosen.nbytes, offset=_STEP_BYTES * number
                )
                self.tensors[chosen.name] = flat.view(dtype).view(shape)
            else:
                self.tensors[chosen.name] = torch.empty(shape, dtype=dtype, device="cpu")
        self._parts: list[int | bytearray] = [bytearray()]

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        number = self._number(view)
        if number is not None:
            self._parts += [number, bytearray()]
        else:
            last = self._parts[-1]
            assert isinstance(last, bytearray)
            last += view
        return view.nbytes

    def _number(self, view: memoryview) -> int | None:
        if not view.nbytes:
            return None
        place = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        if not self._begin <= place < self._end:
            return None
        number = (place - self._begin) // _STEP_BYTES
        if self._sizes[number] != view.nbytes:
            raise AssertionError("torch.save wrote a tensor in an unknown way")
        return int(number)

    def flush(self) -> None:
        pass

    def finish(self) -> list[bytes | int]:
        """The file: bytes, and in between the numbers of tensors."""
        parts = [bytes(part) if isinstance(part, bytearray) else part for part in self._parts]
        if sorted(part for part in parts if isinstance(part, int)) != [
            n for n, size in enumerate(self._sizes) if size
        ]:
            raise AssertionError("torch.save wrote a tensor twice, or not at all")
        return [part for part in parts if part != b""]
