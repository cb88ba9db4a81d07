"""Ranks that want the same read it once, and pass it on; each gets what it would have read itself."""

from __future__ import annotations

import math
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from support.ranks import Job, RankDied, run_ranks
from support.states import digest, emptied, plain_state, random_tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.backends.base import MIB
from ckpt.backends.posix import PosixStore
from ckpt.errors import AccessDenied, IntegrityError, LoadFailed
from ckpt.format.elements import StoredTensor
from ckpt.ranks.messages import Messages
from ckpt.reading.parcels import TensorParcel, WholeParcel, cut_parts, part_bytes
from ckpt.transfer.fetcher import StoredFile
from ckpt.transfer.tensor_memory import memory_of

PATCH = pytest.MonkeyPatch()
"""Of one rank, whose process ends with its function."""

Read = list[tuple[str, int, int]]
"""Keys, first bytes and counts of bytes that were read from data files."""


def count_reads(*endings: str) -> Read:
    seen: Read = []
    read_into = PosixStore.read_into

    def counting(self: PosixStore, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if key.endswith(endings or (".distcp", ".safetensors")):
            seen.append((key, start, sum(buffer.nbytes for buffer in buffers)))
        read_into(self, key, start, buffers)

    PATCH.setattr(PosixStore, "read_into", counting)
    return seen


def test_each_manifest_is_read_by_one_rank(tmp_path: Path) -> None:
    """Replicas or not: each of three ranks wants what all three have saved."""
    keys = [key for seen in run_ranks(3, _load_what_others_saved, str(tmp_path / "c")) for key in seen]
    assert len(keys) == len(set(keys)) == 3


def _load_what_others_saved(rank: int, url: str) -> list[str]:
    saved = {f"weight-{number}": random_tensor(1000, seed=number) for number in range(3)}
    own = {name: tensor for name, tensor in saved.items() if name.endswith(str(rank))}
    on_own_node(rank)
    ckpt.save(own, url)
    seen = count_reads(".json")
    state = emptied(saved)
    ckpt.load(state, url)
    assert digest(state) == digest(saved)
    return [key for key, _, _ in seen if key.startswith("rank-")]


@pytest.mark.parametrize("refused", [0, 1])
def test_a_manifest_that_one_rank_cannot_read_is_tried_once(tmp_path: Path, refused: int) -> None:
    """The load fails on all ranks, so that none tries again what may take all the time that is left."""
    tries = run_ranks(3, _one_reads_no_manifest, str(tmp_path / "c"), refused)
    assert [folder for tried in tries for folder in tried].count(f"rank-0000{refused}") == 1


def _one_reads_no_manifest(rank: int, url: str, refused: int) -> list[str]:
    """Return the folders of the manifests that this rank tried to read."""
    saved = {f"weight-{number}": random_tensor(1000, seed=number) for number in range(3)}
    on_own_node(rank)
    ckpt.save({name: tensor for name, tensor in saved.items() if name.endswith(str(rank))}, url)
    read_into, tried = PosixStore.read_into, []

    def refuse(self: PosixStore, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if key.endswith(".json") and key.startswith("rank-"):
            tried.append(key.partition("/")[0])
            if key.startswith(f"rank-0000{refused}"):
                raise AccessDenied("there is no right", key=key)
        read_into(self, key, start, buffers)

    PATCH.setattr(PosixStore, "read_into", refuse)
    # Of what others need too, the first that needs it reads: rank 0 does not need what it has itself saved.
    wanted = {name: tensor for name, tensor in saved.items() if rank or not name.endswith("0")}
    with pytest.raises(AccessDenied, match="there is no right"):
        ckpt.load(emptied(wanted), url)
    return tried


def on_own_node(rank: int) -> None:
    """On one node each rank reads files for itself."""
    PATCH.setattr(socket, "gethostname", lambda: f"node-{rank}")


SHAPES = {"embed": (9000, 512), "wide": (64, 70000), "norm": (257,), "last": (1001, 3513)}
MODEL_BYTES = sum(4 * math.prod(shape) for shape in SHAPES.values())


def hybrid_model() -> dict[str, Any]:
    """A model that HSDP shards in two, by rows and columns, and replicates on the other ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2))
    return {
        "model": {
            name: distribute_tensor(random_tensor(*shape), mesh, [Replicate(), Shard(len(shape) - 1)])
            for name, shape in SHAPES.items()
        }
    }


def test_each_byte_is_read_by_one_of_the_replicas(tmp_path: Path) -> None:
    url = str(tmp_path / "c")
    for replicas in (2, 4):
        apart, together = map(sum, zip(*run_ranks(2 * replicas, _load_both_ways, url), strict=True))
        assert MODEL_BYTES <= together < 1.02 * MODEL_BYTES
        assert apart >= replicas * MODEL_BYTES


def _load_both_ways(rank: int, url: str) -> tuple[int, int]:
    on_own_node(rank)
    saved = hybrid_model()
    ckpt.save(saved, url)
    seen, counts = count_reads(), []
    for read_once in (False, True):
        seen.clear()
        state = emptied(saved)
        ckpt.load(state, url, read_once=read_once)
        assert digest(state) == digest(saved)
        counts.append(sum(nbytes for _, _, nbytes in seen))
    return counts[0], counts[1]


def test_ranks_of_one_node_read_files_themselves(tmp_path: Path) -> None:
    """The node's memory has what one of them read: passing it on would only take longer."""
    for own, passed in run_ranks(2, _load_on_one_node, str(tmp_path / "c")):
        assert own
        assert passed == 0


def _load_on_one_node(rank: int, url: str) -> tuple[int, int]:
    saved = {"model": {"weight": random_tensor(2 * MIB)}}
    ckpt.save(saved, url)
    passed: list[int] = []
    receive = Messages.receive

    def count(self: Messages, memory: torch.Tensor, sender: int, tag: int) -> Any:
        passed.append(memory.numel())
        return receive(self, memory, sender, tag)

    PATCH.setattr(Messages, "receive", count)
    seen = count_reads()
    ckpt.load(emptied(saved), url)
    return len(seen), sum(passed)


@pytest.mark.parametrize("kind", ["ours", "stock", "safetensors"])
def test_all_kinds_of_state_come_back(tmp_path: Path, kind: str) -> None:
    run_ranks(3, _all_kinds, str(tmp_path / "c"), kind)


def _all_kinds(rank: int, url: str, kind: str) -> None:
    on_own_node(rank)
    saved: dict[str, Any] = {"plain": plain_state(), "more": {"weight": random_tensor(3, 500, 1111)}}
    if kind == "stock":
        dcp.save(saved, checkpoint_id=url)
    elif kind == "safetensors":
        saved = {f"layers.{number}": random_tensor(700, 900 + number) for number in range(5)}
        ckpt.save(saved, url, format="safetensors")
    else:
        ckpt.save(saved, url)
    dist.barrier()
    seen = count_reads()
    state = emptied(saved)
    ckpt.load(state, url)
    assert digest(state) == digest(saved)
    unique = sum(size for _, size in {(key, size) for key, _, size in seen})
    read = [0]
    dist.all_gather_object(gathered := [0] * 3, sum(nbytes for _, _, nbytes in seen))
    assert max(gathered) < 0.5 * sum(gathered), (read, unique)


def test_targets_of_other_dtypes_and_strides(tmp_path: Path) -> None:
    run_ranks(2, _odd_targets, str(tmp_path / "c"))


def _odd_targets(rank: int, url: str) -> None:
    """Replicas need not want the same dtype, or memory without gaps."""
    on_own_node(rank)
    weight, tied = torch.randn(1000, 700, generator=torch.Generator().manual_seed(1)), random_tensor(MIB)
    ckpt.save({"model": {"weight": weight, "a": tied, "b": tied}}, url)
    shared = torch.zeros(MIB)
    target = torch.zeros(1000, 1400, dtype=torch.float64 if rank else torch.float32)[:, ::2]
    ckpt.load({"model": {"weight": target, "a": shared, "b": shared}}, url)
    assert torch.equal(target, weight.to(target.dtype))
    assert torch.equal(shared.view(torch.int32), tied.view(torch.int32))


def test_what_only_some_share(tmp_path: Path) -> None:
    """The model is replicated, the optimizer is not: as with ZeRO-1."""
    counts = run_ranks(3, _zero_1, str(tmp_path / "c"))
    assert all(4 * MIB <= optimizer < 4.6 * MIB for optimizer, _ in counts)
    assert 6 * MIB <= sum(model for _, model in counts) < 6.6 * MIB


def _zero_1(rank: int, url: str) -> tuple[int, int]:
    on_own_node(rank)
    model = {"model": {"weight": random_tensor(3 * MIB // 2)}}
    saved = {**model, "optimizer": {f"moment-{rank}": random_tensor(MIB, seed=rank)}}
    ckpt.save(saved, url)
    seen = count_reads()
    ckpt.load(state := emptied(saved), url)
    assert digest(state) == digest(saved)
    whole = sum(nbytes for _, _, nbytes in seen)
    seen.clear()
    ckpt.load(emptied(model), url)
    return whole - sum(nbytes for _, _, nbytes in seen), sum(nbytes for _, _, nbytes in seen)


class Slow(DefaultLoadPlanner):
    """Looks at each tensor as it comes."""

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        assert tensor.numel()


def test_planners_that_look_at_each_item_read_for_themselves(tmp_path: Path) -> None:
    (first, others) = run_ranks(2, _with_own_planner, str(tmp_path / "c"))
    assert first == others
    assert first >= 8 * MIB


def _with_own_planner(rank: int, url: str) -> int:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(2 * MIB)}}
    ckpt.save(saved, url)
    seen = count_reads()
    ckpt.load(emptied(saved), url, planner=Slow())
    return sum(nbytes for _, _, nbytes in seen)


# -- failures ----------------------------------------------------------------------------------------------


def test_damage_is_the_same_error_on_all_replicas(tmp_path: Path) -> None:
    """As the rank that read it met it: a restore passes over to an older checkpoint by its type."""
    found = run_ranks(3, _load_damaged, str(tmp_path / "c"))
    assert len({(text, rank) for text, rank in found}) == 1
    assert "do not match their checksum" in found[0][0]


def _load_damaged(rank: int, url: str) -> tuple[str, int | None]:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(6 * MIB)}}
    ckpt.save(saved, url)
    dist.barrier()
    if rank == 0:
        largest = max(Path(url).rglob("*.distcp"), key=lambda path: path.stat().st_size)
        with open(largest, "r+b") as file:
            file.seek(largest.stat().st_size // 2)
            file.write(b"damaged")
    dist.barrier()
    with pytest.raises(IntegrityError) as caught:
        ckpt.load(emptied(saved), url)
    ckpt.load({}, url)  # the ranks can still talk
    return str(caught.value), caught.value.rank


def test_one_rank_that_may_not_read_fails_all(tmp_path: Path) -> None:
    for text in run_ranks(3, _one_may_not_read, str(tmp_path / "c")):
        assert "rank 1" in text
        assert "no right" in text


def _one_may_not_read(rank: int, url: str) -> str:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(6 * MIB)}}
    ckpt.save(saved, url)
    read_into = PosixStore.read_into

    def refuse(self: PosixStore, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if rank == 1 and start and key.endswith(".distcp"):
            raise AccessDenied("no right to read", key=key)
        read_into(self, key, start, buffers)

    PATCH.setattr(PosixStore, "read_into", refuse)
    with pytest.raises(AccessDenied) as caught:
        ckpt.load(emptied(saved), url)
    return str(caught.value)


def test_damage_on_the_way_is_noticed(tmp_path: Path) -> None:
    for text in run_ranks(3, _damaged_on_the_way, str(tmp_path / "c")):
        assert "a part that rank 0 read was damaged on its way" in text


def _damaged_on_the_way(rank: int, url: str) -> str:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(6 * MIB)}}
    ckpt.save(saved, url)
    begin_send = Messages.begin_send

    def damage(self: Messages, memory: torch.Tensor, to: int, tag: int) -> Any:
        if rank == 0 and memory.numel() > MIB:
            memory = memory.clone()
            memory[1000] ^= 1
        return begin_send(self, memory, to, tag)

    PATCH.setattr(Messages, "begin_send", damage)
    with pytest.raises((IntegrityError, LoadFailed)) as caught:
        ckpt.load(emptied(saved), url)
    return str(caught.value)


