"""What users of fms-fsdp rely on, tried on two ranks; the report names the number of checks that held."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
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
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import ckpt
from ckpt.backends.bodies import BytesBody
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError
from ckpt.trainer_integration.adapters.fms_fsdp import Checkpointer


class Run:
    """A training of a few steps."""

    def __init__(self, strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD) -> None:
        self.model = FSDP(
            toy_model(),
            sharding_strategy=strategy,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
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

    def digests(self, part: str = "") -> dict[str, str]:
        options = StateDictOptions(full_state_dict=True)
        whole = zip("mo", get_state_dict(self.model, self.optimizer, options=options), strict=True)
        return digests({name: state for name, state in whole if name.startswith(part)})


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

    def _validate_ckp_path(self, path: str, verbose: bool = False) -> str:
        folders = os.listdir(path) if os.path.isdir(path) else []
        if not folders:
            return ""
        newest = max(folders, key=lambda name: int(name.split("_")[-2]))
        self.step = int(newest.split("_")[-2])
        return os.path.join(path, newest)

    def load_from_path(self, path: str) -> None:
        if folder := self._validate_ckp_path(self.path):
            super().load_from_path(folder)


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
    checkpointer.close()  # removals go on after a save
    dist.barrier()
    listed = ckpt.list_checkpoints(f"{root}/durable")
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
    place = f"{root}/durable/step-00000003"
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
        fourth, folder = Run(), f"{root}/durable/step-00000003"
        if dist.get_rank() == 0:
            torch.save({"step": 3}, f"{folder}/metadata.pth")
        os.makedirs(f"{root}-c", exist_ok=True)
        dist.barrier()
        native_checkpointer(f"{root}-c").load(fourth.model, fourth.optimizer, None, path=folder)
        for group in fourth.optimizer.param_groups:  # it is as the scheduler of the main script makes it
            assert group.pop("initial_lr") == group["lr"]
        assert fourth.same(other)


def single_file(root: str) -> None:
    """A model in one file, also one of a compiled model, and without some of its parameters."""
    run = Run().train(1, 1)
    path = f"{root}.pth" if "://" not in root else f"{os.getcwd()}/single.pth"
    with FSDP.state_dict_type(run.model, StateDictType.FULL_STATE_DICT):
        weights = run.model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"step": 1, "model_state": weights}, path)
        if "://" in root:
            with contextlib.closing(open_store(root, None)) as store:
                store.put("single.pth", BytesBody(memoryview(Path(path).read_bytes())))
    dist.barrier()
    path = path if "://" not in root else f"{root}/single.pth"
    for is_compiled in (False, True):
        other = Run()
        model = torch.compile(other.model, backend="eager") if is_compiled else other.model
        found = checkpointer_of(f"{root}-b").load(
            model, *other.parts[1:], path=path, strict=False, is_compiled=is_compiled
        )
        assert found[3:] == (0, 0, False)
        assert run.digests("m") == other.digests("m")


def with_a_scheduler(root: str) -> None:
    """The main script makes its scheduler after `load`: the rate goes on, and starts as configured."""
    run, checkpointer = Run(), checkpointer_of(root)
    checkpointer.load(*run.parts)
    assert "initial_lr" not in run.optimizer.param_groups[0]
    scheduler = LambdaLR(run.optimizer, lambda step: 1 / (1 + step))
    for step in (1, 2):
        run.train(step, step)
        scheduler.step()
        checkpointer.save(step, *run.parts)
    other = Run()
    start_step = checkpointer_of(root).load(*other.parts)[3]
    resumed = LambdaLR(other.optimizer, lambda step: 1 / (1 + step + start_step))
    assert resumed.get_last_lr() == scheduler.get_last_lr() == pytest.approx([1e-2 / 3])
    assert other.same(run)


def unsharded(root: str) -> None:
    """`sharding_strategy="ddp"`: FSDP without shards, also compiled."""
    run = Run(ShardingStrategy.NO_SHARD).train(1, 1)
    Checkpointer(root, 2, "ddp", dist.get_rank(), "cpu").save(1, *run.parts)
    other = Run(ShardingStrategy.NO_SHARD)
    compiled = torch.compile(other.model, backend="eager")
    assert Checkpointer(root, 2, "ddp", dist.get_rank(), "cpu").load(compiled, *other.parts[1:])[3] == 1
    assert other.same(run)


def loader_of_its_own(root: str) -> None:
    """The chosen checkpoint decides, not what the dataset finds in the folder that fms-fsdp gives it."""
    run, checkpointer = Run(), checkpointer_of(root)
    run.train(1, 3, checkpointer)
    own = f"{root}/checkpoints" if "://" not in root else f"{os.getcwd()}/loader"
    os.makedirs(f"{own}/step_9_ckp", exist_ok=True)
    torch.save({"position": 9}, f"{own}/step_9_ckp/loader_state_{dist.get_rank()}.pth")
    dist.barrier()
    other = Run()
    other.loader.dataset = dataset = AutoSavedDataset(own)
    checkpointer_of(root).load(*other.parts)
    dataset.setup()  # as the first batch does
    assert (dataset.position, dataset.step, dataset.path) == (3, 3, own)
    alone = AutoSavedDataset(own)  # as the main script has it, which passes no loader
    alone.setup()
    assert (alone.position, alone.step) == (9, 9)
    # With worker processes the files of the dataset stay its own, but it takes those of the step.
    for position, kept in ((9, 9), (3, 3)):
        loader = CountingLoader()
        loader.num_workers, loader.dataset = 1, AutoSavedDataset(own)
        checkpointer_of(root).load(run.model, run.optimizer, loader)
        in_worker = pickle.loads(pickle.dumps(loader.dataset))
        in_worker.setup()
        assert (in_worker.position, in_worker.step, in_worker.path) == (position, kept, own)
        dist.barrier()
        os.makedirs(f"{own}/step_3_ckp", exist_ok=True)
        torch.save({"position": 3}, f"{own}/step_3_ckp/loader_state_{dist.get_rank()}.pth")
        dist.barrier()
    # So it is without them too, if the loader was not passed to `save`, as in the main script.
    checkpointer.save(4, run.model, run.optimizer, None)
    os.makedirs(f"{own}/step_4_ckp", exist_ok=True)
    torch.save({"position": 4}, f"{own}/step_4_ckp/loader_state_{dist.get_rank()}.pth")
    dist.barrier()
    other.loader.dataset = dataset = AutoSavedDataset(own)
    assert checkpointer_of(root).load(*other.parts)[3] == 4
    dataset.setup()
    assert (dataset.position, dataset.step, dataset.path) == (4, 4, own)


def metadata(root: str) -> None:
    run, checkpointer = Run(), checkpointer_of(root)
    with pytest.raises(ConfigurationError, match="plain values"):
        checkpointer.save(1, *run.parts, tokens_seen=object())
    checkpointer.save(2, run.model, run.optimizer, None, tokens_seen=torch.tensor(7))
    stateless: Any = DataLoader([0])  # type: ignore[arg-type]  # as of the main script's dummy dataset
    assert checkpointer_of(root).load(run.model, run.optimizer, stateless)[3:] == (2, 7, True)


def main(life: Life) -> None:
    dist.init_process_group("gloo")
    checks: list[Callable[[str], None]] = [
        beginning,
        retention,
        background,
        of_fms_fsdp_itself,
        single_file,
        with_a_scheduler,
        unsharded,
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
