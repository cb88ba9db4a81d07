"""Train a small Llama with transformers' `Trainer`, with checkpoints at any URL; the same command goes on.

    pip install 'transformers==5.23.0' 'accelerate==1.15.0'
    torchrun --nproc-per-node 2 examples/huggingface/train.py --output-dir s3://bucket/run

Kill it at any time, and start it again, also with another number of ranks. Without `--output-dir` it
uses the folder `run`. On CPUs it uses DDP; on GPUs, FSDP2.

The model and the data (the Python standard library's sources, byte by byte) are there to be replaced.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from ckpt.trainer_integration.adapters.huggingface import Trainer

TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output-dir", default="run", help="a folder or URL")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-steps", type=int, default=20)
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    args = TrainingArguments(
        output_dir=options.output_dir,
        max_steps=options.steps,
        save_steps=options.save_steps,
        save_total_limit=3,
        logging_steps=10,
        per_device_train_batch_size=8,
        report_to="none",
        use_cpu=not has_gpu,
        fsdp=has_gpu,
        fsdp_config={"version": 2} if has_gpu else None,
    )
    trainer = Trainer(small_llama(), args, train_dataset=Sources())
    trainer.train(resume_from_checkpoint=True)


def small_llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


class Sources(Dataset[dict[str, torch.Tensor]]):
    """Cut the sources into rows of bytes."""

    def __init__(self) -> None:
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = b"".join(file.read_bytes() for file in files[:40])
        self._bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self._bytes) // TOKENS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self._bytes[index * TOKENS : (index + 1) * TOKENS].long()
        return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    main()