def test_a_rank_that_is_late_is_waited_for(tmp_path: Path) -> None:
    run_ranks(3, _one_is_late, str(tmp_path / "c"))


def _one_is_late(rank: int, url: str) -> None:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(6 * MIB)}}
    ckpt.save(saved, url)
    read_into = PosixStore.read_into

    def late(self: PosixStore, key: str, start: int, buffers: Sequence[memoryview]) -> None:
        if rank == 1 and key.endswith(".distcp"):
            time.sleep(1.5)
        read_into(self, key, start, buffers)

    PATCH.setattr(PosixStore, "read_into", late)
    state = emptied(saved)
    ckpt.load(state, url)
    assert digest(state) == digest(saved)


def test_a_rank_that_is_killed_is_named(tmp_path: Path) -> None:
    """In the middle of passing on; the others fail in time."""
    job = Job(3, _one_is_killed, str(tmp_path / "c"))
    try:
        with pytest.raises(RankDied):
            job.result(1, 60)
        for rank in (0, 2):
            assert "rank 1" in job.result(rank, 60)
    finally:
        job.kill()


def _one_is_killed(rank: int, url: str) -> str:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(20 * MIB)}}
    ckpt.save(saved, url)
    begin_send, sent = Messages.begin_send, []

    def die(self: Messages, memory: torch.Tensor, to: int, tag: int) -> Any:
        sent.append(to)
        if rank == 1 and len(sent) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return begin_send(self, memory, to, tag)

    PATCH.setattr(Messages, "begin_send", die)
    with pytest.raises(LoadFailed) as caught:
        ckpt.load(emptied(saved), url, timeout_s=20)
    return str(caught.value)


