"""Write one file as `torch.save` does.

torch itself writes it, with tensors over untouched memory, into a writer that keeps everything but
their bytes: the frame. The bytes are then streamed into the frame.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckpt.conversion.selection import ChosenTensor
from ckpt.conversion.target import FileTarget, Written, end_to_end
from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.planner_data import check_planner_data
from ckpt.stock.item_frame import save_without_crc32, tensor_over, untouched_memory
from ckpt.torch_private import unflatten_state_dict
from ckpt.transfer.file_body import BytesPayload, Payload

_STEP_BYTES = 64


class TorchTarget(FileTarget):
    """One file, which cannot be shared: the first rank writes it, the others wait."""

    def begin(self) -> None:
        if self.ranks.rank == 0:
            self.refuse_existing_file()

    def write(self) -> Written:
        if self.ranks.rank != 0:
            return Written(0, 0)
        assert self.destination.key is not None
        body = self.body(end_to_end(self._payloads()), check_source=True)
        self.total_bytes = body.nbytes
        self.put_all({self.destination.key: body})
        return Written(1, body.nbytes)

    def _payloads(self) -> Iterator[Payload]:
        selection, source = self.selection, self.source
        frame = _FrameWriter(selection.tensors)
        selection.check_paths()
        objects = {chosen.name: source.load_object(chosen.source) for chosen in selection.objects}
        state = self._nested(frame.tensors | objects)
        try:
            save_without_crc32(state, frame)
        except KeyError as error:
            raise ConfigurationError(f"torch.save does not support the dtype of a tensor: {error}") from None
        for part in frame.finish():
            yield BytesPayload(part) if isinstance(part, bytes) else self.whole(selection.tensors[part])

    def _nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rebuild the nested state. Raises FormatError if paths contradict each other."""
        if not self.selection.is_renamed:
            state: dict[str, Any] | None = self.source.nested(values)
            if state is not None:
                return state
        paths = self.selection.paths
        try:
            check_planner_data(paths)
            nested: dict[str, Any] = unflatten_state_dict(dict(values), paths)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            text = f"the nested state cannot be rebuilt from its flat names: {error}"
            raise FormatError(text, url=self.source.url) from None
        return nested


class _FrameWriter:
    """A file for `torch.save` that keeps all but the bytes of `tensors`.

    The tensors overlap in memory, each a step after the last: torch knows storages by address.
    """

    def __init__(self, tensors: Sequence[ChosenTensor]) -> None:
        self._sizes = [tensor.nbytes for tensor in tensors]
        span = _STEP_BYTES * len(self._sizes)
        memory = memoryview(untouched_memory(max(self._sizes, default=0) + span + 1))
        self._begin = np.frombuffer(memory, dtype=np.uint8).__array_interface__["data"][0]
        self._end = self._begin + span
        self.tensors: dict[str, Any] = {}
        for number, chosen in enumerate(tensors):
            begin = _STEP_BYTES * number
            own, shape = memory[begin : begin + chosen.nbytes], torch.Size(chosen.facts.shape)
            self.tensors[chosen.name] = tensor_over(own, chosen.facts.dtype, shape)
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
