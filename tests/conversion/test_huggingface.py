"""`ckpt convert` and transformers: folders of `save_pretrained` in, folders for `from_pretrained` out."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.conversions import convert, read, read_safetensors
from support.ranks import run_ranks
from support.states import digest

import ckpt

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def llama(*, tied: bool, seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97, tie_word_embeddings=tied, dtype="float32",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def logits(folder: Path, **more: Any) -> torch.Tensor:
    import transformers

    model = transformers.LlamaForCausalLM.from_pretrained(folder, local_files_only=True, **more).eval()
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(20)[None]).logits
    return found


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_from_save_pretrained_and_back(tied: bool, shard_size: str, tmp_path: Path) -> None:
    model = llama(tied=tied)
    model.save_pretrained(tmp_path / "hf", max_shard_size=shard_size)
    assert (tmp_path / "hf" / "model.safetensors").exists() == (shard_size == "5GB")
    convert(tmp_path / "hf", tmp_path / "ours")
    convert(tmp_path / "ours", tmp_path / "back", "--to", "safetensors", "--max-shard-size", shard_size)
    assert digest(read_safetensors(tmp_path / "back")) == digest(read_safetensors(tmp_path / "hf"))
    for name in ("config.json", "generation_config.json"):
        (tmp_path / "back" / name).write_bytes((tmp_path / "hf" / name).read_bytes())
    assert torch.equal(logits(tmp_path / "back"), logits(tmp_path / "hf"))


@pytest.mark.parametrize("tied", [False, True])
def test_a_trainers_state_becomes_a_model(tied: bool, tmp_path: Path) -> None:
    """The model's state dict, under `model`, with optimizer state; tied weights are in it twice."""
    model = llama(tied=tied)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(20)[None]).logits.sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}
    model.save_pretrained(tmp_path / "expected")
    expected = set(read_safetensors(tmp_path / "expected"))
    torch.save(state, tmp_path / "a.pt")
    ckpt.save(state, tmp_path / "ours")
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    for source in ("a.pt", "ours", "stock"):
        result = tmp_path / f"hf-{source}"
        done = convert(
            tmp_path / source, result, "--to", "safetensors", "--weights-only", "--rename", r"^model\.="
        )
        if source == "a.pt":  # which tells that two names are one memory
            assert set(read_safetensors(result)) == expected
            assert set(done["dropped"]) == ({"lm_head.weight"} if tied else set())
        model.config.save_pretrained(result)
        assert torch.equal(logits(result), logits(tmp_path / "expected"))


@pytest.mark.parametrize("source", ["hf", "flat.pt", "ours", "stock", "nested.pt"])
def test_a_head_beside_the_model_is_a_weight_too(source: str, tmp_path: Path) -> None:
    """`lm_head.weight` stands beside `model.*`, which here is no dict but the beginning of names."""
    model = llama(tied=False)
    model.save_pretrained(tmp_path / "hf")
    torch.save(model.state_dict(), tmp_path / "flat.pt")
    torch.save({"state_dict": model.state_dict(), "rng": torch.zeros(9)}, tmp_path / "nested.pt")
    ckpt.save(model.state_dict(), tmp_path / "ours")
    dcp.save(model.state_dict(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"), no_dist=True)
    options = ["--weights-only", "--dtype", "float16", "--rename", r"^state_dict\.="]
    convert(tmp_path / source, tmp_path / "a.safetensors", *options)
    expected = {name: value.to(torch.float16) for name, value in model.state_dict().items()}
    assert digest(read_safetensors(tmp_path / "a.safetensors")) == digest(expected)
    if source in ("ours", "stock"):
        assert ckpt.inspect(tmp_path / source).parameters == sum(value.numel() for value in expected.values())


@pytest.mark.parametrize("tied", [False, True])
def test_dtype_is_that_of_save_pretrained(tied: bool, tmp_path: Path) -> None:
    import transformers

    model = llama(tied=tied)
    model.save_pretrained(tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "half", "--to", "safetensors", "--dtype", "bfloat16")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "expected")
    assert digest(read_safetensors(tmp_path / "half")) == digest(read_safetensors(tmp_path / "expected"))
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("half", "expected")]
    assert configs[0] == configs[1]
    assert configs[0]["dtype"] == "bfloat16"
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "half", dtype="auto")
    assert loaded.dtype == torch.bfloat16


