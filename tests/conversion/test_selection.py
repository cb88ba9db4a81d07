"""`ckpt convert`: what is chosen, how it is named, what it becomes; what is in the way; exit codes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.commands import run
from support.conversions import convert, read
from support.states import digest, random_tensor

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import ConfigurationError


def training_state() -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": random_tensor(6, 4).nan_to_num(0, 1, -1), "layers.1.bias": random_tensor(4).nan_to_num(0, 1, -1),
                  "count": torch.tensor(5)},
        "optim": {"state": {"layers.0.weight": {"exp_avg": random_tensor(6, 4), "step": torch.tensor(300.0)}}, "lr": 0.5},
        "step": 12,
    }  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("training") / "step-12"
    ckpt.save(training_state(), found)
    return found


def names(place: Path, *options: str, target: Path) -> set[str]:
    convert(place, target, *options)
    return set(read(target, "safetensors"))


def test_globs(place: Path, tmp_path: Path) -> None:
    files = (tmp_path / f"{number}.safetensors" for number in range(9))
    assert names(place, "--include", "model.*", target=next(files)) == {
        "model.layers.0.weight", "model.layers.1.bias", "model.count",
    }  # fmt: skip
    chosen = ("--include", "*weight*", "--include", "*count", "--exclude", "optim.*")
    assert names(place, *chosen, target=next(files)) == {"model.layers.0.weight", "model.count"}
    assert names(place, "--weights-only", target=next(files)) == {
        "model.layers.0.weight", "model.layers.1.bias", "model.count",
    }  # fmt: skip
    with pytest.raises(ConfigurationError, match="include must be a list of globs, not a single str"):
        ckpt.convert(place, tmp_path / "str.safetensors", include="model.*")
    with pytest.raises(ConfigurationError, match="exclude must be a list of globs, not a single str"):
        ckpt.convert(place, tmp_path / "str.safetensors", exclude="model.*")
    error = convert(place, next(files), "--include", "nothing*", code=2)["error"]
    assert "no tensor or object is left to convert" in error["message"]


def test_weights_of_an_app_state(tmp_path: Path) -> None:
    """The names of PyTorch's own tutorial on DCP."""
    ckpt.save({"app": training_state()}, tmp_path / "app")
    weights = {"app.model.layers.0.weight", "app.model.layers.1.bias", "app.model.count"}
    assert names(tmp_path / "app", "--weights-only", target=tmp_path / "a.safetensors") == weights


def test_what_is_left_out_is_said(place: Path, tmp_path: Path) -> None:
    done = convert(place, tmp_path / "a.safetensors")
    assert set(done["dropped"]) == {"step", "optim.lr"}
    ran = run("convert", place, tmp_path / "b.safetensors")
    assert "left out: optim.lr, step (not a tensor" in ran.out
    assert (done["tensors"], done["objects"]) == (5, 0)
    torch.save({"model": {"w": torch.ones(3)}, "scales": torch.ones(2)}, tmp_path / "a.pt")
    done = convert(tmp_path / "a.pt", tmp_path / "b.pt", "--weights-only")
    assert (done["tensors"], list(done["dropped"])) == (1, ["scales"])


def test_a_weight_may_take_the_name_of_what_was_left_out(tmp_path: Path) -> None:
    torch.save(
        {"model": {"w": torch.ones(3), "scales": torch.ones(2)}, "scales": torch.ones(4)}, tmp_path / "a.pt"
    )
    rules = ("--weights-only", "--rename", r"^model\.=")
    assert names(tmp_path / "a.pt", *rules, target=tmp_path / "a.safetensors") == {"w", "scales"}


