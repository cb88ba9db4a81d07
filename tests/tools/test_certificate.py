"""Certificates of honest loads are exact, whatever was loaded and however; their text; loads that are not recorded pay nothing."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.certificates import flat, kinds, load_recorded
from support.damage import blocks_of, flip_blocks
from support.parts import Part
from support.states import SAVABLE_DTYPES, digest, emptied, plain_state, random_tensor
from support.strict_s3 import StrictS3
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ckpt
from ckpt.errors import ConfigurationError, IntegrityError, LoadFailed, NotFound
from ckpt.options import LoadOptions
from ckpt.reading.delivered import DeliveredRegion
from ckpt.reading.reader import CheckpointReader
from ckpt.tools import live_compare
from ckpt.tools.certificate import Certificate, certificate
from ckpt.tools.certify import certify
from ckpt.transfer.buffer_pool import StagingPool

LAYOUTS = ("row major", "column major", "view", "channels last", "strided")


def drawn_tensor(draw: random.Random, seed: int) -> torch.Tensor:
    """A tensor of any dtype, size and layout."""
    shape = [draw.choice([0, 1, 2, 3, 17, 64, 150]) for _ in range(draw.randrange(4))]
    tensor = random_tensor(*shape, dtype=draw.choice(SAVABLE_DTYPES), seed=seed)
    layout = draw.choice(LAYOUTS)
    if layout == "column major" and tensor.dim() > 1:
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "view" and tensor.dim() and tensor.size(0) > 1:
        return tensor[1:]
    if layout == "strided" and tensor.dim():
        return tensor[..., ::2]
    if layout == "channels last" and tensor.dim() == 3:
        return tensor.permute(2, 0, 1)
    return tensor


def drawn_target(draw: random.Random, tensor: torch.Tensor) -> torch.Tensor:
    """A target for it, of a layout of its own."""
    target = torch.zeros(tensor.shape, dtype=tensor.dtype)
    if tensor.dim() > 1 and draw.random() < 0.4:
        return torch.zeros(tensor.shape[::-1], dtype=tensor.dtype).permute(*range(tensor.dim())[::-1])
    if tensor.dim() and draw.random() < 0.3:
        wide = torch.zeros(*tensor.shape[:-1], tensor.size(-1) + 3, dtype=tensor.dtype)
        return wide[..., 1 : 1 + tensor.size(-1)]
    return target


@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(n, marks=pytest.mark.long) for n in range(20, 300))]
)
def test_loads_of_anything_are_exact(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    state: dict[str, Any] = {f"t{n}": drawn_tensor(draw, seed + n) for n in range(draw.randrange(1, 12))}
    if draw.random() < 0.5:
        state["large"] = random_tensor(draw.choice([300_000, 131_072, 1_000_003]), seed=seed)
        state["wide"] = random_tensor(draw.choice([64, 700]), 1000, seed=seed)
    state["object"] = draw.choice([None, 3, [1.5, None], "text"])
    url = str(tmp_path / "c")
    if draw.random() < 0.5:
        ckpt.save(state, url, no_dist=True)
    else:
        dcp.save(state, checkpoint_id=url, no_dist=True)
    live = {k: drawn_target(draw, v) if isinstance(v, torch.Tensor) else None for k, v in state.items()}
    delivered = load_recorded(live, url, verify=draw.random() < 0.7)
    found = certificate(flat(live), delivered)
    assert found.is_exact, str(found)
    assert found.compared_bytes == sum(v.nbytes for v in state.values() if isinstance(v, torch.Tensor))
    assert certify(live, url, no_dist=True).is_exact


@pytest.mark.parametrize("way", ["own", "stock", "unverified", "digests", "base"])
def test_a_state_of_every_kind_is_exact(way: str, tmp_path: Path) -> None:
    state, url = plain_state(), str(tmp_path / "c")
    if way == "stock":
        dcp.save(state, checkpoint_id=url, no_dist=True)
    elif way == "base":
        ckpt.save(state, str(tmp_path / "b"), no_dist=True, digests=True)
        ckpt.save(state, url, no_dist=True, base=str(tmp_path / "b"))
    else:
        ckpt.save(state, url, no_dist=True, block_digests="sha256" if way == "digests" else None)
    live = emptied(state)
    found = certificate(flat(live), load_recorded(live, url, verify=way != "unverified"))
    assert not found.is_exact  # before it is put back
    found = certificate(flat(live), load_recorded(live, url, verify=way != "unverified"))
    assert found.is_exact, str(found)
    assert certify(live, url, no_dist=True).is_exact


def test_a_model_in_safetensors_is_exact_and_its_tied_head_is_not_missing(tmp_path: Path) -> None:
    embed = random_tensor(100, 30, seed=1)
    model = {"embed": embed, "norm": random_tensor(30, dtype=torch.bfloat16, seed=2), "head": embed}
    url = str(tmp_path / "m")
    ckpt.save(model, url, format="safetensors", no_dist=True)
    live = emptied(model)
    live["head"] = live["embed"]
    delivered = load_recorded(live, url)
    live["head"] = live["embed"]
    assert certificate(live, delivered).is_exact
    assert certify(live, url, no_dist=True).is_exact
    live["head"] = live["embed"].clone()  # it is untied: the checkpoint says nothing about it
    assert kinds(certificate(live, delivered)) == {"missing": ("head",)}


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("strided", [False, True])
def test_what_the_load_casts_is_known_after_the_cast(tmp_path: Path, *, narrow: bool, strided: bool) -> None:
    state = {"w": torch.randn(700, 500), "small": torch.randn(3), "t": torch.randn(40, 60).t()}
    url = str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    dtype = torch.bfloat16 if narrow else torch.float64
    live = {name: torch.zeros(each.shape, dtype=dtype) for name, each in state.items()}
    if strided:
        live = {name: each.t().contiguous().t() if each.dim() == 2 else each for name, each in live.items()}
    delivered = load_recorded(live, url)
    found, again = certificate(live, delivered), certify(live, url, no_dist=True)
    assert kinds(found) == kinds(again) == {"cast": ("small", "t", "w")}
    assert found.cast[0] == ("small", "float32", str(dtype).removeprefix("torch."))
    live["w"][5, 6] *= 1.5
    for each in (certificate(live, delivered), certify(live, url, no_dist=True)):
        assert kinds(each) == {"cast": ("small", "t"), "different": ("w",)}


def test_a_part_of_a_tensor_that_another_program_asked_for_is_exact(tmp_path: Path) -> None:
    """Rows of a column-major tensor of stock PyTorch, columns of a row-major one: neither is one run of the file."""
    state = {"cols": random_tensor(1000, 900, seed=1).t(), "rows": random_tensor(900, 1000, seed=2)}
    url = str(tmp_path / "c")
    dcp.save(state, checkpoint_id=url, no_dist=True)
    for strides in ("own", "other"):
        live = {
            k: torch.zeros_like(v) if strides == "own" else torch.zeros(v.shape) for k, v in state.items()
        }
        delivered = load_recorded(live, url)
        assert certificate(live, delivered).is_exact
        live["cols"][3, 4] = 5.0
        assert kinds(certificate(live, delivered)) == {"different": ("cols",)}


def test_a_tensor_that_was_loaded_whole_and_cut_afterwards_is_unchecked_until_it_is_read_again(
    tmp_path: Path,
) -> None:
    state, url = {"w": random_tensor(100, 8, seed=1)}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    live = emptied(state)
    delivered = load_recorded(live, url)
    half = _Half(live["w"][:50])
    assert kinds(certificate({"w": half}, delivered)) == {"unchecked": ("w",)}
    assert certify({"w": half}, url, no_dist=True).is_exact
    live["w"][0, 0] = 5.0
    assert kinds(certify({"w": half}, url, no_dist=True)) == {"different": ("w",)}


class _Half(torch.Tensor):
    """The first rows of a tensor of 100: it says to DCP which chunk it is."""

    def size(self, *dim: Any) -> Any:
        return torch.Size([100, 8])[dim[0]] if dim else torch.Size([100, 8])

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([50, 8]))]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_a_load_from_s3_is_exact(server: StrictS3) -> None:
    url, options = "s3://bucket/certificate", server.options
    state = {"w": random_tensor(700_000, seed=1), "n": 3, "small": random_tensor(5, seed=2)}
    ckpt.save(state, url, storage_options=options, no_dist=True)
    live = emptied(state)
    delivered = load_recorded(live, url, storage_options=options)
    assert certificate(live, delivered).is_exact
    assert certify(live, url, storage_options=options, no_dist=True).is_exact


def test_a_state_with_stateful_parts_is_only_looked_at(tmp_path: Path) -> None:
    class Part:
        def __init__(self) -> None:
            self.weight, self.loads = nn.Parameter(torch.randn(20)), 0

        def state_dict(self) -> dict[str, Any]:
            return {"weight": self.weight, "bare": torch.empty(3, device="meta")}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.loads += 1

    part, url = Part(), str(tmp_path / "c")
    ckpt.save({"part": {"weight": part.weight, "bare": torch.zeros(3)}}, url, no_dist=True)
    state: dict[str, Any] = {"part": part}
    before = part.weight._version
    assert kinds(certify(state, url, no_dist=True)) == {"untouched": ("part.bare",)}
    assert (part.loads, part.weight._version, state) == (0, before, {"part": part})


def test_damage_that_a_second_reading_meets_is_an_error(tmp_path: Path) -> None:
    state, url = {"w": random_tensor(100_000, seed=1)}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    flip_blocks(blocks_of(tmp_path / "c")[:1])
    with pytest.raises(IntegrityError, match="do not match their checksum"):
        certify(state, url, no_dist=True)


def test_errors_are_those_of_a_load(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        certify({"w": torch.zeros(1)}, str(tmp_path / "none"), no_dist=True)
    with pytest.raises(ConfigurationError, match="state_dict must be a dict"):
        certify(torch.zeros(1), str(tmp_path / "none"), no_dist=True)  # type: ignore[arg-type]


def test_objects_that_only_the_program_may_unpickle_are_compared_as_pickles(tmp_path: Path) -> None:
    state, url = {"o": random.Random, "w": torch.ones(2)}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    live: dict[str, Any] = {"o": None, "w": torch.zeros(2)}
    delivered = load_recorded(live, url, trusted_objects=["o"])
    assert certificate(live, delivered).is_exact
    assert kinds(certificate({**live, "o": random.SystemRandom}, delivered)) == {"unchecked": ("o",)}


def test_what_another_checkpoint_delivered_does_not_count(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    ckpt.save({"w": torch.ones(5), "v": torch.ones(5)}, first, no_dist=True)
    ckpt.save({"w": torch.zeros(5)}, second, no_dist=True)
    live = {"w": torch.full((5,), 7.0)}
    reader = CheckpointReader(first)
    delivered = reader.record_delivered()
    dcp.load(live, storage_reader=reader, planner=DefaultLoadPlanner(), no_dist=True)
    assert kinds(certificate(live, delivered)) == {"left_over": ("v",)}
    dcp.load(live, storage_reader=reader, checkpoint_id=second, no_dist=True)
    assert certificate(live, delivered).is_exact
    reader.close()


def test_loads_that_are_not_recorded_digest_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, url = {"w": random_tensor(300_000, seed=1), "o": [1]}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)

    def refuse(*arguments: object) -> None:
        raise AssertionError("a digest was made")

    monkeypatch.setattr("ckpt.transfer.region_digests.RegionDigest.add", refuse)
    monkeypatch.setattr("ckpt.reading.delivered.value_digest", refuse)
    live = emptied(state)
    ckpt.load(live, url, no_dist=True)
    assert digest(live) == digest(state)
    with pytest.raises(LoadFailed, match="a digest was made"):
        load_recorded(live, url)


def test_a_second_reading_takes_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state, url = {"w": random_tensor(8 << 20, seed=1)}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    scratch: list[int] = []
    allocate = StagingPool._allocate

    def counting(self: StagingPool, nbytes: int) -> memoryview:
        scratch.append(nbytes)
        return allocate(self, nbytes)

    monkeypatch.setattr(StagingPool, "_allocate", counting)
    assert certify(state, url, no_dist=True, threads=2).is_exact
    assert 0 < sum(scratch) <= 8 << 20


def test_digests_travel_to_another_process(tmp_path: Path) -> None:
    state, url = {"w": random_tensor(3000, seed=1), "o": [1]}, str(tmp_path / "c")
    ckpt.save(state, url, no_dist=True)
    live = emptied(state)
    delivered = pickle.loads(pickle.dumps(load_recorded(live, url)))
    assert certificate(live, delivered).is_exact


# -- the text of a certificate -------------------------------------------------------------------------------


def test_a_certificate_says_what_it_found() -> None:
    exact = Certificate("/c", tensors=120, objects=3, compared_bytes=3 << 30)
    assert str(exact) == "bit for bit: 120 tensors, 3.00 GiB, 3 objects"
    names = tuple(f"w{number}" for number in range(25))
    found = Certificate("/c", different=names, left_over=("a<b>\n",), tensors=25)
    assert not found.is_exact
    lines = str(found).split("\n")
    assert lines[0] == "not bit for bit: 25 tensors, 0 B"
    assert lines[1] == f"  different (25): {', '.join(names[:20])} and 5 more"
    assert lines[2] == "  left over (1): a<b>\\n"
    html = found._repr_html_()
    assert "a&lt;b&gt;" in html
    assert "not bit for bit" in html
    assert pickle.loads(pickle.dumps(found)) == found


def test_certificates_of_ranks_join() -> None:
    first = Certificate("/c", different=("w",), left_over=("a", "b"), tensors=2, compared_bytes=5, took_s=1.0)
    second = Certificate(
        "/c", different=("v", "w"), left_over=("b", "c"), tensors=3, compared_bytes=7, took_s=2.0
    )
    both = first.join(second)
    assert both == Certificate(
        "/c", different=("v", "w"), left_over=("b",), tensors=5, compared_bytes=12, took_s=2.0, ranks=2
    )
    assert "5 tensors, 12 B, on 2 ranks" in str(both)


# -- what only one side has -----------------------------------------------------------------------------------


def test_parts_that_were_not_restored_are_left_over(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with ckpt.CheckpointManager(tmp_path, save=1, preflight=False) as manager:
        manager.save(1, model=model, part=Part({"a": 1}))
    with ckpt.CheckpointManager(tmp_path, save=1, preflight=False) as manager:
        restored = manager.restore(model=model)
    assert restored is not None
    assert kinds(restored.certificate) == {"left_over": ("part.a",)}, "random states are exempt"


def test_what_only_the_live_state_has_is_missing(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    part = Part({"a": 1})
    plain = {"x": 1}
    state: dict[str, Any] = {"model": model, "part": part, "plain": plain}
    ckpt.save(state, tmp_path, no_dist=True)
    assert certify(state, tmp_path, no_dist=True).is_exact
    model.register_buffer("mask", torch.ones(2))
    part.value = {"a": 1, "t": torch.zeros(3)}
    plain["y"] = 2
    expected = {"missing": ("model.mask", "part.t", "plain.y")}
    assert kinds(certify(state, tmp_path, no_dist=True)) == expected


def test_a_state_under_other_names_is_certified(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    ckpt.save({"model": model}, tmp_path, no_dist=True)
    options = LoadOptions(rename={"model.": "net."})
    assert certify({"net": model}, tmp_path, no_dist=True, options=options).is_exact
    assert not certify({"net": model}, tmp_path, no_dist=True).is_exact


def test_each_ranks_own_is_compared(tmp_path: Path) -> None:
    part = Part({"position": 7})
    state: dict[str, Any] = {"loader": ckpt.per_rank(part)}
    ckpt.save(state, tmp_path, no_dist=True)
    assert certify(state, tmp_path, no_dist=True).is_exact
    part.value = {"position": 8}
    assert kinds(certify(state, tmp_path, no_dist=True)) == {"different": ("loader.rank-00000.position",)}


def test_what_a_merge_made_of_ranks_is_unchecked(tmp_path: Path) -> None:
    saved = {"ranks": 2, "rank-00000": {"position": 3}, "rank-00001": {"position": 4}}
    dcp.save({"loader": saved}, storage_writer=ckpt.CheckpointWriter(tmp_path / "c"), no_dist=True)
    part = Part({"position": 0})
    own = ckpt.per_rank(part, merge=lambda states, rank, size: {"position": 7})
    with ckpt.CheckpointManager(tmp_path / "run", save=1, preflight=False) as manager:
        restored = manager.restore(initial=tmp_path / "c", loader=own, rng=False)
    assert restored is not None
    assert part.value == {"position": 7}
    expected = {"unchecked": ("loader.rank-00000.position", "loader.rank-00001.position", "loader.ranks")}
    assert kinds(restored.certificate) == expected
    assert kinds(certify({"loader": own}, tmp_path / "c", no_dist=True)) == expected


def test_chunks_are_compared_with_few_regions_each(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    common = live_compare._common

    def counted(some: Any, other: Any) -> Any:
        nonlocal looked
        looked += 1
        return common(some, other)

    monkeypatch.setattr(live_compare, "_common", counted)
    digest: Any = None
    regions = [
        DeliveredRegion((0, n), (3, 1), (0, 1), torch.float32, torch.float32, digest) for n in range(100)
    ]
    found = live_compare._Regions(regions)
    assert [*found.touching(((0, 5), (3, 6)))] == [regions[5]]
    assert looked == 0, "the same box"
    assert [*found.touching(((1, 5), (2, 8)))] == regions[5:8]
    assert looked == 3
    assert [*live_compare._Regions([]).touching(((0,), (1,)))] == []
