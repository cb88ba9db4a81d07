"""Write one file as `torch.save` does.

torch itself writes the frame, and the bytes of the tensors are then streamed into it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ckpt.conversion.target import FileTarget, Written, end_to_end
from ckpt.errors import ConfigurationError, FormatError
from ckpt.format.fqns import Path
from ckpt.format.planner_data import check_planner_data
from ckpt.state.stored import StoredState, StoredValue
from ckpt.state.structure import build
from ckpt.stock.item_frame import FrameWriter
from ckpt.stock.safe_load import fault_for_torch
from ckpt.torch_private import unflatten_state_dict
from ckpt.transfer.file_body import BytesPayload, Payload


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
        writer = FrameWriter([(chosen.facts.dtype, chosen.facts.shape) for chosen in selection.tensors])
        names = [chosen.name for chosen in selection.tensors]
        selection.check_paths()
        objects = {chosen.name: source.load_object(chosen.source) for chosen in selection.objects}
        for name, value in objects.items():
            self._check_loads(name, value)
        state = self._nested(dict(zip(names, writer.tensors, strict=True)) | objects)
        try:
            parts = writer.save(state)
        except KeyError as error:
            raise ConfigurationError(f"torch.save does not support the dtype of a tensor: {error}") from None
        for part in parts:
            yield BytesPayload(part) if isinstance(part, bytes) else self.whole(selection.tensors[part])

    def _check_loads(self, name: str, value: Any) -> None:
        """Refuse an object that a checkpoint may have, but `torch.load(weights_only=True)` refuses."""
        fault = fault_for_torch(value)
        if fault is not None:
            text = (
                f"{name[:200]!r} is nothing that torch.load(weights_only=True) loads ({fault}); --exclude it"
            )
            raise ConfigurationError(text, url=self.source.url)

    def _nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Rebuild the nested state. Raises FormatError if paths contradict each other."""
        if not self.selection.is_renamed:
            state: dict[str, Any] | None = self.source.nested(values)
            if state is not None:
                return state
        paths = self.selection.paths
        if self.selection.structures:
            return self._structured(values, paths)
        try:
            check_planner_data(paths)
            nested: dict[str, Any] = unflatten_state_dict(dict(values), paths)
        except (ValueError, TypeError, IndexError, KeyError, AttributeError) as error:
            text = f"the nested state cannot be rebuilt from its flat names: {error}"
            raise FormatError(text, url=self.source.url) from None
        return nested

    def _structured(self, values: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
        """Rebuild a state of which is noted what flattening lost."""
        texts = {chosen.name: self.source.load_object(chosen.source) for chosen in self.selection.structures}
        noted = {chosen.name: chosen.path for chosen in self.selection.structures}
        stored = StoredState(map(StoredValue, values), {**paths, **noted}, texts)
        nested = {}
        for name, part in stored.parts.items():
            leaves = {path: values[value.name] for path, value in part.values.items()}
            nested[name] = build(leaves, part.nodes, None, name)
        return nested