def test_renaming(place: Path, tmp_path: Path) -> None:
    rules = ("--weights-only", "--rename", r"^model\.=", "--rename", r"layers\.(\d+)\.=h.\1.")
    assert names(place, *rules, target=tmp_path / "a.safetensors") == {"h.0.weight", "h.1.bias", "count"}
    convert(place, tmp_path / "a.pt", *rules)
    state = torch.load(tmp_path / "a.pt", weights_only=True)
    assert set(state) == {"h.0.weight", "h.1.bias", "count"}, "a state dict that a model loads"
    convert(place, tmp_path / "b.pt", "--rename", "weight$=kernel")
    state = torch.load(tmp_path / "b.pt", weights_only=True)
    assert set(state["model"]) == {"layers.0.kernel", "layers.1.bias", "count"}
    assert state["step"] == 12
    for rule, text in [
        ("layers.*=x", "would both be named 'model.x'"),
        ("(=x", "is not a valid regular expression"),
        ("w=\\7", "does not fit"),
        ("no rule", "write REGEX=NEW"),
        (".*=", "--rename leaves no name for"),
        ("^step$=model", "'model' and 'model.layers.0.weight' cannot both be in one nested state"),
    ]:
        error = convert(place, tmp_path / "c.pt", "--rename", rule, code=2)["error"]
        assert text in error["message"]
        if "nested" in text:
            for form in ("ckpt", "dcp"):
                assert (
                    text
                    in convert(place, tmp_path / form, "--to", form, "--rename", rule, code=2)["error"][
                        "message"
                    ]
                )
                assert not [path for path in (tmp_path / form).rglob("*") if path.is_file()]


def test_dtypes_of_weights_change_and_of_nothing_else(place: Path, tmp_path: Path) -> None:
    convert(place, tmp_path / "a.pt", "--dtype", "bf16")
    expected = training_state()
    for name in ("layers.0.weight", "layers.1.bias"):
        expected["model"][name] = expected["model"][name].to(torch.bfloat16)
    assert digest(torch.load(tmp_path / "a.pt", weights_only=True)) == digest(expected)
    for wrong in ("int8", "Tensor", "complex64", "nothing", "float8_e8m0fnu", "float4_e2m1fn_x2"):
        assert (
            "is not a floating-point dtype"
            in convert(place, tmp_path / "b.pt", "--dtype", wrong, code=2)["error"]["message"]
        )
    with pytest.raises(ckpt.errors.ConfigurationError, match="is not a floating-point dtype"):
        ckpt.convert(place, tmp_path / "b.pt", dtype=torch.int8)


def test_packed_weights_and_their_scales_keep_their_dtype(tmp_path: Path) -> None:
    packed = torch.arange(8, dtype=torch.uint8)
    saved = {"w": packed.view(torch.float4_e2m1fn_x2), "scale": packed.view(torch.float8_e8m0fnu)}
    torch.save(saved, tmp_path / "a.pt")
    convert(tmp_path / "a.pt", tmp_path / "b.pt", "--dtype", "bfloat16")
    found = torch.load(tmp_path / "b.pt", weights_only=True)
    assert {name: value.dtype for name, value in found.items()} == {n: v.dtype for n, v in saved.items()}
    assert all(torch.equal(value.view(torch.uint8), packed) for value in found.values())


def test_every_dtype_becomes_every_other_as_torch_converts_it(tmp_path: Path) -> None:
    floats = [
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
    ]
    values = torch.randn(70, 1000, generator=torch.Generator().manual_seed(0))
    saved = {str(dtype).removeprefix("torch."): values.to(dtype) for dtype in floats}
    torch.save(saved, tmp_path / "a.pt")
    for dtype in floats:
        name = str(dtype).removeprefix("torch.")
        convert(tmp_path / "a.pt", tmp_path / name, "--to", "dcp", "--dtype", name)
        assert digest(read(tmp_path / name, "dcp")) == digest({k: v.to(dtype) for k, v in saved.items()})


