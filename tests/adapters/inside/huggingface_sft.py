"""Fine-tune with TRL's `SFTTrainer`: after `install()`, that is all that changes.

Arguments: the run's folder, of which `native` is without this library; steps; `lora` or `whole`. The last
line of the output is a digest of what was trained.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch


def main(root: Path, steps: int, what: str) -> None:
    is_native = root.name == "native"
    if not is_native:
        from ckpt.trainer_integration.adapters import huggingface

        huggingface.install()
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    texts = [f"the number {number} comes before {number + 1}" for number in range(64)]
    tokenizer = tokenizer_of(texts)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(3)
    args = SFTConfig(
        output_dir=str(root), max_steps=steps, save_steps=2, save_total_limit=2, per_device_train_batch_size=2,
        use_cpu=True, bf16=False, report_to="none", learning_rate=1e-2, lr_scheduler_type="constant", max_length=32,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj"]) if what == "lora" else None,
    )
    trainer.train(resume_from_checkpoint=not is_native)
    if not is_native:
        trainer.checkpoints.close()
    digest = hashlib.sha256()
    for _, parameter in sorted(trainer.model.named_parameters()):
        digest.update(parameter.detach().numpy().tobytes())
    print(f"\n{digest.hexdigest()}")


def tokenizer_of(texts: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special.values()))
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
