"""What users of fms-fsdp rely on, tried on two ranks; the report names the number of checks that held."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from adapters.fms_layout import CountingDataset, CountingLoader, native_checkpointer
from adapters.life import Life, digests, loss_of, read_life, toy_model
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

import ckpt
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.adapters.fms_fsdp import Checkpointer


class Run:
    """A training of a few steps."""

    def __init__(self) -> None:
        self.model = FSDP(toy_model(), device_id=torch.device("cpu"), use_orig_params=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.loader = CountingLoader()

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        return self.model, self.optimizer, self.loader

    def train(self, first: int, last: int, checkpointer: Any = None) -> Run:
        for step in range(first, last + 1):
            self.optimizer.zero_grad()
            self.loader.dataset.position += 1
            loss_of(self.model, step).backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            if checkpointer is not None:
                checkpointer.save(step, *self.parts, tokens_seen=100 * step)
        return self

    def same(self, other: Run) -> bool:
        return self.digests() == other.digests()

    def digests(self) -> dict[str, str]:
        options = StateDictOptions(full_state_dict=True)
        return digests(
            dict(zip("mo", get_state_dict(self.model, self.optimizer, options=options), strict=True))
        )


class AutoSavedDataset(CountingDataset):
    """As fms-fsdp's `CheckpointDataset`: it looks for its newest state below a path of its own."""

    def __init__(self, load_path: str) -> None:
        super().__init__()
        self.path = self.load_path = load_path
        self.is_setup, self.step = False, 0

    def setup(self) -> None:
        if not self.is_setup:
            self.is_setup = True
            self.load_from_path(self.load_path)

    def load_from_path(self, path: str) -> None:
        folders = os.listdir(self.path) if os.path.isdir(self.path) else []
        if folders:
            newest = max(folders, key=lambda name: int(name.split("_")[-2]))
            self.step = int(newest.split("_")[-2])
            super().load_from_path(os.path.join(self.path, newest))


def checkpointer_of(root: str, keep: int = 2, **options: Any) -> Checkpointer:
    return Checkpointer(
        root, keep, "fsdp", dist.get_rank(), "cpu", report_fn=lambda *_, **__: None, **options
    )


def beginning(root: str) -> None:
    run = Run()
    *_, step, tokens, is_resuming = checkpointer_of(root).load(*run.parts, path=f"{root}-none/checkpoints/")
    assert (step, tokens, is_resuming) == (0, 0, False)
    with pytest.raises(ConfigurationError, match="parallel_mode"):
        Checkpointer(root, 2, "tp", dist.get_rank(), "cpu")


def retention(root: str) -> None:
    run, checkpointer = Run(), checkpointer_of(root)
    run.train(1, 4, checkpointer)
    dist.barrier()
    listed = ckpt.list_checkpoints(f"{root}/checkpoints")
    assert [each.step for each in listed if each.state == "committed"] == [3, 4]
    other = Run()
    *_, step, tokens, is_resuming = checkpointer_of(root).load(*other.parts)
    assert (step, tokens, is_resuming, other.loader.dataset.position) == (4, 400, True, 4)
    assert other.same(run)
    # Another run begins from it: model, optimizer and loader, and its own steps.
    third = Run()
    *_, step, tokens, is_resuming = checkpointer_of(f"{root}-b").load(
        *third.parts, path=f"{root}/checkpoints/"
    )
    assert (step, tokens, is_resuming, third.loader.dataset.position) == (0, 0, False, 4)
    assert third.same(run)
    fourth = Run()
    place = f"{root}/checkpoints/step-00000003"
    checkpointer_of(f"{root}-b").load(*fourth.parts, path=place, reset_stepcount=True)
    assert fourth.loader.dataset.position == 0
    assert not fourth.optimizer.state