def test_formats_that_nobody_named(place: Path, tmp_path: Path) -> None:
    assert convert(place, tmp_path / "a.pt")["format"] == "torch"
    assert convert(tmp_path / "a.pt", tmp_path / "a.safetensors")["format"] == "safetensors"
    assert convert(tmp_path / "a.safetensors", tmp_path / "ours")["format"] == "ckpt"
    assert "--to" in convert(place, tmp_path / "folder", code=2)["error"]["message"]
    assert (
        "is not a format" in convert(place, tmp_path / "folder", "--to", "gguf", code=2)["error"]["message"]
    )
    assert convert(place, tmp_path / "again", "--to", "ckpt")["source_format"] == "ckpt"
    assert "are the same" in convert(place, place, "--to", "ckpt", "--overwrite", code=2)["error"]["message"]


@pytest.mark.parametrize("name", ["y.foo", "a.safetensor", "model.PT"])
def test_an_ending_that_is_no_format(name: str, place: Path, tmp_path: Path) -> None:
    convert(place, tmp_path / "a.pt")
    for source in (place, tmp_path / "a.pt"):
        message = convert(source, tmp_path / name, code=2)["error"]["message"]
        assert f"'.{name.split('.')[1]}' is not that of a format" in message
    assert not (tmp_path / name).exists()
    for number, (folder, options) in enumerate(
        [(f"{tmp_path / name}/", []), (tmp_path / name, ["--to", "ckpt"])]
    ):
        convert(tmp_path / "a.pt", folder, *options, *["--overwrite"] * number)


def test_folders_with_dots_in_their_names(place: Path, tmp_path: Path) -> None:
    convert(place, tmp_path / "a.pt")
    for name in ("Llama-3.1-8B", "step-1.5", ".hidden"):
        assert convert(tmp_path / "a.pt", tmp_path / name)["format"] == "ckpt"