def test_what_belongs_to_the_model_comes_along(tmp_path: Path) -> None:
    source, target = tmp_path / "hf", tmp_path / "copy"
    llama(tied=False).save_pretrained(source)
    for name, text in [
        ("tokenizer.json", "{}"), ("merges.txt", "a b"), ("LICENSE", "..."), ("tokenizer.model", "x"),
        ("pytorch_model.bin", "old weights"), (".gitattributes", "*"), ("weights.gguf", "others"),
    ]:  # fmt: skip
        (source / name).write_text(text)
    (source / "onnx").mkdir()
    (source / "onnx" / "model.onnx").write_text("others")
    target.mkdir()
    (target / "merges.txt").write_text("mine")
    convert(source, target, "--to", "safetensors", "--dtype", "float16")
    names = {
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "merges.txt",
        "LICENSE",
        "tokenizer.model",
    }
    assert {path.name for path in target.iterdir()} == {*names, "model.safetensors"}
    assert (target / "merges.txt").read_text() == "mine"


def test_an_old_folder_of_pickles(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.config.save_pretrained(tmp_path / "old")
    torch.save(model.state_dict(), tmp_path / "old" / "pytorch_model.bin")
    convert(tmp_path / "old", tmp_path / "new", "--to", "safetensors")
    model.save_pretrained(tmp_path / "expected")
    assert torch.equal(logits(tmp_path / "new"), logits(tmp_path / "expected"))
    assert set(read_safetensors(tmp_path / "new")) == set(read_safetensors(tmp_path / "expected"))
    convert(tmp_path / "old", tmp_path / "old", "--to", "safetensors")
    assert torch.equal(logits(tmp_path / "old"), logits(tmp_path / "expected"))


def test_a_file_named_otherwise(tmp_path: Path) -> None:
    llama(tied=False).save_pretrained(tmp_path / "hf")
    expected = digest(read_safetensors(tmp_path / "hf"))
    (tmp_path / "hf" / "model.safetensors").rename(tmp_path / "hf" / "diffusion_pytorch_model.safetensors")
    convert(tmp_path / "hf", tmp_path / "a.pt")
    assert digest(read(tmp_path / "a.pt", "torch")) == expected
    (tmp_path / "hf" / "other.safetensors").write_text("")
    assert (
        "name one of them as the source"
        in convert(tmp_path / "hf", tmp_path / "b.pt", code=2)["error"]["message"]
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long)])
def test_fsdp_ranks_write_what_from_pretrained_reads(size: int, dtype: str, tmp_path: Path) -> None:
    """Without a gather; and FSDP ranks load what `save_pretrained` wrote."""
    import transformers

    model = llama(tied=False).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path / "source", max_shard_size="20KB")
    run_ranks(size, _reshard, str(tmp_path / "source"), str(tmp_path / "ours"), dtype)
    model.config.save_pretrained(tmp_path / "ours")
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto")
    assert digest(dict(found.state_dict())) == digest(dict(model.state_dict()))
    assert torch.equal(logits(tmp_path / "ours"), logits(tmp_path / "source"))


def _reshard(rank: int, source: str, target: str, dtype: str) -> None:
    """Load a folder into a model of other values under FSDP2, and save that as another folder."""
    from torch.distributed.fsdp import fully_shard

    model = llama(tied=False, seed=1).to(getattr(torch, dtype))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    state = model.state_dict()
    ckpt.load(state, source)
    ckpt.save(model.state_dict(), target, format="safetensors", max_shard_size="20KB")


def test_a_tied_model_under_fsdp(tmp_path: Path) -> None:
    model = llama(tied=True)
    model.save_pretrained(tmp_path / "source")
    run_ranks(2, _reshard_tied, str(tmp_path / "source"), str(tmp_path / "ours"))
    model.config.save_pretrained(tmp_path / "ours")
    assert set(read_safetensors(tmp_path / "ours")) == set(read_safetensors(tmp_path / "source"))
    assert torch.equal(logits(tmp_path / "ours"), logits(tmp_path / "source"))


def _reshard_tied(rank: int, source: str, target: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = llama(tied=True, seed=1)
    fully_shard(model)
    state = model.state_dict()
    assert "lm_head.weight" in state
    ckpt.load(state, source)
    ckpt.save(model.state_dict(), target, format="safetensors")
