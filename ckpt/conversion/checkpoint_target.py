"""Write a checkpoint of this library or of stock DCP: all ranks write, the first commits."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

from ckpt.backends.base import exists
from ckpt.consistency.commit import COMMIT_KEY, STOCK_METADATA_KEY, proves_no_commit
from ckpt.conversion.chunks import Chunks
from ckpt.conversion.job import ConversionJob
from ckpt.conversion.output_files import OutputFile, OutputFiles, is_settled
from ckpt.errors import AlreadyExists
from ckpt.format.names import last_segment, rank_directory
from ckpt.stock.metadata_writer import pickled_metadata
from ckpt.writing.coordinator import Coordinator
from ckpt.writing.layout import Entry, place
from ckpt.writing.rank_files import RankFiles
from ckpt.writing.receipts import PlacedItem, RankReceipt, collect, pack_items
from ckpt.writing.save_objects import SaveObjects


def write_checkpoint(job: ConversionJob) -> None:
    """Write a checkpoint of this library. An existing one stays until this one is committed."""
    store, ranks, chunks = job.destination.folder, job.ranks, Chunks(job)
    objects = SaveObjects(ranks.rank)
    coordinator = Coordinator(store, objects) if ranks.rank == 0 else None

    def begin() -> None:
        store.prepare(rank_directory(ranks.rank))
        if coordinator is not None:
            chunks.checked_paths()
            coordinator.look(overwrite=job.overwrite)

    def write() -> RankReceipt:
        files = RankFiles(store, objects, job.pool, chunks.counter().add)
        chunks.put(files.put)
        receipt = files.receipt(last_segment(store.url), files.put_manifest())
        job.source.check_unchanged()
        job.wrote(len(receipt.files), files.data_bytes)
        return receipt

    def commit() -> None:
        assert coordinator is not None
        coordinator.commit(chunks.metadata(), receipts, world_size=ranks.size, tags=job.source.tags)

    def discard() -> None:
        objects.discard(store)

    with job.discarding(discard):
        ranks.together(job.call, begin)
        receipts = ranks.gather(ranks.together(job.call, write))
    job.publish(commit, discard, proves_no_commit)


def write_stock_checkpoint(job: ConversionJob) -> None:
    """Write a checkpoint of stock DCP; `.metadata`, which makes it one, comes last."""
    store, ranks, chunks = job.destination.folder, job.ranks, Chunks(job)
    output = OutputFiles(store, job.pool, replace=job.overwrite, pace=chunks.counter().add)
    files = _StockFiles(output, ranks.rank)

    def begin() -> None:
        store.prepare("")
        if ranks.rank == 0:
            chunks.checked_paths()
        for key in (COMMIT_KEY, STOCK_METADATA_KEY) if ranks.rank == 0 else ():
            if exists(store, key):
                raise AlreadyExists(
                    "there is a checkpoint here already; choose another place, or remove it first",
                    url=store.url, key=key,
                )  # fmt: skip

    def write() -> RankReceipt:
        chunks.put(files.put)
        job.source.check_unchanged()
        receipt = files.receipt(last_segment(store.url))
        job.wrote(len(receipt.files), files.data_bytes)
        return receipt

    def finish() -> None:
        columns = collect(chunks.metadata(), receipts)
        columns.version = CURRENT_DCP_VERSION
        output.put_bytes(STOCK_METADATA_KEY, pickled_metadata(columns))

    with job.discarding(output.discard):
        ranks.together(job.call, begin)
        receipts = ranks.gather(ranks.together(job.call, write))
    job.publish(finish, output.discard, is_settled)


class _StockFiles:
    """Write `__<rank>_<number>.distcp` files, and record the place of each item."""

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