def test_a_configuration_comes_along(place: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.model", "weights.pkl", "old.safetensors"):
        (model / name).write_text('{"dtype": "float32"}')
    options = ["--to", "safetensors"]
    done = convert(place, tmp_path / "a", *options)
    assert done["lacks_config"]
    assert "it has no config.json" in run("convert", place, tmp_path / "b", *options).out
    done = convert(place, tmp_path / "c", *options, "--config-from", model, "--dtype", "bfloat16")
    assert not done["lacks_config"]
    files = {path.name for path in (tmp_path / "c").iterdir()}
    assert files == {"config.json", "tokenizer.model", "model.safetensors"}
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == {"dtype": "bfloat16"}
    # A checkpoint's folder may hold one itself.
    copy = Path(shutil.copytree(place, tmp_path / "copy"))
    (copy / "config.json").write_text("{}")
    assert "it has no" not in run("convert", copy, tmp_path / "d", *options).out
    assert (tmp_path / "d" / "config.json").read_text() == "{}"


def test_a_configuration_that_is_not_there(place: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "missing"):
        error = convert(
            place, tmp_path / "a", "--to", "safetensors", "--config-from", tmp_path / folder, code=3
        )["error"]
        assert "no config.json here" in error["message"]
    for target in ("a.safetensors", "a.pt"):
        options = ["--config-from", tmp_path / "empty"]
        assert (
            "folder of safetensors" in convert(place, tmp_path / target, *options, code=2)["error"]["message"]
        )


def test_what_is_left_out_is_folded(tmp_path: Path) -> None:
    state = {
        "model": {"w": torch.ones(2)},
        "loader": {"shards": {f"{n:06d}": torch.ones(1) for n in range(60)}},
        "optim": {"lr": 0.1, "steps": {f"{n}": n for n in range(25)}},
    }
    torch.save(state, tmp_path / "a.pt")
    lines = run("convert", tmp_path / "a.pt", tmp_path / "a.safetensors", "--weights-only").out.splitlines()
    assert lines[0] == (
        "left out: 60 x loader.shards.* (--weights-only: the name does not look like a model weight)"
    )
    assert len(lines) == 2
    lines = run("convert", tmp_path / "a.pt", tmp_path / "b.safetensors").out.splitlines()
    assert lines[0] == (
        "left out: optim.lr, 25 x optim.steps.* (not a tensor; safetensors files hold tensors only)"
    )


def test_stores_that_are_open(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is read through one store: what it was found with is closed."""
    opened: list[PosixStore] = []
    most_open = 0
    monkeypatch.setattr(PosixStore, "__init__", noting(PosixStore.__init__, opened.append))
    monkeypatch.setattr(PosixStore, "close", noting(PosixStore.close, opened.remove))
    read = PosixStore.read_into

    def read_into(store: PosixStore, key: str, *rest: Any) -> None:
        nonlocal most_open
        if key.endswith(".distcp"):
            most_open = max(most_open, len(opened))
        read(store, key, *rest)

    monkeypatch.setattr(PosixStore, "read_into", read_into)
    convert(place, tmp_path / "a.pt")
    assert (most_open, opened) == (2, [])  # of the source, and of the destination


def noting(method: Any, note: Any) -> Any:
    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        note(self)
        return method(self, *arguments, **options)

    return noted


def test_nothing_is_replaced_unasked(place: Path, tmp_path: Path) -> None:
    file, ours, hf, stock = tmp_path / "a.pt", tmp_path / "ours", tmp_path / "hf", tmp_path / "stock"
    targets: list[tuple[Path, list[str]]] = [
        (file, []), (tmp_path / "a.safetensors", []), (ours, ["--to", "ckpt"]),
        (hf, ["--to", "safetensors"]), (stock, ["--to", "dcp"]),
    ]  # fmt: skip
    for target, options in targets:
        convert(place, target, *options)
        before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
        assert convert(place, target, *options, code=1)["error"]["type"] == "AlreadyExists"
        if target in (hf, stock):
            assert convert(place, target, *options, "--overwrite", code=1)["error"]["type"] == "AlreadyExists"
        assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before
    for target, options in targets[:3]:
        convert(place, target, *options, "--overwrite", "--include", "model.*")
    assert set(torch.load(file, weights_only=True)) == {"model"}
    assert not ckpt.inspect(ours).objects


@pytest.mark.parametrize(
    "source", ["hf", "hf-link", "sharded", "sharded/model.safetensors.index.json", "old", "ours", "stock"]
)
def test_no_file_of_the_source_is_replaced(source: str, place: Path, tmp_path: Path) -> None:
    targets = {"hf": "hf/model.safetensors", "hf-link": "hf/model.safetensors", "old": "old/pytorch_model.bin",
               "ours": "ours/.metadata", "stock": "stock/__0_0.distcp"}  # fmt: skip
    for name, options in [
        ("hf", ["--to", "safetensors"]), ("sharded", ["--to", "safetensors", "--max-shard-size", "1B"]),
        ("old/pytorch_model.bin", []), ("ours", ["--to", "ckpt"]), ("stock", ["--to", "dcp"]),
    ]:  # fmt: skip
        convert(place, tmp_path / name, *options)
    (tmp_path / "hf-link").symlink_to(tmp_path / "hf")
    before = {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()}
    target = tmp_path / targets.get(source, "sharded/model-00002-of-00005.safetensors")
    form = "safetensors" if target.suffix == ".safetensors" else "torch"
    error = convert(tmp_path / source, target, "--to", form, "--overwrite", code=2)["error"]
    assert "the destination is a file of the source" in error["message"] or "are the same" in error["message"]
    assert {p: p.read_bytes() for p in sorted(tmp_path.rglob("*")) if p.is_file()} == before


def test_leftovers_are_named_and_replaced_when_asked(place: Path, tmp_path: Path) -> None:
    hf, stock = tmp_path / "hf", tmp_path / "stock"
    for folder, leftover, options in [
        (hf, "model-00001-of-00005.safetensors", ["--to", "safetensors", "--max-shard-size", "1B"]),
        (stock, "__0_0.distcp", ["--to", "dcp"]),
    ]:
        folder.mkdir()
        (folder / leftover).write_text("half")
        assert convert(place, folder, *options, code=1)["error"]["key"] == leftover
        assert (folder / leftover).read_text() == "half"
        assert [p.name for p in folder.iterdir()] == [leftover]
        convert(place, folder, *options, "--overwrite")
    assert len(read(hf, "safetensors")) == 5
    assert digest(read(stock, "dcp")) == digest(training_state())


def test_shards(place: Path, tmp_path: Path) -> None:
    done = convert(place, tmp_path / "hf", "--to", "safetensors", "--max-shard-size", "100B")
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert done["files"] == len(files) > 1
    assert index["metadata"]["total_size"] == done["tensor_bytes"] == 6 * 4 * 4 + 4 * 4 + 8 + 6 * 4 * 4 + 4
    assert (
        "'big' is not understood; write 5GB"
        in convert(place, tmp_path / "x", "--to", "safetensors", "--max-shard-size", "big", code=2)["error"][
            "message"
        ]
    )


def test_exit_codes(place: Path, tmp_path: Path) -> None:
    assert convert(tmp_path / "nothing", tmp_path / "a.pt", code=3)["error"]["type"] == "NotFound"
    (tmp_path / "empty" / "sub").mkdir(parents=True)
    (tmp_path / "empty" / "file").write_text("")
    convert(tmp_path / "empty", tmp_path / "a.pt", code=3)
    convert(place, tmp_path / "empty" / "file" / "below.pt", code=3)
    convert("s3://b/x", tmp_path / "a.pt", "--storage-options", "nonsense=1", code=2)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "pytorch_model.bin.index.json").write_text("{}")
    assert "several pickles" in convert(tmp_path / "old", tmp_path / "a.pt", code=1)["error"]["message"]
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    message = convert(tmp_path / "module.pt", tmp_path / "a.pt", code=1)["error"]["message"]
    assert "torch.nn.modules.linear.Linear" in message
    assert message.isprintable()
    (tmp_path / "text.txt").write_text("no checkpoint")
    assert (
        "is not a torch.save archive"
        in convert(tmp_path / "text.txt", tmp_path / "a.pt", code=1)["error"]["message"]
    )
    convert(
        "s3://b/x",
        tmp_path / "a.pt",
        "--storage-options",
        '{"endpoint_url": "http://127.0.0.1:9", "max_attempts": 1}',
        code=4,
    )


def test_a_link_to_a_file_and_a_hugging_face_cache(place: Path, tmp_path: Path) -> None:
    convert(place, tmp_path / "real" / "a.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "real" / "a.pt")
    convert(tmp_path / "link.pt", tmp_path / "b.safetensors")
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for name in ("model.safetensors", "config.json"):
        (snapshot / name).symlink_to(f"../../blobs/{name}0")
    os.replace(tmp_path / "b.safetensors", blobs / "model.safetensors0")
    (blobs / "config.json0").write_text("{}")
    convert(snapshot, tmp_path / "hf", "--to", "safetensors")
    assert sorted(p.name for p in (tmp_path / "hf").iterdir()) == ["config.json", "model.safetensors"]
    outside = tmp_path / "model"
    outside.mkdir()
    (outside / "model.safetensors").symlink_to(blobs / "model.safetensors0")
    assert convert(outside, tmp_path / "c.pt", code=1)["error"]["type"] == "UnsafeContent"


def test_typed_result(place: Path, tmp_path: Path) -> None:
    done = ckpt.convert(place, tmp_path / "a.pt", dtype=torch.float16, weights_only=True)
    assert (done.format, done.tensors, done.source) == ("torch", 3, str(place))
    with pytest.raises(ckpt.errors.ConfigurationError, match="max_shard_bytes"):
        ckpt.convert(place, tmp_path / "b", max_shard_bytes=0)
