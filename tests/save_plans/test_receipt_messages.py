"""Ranks tell the coordinator what they have written: layouts that many share once, in later saves not again."""

from __future__ import annotations

import pytest
from support.simulated_plans import Rendezvous, ThreadRanks, on_ranks

from ckpt.errors import CheckpointError, StorageError
from ckpt.format.names import data_key, manifest_key
from ckpt.format.records import ManifestRef
from ckpt.save_plans.exchange import FEW_RANKS
from ckpt.save_plans.file_layouts import pack_placed
from ckpt.save_plans.receipt_messages import Layouts, RankReceipt, Receipts, gather_receipts, message_of

MANY = FEW_RANKS + 8


def receipt_of(rank: int, *, items: int = 200, objects_bytes: int = 0, files: int = 2) -> RankReceipt:
    """The report of a rank; odd ranks have laid out their files in another way."""
    token = f"{rank:016x}"
    rows = [(n, n % files, 64 * n + objects_bytes, 40 + rank % 2) for n in range(items)]
    path, names = manifest_key(rank, token), [data_key(rank, token, number) for number in range(files)]
    manifest = ManifestRef(
        path=path, size_bytes=9, crc64nvme="0" * 16, rank=rank, files=files, items=items, data_bytes=rank
    )
    return RankReceipt(rank, "step-1", manifest, names, pack_placed(rows), retries=rank)


def gathered(
    reports: list[RankReceipt | CheckpointError], known: Layouts
) -> tuple[Receipts | CheckpointError, Rendezvous]:
    """What the coordinator has in the end, and what was sent."""
    rendezvous = Rendezvous(len(reports))

    def work(ranks: ThreadRanks) -> Receipts | CheckpointError | None:
        return gather_receipts(ranks, reports[ranks.rank], known if ranks.rank == 0 else Layouts())  # type: ignore[arg-type]

    first, *others = on_ranks(rendezvous, work)
    assert others == [None] * len(others)
    assert isinstance(first, Receipts | CheckpointError)
    return first, rendezvous


@pytest.mark.parametrize("count", [2, FEW_RANKS, MANY])
def test_the_coordinator_has_the_receipts_of_all(count: int) -> None:
    reports = [receipt_of(rank) for rank in range(count)]
    reports[1] = RankReceipt(1, "step-1", None, [], pack_placed([]))
    known = Layouts()
    for _ in range(2):
        receipts, _ = gathered([*reports], known)
        assert isinstance(receipts, Receipts)
        assert receipts.all() == reports


def test_a_layout_is_sent_once_and_in_later_saves_not_at_all() -> None:
    known, reports = Layouts(), [receipt_of(rank) for rank in range(MANY)]
    first, rendezvous = gathered([*reports], known)
    assert isinstance(first, Receipts)
    assert [rank for rank, wanted in enumerate(first.wanted) if wanted] == [
        1
    ]  # the first rank's own is known
    assert rendezvous.calls == ["gather_bytes", "first_number", "scatter_bytes", "gather_bytes"]
    first.all()
    later, rendezvous = gathered([*reports], known)
    assert rendezvous.calls == ["gather_bytes", "first_number"]
    assert rendezvous.sent_bytes < 120
    assert isinstance(later, Receipts)
    assert later.all() == reports
    # Objects of one rank take more bytes than before: that rank alone sends its layout.
    changed = [*reports[:5], receipt_of(5, objects_bytes=64), *reports[6:]]
    last, _ = gathered([*changed], known)
    assert isinstance(last, Receipts)
    assert [rank for rank, wanted in enumerate(last.wanted) if wanted] == [5]
    last.take([changed[rank].items if wanted else b"" for rank, wanted in enumerate(last.wanted)])
    assert last.all() == changed


@pytest.mark.parametrize("count", [4, MANY])
def test_failures_are_told_without_layouts(count: int) -> None:
    reports: list[RankReceipt | CheckpointError] = [receipt_of(rank) for rank in range(count)]
    reports[2] = StorageError("full", url="s3://b/c", rank=2)
    receipts, rendezvous = gathered(reports, Layouts())
    assert isinstance(receipts, Receipts)
    assert {rank: str(error) for rank, error in receipts.failures.items()} == {2: str(reports[2])}
    assert "scatter_bytes" not in rendezvous.calls


def test_another_layout_than_told_is_an_error() -> None:
    told = [message_of(receipt_of(rank), with_layout=False) for rank in range(MANY)]
    receipts = Receipts(told, Layouts(), receipt_of(0))
    with pytest.raises(CheckpointError, match="sent another layout"):
        receipts.take([receipt_of(0).items] * MANY)


def test_what_cannot_be_read_is_an_error_of_the_coordinator() -> None:
    def work(ranks: ThreadRanks) -> Receipts | CheckpointError | None:
        if ranks.rank == 3:
            ranks.gather_bytes(b"\xc1")
            ranks.first_number(0)
            return None
        return gather_receipts(ranks, receipt_of(ranks.rank), Layouts())  # type: ignore[arg-type]

    first, *_ = on_ranks(Rendezvous(MANY), work)
    assert isinstance(first, CheckpointError)
    assert "cannot be read" in str(first)


def test_very_large_layouts_are_not_kept() -> None:
    known = Layouts()
    known.keep({b"a": bytes(1000)})
    assert known.get(b"a") == bytes(1000)
    known.keep({b"b": bytes(65 << 20)})
    assert known.get(b"a") is known.get(b"b") is None


def test_a_message_is_small() -> None:
    messages = [message_of(receipt_of(rank), with_layout=False) for rank in range(100)]
    assert max(map(len, messages)) < 110