def test_an_interrupt_of_one_rank_frees_the_others(tmp_path: Path) -> None:
    first, interrupted, last = run_ranks(3, _one_is_interrupted, str(tmp_path / "c"))
    assert interrupted == "KeyboardInterrupt"
    assert "rank 1" in first
    assert "rank 1" in last


def _one_is_interrupted(rank: int, url: str) -> str:
    on_own_node(rank)
    saved = {"model": {"weight": random_tensor(20 * MIB)}}
    ckpt.save(saved, url)
    begin_send, sent = Messages.begin_send, []

    def interrupt(self: Messages, memory: torch.Tensor, to: int, tag: int) -> Any:
        sent.append(to)
        if rank == 1 and len(sent) == 2:
            raise KeyboardInterrupt
        return begin_send(self, memory, to, tag)

    PATCH.setattr(Messages, "begin_send", interrupt)
    with pytest.raises((LoadFailed, KeyboardInterrupt)) as caught:
        ckpt.load(emptied(saved), url, timeout_s=20)
    return str(caught.value) or type(caught.value).__name__


# -- how items are cut -------------------------------------------------------------------------------------

SIZES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=6)


@given(
    shapes=SIZES,
    count=st.integers(1, 9),
    block=st.sampled_from([0, 64, 256, 1000]),
    data=st.data(),
)
def test_parts_hold_every_byte_once(
    shapes: list[tuple[int, int]], count: int, block: int, data: st.DataObject
) -> None:
    """Whatever the regions are: read part by part they give what is stored there."""
    contents = memory_of(
        random_tensor(sum(64 + 4 * rows * columns for rows, columns in shapes), dtype=torch.uint8)
    )
    crcs = [0] * (len(contents) // max(block, 1) + 1) if block else None
    file = StoredFile("f", len(contents), block or 1, crcs)
    parcels: list[Any] = []
    at = 0
    wanted: list[torch.Tensor] = []
    finished: list[Any] = []
    for rows, columns in shapes:
        start = -(-at // 64) * 64
        if data.draw(st.booleans()):
            top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
            stored = StoredTensor.row_major(start, torch.float32, (rows, columns))
            whole = torch.frombuffer(contents[start : start + stored.payload_bytes], dtype=torch.float32)
            wanted.append(whole.view(rows, columns)[top:, left:])
            target = torch.zeros(rows - top, columns - left)
            at = start + stored.payload_bytes
            parcels.append(
                TensorParcel(file, start, at, lambda: finished.append(1), stored, (top, left), target, False)
            )
        else:
            at = start + rows * columns
            wanted.append(torch.frombuffer(contents[start:at], dtype=torch.uint8))
            parcels.append(WholeParcel(file, start, at, lambda found: finished.append(found)))
    parts = cut_parts(parcels, count)
    assert len(parts) == count
    for part in parts:
        for segment in part:
            memory = memoryview(bytearray(segment.stop - segment.start))
            for piece in segment.parcel.pieces(segment.start, segment.stop, memory):
                piece.sink.deliver(0, contents[piece.start : piece.stop])
            segment.parcel.take(segment.start, memory)
        ends = [segment.at + segment.stop - segment.start for segment in part]
        assert all(end <= later.at for end, later in zip(ends, part[1:], strict=False))
        assert part_bytes(part) == max(ends, default=0)
    assert len(finished) == len(parcels)
    for parcel, expected in zip(parcels, wanted, strict=True):
        if isinstance(parcel, TensorParcel):
            assert torch.equal(parcel.target.view(torch.int32), expected.view(torch.int32))
        else:
            assert bytes(memory_of(expected.contiguous())) in [
                bytes(found) for found in finished if found != 1
            ]
