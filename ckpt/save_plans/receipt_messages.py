"""Tell the coordinator what each rank has written: what many ranks have in common is sent once.

In large jobs a rank sends a digest of where its items are. Of each that the coordinator does not know, one rank sends
the content; in later saves it knows them all, unless a rank's objects take more or fewer bytes than before.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from ckpt.errors import CheckpointError
from ckpt.format.figures import pack_ms, unpack_ms
from ckpt.format.names import ObjectName, data_key, manifest_key
from ckpt.format.records import ManifestRef
from ckpt.ranks.first_rank import FirstRank
from ckpt.save_plans.exchange import FEW_RANKS
from ckpt.save_plans.sections import digest_of

_MAX_KEPT_BYTES = 64 << 20


@dataclass(frozen=True)
class RankReceipt:
    """One rank's report to the coordinator.

    Attributes:
        place: the last segment of the URL that it saves to; ranks may see the rest differently.
        manifest: None if it had nothing to write.
        files: the names of its data files.
        items: the items in them, packed (objects would take seconds to unpickle), by number if they have one.
        retries: requests that it has sent again so far in this save.
        write_ms: from its plan to the end of its last put.
        content: what it has seen of its content (`ckpt.content.rank_content`); empty if it did not look.
    """

    rank: int
    place: str
    manifest: ManifestRef | None
    files: list[str]
    items: bytes
    retries: int = 0
    write_ms: int = 0
    content: bytes = b""


class ReceiptStep(enum.IntEnum):
    """What all ranks do after they have told the coordinator."""

    COMMIT = 16  # apart from the numbers of `exchange`, for whoever watches both
    SEND_LAYOUTS = 17


class _Written(msgspec.Struct, frozen=True, array_like=True):
    """A rank's files and its manifest, whose names follow from its token."""

    token: str
    files: int
    size_bytes: int
    crc64nvme: str
    items: int
    data_bytes: int
    digest: bytes = b""


class _Message(msgspec.Struct, frozen=True, array_like=True):
    """A receipt.

    Attributes:
        written: None if there was nothing to write.
        layout: where the items are, or the digest of that.
        write_ms: packed.
        failure: the pickled error of a rank that failed.
    """

    rank: int
    place: str
    retries: int
    written: _Written | None
    layout: bytes
    write_ms: bytes = b""
    failure: bytes = b""
    content: bytes = b""


_MESSAGE = msgspec.msgpack.Decoder(_Message)  # made once, before there are threads


