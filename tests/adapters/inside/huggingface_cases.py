"""Tests inside of transformers' `Trainer` and of accelerate: `test_huggingface.py` runs them with these."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator, PartialState
from adapters.hosts.huggingface import Texts, small_llama
from peft import LoraConfig, get_peft_model
from support.files import damage
from support.servers import S3Server
from torch.utils.data import DataLoader
from transformers import TrainerCallback, TrainingArguments
from transformers.distributed.checkpoint import load_optimizer_distributed, save_optimizer_distributed

import ckpt
from ckpt.backends.base import read_bytes
from ckpt.backends.registry import open_store
from ckpt.errors import ConfigurationError, LoadFailed
from ckpt.options import DataOptions
from ckpt.tools.inspect import inspect
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.adapters import accelerate, huggingface
from ckpt.trainer_integration.adapters.huggingface import Trainer
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def arguments(root: str | Path, steps: int = 6, **options: Any) -> TrainingArguments:
    own = {"save_strategy": "steps", "save_steps": 2, "report_to": "none", "logging_steps": 1}
    return TrainingArguments(
        output_dir=str(root), use_cpu=True, max_steps=steps, per_device_train_batch_size=4, disable_tqdm=True,
        **{**own, **options},
    )  # fmt: skip


def trainer_of(
    root: str | Path,
    steps: int = 6,
    *,
    kind: type[transformers.Trainer] = Trainer,
    model: Any = None,
    callbacks: Any = None,
    checkpoints: Any = None,
    data: Any = None,
    **options: Any,
) -> Any:
    data = data or Texts(8, 1)
    own = {} if kind is transformers.Trainer else {"checkpoints": checkpoints}
    return kind(
        model=small_llama(WIDTH) if model is None else model, args=arguments(root, steps, **options),
        train_dataset=data, eval_dataset=data, callbacks=callbacks, **own,
    )  # fmt: skip


def loader_of(*, positions: bool = True) -> RescalableLoader:
    source = MapSource([[row] * 8 for row in range(64)])
    dataset = ShardedDataset(source, sequence_length=8, options=DataOptions(positions=positions))
    return RescalableLoader(dataset, batch_size=2)


def train(trainer: Any, **options: Any) -> None:
    """Train, and wait until old checkpoints have been removed, as the end of the program does."""
    trainer.train(**options)
    trainer.checkpoints.close()


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def committed(root: str | Path) -> list[int]:
    listed = ckpt.list_checkpoints(str(root))
    return sorted(each.step for each in listed if each.state == "committed" and each.step is not None)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Weights after 6 steps with Trainer's own saving."""
    trainer = trainer_of(tmp_path_factory.mktemp("reference"), kind=transformers.Trainer)
    trainer.train()
    return weights(trainer)


def test_a_damaged_newest_checkpoint_is_passed_over(tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer_of(root, steps=4, lr_scheduler_type="constant").train()
    # The whole state of step 4 cannot be loaded, though Trainer's own part of it can.
    damage(root / "step-00000004")
    again = trainer_of(root, lr_scheduler_type="constant")
    steps: list[int] = []

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            steps.append(state.global_step)

    again.add_callback(Steps)
    again.train(resume_from_checkpoint=True)
    assert steps == [3, 4, 5, 6]
    whole = trainer_of(tmp_path / "whole", kind=transformers.Trainer, lr_scheduler_type="constant")
    whole.train()
    assert_equal(weights(again), weights(whole))
    assert (root / "step-00000004.again").is_dir()


def test_everything_goes_to_the_url_and_the_rest_to_a_local_folder(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, torch.Tensor]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint_url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3.secret_key)
    root = f"s3://{s3.new_bucket()}/run"
    args = arguments(root, save_total_limit=2)
    train(Trainer(model=small_llama(WIDTH), args=args, train_dataset=Texts(8, 1)))
    assert args.output_dir == root
    assert committed(root) == [4, 6]
    assert os.listdir() == ["trainer_output"]
    assert os.listdir("trainer_output") == ["run"]
    assert os.listdir("trainer_output/run") == []

    resumed = trainer_of(root)
    resumed.train(resume_from_checkpoint=f"{root}/step-00000004")
    assert_equal(weights(resumed), reference)

    # The model goes to a URL too: to that of the run, beside its checkpoints, or to any other.
    resumed.save_model()
    resumed.save_model(f"{root}/model")
    for place in (root, f"{root}/model"):
        download(place, tmp_path / "model")
        served = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
        assert_equal(dict(served.named_parameters()), reference)
    assert os.listdir("trainer_output/run") == []
    again = trainer_of(root, steps=8)
    again.train(resume_from_checkpoint=True)
    assert again._initial_global_step == 6


