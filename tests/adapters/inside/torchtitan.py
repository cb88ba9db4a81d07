"""Uses of torchtitan's settings with our manager; run by `test_torchtitan.py` in its environment."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from support.files import damage
from support.servers import S3Server
from torch import nn
from torch.distributed.checkpoint import HuggingFaceStorageReader
from torchtitan.components.checkpointer.dcp import CheckpointManager as TitanManager

import ckpt
from ckpt.errors import ConfigurationError, LoadFailed, NotFound, SaveFailed
from ckpt.trainer_integration.adapters.torchtitan import CheckpointManager

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan, and of torch without process groups


class Values:
    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = dict(state)


class Adapter:
    """torchtitan's adapter to names of Hugging Face's, of a model whose names are the same."""

    fqn_to_index_mapping = None
    hf_assets_path = None

    def to_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def from_hf(self, state: dict[str, Any]) -> dict[str, Any]:
        return state

    def get_hf_storage_reader(self, path: str, from_quantized: bool = False) -> HuggingFaceStorageReader:
        return HuggingFaceStorageReader(path)


class Run:
    """A trainer of a model whose weights are the number of the step."""

    def __init__(self, folder: Any, kind: type[Any] = CheckpointManager, **settings: Any) -> None:
        self.model, self.trainer = nn.Linear(4, 4), Values(step=0)
        self.optimizers = Values(moment=torch.zeros(3))
        given: dict[str, Any] = {"interval": 1, "last_save_model_only": False, **settings}
        self.manager = kind.Config(enable=True, folder=str(folder), **given).build(
            dataloader=Values(position=0), model_parts=[self.model], optimizers=self.optimizers,
            lr_schedulers=Values(last_epoch=0), states={"train_state": self.trainer}, sd_adapter=Adapter(),
        )  # fmt: skip

    def to(self, steps: int, *, last: bool = False) -> Run:
        for step in range(self.trainer.values["step"] + 1, steps + 1):
            self.trainer.values["step"] = step
            self.optimizers.values["moment"] = torch.full((3,), float(step))
            with torch.no_grad():
                self.model.weight.fill_(step)
            self.manager.save(step, last_step=last and step == steps)
        self.manager.maybe_wait_for_saving()
        return self

    def state(self) -> tuple[float, int, float]:
        moment = self.optimizers.values["moment"]
        return self.model.weight[0, 0].item(), self.trainer.values["step"], moment[0].item()


def steps_at(root: Any, **options: Any) -> list[int | None]:
    return [each.step for each in ckpt.list_checkpoints(root, **options) if each.state == "committed"]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_modes_and_keep_latest_k(tmp_path: Path, mode: str) -> None:
    run = Run(tmp_path, async_mode=mode, keep_latest_k=2).to(5)
    run.manager.close()
    assert steps_at(tmp_path) == [4, 5]
    again = Run(tmp_path)
    assert again.manager.load()
    assert again.state() == (5, 5, 5)
    assert Run(tmp_path).manager.load(4)
    with pytest.raises(NotFound):
        again.manager.load(3)


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("installed", [False, True])
def test_its_own_purge(tmp_path: Path, mode: str, installed: bool) -> None:
    """It counts the folders that exist when a save has begun."""
    root = tmp_path / "run"
    wanted = {"step-4", "step-5"}
    if installed:
        ckpt.install()
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        run = Run(root, TitanManager, async_mode=mode, keep_latest_k=2).to(5)
        deadline_s = time.monotonic() + 60
        while {path.name for path in root.iterdir()} != wanted and time.monotonic() < deadline_s:
            time.sleep(0.05)
        run.manager.close()
        again = Run(root, TitanManager)
        assert again.manager.load()
        assert again.state() == (5, 5, 5)
    finally:
        ckpt.uninstall()
        torch.distributed.destroy_process_group()
    assert {path.name for path in root.iterdir()} == wanted


def test_a_folder_on_s3(s3: S3Server) -> None:
    root = f"s3://{s3.new_bucket()}/run"
    settings: dict[str, Any] = {"storage_options": s3.options, "keep_latest_k": 2, "async_mode": "async"}
    run = Run(root, **settings)
    assert not run.manager.load()
    run.to(4).manager.close()
    assert steps_at(root, storage_options=s3.options) == [3, 4]
    again = Run(root, **settings)
    assert again.manager.load()
    assert again.state() == (4, 4, 4)


def test_foreign_and_torn_folders_stay_and_do_not_count(tmp_path: Path) -> None:
    Run(tmp_path).to(2)
    for name in ("step-00000009/rank-00000/0123456789abcdef-0.distcp", "step-00000001.mine/notes"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("torn, or somebody's")
    run = Run(tmp_path, keep_latest_k=2)
    assert run.manager.load()
    assert run.state() == (2, 2, 2)
    run.to(5).manager.close()
    assert steps_at(tmp_path) == [4, 5]
    assert (tmp_path / "step-00000001.mine" / "notes").exists()


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    Run(tmp_path).to(2)
    damage(tmp_path / "step-00000002")
    run = Run(tmp_path)
    assert run.manager.load()
    assert run.state() == (1, 1, 1)


def test_a_run_of_torchtitans_own_manager_goes_on(tmp_path: Path) -> None:
    Run(tmp_path, TitanManager, keep_latest_k=0).to(3)
    run = Run(tmp_path, keep_latest_k=2)
    assert run.manager.load(2)
    assert run.state() == (2, 2, 2)
    assert run.manager.load()
    assert run.state() == (3, 3, 3)
    run.to(6).manager.close()
    assert steps_at(tmp_path) == [5, 6]
    assert (tmp_path / "step-3" / ".metadata").exists()
    again = Run(tmp_path)
    assert again.manager.load()
    assert again.state() == (6, 6, 6)


def test_what_torchtitans_own_manager_saved_last_is_gone_on_from(tmp_path: Path) -> None:
    Run(tmp_path).to(2)
    Run(tmp_path, TitanManager, keep_latest_k=0).to(4)
    run = Run(tmp_path)
    assert run.manager.load()
    assert run.state() == (4, 4, 4)
    run.to(5)
    again = Run(tmp_path)
    assert again.manager.load()
    assert again.state() == (5, 5, 5)


def test_a_part_gets_all_that_was_saved_of_it(tmp_path: Path) -> None:
    old = Run(tmp_path)
    old.optimizers.values["more"] = torch.ones(2)
    old.to(1)
    new = Run(tmp_path)
    assert new.manager.load()
    assert new.state() == (1, 1, 1)
    assert torch.equal(new.optimizers.values["more"], torch.ones(2))


def test_torchtitans_own_manager_begins_from_ours(tmp_path: Path) -> None:
    Run(tmp_path).to(3)
    back = Run(
        tmp_path / "other",
        TitanManager,
        initial_load_path=str(tmp_path / "step-00000003"),
        initial_load_model_only=False,
    )
    assert back.manager.load()
    assert back.state() == (3, 3, 3)


def test_a_seed_checkpoint_gives_the_model_alone(tmp_path: Path) -> None:
    seed = Run(tmp_path)
    with torch.no_grad():
        seed.model.weight.fill_(7)
    seed.optimizers.values["moment"] = torch.ones(3)
    seed.manager.save(0, last_step=True)
    run = Run(tmp_path)
    assert run.manager.load()
    assert run.state() == (7, 0, 0)


def test_a_seed_does_not_follow_a_damaged_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path, last_save_model_only=True).manager.save(0, last_step=True)
    Run(tmp_path).to(1)
    damage(tmp_path / "step-00000001")
    with pytest.raises(LoadFailed, match="load_step=0 begins from this seed"):
        Run(tmp_path).manager.load()
    run = Run(tmp_path)
    assert run.manager.load(0)
    assert run.state()[1:] == (0, 0)


def test_a_last_save_of_the_model_alone(tmp_path: Path) -> None:
    Run(tmp_path, last_save_model_only=True, export_dtype="bfloat16").to(3, last=True)
    assert steps_at(tmp_path) == [1, 2, 3]
    with pytest.raises(LoadFailed, match="optimizer"):
        Run(tmp_path).manager.load()
    run = Run(tmp_path)
    assert run.manager.load(2)
    begun = Run(tmp_path / "other", initial_load_path=str(tmp_path / "step-00000003"))
    assert begun.manager.load()
    assert begun.state() == (3, 0, 0)


def test_hugging_faces_format_at_the_end_and_at_the_beginning(tmp_path: Path) -> None:
    Run(tmp_path, last_save_model_only=True, last_save_in_hf=True).to(3, last=True)
    assert list((tmp_path / "step-3").glob("*.safetensors"))
    resumed = Run(tmp_path)
    assert resumed.manager.load()
    assert resumed.state() == (2, 2, 2)
    begun = Run(tmp_path / "other", initial_load_path=str(tmp_path / "step-3"), initial_load_in_hf=True)
    assert begun.manager.load()
    assert begun.state() == (3, 0, 0)


def test_a_failed_save_is_raised(tmp_path: Path) -> None:
    run = Run(tmp_path).to(1)
    (tmp_path / "step-00000002").write_text("in the way")
    with pytest.raises(SaveFailed):
        run.to(2)


def test_load_only_writes_nothing(tmp_path: Path) -> None:
    Run(tmp_path).to(1)
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    run = Run(tmp_path, load_only=True)
    assert run.manager.load()
    assert not run.manager.save(2)
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("folder", "settings", "error", "text"),
    [
        ("s3://b/run", {"last_save_in_hf": True, "last_save_model_only": True}, ValueError, "last_save_in_hf"),
        ("s3://b/run", {"storage_options": {"nosuch": "x"}}, ConfigurationError, "nosuch"),
        ("/tmp/run", {"storage_options": {"key": "x"}}, ConfigurationError, "key"),
        ("nosuch://b/run", {}, ConfigurationError, "nosuch"),
        ("/tmp/run", {"keep_latest_k": 1}, ValueError, "at least 2"),
        ("/tmp/run", {"async_mode": "sometimes"}, ValueError, "async_mode"),
        ("/tmp/run", {"async_mode": "async_with_pinned_mem"}, ConfigurationError, "init_process_group"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_an_error_at_once(
    folder: str, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        Run(folder, **settings)
