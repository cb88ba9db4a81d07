"""Train on two ranks, pass over a damaged checkpoint, and write a model: torchrun runs this.

Arguments: a folder; `ddp` or `fsdp`; `lora`, to train adapters.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from adapters.hosts.huggingface import Texts, small_llama
from peft import LoraConfig, PeftModel, get_peft_model
from support.files import damage
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import TrainingArguments

from ckpt.trainer_integration.adapters.huggingface import Trainer

WIDTH = 16


def main(folder: Path, wrapper: str, has_adapters: bool) -> None:
    whole = trainer_of(folder / "whole", 6, wrapper, has_adapters)
    whole.train()
    trainer_of(folder / "run", 4, wrapper, has_adapters).train()
    dist.barrier()
    if dist.get_rank() == 0:
        damage(folder / "run" / "step-00000004")
    dist.barrier()
    resumed = trainer_of(folder / "run", 6, wrapper, has_adapters)
    resumed.train(resume_from_checkpoint=True)
    expected, weights = weights_of(whole), weights_of(resumed)
    # Where FSDP keeps the model sharded, Trainer alone writes nothing; and it knows no URLs.
    resumed.save_model(f"{folder}/model" if wrapper == "fsdp" else f"file://{folder}/model")
    dist.barrier()
    if dist.get_rank() == 0:
        report = {
            "files": sorted(path.suffix for path in (folder / "model").iterdir()),
            "resumed": unequal(expected, weights),
            "served": unequal(weights, served(folder / "model", has_adapters)),
        }
        (folder / "report.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()


def trainer_of(root: Path, steps: int, wrapper: str, has_adapters: bool) -> Any:
    sharded: dict[str, Any] = {}
    if wrapper == "fsdp":
        sharded = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}}
    args = TrainingArguments(
        output_dir=str(root), use_cpu=True, max_steps=steps, save_steps=2, per_device_train_batch_size=4,
        train_sampling_strategy="sequential", learning_rate=1e-2, lr_scheduler_type="constant",
        report_to="none", disable_tqdm=True, **sharded,
    )  # fmt: skip
    assert args.device.type == "cpu"
    if sharded:  # accelerate knows FSDP on accelerators alone; torch's runs on gloo too
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return Trainer(model_of(has_adapters), args, train_dataset=Texts(8, 2))


def model_of(has_adapters: bool) -> Any:
    model = small_llama(WIDTH)
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    return get_peft_model(model, config) if has_adapters else model


def served(folder: Path, has_adapters: bool) -> dict[str, torch.Tensor]:
    if has_adapters:
        return dict(PeftModel.from_pretrained(small_llama(WIDTH), folder).state_dict())
    return dict(transformers.LlamaForCausalLM.from_pretrained(folder).state_dict())


def weights_of(trainer: Any) -> dict[str, Any]:
    return get_model_state_dict(trainer.model, options=StateDictOptions(full_state_dict=True))


def unequal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "lora" in sys.argv)
