"""Faults of a resume, drawn from seeds: a certificate finds each, under its name, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.certificates import flat, kinds, load_recorded
from support.states import emptied, random_tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

import ckpt
from ckpt.reading.delivered import DeliveredDigests
from ckpt.tools.certificate import certificate
from ckpt.tools.certify import certify

Live = dict[str, Any]
Found = dict[str, tuple[str, ...]]
Fault = Callable[[Live, random.Random], Found]

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 5))]
BLOCK = 512 << 10


def _state() -> Live:
    head = random_tensor(50, 40, seed=9)
    return {
        "w": torch.randn(300, 200, generator=torch.Generator().manual_seed(1)),
        "v": torch.randn(300, 200, generator=torch.Generator().manual_seed(2)),
        "t": random_tensor(120, 120, seed=3).t(),
        "b": torch.randn(64, 33, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16),
        "i": random_tensor(1000, dtype=torch.int64, seed=4),
        "big": random_tensor(700_000, seed=5),
        "z": random_tensor(77, dtype=torch.bool, seed=6),
        "c": random_tensor(5, 4, dtype=torch.complex64, seed=7),
        "s": torch.tensor(3.5),
        "nan": torch.tensor([float("nan"), 0.0, 1.0]),
        "embed": head,
        "head": head,
        "lr": 0.25,
        "step": 7,
        "is_on": True,
        "sizes": [1, 2, 3],
        "groups": {"betas": (0.9, 0.0)},
    }


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("faults") / "c")
    ckpt.save(_state(), url, no_dist=True)
    return url


@pytest.fixture
def loaded(place: str) -> tuple[Live, DeliveredDigests]:
    state = emptied(_state())
    state["head"] = state["embed"]
    delivered = load_recorded(state, place)
    return flat(state), delivered


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def bit_flipped(live: Live, draw: random.Random) -> Found:
    name = draw.choice(["w", "big", "b", "i"])
    data = _bytes(live[name])
    data[draw.randrange(data.numel())] ^= 1 << draw.randrange(8)
    return {"different": (name,)}


def one_element(live: Live, draw: random.Random) -> Found:
    live["w"][draw.randrange(300), draw.randrange(200)] += 1
    return {"different": ("w",)}


def next_number(live: Live, draw: random.Random) -> Found:
    row, column = draw.randrange(300), draw.randrange(200)
    live["w"][row, column] = torch.nextafter(live["w"][row, column], torch.tensor(100.0))
    return {"different": ("w",)}


def first_byte_of_a_block(live: Live, draw: random.Random) -> Found:
    _bytes(live["big"])[draw.randrange(5) * BLOCK] ^= 1
    return {"different": ("big",)}


def last_byte(live: Live, draw: random.Random) -> Found:
    _bytes(live["big"])[-1] ^= 1 << draw.randrange(8)
    return {"different": ("big",)}


def swapped_pair(live: Live, draw: random.Random) -> Found:
    live["w"], live["v"] = live["v"], live["w"]
    return {"different": ("v", "w")}


def one_for_two(live: Live, draw: random.Random) -> Found:
    live["v"] = live["w"]
    return {"different": ("v",)}


def renamed(live: Live, draw: random.Random) -> Found:
    live["module.w"] = live.pop("w")
    return {"missing": ("module.w",), "left_over": ("w",)}


def transposed(live: Live, draw: random.Random) -> Found:
    live["t"] = live["t"].t().contiguous()
    return {"different": ("t",)}


def transposed_by_strides(live: Live, draw: random.Random) -> Found:
    live["t"] = live["t"].t()
    return {"different": ("t",)}


def rows_swapped(live: Live, draw: random.Random) -> Found:
    first, second = draw.sample(range(300), 2)
    live["w"][[first, second]] = live["w"][[second, first]]
    return {"different": ("w",)}


def rows_shifted(live: Live, draw: random.Random) -> Found:
    live["w"] = live["w"].roll(draw.choice([-1, 1]), dims=0)
    return {"different": ("w",)}


def rows_reversed(live: Live, draw: random.Random) -> Found:
    live["w"] = live["w"].flip(0)
    return {"different": ("w",)}


def other_shape_of_one_size(live: Live, draw: random.Random) -> Found:
    live["w"] = live["w"].view(200, 300)
    return {"resized": ("w",)}


def all_zeros(live: Live, draw: random.Random) -> Found:
    name = draw.choice(["w", "b", "i", "big", "t"])
    live[name] = torch.zeros_like(live[name])
    return {"different": (name,)}


def zeros_at_the_end(live: Live, draw: random.Random) -> Found:
    live["big"][-draw.choice([1, 1000, 200_000]) :] = 0
    return {"different": ("big",)}


def initial_values(live: Live, draw: random.Random) -> Found:
    torch.nn.init.normal_(live["w"], generator=torch.Generator().manual_seed(draw.randrange(1000)))
    return {"different": ("w",)}


def widened(live: Live, draw: random.Random) -> Found:
    live["b"] = live["b"].to(draw.choice([torch.float32, torch.float64]))
    return {"cast": ("b",)}


def widened_and_changed(live: Live, draw: random.Random) -> Found:
    live["b"] = live["b"].float()
    _bytes(live["b"])[0] ^= 1  # a bit that the stored dtype does not have
    return {"different": ("b",)}


def as_other_integers(live: Live, draw: random.Random) -> Found:
    live["i"] = live["i"].to(torch.int32)
    return {"unchecked": ("i",)}


def grown(live: Live, draw: random.Random) -> Found:
    live["w"] = torch.cat([live["w"], torch.zeros(draw.randrange(1, 9), 200)])
    return {"resized": ("w",)}


def cut_off(live: Live, draw: random.Random) -> Found:
    live["big"] = live["big"][: -draw.randrange(1, 1000)]
    return {"resized": ("big",)}


def missing(live: Live, draw: random.Random) -> Found:
    live["new"] = torch.zeros(3)
    return {"missing": ("new",)}


def missing_object(live: Live, draw: random.Random) -> Found:
    live["warmup"] = 100
    return {"missing": ("warmup",)}


def left_over(live: Live, draw: random.Random) -> Found:
    name = draw.choice(["v", "s", "lr"])
    del live[name]
    return {"left_over": (name,)}


def nan_payload(live: Live, draw: random.Random) -> Found:
    live["nan"].view(torch.int32)[0] ^= 1 << draw.randrange(20)
    assert live["nan"][0].isnan()
    return {"different": ("nan",)}


def sign_of_nan(live: Live, draw: random.Random) -> Found:
    live["nan"].view(torch.int32)[0] ^= -(1 << 31)
    return {"different": ("nan",)}


def negative_zero(live: Live, draw: random.Random) -> Found:
    live["nan"][1] = -0.0
    return {"different": ("nan",)}


def no_memory(live: Live, draw: random.Random) -> Found:
    live["w"] = live["w"].to("meta")
    return {"untouched": ("w",)}


def freed(live: Live, draw: random.Random) -> Found:
    live["w"] = live["w"].clone()
    live["w"].untyped_storage().resize_(0)
    return {"untouched": ("w",)}


def conjugated(live: Live, draw: random.Random) -> Found:
    live["c"] = live["c"].conj()
    return {"different": ("c",)}


def bool_flipped(live: Live, draw: random.Random) -> Found:
    place = draw.randrange(77)
    live["z"][place] = ~live["z"][place]
    return {"different": ("z",)}


def scalar_changed(live: Live, draw: random.Random) -> Found:
    live["s"] += 1
    return {"different": ("s",)}


def untied_and_trained(live: Live, draw: random.Random) -> Found:
    live["head"] = live["head"].clone()
    _bytes(live["head"])[draw.randrange(8000)] ^= 1
    return {"different": ("head",)}


def tied_and_trained(live: Live, draw: random.Random) -> Found:
    _bytes(live["head"])[draw.randrange(8000)] ^= 1
    return {"different": ("embed", "head")}


def tied_to_another(live: Live, draw: random.Random) -> Found:
    live["v"] = live["w"]
    live["w"].view(torch.int32)[0, 0] ^= 1
    return {"different": ("v", "w")}


def object_changed(live: Live, draw: random.Random) -> Found:
    live["lr"] = draw.random()
    return {"different": ("lr",)}


def object_of_another_type(live: Live, draw: random.Random) -> Found:
    name, value = draw.choice([("step", 7.0), ("is_on", 1), ("sizes", (1, 2, 3)), ("step", "7")])
    live[name] = value
    return {"different": (name,)}


def negative_zero_in_an_object(live: Live, draw: random.Random) -> Found:
    live["groups.betas"] = (0.9, -0.0)
    return {"different": ("groups.betas",)}


def order_in_an_object(live: Live, draw: random.Random) -> Found:
    live["sizes"] = [2, 1, 3]
    return {"different": ("sizes",)}


def object_without_a_digest(live: Live, draw: random.Random) -> Found:
    live["lr"] = (each for each in [1])
    return {"unchecked": ("lr",)}


def number_for_a_tensor(live: Live, draw: random.Random) -> Found:
    live["s"] = 3.5
    return {"different": ("s",)}


def tensor_for_a_number(live: Live, draw: random.Random) -> Found:
    live["step"] = torch.tensor(7)
    return {"different": ("step",)}


FAULTS: list[Fault] = [
    bit_flipped, one_element, next_number, first_byte_of_a_block, last_byte, swapped_pair, one_for_two, renamed,
    transposed, transposed_by_strides, rows_swapped, rows_shifted, rows_reversed, other_shape_of_one_size, all_zeros,
    zeros_at_the_end, initial_values, widened, widened_and_changed, as_other_integers, grown, cut_off, missing,
    missing_object, left_over, nan_payload, sign_of_nan, negative_zero, no_memory, freed, conjugated, bool_flipped,
    scalar_changed, untied_and_trained, tied_and_trained, tied_to_another, object_changed, object_of_another_type,
    negative_zero_in_an_object, order_in_an_object, object_without_a_digest, number_for_a_tensor, tensor_for_a_number,
]  # fmt: skip


def test_without_a_fault_it_is_exact(loaded: tuple[Live, DeliveredDigests]) -> None:
    found = certificate(*loaded)
    assert found.is_exact, str(found)
    assert (found.tensors, found.objects) == (12, 5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(loaded: tuple[Live, DeliveredDigests], fault: Fault, seed: int) -> None:
    live, delivered = loaded
    expected = fault(live, random.Random(seed))
    found = certificate(live, delivered)
    assert kinds(found) == expected
    assert not found.is_exact


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found_by_reading_again(
    loaded: tuple[Live, DeliveredDigests], place: str, fault: Fault
) -> None:
    live, _ = loaded
    expected = fault(live, random.Random(5))
    if fault is as_other_integers:  # reading again, the cast can be done again
        expected = {"cast": ("i",)}
    assert kinds(certify(live, place, no_dist=True)) == expected


def test_a_target_that_nothing_was_loaded_into_is_found(place: str) -> None:
    """A planner that loads some names, and leaves the rest at its initial values: here zeros."""
    state = emptied(_state())
    chosen = {name: state[name] for name in ("w", "big", "lr")}
    delivered = load_recorded(chosen, place, planner=DefaultLoadPlanner(allow_partial_load=True))
    found = kinds(certificate(flat({**state, **chosen}), delivered))
    assert {"v", "t", "head", "step"} <= {*found.pop("untouched")}
    assert not found


def test_an_object_that_is_changed_in_place_is_found(loaded: tuple[Live, DeliveredDigests]) -> None:
    live, delivered = loaded
    live["sizes"].append(4)
    assert kinds(certificate(live, delivered)) == {"different": ("sizes",)}


def test_a_planner_that_spoils_what_it_was_given_is_found(place: str, tmp_path: Path) -> None:
    """The digests are of the verified bytes, not of the target afterwards."""

    class Spoiling(DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
            if read_item.dest_index.fqn == "w":
                tensor[0, 0] = 5.0

    state = emptied(_state())
    delivered = load_recorded(state, place, planner=Spoiling())
    assert kinds(certificate(flat(state), delivered)) == {"different": ("w",)}
