"""Write one file as `torch.save` does.

torch itself writes it, with tensors over untouched memory, into a writer that keeps everything but
their bytes: the frame. The bytes are then streamed into the frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ckpt.conversion.job import ConversionJob
from ckpt.conversion.output_files import OutputFile, OutputFiles
from ckpt.conversion.selection import Selection
from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.planner_data import check_planner_data
from ckpt.stock.item_frame import save_without_crc32, untouched_memory
from ckpt.torch_private import unflatten_state_dict
from ckpt.transfer.file_body import BytesPayload, FileItem

_STEP_BYTES = 64


def write_torch_file(job: ConversionJob) -> None:
    """Write the state of `job` on the first rank, as one file cannot be shared; the others wait."""
    first = job.ranks.rank == 0
    file = job.ranks.together(job.call, lambda: _file(job) if first else None)
    counter = job.counter(file.nbytes if file is not None else 0)
    output = OutputFiles(job.destination.folder, job.pool, replace=job.overwrite, pace=counter.add)

    def work() -> None:
        if file is not None:
            output.put_all([file], check_source=job.source.check_unchanged)
            job.wrote(1, file.nbytes)

    with job.discarding(output.discard if not job.replaces_file else lambda: None):
        job.ranks.together(job.call, work)


def _file(job: ConversionJob) -> OutputFile:
    assert job.destination.key is not None
    job.refuse_existing_file()
    selection, source = job.selection, job.source
    frame = _FrameWriter(selection)
    selection.check_paths()
    objects = {chosen.name: source.load_object(chosen.source) for chosen in selection.objects}
    state = _nested(job, frame.tensors | objects)
    try:
        save_without_crc32(state, frame)
    except KeyError as error:
        raise ConfigurationError(f"torch.save does not support the dtype of a tensor: {error}") from None
    items: list[FileItem] = []
    end = 0
    for part in frame.finish():
        if isinstance(part, bytes):
            items.append(FileItem(end, b"", BytesPayload(part), b""))
        else:
            tensor = selection.tensors[part]
            payload = job.stream.whole(tensor.source, tensor.facts.shape, tensor.facts.dtype)
            items.append(FileItem(end, b"", payload, b""))
        end += items[-1].length
    return OutputFile(job.destination.key, items)


def _nested(job: ConversionJob, values: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the nested state. Raises FormatError if paths contradict each other."""
    paths = job.selection.paths
    if not job.selection.renamed:
        state: dict[str, Any] | None = job.source.nested(values)
        if state is not None:
            return state
    try:
        check_planner_data(paths)
        nested: dict[str, Any] = unflatten_state_dict(dict(values), paths)
    except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
        text = f"the nested state cannot be rebuilt from its flat names: {error}"
        raise FormatError(text, url=job.source.url) from None
    return nested


class _FrameWriter:
    """A file for `torch.save` that keeps all but the bytes of `tensors`.

    The tensors overlap in memory, each a step after the last: torch knows storages by their
        address.
    """

    def __init__(self, selection: Selection) -> None:
        self._sizes = [tensor.nbytes for tensor in selection.tensors]
        span = _STEP_BYTES * len(self._sizes)
        memory = untouched_memory(max(self._sizes, default=0) + span + 1)
        self._begin = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        self._end = self._begin + span
        self.tensors: dict[str, Any] = {}
        for number, chosen in enumerate(selection.tensors):
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
        address = np.frombuffer(view, dtype=np.uint8).__array_interface__["data"][0]
        if not self._begin <= address < self._end:
            return None
        number = (address - self._begin) // _STEP_BYTES
        if self._sizes[number] != view.nbytes:
            raise AssertionError("torch.save wrote a tensor in an unknown way")
        return int(number)

    def flush(self) -> None:
        pass

    def finish(self) -> list[bytes | int]:
        """Return the file: bytes, and in between the numbers of tensors."""
        numbers = sorted(part for part in self._parts if isinstance(part, int))
        if numbers != [number for number, size in enumerate(self._sizes) if size]:
            raise AssertionError("torch.save wrote a tensor twice, or not at all")
        parts = [bytes(part) if isinstance(part, bytearray) else part for part in self._parts]
        return [part for part in parts if part != b""]
