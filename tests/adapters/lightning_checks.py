"""Tests of the adapter for Lightning; `test_lightning.py` runs them in Lightning's environment."""

from __future__ import annotations

import importlib
import pickle
import shutil
import threading
import warnings
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.servers import free_port

import ckpt
from adapters.life import loss_of, toy_model
from ckpt.backends.posix import PosixStore
from ckpt.errors import ConfigurationError, LoadFailed, NotCommitted, SaveFailed, UnsafeContent
from ckpt.options import DataOptions
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

pytestmark = pytest.mark.filterwarnings("ignore")
PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


class Own:
    """A class that torch does not unpickle by itself."""


@pytest.fixture(params=PACKAGES)
def both(request: pytest.FixtureRequest) -> SimpleNamespace:
    """Offer the adapter, and the package that it is for."""
    return package(request.param)


@pytest.fixture
def one() -> SimpleNamespace:
    return package("lightning")


def package(name: str) -> SimpleNamespace:
    pl = importlib.import_module(PACKAGES[name])
    return SimpleNamespace(pl=pl, of=importlib.import_module(f"ckpt.trainer_integration.adapters.{name}"))


def module_type(pl: Any, **hparams: Any) -> Any:
    class Toy(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters(hparams)
            self.model = toy_model(8)

        def training_step(self, _: Any) -> torch.Tensor:
            return loss_of(self.model, self.trainer.global_step + 1, 8)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader([*range(100)], batch_size=None)  # type: ignore[arg-type]

    return Toy


def module_of(pl: Any, **hparams: Any) -> Any:
    return module_type(pl, **hparams)()


def trainer_of(
    of: SimpleNamespace, root: Path, steps: int, *plugins: Any, callback: Any = None, **options: Any
) -> Any:
    saving = callback or of.of.ModelCheckpoint(
        dirpath=str(root), filename="{step}", every_n_train_steps=1, save_top_k=2, monitor="step", mode="max",
    )  # fmt: skip
    return of.pl.Trainer(
        accelerator="cpu", devices=1, max_steps=steps, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=str(root.parent), callbacks=[saving],
        plugins=list(plugins) or [of.of.CheckpointIO()], **options,
    )  # fmt: skip


def train(of: SimpleNamespace, root: Path, steps: int, *plugins: Any, **fit: Any) -> Any:
    module = module_of(of.pl, width=8)
    trainer = trainer_of(of, root, steps, *plugins)
    trainer.fit(module, **fit)
    return module


def committed(root: Path) -> list[str]:
    return sorted(each.path for each in ckpt.list_checkpoints(root, depth=1) if each.state == "committed")


def weights(module: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_a_run_in_two_parts_is_one_run(both: SimpleNamespace, tmp_path: Path) -> None:
    whole = weights(train(both, tmp_path / "whole", 5))
    with warnings.catch_warnings(record=True) as said:
        train(both, tmp_path / "run", 3, ckpt_path="last")
    assert not [each for each in said if "no last checkpoint" in str(each.message)]
    assert committed(tmp_path / "run") == ["step=2.ckpt", "step=3.ckpt"]
    resumed = train(both, tmp_path / "run", 5, ckpt_path="last")
    assert resumed.hparams["width"] == 8
    assert (
        resumed.trainer.lr_scheduler_configs[0].scheduler.last_epoch == 0
    )  # by epoch, of which none has ended
    assert_same(weights(resumed), whole)
    assert committed(tmp_path / "run") == ["step=4.ckpt", "step=5.ckpt"]


def test_loaders_go_on_behind_what_was_trained(both: SimpleNamespace, tmp_path: Path) -> None:
    """Lightning fetches one batch ahead; with accumulation a step has several batches of each loader."""

    class Reads(module_type(both.pl)):  # type: ignore[misc]
        def training_step(self, batch: Any) -> torch.Tensor:
            read.append([int(batch[name]["tokens"][0, 0]) for name in ("a", "b")])
            loss: torch.Tensor = super().training_step(batch)
            return loss

        def train_dataloader(self) -> Any:
            return {"a": loader_of(0), "b": loader_of(100)}

    read: list[list[int]] = []
    for steps in (2, 4):
        callback = both.of.ModelCheckpoint(dirpath=str(tmp_path / "run"), every_n_train_steps=1)
        trainer = trainer_of(both, tmp_path / "run", steps, callback=callback, accumulate_grad_batches=2)
        trainer.fit(Reads(), ckpt_path="last")
    first, second = (
        [int(each["tokens"][0, 0]) for each in islice(loader_of(start), 8)] for start in (0, 100)
    )
    assert read == [[*pair] for pair in zip(first, second, strict=True)]


def loader_of(start: int) -> RescalableLoader:
    source = MapSource([[start + row] * 8 for row in range(64)])
    dataset = ShardedDataset(source, sequence_length=8, options=DataOptions(positions=True))
    return RescalableLoader(dataset, batch_size=2)


def test_last_is_found_where_lightning_saves_by_default(both: SimpleNamespace, tmp_path: Path) -> None:
    begun = []
    for steps in (3, 5):
        saving = both.of.ModelCheckpoint(every_n_train_steps=1, save_last=True)
        trainer = trainer_of(both, tmp_path / "run", steps, callback=saving)
        module = module_of(both.pl)
        module.on_train_start = lambda trainer=trainer: begun.append(trainer.global_step)
        trainer.fit(module, ckpt_path="last")
    assert begun == [0, 3]
    assert "last.ckpt" in committed(tmp_path / "checkpoints")


def test_torn_and_damaged_checkpoints_are_passed_over(one: SimpleNamespace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(one, run, 3)
    shutil.copytree(run / "step=3.ckpt", run / "step=4.ckpt")
    (run / "step=4.ckpt" / "commit.json").unlink()
    for path in (run / "step=3.ckpt").glob("rank-*/*.distcp"):
        path.unlink()
    seen = train(one, run, 3, ckpt_path=str(run)).trainer.global_step
    assert seen == 3  # it went on at 2, in the folder that was named
    assert {"step=2.ckpt", "step=3-v1.ckpt"} <= set(committed(run))


def test_a_checkpoint_asked_for_by_name_is_loaded_or_an_error(one: SimpleNamespace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(one, run, 3)
    assert train(one, run, 2, ckpt_path=str(run / "step=2.ckpt")).trainer.global_step == 2
    (run / "step=2.ckpt" / "commit.json").unlink()
    with pytest.raises(NotCommitted, match="step=2"):
        train(one, run, 3, ckpt_path=str(run / "step=2.ckpt"))


def test_nothing_goes_before_the_save_in_flight_is_durable(
    one: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving, go_on, put = one.of.CheckpointIO(async_save=True), threading.Event(), PosixStore.put
    old, new = str(tmp_path / "old.ckpt"), str(tmp_path / "new.ckpt")
    state = {"state_dict": {"a": torch.ones(3)}, "global_step": 1}
    saving.save_checkpoint(state, old)
    saving.teardown()

    def put_later(self: Any, key: str, *arguments: Any, **options: Any) -> None:
        assert go_on.wait(30)
        put(self, key, *arguments, **options)

    monkeypatch.setattr(PosixStore, "put", put_later)
    saving.save_checkpoint(state, new)
    state["state_dict"]["a"].zero_()  # type: ignore[index]
    saving.remove_checkpoint(old)
    assert committed(tmp_path) == ["old.ckpt"]
    go_on.set()
    saving.teardown()
    assert committed(tmp_path) == ["new.ckpt"]
    assert saving.load_checkpoint(new)["state_dict"]["a"].sum() == 3  # as it was when it was saved


def test_a_failed_save_removes_nothing(
    one: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving = one.of.CheckpointIO(async_save=True)
    state = {"state_dict": {"a": torch.ones(3)}, "global_step": 1}
    saving.save_checkpoint(state, str(tmp_path / "old.ckpt"))
    saving.teardown()

    def fail(self: Any, *arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PosixStore, "put", fail)
    saving.save_checkpoint(state, str(tmp_path / "new.ckpt"))
    saving.remove_checkpoint(str(tmp_path / "old.ckpt"))
    with pytest.raises(SaveFailed, match="No space left"):
        saving.teardown()
    saving.teardown()
    assert committed(tmp_path) == ["old.ckpt"]
    monkeypatch.undo()
    saving.save_checkpoint(state, str(tmp_path / "next.ckpt"))
    saving.teardown()
    assert committed(tmp_path) == ["next.ckpt"]


def test_lightnings_asynchronous_saving_takes_it_too(one: SimpleNamespace, tmp_path: Path) -> None:
    from lightning.pytorch.plugins.io import AsyncCheckpointIO

    train(one, tmp_path / "run", 3, AsyncCheckpointIO(one.of.CheckpointIO()))
    assert "step=3.ckpt" in committed(tmp_path / "run")
    assert train(one, tmp_path / "run", 4, ckpt_path="last").trainer.global_step == 4


def test_lightnings_own_file_is_gone_on_from(one: SimpleNamespace, tmp_path: Path) -> None:
    own = one.pl.callbacks.ModelCheckpoint(
        dirpath=str(tmp_path / "old"), every_n_train_steps=1, save_last=True
    )
    module = module_of(one.pl, width=8)
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    trainer_of(one, tmp_path / "old", 3, TorchCheckpointIO(), callback=own).fit(module)
    whole = weights(train(one, tmp_path / "whole", 5))
    resumed = train(one, tmp_path / "new", 5, ckpt_path=str(tmp_path / "old" / "last.ckpt"))
    assert_same(weights(resumed), whole)


def test_objects_that_could_run_code_need_trust(one: SimpleNamespace, tmp_path: Path) -> None:
    saving, place = one.of.CheckpointIO(), str(tmp_path / "x.ckpt")
    saving.save_checkpoint({"state_dict": {"a": torch.ones(3)}, "hyper_parameters": {"own": Own()}}, place)
    with pytest.raises(UnsafeContent, match=r"weights_only=False"):
        saving.load_checkpoint(place)
    assert isinstance(saving.load_checkpoint(place, weights_only=False)["hyper_parameters"]["own"], Own)


def test_everything_comes_back_as_it_was(one: SimpleNamespace, tmp_path: Path) -> None:
    saving, place = one.of.CheckpointIO(), str(tmp_path / "x.ckpt")
    sparse = torch.eye(3).to_sparse()
    state = module_of(one.pl).state_dict()
    checkpoint = {
        "state_dict": state,
        "optimizer_states": [{"state": {0: {"step": torch.tensor(2.0), "name": "x"}}, "param_groups": [{"lr": 0.1}]}],
        "lr_schedulers": [],
        "callbacks": {"Own": {"best": torch.tensor(1.5), 3: (1, 2)}},
        "sparse": sparse,
    }  # fmt: skip
    saving.save_checkpoint(checkpoint, place)
    loaded = saving.load_checkpoint(place)
    assert type(loaded["state_dict"]) is type(state)
    assert loaded["state_dict"]._metadata == state._metadata  # the versions of modules
    assert_same(loaded["state_dict"], state)
    assert loaded["optimizer_states"] == checkpoint["optimizer_states"]
    assert loaded["lr_schedulers"] == []
    assert loaded["callbacks"] == {"Own": {"best": torch.tensor(1.5), 3: (1, 2)}}
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


def test_what_cannot_be_saved_is_an_error_before_training(one: SimpleNamespace, tmp_path: Path) -> None:
    strategies = importlib.import_module("lightning.pytorch.strategies")
    saving = one.of.ModelCheckpoint(dirpath=str(tmp_path))
    native = SimpleNamespace(strategy=strategies.ModelParallelStrategy())
    with pytest.raises(ConfigurationError, match="does not reach what ModelParallelStrategy saves"):
        saving.setup(native, None, "fit")
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    with pytest.raises(ConfigurationError, match=r"plugins=\[CheckpointIO\(\)\]"):
        trainer_of(one, tmp_path / "run", 1, TorchCheckpointIO()).fit(module_of(one.pl))
    sharded = one.of.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(ConfigurationError, match="TorchCheckpointIO"):
        trainer_of(one, tmp_path / "run", 1, TorchCheckpointIO(), strategy=sharded).fit(module_of(one.pl))


def test_an_option_that_does_not_exist_is_an_error_at_once(one: SimpleNamespace) -> None:
    with pytest.raises(ConfigurationError, match="CheckpointIO has no option treads"):
        one.of.CheckpointIO(treads=4)


def test_the_classes_are_pickled_by_the_name_of_their_adapter(both: SimpleNamespace) -> None:
    for name in both.of.__all__:
        kind = getattr(both.of, name)
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert kind.__module__ == both.of.__name__
    saving = both.of.ModelCheckpoint(dirpath="runs/7", save_top_k=-1)
    assert pickle.loads(pickle.dumps(saving)).save_top_k == -1
    assert isinstance(saving, both.pl.callbacks.ModelCheckpoint)


def test_a_link_goes_without_the_checkpoint_to_which_it_leads(one: SimpleNamespace, tmp_path: Path) -> None:
    saving, link = one.of.CheckpointIO(), tmp_path / "last-1.ckpt"
    saving.save_checkpoint({"state_dict": {"a": torch.ones(3)}, "global_step": 1}, str(tmp_path / "x.ckpt"))
    link.symlink_to("x.ckpt")
    saving.remove_checkpoint(str(link))
    assert not link.is_symlink()
    assert saving.load_checkpoint(str(tmp_path / "x.ckpt"))["state_dict"]["a"].sum() == 3


def test_ranks_that_find_different_checkpoints_do_not_begin(one: SimpleNamespace, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(one, run, 3)
    for seen, text in ((None, "is None on rank 0"), (2, "the step gone on from is 2 on rank 0, 3 on")):
        trainer = trainer_of(one, run, 4)

        def broadcast(value: Any, src: int = 0, seen: int | None = seen) -> Any:
            """Tell what rank 0 would: it has found nothing, or has passed over the newest."""
            if seen is None:
                return None if str(value).endswith("step=3.ckpt") else value
            return seen if value == 3 else value

        trainer.strategy.broadcast = broadcast
        with pytest.raises(LoadFailed, match=text):
            trainer.fit(module_of(one.pl), ckpt_path="last")


def test_shards_are_saved_while_the_steps_go_on(
    one: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning passes no `weights_only` on to a sharded strategy: the CheckpointIO has it."""
    from torch.distributed.fsdp import fully_shard

    class Sharded(type(module_of(one.pl))):  # type: ignore[misc]
        def configure_model(self) -> None:
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def fit(steps: int, **options: Any) -> Any:
        module = Sharded()
        module.save_hyperparameters({"own": Own()})
        strategy = one.of.ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
        saving = one.of.CheckpointIO(async_save=True, **options)
        trainer = trainer_of(one, tmp_path / "run", steps, saving, strategy=strategy)
        trainer.fit(module, ckpt_path="last", weights_only=False)
        return {name: value.full_tensor().clone() for name, value in module.state_dict().items()}

    try:
        fit(3)
        assert committed(tmp_path / "run") == ["step=2.ckpt", "step=3.ckpt"]
        with pytest.raises(UnsafeContent, match=r"CheckpointIO\(weights_only=False\)"):
            fit(5)
        resumed = fit(5, weights_only=False)
        assert committed(tmp_path / "run") == ["step=4.ckpt", "step=5.ckpt"]
        assert_same(resumed, weights(train(one, tmp_path / "whole", 5)))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["full", "sharded"])
def test_fsdp_saves_and_loads_its_shards(
    one: SimpleNamespace, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's Trainer refuses FSDP without a GPU; its strategy is called as the Trainer does."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    for name, value in {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "RANK": 0,
        "WORLD_SIZE": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group("gloo")
    try:

        def strategy_of() -> Any:
            model = FullyShardedDataParallel(
                toy_model(8), device_id=torch.device("cpu"), use_orig_params=True
            )
            strategy = one.of.FSDPStrategy(
                state_dict_type=kind,
                cluster_environment=importlib.import_module(
                    "lightning.pytorch.plugins.environments"
                ).TorchElasticEnvironment(),
            )
            strategy.checkpoint_io = one.of.CheckpointIO()
            strategy.model = model
            state = SimpleNamespace(fn="fit")
            strategy._lightning_module = SimpleNamespace(
                strict_loading=True, trainer=SimpleNamespace(state=state)
            )
            strategy.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
            return strategy

        def step(strategy: Any) -> None:
            loss_of(strategy.model, 1, 8).backward()  # type: ignore[no-untyped-call]
            strategy.optimizers[0].step()
            strategy.optimizers[0].zero_grad()

        first, second = strategy_of(), strategy_of()
        step(first)
        states = [first.optimizer_state(first.optimizers[0])]
        meta = {"global_step": 1, "loops": {"done": 1}}
        place = str(tmp_path / "x.ckpt")
        first.save_checkpoint(
            {"state_dict": first.lightning_module_state_dict(), "optimizer_states": states, **meta}, place
        )
        step(second)
        assert second.load_checkpoint(place) == meta
        step(first)
        step(second)
        assert_same(first.lightning_module_state_dict(), second.lightning_module_state_dict())
        second.model = FullyShardedDataParallel(
            torch.nn.Sequential(toy_model(8)), device_id=torch.device("cpu"), use_orig_params=True
        )
        second.optimizers = [torch.optim.AdamW(second.model.parameters())]
        with pytest.raises(LoadFailed, match="the checkpoint lacks"):
            second.load_checkpoint(place)
    finally:
        dist.destroy_process_group()
