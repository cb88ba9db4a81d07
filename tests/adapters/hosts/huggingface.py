"""Train a small Llama with transformers' `Trainer`: another class and another folder are all that changes.

`options`: `fsdp` is the state_dict_type with which `Trainer` shards the model; without it, it uses DDP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate import PartialState
from accelerate.utils import DistributedType
from adapters.life import WIDTH, Life, Reading, read_life, report, timed
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

BATCH = 4
TOKENS = 16
VOCABULARY = 128


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Give all ranks the same batch in a step: sums of gradients are then exact on 1, 2 or 4 ranks."""

    def __init__(self, steps: int, ranks: int) -> None:
        self._size = steps * BATCH * ranks
        self.ranks = ranks

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        step = index // (BATCH * self.ranks)
        row = index % BATCH
        generator = torch.Generator().manual_seed(1000 * step + row)
        tokens = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        """Return the batch that each rank has in a step, counted from 0."""
        first = step * BATCH * self.ranks
        tokens = torch.stack([self[row]["input_ids"] for row in range(first, first + BATCH)])
        return {"input_ids": tokens, "labels": tokens}


def small_llama(width: int) -> LlamaForCausalLM:
    torch.manual_seed(1)
    layers = 2 if width <= WIDTH else 1  # a wide one is measured: 72 bytes of state for width * width
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=TOKENS,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments(life: Life) -> TrainingArguments:
    sharded: dict[str, Any] = {}
    if "fsdp" in life.options:
        sharded = {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": life.options["fsdp"]}}
    args = TrainingArguments(
        output_dir=life.root, use_cpu=True, max_steps=life.steps, save_steps=life.save_every, save_strategy="steps",
        per_device_train_batch_size=BATCH, train_sampling_strategy="sequential", learning_rate=1e-2,
        lr_scheduler_type="linear", max_grad_norm=0.0, logging_steps=1, report_to="none", disable_tqdm=True,
        **sharded,
    )  # fmt: skip
    assert args.device.type == "cpu"  # it has looked for the other ranks by now
    if sharded:  # accelerate knows FSDP on accelerators alone; torch's runs on gloo too
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return args


def main(life: Life) -> None:
    args = arguments(life)
    options: dict[str, Any] = {}
    base: Any = transformers.Trainer
    texts = Texts(life.steps, args.world_size)
    data: Any = texts
    if not life.native:
        from ckpt.trainer_integration.adapters.huggingface import Trainer

        base = Trainer
        reading = Reading(life)
        data = reading.loader
        options = {"checkpoints": {"keep": 3, **life.options.get("checkpoints", {})}}

    class Timed(base):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not life.native:  # note the tokens of this rank, and train on those of the native run
                reading.note(self.state.global_step + 1, inputs["input_ids"])
                inputs = texts.batch(self.state.global_step)
                kwargs["num_items_in_batch"] = torch.tensor(float(BATCH * (TOKENS - 1) * texts.ranks))
            return super().compute_loss(model, inputs, *args, **kwargs)

        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            with timed():
                super()._save_checkpoint(*args, **kwargs)

        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            self.resumed_step = self.state.global_step

    trainer = Timed(small_llama(life.width), args, train_dataset=data, **options)
    trainer.resumed_step = None
    trainer.train(resume_from_checkpoint=not life.native)
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    report(life, trainer.model, optimizer, resumed_step=trainer.resumed_step)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(read_life())
