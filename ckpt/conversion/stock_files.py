"""What a rank writes of a checkpoint in stock PyTorch's own layout."""

from __future__ import annotations

from collections.abc import Sequence

from ckpt.conversion.output_files import OutputFile, OutputFiles
from ckpt.writing.layout import Entry, place
from ckpt.writing.receipts import PlacedItem, RankReceipt, pack_items

__all__ = ["StockFiles"]


class StockFiles:
    """Writes `__<rank>_<number>.distcp` files, and keeps the record of what is where."""

    def __init__(self, output: OutputFiles, rank: int) -> None:
        self._output, self._rank = output, rank
        self._names: list[str] = []
        self._placed: list[PlacedItem] = []
        self.data_bytes = 0

    def put(self, files: Sequence[Sequence[Entry]]) -> None:
        first = len(self._names)
        outputs = [
            OutputFile(f"__{self._rank}_{first + number}.distcp", place(entries))
            for number, entries in enumerate(files)
        ]
        self._output.put_all(outputs)
        for number, (file, entries) in enumerate(zip(outputs, files, strict=True), first):
            self._names.append(file.key)
            self.data_bytes += file.nbytes
            for item, entry in zip(file.items, entries, strict=True):
                index = entry.index
                offsets = None if index.offset is None else tuple(index.offset)
                self._placed.append(
                    PlacedItem(index.fqn, offsets, index.index, number, item.offset, item.length)
                )

    def receipt(self, place: str) -> RankReceipt:
        return RankReceipt(self._rank, place, None, self._names, pack_items(self._placed))