def background(root: str) -> None:
    run, checkpointer = Run(), checkpointer_of(root, async_mode="thread")
    run.train(1, 2, checkpointer)
    checkpointer.close()
    other = Run()
    assert checkpointer_of(root).load(*other.parts)[3] == 2
    assert other.same(run)


def of_fms_fsdp_itself(root: str) -> None:
    """A run that fms-fsdp has begun goes on, from its newest whole checkpoint; a torn one is passed over."""
    if "://" in root:
        return
    os.makedirs(root, exist_ok=True)
    dist.barrier()
    run = Run().train(1, 2, native_checkpointer(root))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.copytree(f"{root}/checkpoints/step_2_ckp", f"{root}/checkpoints/step_3_ckp")
        os.remove(f"{root}/checkpoints/step_3_ckp/metadata.pth")
    dist.barrier()
    other, checkpointer = Run(), checkpointer_of(root)
    *_, step, tokens, is_resuming = checkpointer.load(*other.parts)
    assert (step, tokens, is_resuming, other.loader.dataset.position) == (2, 200, True, 2)
    assert other.same(run)
    other.train(3, 3, checkpointer)
    third = Run()
    assert checkpointer_of(root).load(*third.parts)[3:] == (3, 300, True)
    assert third.same(other)
    # ... and unchanged code of fms-fsdp can load what the adapter saved.
    if "FMS_FSDP_CHECKOUT" in os.environ:
        fourth, folder = Run(), f"{root}/checkpoints/step-00000003"
        if dist.get_rank() == 0:
            torch.save({"step": 3}, f"{folder}/metadata.pth")
        os.makedirs(f"{root}-c", exist_ok=True)
        dist.barrier()
        native_checkpointer(f"{root}-c").load(fourth.model, fourth.optimizer, None, path=folder)
        assert fourth.same(other)


def single_file(root: str) -> None:
    run, checkpointer = Run(), checkpointer_of(root)
    run.train(1, 1)
    checkpointer.save_single_file(1, run.model, tokens_seen=100)
    other = Run()
    path = f"{root}/pth/step_1/consolidated.00.pth"
    assert checkpointer_of(f"{root}-b").load(*other.parts, path=path)[3:] == (0, 0, False)
    weights, others = (
        {name: value for name, value in each.digests().items() if name.startswith("m.")}
        for each in (run, other)
    )
    assert weights == others


def loader_of_its_own(root: str) -> None:
    """The chosen checkpoint decides, not what the dataset finds below its own path."""
    run, checkpointer = Run(), checkpointer_of(root)
    run.train(1, 3, checkpointer)
    own = f"{root}-loader" if "://" not in root else f"{os.getcwd()}/loader"
    os.makedirs(f"{own}/step_9_ckp", exist_ok=True)
    torch.save({"position": 9}, f"{own}/step_9_ckp/loader_state_{dist.get_rank()}.pth")
    dist.barrier()
    other = Run()
    other.loader.dataset = dataset = AutoSavedDataset(own)
    checkpointer_of(root).load(*other.parts)
    dataset.setup()  # as the first batch does
    assert (dataset.position, dataset.step, dataset.path) == (3, 3, own)


def metadata(root: str) -> None:
    run, checkpointer = Run(), checkpointer_of(root)
    with pytest.raises(ConfigurationError, match="plain values"):
        checkpointer.save(1, *run.parts, tokens_seen=object())
    checkpointer.save(2, *run.parts, tokens_seen=torch.tensor(7))
    assert checkpointer_of(root).load(*Run().parts)[4] == 7


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    checks: list[Callable[[str], None]] = [
        beginning,
        retention,
        background,
        of_fms_fsdp_itself,
        single_file,
        loader_of_its_own,
        metadata,
    ]
    for number, check in enumerate(checks):
        print(number, check.__name__, flush=True)
        check(f"{life.root}/check-{number}")
        dist.barrier()
    if dist.get_rank() == 0:
        Path(life.report).write_text(json.dumps({"checks": len(checks)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