def download(url: str, folder: Path) -> None:
    """Copy the files of a model, as a program that serves it does."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    with contextlib.closing(open_store(url)) as store:
        for stat in store.list():
            if "/" not in stat.key:
                (folder / stat.key).write_bytes(read_bytes(store, stat.key))


def test_a_run_without_checkpoints_begins_anew_and_one_with_some_does_not(tmp_path: Path) -> None:
    trainer_of(tmp_path / "run", steps=2).train(resume_from_checkpoint=True)
    with pytest.raises(ConfigurationError, match=r"step 2: train\(resume_from_checkpoint=True\)"):
        trainer_of(tmp_path / "run").train()
    damage(tmp_path / "run" / "step-00000002")
    with pytest.raises(LoadFailed):
        trainer_of(tmp_path / "run").train(resume_from_checkpoint=True)


def test_a_run_goes_on_from_checkpoints_of_trainers_own(
    tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    for how in (True, str(tmp_path / "True" / "checkpoint-4")):
        root = tmp_path / "True" if how is True else tmp_path / "other"
        if how is True:
            trainer_of(root, kind=transformers.Trainer).train()
            os.rename(root / "checkpoint-6", tmp_path / "newest")
        resumed = trainer_of(root)
        resumed.train(resume_from_checkpoint=how)
        assert_equal(weights(resumed), reference)
        assert committed(root) == [6]


def test_a_run_begins_with_the_checkpoint_of_another(
    tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    trainer_of(tmp_path / "one").train()
    resumed = trainer_of(tmp_path / "two")
    resumed.train(resume_from_checkpoint=str(tmp_path / "one" / "step-00000002"))
    assert_equal(weights(resumed), reference)
    assert committed(tmp_path / "two") == [4, 6]


@pytest.mark.parametrize(
    ("losses", "own", "kept"),
    [
        ({2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}, {"save_total_limit": 2}, [4, 8]),
        pytest.param({2: 3.0, 4: 1.0, 6: 1.0, 8: 4.0}, {"save_total_limit": 2}, [6, 8], id="two are equal"),
        pytest.param({2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0}, {"checkpoints": {"keep": 1}}, [4, 8], id="own keep"),
        pytest.param(
            {2: 3.0, 4: 1.0, 6: 2.0, 8: 4.0},
            {"save_total_limit": 1, "checkpoints": {"save": saving.every_steps(4)}},
            [4, 8],
            id="own rules",
        ),
        pytest.param(
            {1: 5.0, 2: 2.0, 3: 1.0, 4: 3.0, 5: 3.0, 6: 3.0, 7: 3.0, 8: 3.0},
            {"eval_steps": 1},
            [2, 4, 6, 8],
            id="the best is not saved",
        ),
    ],
)
def test_the_best_model_is_kept_and_loaded_at_the_end(
    tmp_path: Path, losses: dict[int, float], own: dict[str, Any], kept: list[int]
) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Losses(TrainerCallback):
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
            metrics["eval_loss"] = state.log_history[-1]["eval_loss"] = losses[state.global_step]
            seen[state.global_step] = weights(trainer)

    trainer = trainer_of(
        tmp_path / "run", steps=8, **{"eval_strategy": "steps", "eval_steps": 2, **own}, load_best_model_at_end=True,
        metric_for_best_model="loss", greater_is_better=False, callbacks=[Losses()],
    )  # fmt: skip
    train(trainer)
    assert committed(tmp_path / "run") == kept
    best = next(step for step in (4, 6, 2) if step in kept and losses[step] <= 2.0)
    assert trainer.state.best_global_step == best
    assert trainer.state.best_model_checkpoint == f"{tmp_path}/run/step-{best:08d}"
    assert_equal(weights(trainer), seen[best])


def test_the_checkpoint_that_was_asked_for_is_loaded_however_it_is_named(tmp_path: Path) -> None:
    trainer_of("../run").train()
    (tmp_path / "link").symlink_to(tmp_path / "run" / "step-00000004")
    for name in (tmp_path / "run" / "step-00000002", tmp_path / "link"):
        resumed = trainer_of("../run")
        resumed.train(resume_from_checkpoint=name)
        assert resumed._initial_global_step == (4 if name.name == "link" else 2)


def test_a_run_that_has_begun_says_that_it_does_not_begin_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer_of(tmp_path / "one", steps=2).train()
    trainer_of(tmp_path / "two").train()
    again = trainer_of(tmp_path / "two", steps=8)
    again.train(resume_from_checkpoint=str(tmp_path / "one" / "step-00000002"))
    assert again._initial_global_step == 6
    assert "has checkpoints of its own and goes on from" in caplog.text


def test_checkpoints_are_not_pushed_with_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: dict[str, list[str]] = {}

    class Hub:
        def create_repo(self, name: str, **options: Any) -> Any:
            return SimpleNamespace(repo_id=f"me/{name}")

        def upload_folder(self, repo_id: str, folder_path: str, **options: Any) -> None:
            files = [path for path in Path(folder_path).rglob("*") if path.is_file()]
            pushed[repo_id] = sorted(path.relative_to(folder_path).as_posix() for path in files)

    monkeypatch.setattr(transformers.trainer, "hf_api", Hub)
    monkeypatch.setattr(Trainer, "create_model_card", lambda *args, **options: None)
    for root in (str(tmp_path / "one"), f"file://{tmp_path}/two"):
        trainer = trainer_of(root, steps=2, push_to_hub=True, hub_strategy="end")
        train(trainer)
        trainer.push_to_hub()
    files = ["config.json", "generation_config.json", "model.safetensors", "training_args.bin"]
    assert pushed == {"me/one": files, "me/two": files}


def test_a_checkpoint_of_the_model_alone_goes_on_where_that_is_wanted(tmp_path: Path) -> None:
    first = trainer_of(tmp_path / "run", steps=2, save_only_model=True)
    first.train()
    tops = {name.partition(".")[0] for name in inspect(str(tmp_path / "run" / "step-00000002")).tensors}
    assert tops == {"model"}
    with pytest.raises(LoadFailed, match=r"lacks 7 key\(s\): optimizer, scheduler\."):
        trainer_of(tmp_path / "run").train(resume_from_checkpoint=True)
    again = trainer_of(tmp_path / "run", steps=2, save_only_model=True)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2  # Trainer alone makes one more step than it was told to
    assert_equal(weights(again), weights(first))


def test_rules_of_ours_save_too_and_a_signal_ends_the_training(tmp_path: Path) -> None:
    class Preempt(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                os.kill(os.getpid(), signal.SIGUSR1)

    rules = {"save": saving.on_preemption(), "keep": keeping.every_steps(3)}
    train(trainer_of(tmp_path / "run", callbacks=[Preempt()], checkpoints=rules))
    assert committed(tmp_path / "run") == [3]


def test_callbacks_scheduler_and_random_states_come_from_the_checkpoint(tmp_path: Path) -> None:
    class Draws(TrainerCallback):
        def __init__(self) -> None:
            self.numbers: dict[int, float] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.numbers[state.global_step] = torch.rand(()).item()

    whole, again = Draws(), Draws()
    first = trainer_of(tmp_path / "run", callbacks=[whole, transformers.EarlyStoppingCallback(5)],
                       eval_strategy="steps", eval_steps=2, metric_for_best_model="loss")  # fmt: skip
    first.train()
    stopper = transformers.EarlyStoppingCallback(1)
    resumed = trainer_of(tmp_path / "run", callbacks=[again, stopper], eval_strategy="steps", eval_steps=2,
                         metric_for_best_model="loss",
                         restore_callback_states_from_checkpoint=True)  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "step-00000004"))
    assert again.numbers == {step: number for step, number in whole.numbers.items() if step > 4}
    assert resumed.lr_scheduler.state_dict() == first.lr_scheduler.state_dict()
    (restored,) = [
        each
        for each in resumed.callback_handler.callbacks
        if isinstance(each, transformers.EarlyStoppingCallback)
    ]
    assert restored.early_stopping_patience == 5


def test_of_a_model_with_adapters_only_what_is_trained_is_saved(tmp_path: Path) -> None:
    def lora() -> Any:
        torch.manual_seed(2)
        return get_peft_model(
            small_llama(WIDTH), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
        )

    whole = trainer_of(tmp_path / "whole", kind=transformers.Trainer, model=lora())
    whole.train()
    trainer_of(tmp_path / "run", steps=4, model=lora(), lr_scheduler_type="constant").train()
    names = list(inspect(str(tmp_path / "run" / "step-00000004")).tensors)
    assert not [name for name in names if name.startswith("model.") and "lora" not in name]
    resumed = trainer_of(tmp_path / "other", model=lora())
    trainer_of(tmp_path / "six", model=lora()).train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "six" / "step-00000004"))
    assert_equal(weights(resumed), weights(whole))


def test_a_loader_goes_on_behind_what_was_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer fetches the batches of a step before it trains on the first."""
    read: list[int] = []
    native = transformers.Trainer.compute_loss

    def noting(self: Any, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        read.extend(inputs["input_ids"][:, 0].tolist())
        return native(self, model, inputs, *args, **options)

    monkeypatch.setattr(transformers.Trainer, "compute_loss", noting)
    for steps in (2, 6):
        trainer = trainer_of(tmp_path / "run", steps, data=loader_of(), gradient_accumulation_steps=2)
        train(trainer, resume_from_checkpoint=True)
    rows = [int(row[0]) for _, batch in zip(range(12), loader_of(), strict=False) for row in batch["tokens"]]
    assert read == rows


def test_what_cannot_be_saved_is_an_error_at_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigurationError, match="agreeing"):
        trainer_of(tmp_path / "run", enable_jit_checkpoint=True)
    with pytest.raises(ConfigurationError, match="parts of every rank"):
        trainer_of(tmp_path / "run", save_on_each_node=True)
    with pytest.raises(ConfigurationError, match="per_device_train_batch_size"):
        trainer_of(tmp_path / "run", auto_find_batch_size=True)
    monkeypatch.setenv("HF_MLFLOW_LOG_ARTIFACTS", "1")
    monkeypatch.setattr(transformers.trainer, "get_reporting_integration_callbacks", lambda names: [])
    with pytest.raises(ConfigurationError, match=r"or MLflow\(\)"):
        trainer_of(tmp_path / "run", report_to="mlflow")
    with pytest.raises(ConfigurationError, match="last takes a positive"):
        trainer_of(tmp_path / "run", checkpoints={"keep": keeping.last(0)})
    with pytest.raises(ConfigurationError, match="positions=True"):
        trainer_of(tmp_path / "run", data=loader_of(positions=False))
    with pytest.raises(ConfigurationError, match="hyperparameter search"):
        trainer_of(tmp_path / "run").train(trial={})
    monkeypatch.delattr(transformers.Trainer, "_load_rng_state")
    with pytest.raises(ConfigurationError, match=r"has no Trainer\._load_rng_state"):
        trainer_of(tmp_path / "run")