class Layouts:
    """The layouts that the coordinator knows by their digests: those of the last save."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def get(self, digest: bytes) -> bytes | None:
        return self._known.get(digest)

    def keep(self, layouts: Mapping[bytes, bytes]) -> None:
        """Remember these in the place of those before, unless they take very much memory."""
        self._known = dict(layouts) if sum(map(len, layouts.values())) <= _MAX_KEPT_BYTES else {}

    def clear(self) -> None:
        self._known = {}


def message_of(receipt: RankReceipt | CheckpointError, *, with_layout: bool) -> bytes:
    """Make what a rank sends first."""
    if isinstance(receipt, CheckpointError):
        return msgspec.msgpack.encode(_Message(0, "", 0, None, b"", failure=pickle.dumps(receipt)))
    written = None
    if (manifest := receipt.manifest) is not None:
        name = ObjectName.parse(manifest.path)
        assert name is not None
        assert receipt.files == [data_key(receipt.rank, name.token, n) for n in range(manifest.files)]
        sizes = manifest.size_bytes, manifest.crc64nvme, manifest.items, manifest.data_bytes
        written = _Written(name.token, manifest.files, *sizes, digest=bytes.fromhex(manifest.digest or ""))
    layout = receipt.items if with_layout else digest_of([receipt.items])
    figures = receipt.retries, written, layout, pack_ms(receipt.write_ms)
    message = _Message(receipt.rank, receipt.place, *figures, content=receipt.content)
    return msgspec.msgpack.encode(message)


def _receipt_of(message: _Message) -> RankReceipt:
    rank, written = message.rank, message.written
    figures = message.retries, sum(unpack_ms(message.write_ms)), message.content
    if written is None:
        return RankReceipt(rank, message.place, None, [], message.layout, *figures)
    manifest = ManifestRef(
        path=manifest_key(rank, written.token),
        size_bytes=written.size_bytes,
        crc64nvme=written.crc64nvme,
        digest=written.digest.hex() or msgspec.UNSET,
        rank=rank,
        files=written.files,
        items=written.items,
        data_bytes=written.data_bytes,
    )
    files = [data_key(rank, written.token, number) for number in range(written.files)]
    return RankReceipt(rank, message.place, manifest, files, message.layout, *figures)


class Receipts:
    """The receipts of all ranks, on the coordinator.

    Attributes:
        failures: of the ranks that failed.
        wanted: of each rank, whether it is to send its layout.
    """

    def __init__(self, told: Sequence[bytes], known: Layouts, own: RankReceipt | None) -> None:
        messages = [_MESSAGE.decode(data) for data in told]
        self._known, self._layouts = known, dict[bytes, bytes]()
        self.failures: dict[int, CheckpointError] = {
            rank: pickle.loads(each.failure) for rank, each in enumerate(messages) if each.failure
        }
        self._receipts = [] if self.failures else [_receipt_of(each) for each in messages]
        self.wanted = [b""] * len(told)
        self.is_complete = len(told) <= FEW_RANKS or bool(self.failures)
        if not self.is_complete:
            self._find(own)

    def _find(self, own: RankReceipt | None) -> None:
        """Find the layouts that are known, and which ranks are to send others."""
        if own is not None:
            self._layouts[digest_of([own.items])] = own.items
        asked: set[bytes] = set()
        for rank, receipt in enumerate(self._receipts):
            digest = receipt.items
            if digest in self._layouts or digest in asked:
                continue
            layout = self._known.get(digest)
            if layout is None:
                asked.add(digest)
                self.wanted[rank] = b"\1"
            else:
                self._layouts[digest] = layout
        self.is_complete = not asked

    def take(self, sent: Sequence[bytes]) -> None:
        """Take the layouts that were asked for."""
        for receipt, wanted, layout in zip(self._receipts, self.wanted, sent, strict=True):
            if wanted:
                if digest_of([layout]) != receipt.items:
                    raise CheckpointError("sent another layout than it told of", rank=receipt.rank)
                self._layouts[receipt.items] = layout

    @property
    def contents(self) -> list[bytes]:
        """What the ranks have seen of their content."""
        return [each.content for each in self._receipts]

    def all(self) -> list[RankReceipt]:
        """Return the receipts, by rank."""
        if not self._layouts:
            return self._receipts
        self._known.keep(self._layouts)
        return [replace(each, items=self._layouts[each.items]) for each in self._receipts]


def gather_receipts(
    ranks: FirstRank, receipt: RankReceipt | CheckpointError, known: Layouts
) -> Receipts | CheckpointError | None:
    """Bring the receipts, or failures, of all ranks to the coordinator.

    Returns None on all others; an error if the coordinator cannot read what it was told.
    """
    told = ranks.gather_bytes(message_of(receipt, with_layout=ranks.size <= FEW_RANKS))
    receipts: Receipts | CheckpointError | None = None
    if told is not None:
        own = receipt if isinstance(receipt, RankReceipt) else None
        try:
            receipts = Receipts(told, known, own)
        except Exception as error:  # the others wait for an answer
            receipts = _unreadable(error)
    if ranks.size <= FEW_RANKS:
        return receipts
    is_complete = not isinstance(receipts, Receipts) or receipts.is_complete
    step = ReceiptStep.COMMIT if is_complete else ReceiptStep.SEND_LAYOUTS
    if ranks.first_number(step) == ReceiptStep.COMMIT:
        return receipts
    wanted = ranks.scatter_bytes(receipts.wanted if isinstance(receipts, Receipts) else None)
    assert not wanted or isinstance(receipt, RankReceipt)
    sent = ranks.gather_bytes(receipt.items if wanted and isinstance(receipt, RankReceipt) else b"")
    if sent is not None and isinstance(receipts, Receipts):
        try:
            receipts.take(sent)
        except Exception as error:
            return _unreadable(error)
    return receipts


def _unreadable(error: Exception) -> CheckpointError:
    return CheckpointError(
        f"the reports of the ranks cannot be read: {type(error).__name__}: {error}", rank=0
    )