def test_install_takes_the_place_of_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("transformers", "transformers.trainer"):
        monkeypatch.setattr(sys.modules[module], "Trainer", huggingface._Native)
    monkeypatch.setattr(Trainer, "checkpoint_options", {})
    huggingface.install(keep=1)
    from transformers import Trainer as Installed

    train(Installed(small_llama(WIDTH), arguments(tmp_path / "run"), train_dataset=Texts(8, 1)))
    assert committed(tmp_path / "run") == [6]

    class Theirs(huggingface._Native): ...

    with pytest.raises(ConfigurationError, match=r"before the import of .*Theirs"):
        huggingface.install()


def test_the_optimizer_that_transformers_saves_by_itself(tmp_path: Path) -> None:
    parts = prepared()
    model, optimizer = parts[1:3]
    step(*parts)
    moments = {name: value.clone() for name, value in optimizer.state[model.lm_head.weight].items()}
    ckpt.install()
    try:
        save_optimizer_distributed(model, optimizer.optimizer, str(tmp_path / "one"))
        step(*parts)
        load_optimizer_distributed(model, optimizer.optimizer, str(tmp_path / "one"))
    finally:
        ckpt.uninstall()
    assert_equal(dict(optimizer.state[model.lm_head.weight]), moments)
    assert (tmp_path / "one" / "commit.json").exists()


def prepared() -> tuple[Accelerator, Any, Any, Any]:
    accelerator = Accelerator(cpu=True)
    model = small_llama(WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def step(accelerator: Accelerator, model: Any, optimizer: Any, scheduler: Any) -> None:
    tokens = torch.randint(100, (2, 8))
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_the_state_of_an_accelerator_goes_on(tmp_path: Path) -> None:
    accelerator, *parts = prepared()
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    step(accelerator, *parts)
    counter.count, accelerator.step = 7, 3
    accelerate.save_state(accelerator, tmp_path / "one")
    step(accelerator, *parts)
    after = {name: value.clone() for name, value in parts[0].state_dict().items()}

    accelerator, *parts = prepared()
    accelerator.register_for_checkpointing(again := Counter())
    accelerate.load_state(accelerator, tmp_path / "one")
    assert (again.count, accelerator.step) == (7, 3)
    step(accelerator, *parts)
    assert_equal(dict(parts[0].state_dict()), after)
    assert parts[2].state_dict()["last_epoch"] == 2


def test_a_data_set_that_would_be_dealt_out_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, *_ = prepared()
    accelerator.prepare(DataLoader(loader_of().dataset, batch_size=2))
    assert "loader" not in accelerate.accelerator_state(accelerator)
    monkeypatch.setitem(accelerator.state._shared_state, "num_processes", 2)
    monkeypatch.setitem(PartialState._shared_state, "num_processes", 2)
    with pytest.raises(ConfigurationError, match=r"leave it out of prepare\(\)"):
        accelerate.accelerator_state(accelerator)


def test_an_accelerator_that_cannot_be_saved_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"accelerator\.prepare"):
        accelerate.save_state(Accelerator(cpu=True), tmp_path / "one")
    accelerator, *_ = prepared()
    accelerator.register_save_state_pre_hook(lambda *args: None)
    with pytest.raises(ConfigurationError, match="register_save_state_pre_hook"):
        accelerate.save_state(accelerator, tmp_path / "one")
    assert not (tmp_path / "one").exists()
