"""Saves with a base write only what changed, and load like any other."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.states import bits, digest, emptied
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import ckpt
import ckpt.references.base
from ckpt.errors import (
    CheckpointError,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    NotVisible,
    SaveFailed,
)
from ckpt.format.records import CommitRecord, decode_commit, decode_manifest
from ckpt.options import LoadOptions
from ckpt.reading.opening import open_checkpoint
from ckpt.references.frozen import Patterns
from ckpt.references.request import References


def lora_state(step: int = 0, *, seed: int = 0) -> dict[str, Any]:
    """A base of 400 kB that does not change, and adapters of 8 kB that do."""
    generator = torch.Generator().manual_seed(seed)
    model: dict[str, torch.Tensor] = {}
    for layer in range(5):
        model[f"layers.{layer}.weight"] = torch.randn(100, 200, generator=generator)
        model[f"layers.{layer}.lora_a"] = torch.randn(2, 200, generator=generator) + step
    model["layers.0.transposed"] = torch.randn(30, 20, generator=generator).t()
    model["scalar"] = torch.tensor(3.5)
    model["empty"] = torch.empty(0, 4)
    return {"model": model, "parts": [torch.arange(6.0), {"deep": torch.ones(3)}], "step": step}


def record_of(place: Path) -> CommitRecord:
    return decode_commit((place / "commit.json").read_bytes(), url=str(place), key="commit.json")


def stored_bytes(place: Path) -> int:
    return sum(path.stat().st_size for path in place.rglob("*") if path.is_file())


def loaded(place: Path | str, like: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = emptied(like)
    ckpt.load(state, place)
    return state


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose first save may be referred to."""
    ckpt.save(lora_state(0), tmp_path / "step-0", digests=True)
    return tmp_path


@pytest.mark.parametrize("frozen", [(), ("model.layers.*.weight",)])
def test_only_what_changed_is_written(run: Path, frozen: tuple[str, ...]) -> None:
    for step in range(1, 4):
        state = lora_state(step)
        ckpt.save(state, run / f"step-{step}", base=run / f"step-{step - 1}", frozen=frozen)
        record = record_of(run / f"step-{step}")
        assert record.version == 4
        assert record.data_bytes < 20_000
        assert record.owners["step-0"].carried_bytes > 400_000
        assert record.is_referable
    for step in range(4):
        assert digest(loaded(run / f"step-{step}", lora_state())) == digest(lora_state(step))


def test_references_are_flat(run: Path) -> None:
    """What the base itself carried is named at its first owner: the checkpoints between may go."""
    for step in range(1, 4):
        ckpt.save(lora_state(step), run / f"step-{step}", base=run / f"step-{step - 1}")
    record = record_of(run / "step-3")
    assert record.owners.keys() == {"step-0"}
    shutil.rmtree(run / "step-1")
    shutil.rmtree(run / "step-2")
    assert digest(loaded(run / "step-3", lora_state())) == digest(lora_state(3))


def test_the_whole_run_can_be_moved(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    moved = tmp_path_factory.mktemp("moved") / "run"
    run.rename(moved)
    run.mkdir()
    assert digest(loaded(moved / "step-1", lora_state())) == digest(lora_state(1))


def test_through_a_link(run: Path) -> None:
    """A link is followed before the folder beside the checkpoint is looked for."""
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    (run / "elsewhere").mkdir()
    (run / "elsewhere" / "best").symlink_to(run / "step-1")
    assert digest(loaded(run / "elsewhere" / "best", lora_state())) == digest(lora_state(1))


def test_one_changed_element_is_seen(run: Path) -> None:
    """What was not declared is compared, every byte."""
    state = lora_state(0)
    for name in ("layers.4.weight", "layers.0.transposed", "scalar"):
        tensor = state["model"][name]
        changed = tensor.clone()
        changed[(-1,) * tensor.dim()] += 1
        ckpt.save({**state, "model": {**state["model"], name: changed}}, run / "next", base=run / "step-0")
        found = loaded(run / "next", lora_state())["model"][name]
        assert bits(found) == bits(changed), name


def test_a_declared_tensor_is_not_looked_at(run: Path) -> None:
    """You vouch for it: its bytes are those of the base, whatever they are now."""
    state = lora_state(1)
    state["model"]["layers.0.weight"].zero_()
    ckpt.save(state, run / "step-1", base=run / "step-0", frozen=["model.layers.*.weight"])
    found = loaded(run / "step-1", lora_state())
    assert bits(found["model"]["layers.0.weight"]) == bits(lora_state()["model"]["layers.0.weight"])


def test_what_has_another_shape_or_dtype_is_written(run: Path) -> None:
    state = lora_state(1)
    state["model"]["layers.0.weight"] = torch.ones(7, 3)
    state["model"]["layers.1.weight"] = state["model"]["layers.1.weight"].to(torch.bfloat16)
    state["model"]["new"] = torch.ones(4)
    del state["model"]["layers.2.weight"]
    ckpt.save(state, run / "step-1", base=run / "step-0", frozen=["model.layers.*.weight"])
    found = loaded(run / "step-1", state)
    assert digest(found) == digest(state)
    assert "model.layers.2.weight" not in ckpt.inspect(run / "step-1").tensors


def test_a_base_of_which_little_would_be_named_is_not_kept(run: Path) -> None:
    """Else a few bytes would keep a whole checkpoint on the storage."""
    state = lora_state(1)
    for layer in range(1, 5):
        state["model"][f"layers.{layer}.weight"] += 1
    for frozen in ((), ("model.layers.0.weight",)):
        ckpt.save(state, run / "step-1", base=run / "step-0", frozen=frozen)
        assert record_of(run / "step-1").owners == {}
        assert digest(loaded(run / "step-1", state)) == digest(state)
    ckpt.async_save(state, run / "step-2", base=run / "step-0", frozen=("model.layers.0.weight",)).result()
    assert digest(loaded(run / "step-2", state)) == digest(state)


def test_nothing_changed(run: Path) -> None:
    """Then only objects are written."""
    ckpt.save(lora_state(0), run / "same", base=run / "step-0")
    assert record_of(run / "same").data_bytes < 2000
    ckpt.save({"t": torch.ones(3)}, run / "tensors", digests=True)
    ckpt.save({"t": torch.ones(3)}, run / "again", base=run / "tensors")
    record = record_of(run / "again")
    assert record.own_manifests == []
    assert record.data_bytes == 0
    found = {"t": torch.zeros(3)}
    ckpt.load(found, run / "again")
    assert bits(found["t"]) == bits(torch.ones(3))


def test_async_saves_do_not_copy_what_is_declared(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    take = ckpt.collective.stager._memory.take

    def taken(nbytes: int, **more: Any) -> Any:
        copied.append(nbytes)
        return take(nbytes, **more)

    monkeypatch.setattr(ckpt.collective.stager._memory, "take", taken)
    state = lora_state(1)
    future = ckpt.async_save(state, run / "step-1", base=run / "step-0", frozen=["model.layers.*.weight"])
    for name, tensor in state["model"].items():
        if not name.endswith("weight"):
            tensor.zero_()  # the copy was taken
    future.result()
    assert sum(copied) < 20_000
    assert digest(loaded(run / "step-1", lora_state())) == digest(lora_state(1))


def test_digests_are_those_of_the_bytes(run: Path) -> None:
    import xxhash

    (path,) = (run / "step-0" / "rank-00000").glob("*.json")
    manifest = decode_manifest(path.read_bytes(), url="", key="")
    names = {item.fqn: manifest.digest(number) for number, item in enumerate(manifest.items)}
    state = lora_state()
    assert names["step"] == b""
    for name, tensor in state["model"].items():
        assert names[f"model.{name}"] == xxhash.xxh3_128(bits(tensor)).digest(), name


def test_saves_without_a_base_are_as_ever(tmp_path: Path) -> None:
    """Of version 2, which every release reads."""
    ckpt.save(lora_state(), tmp_path / "plain")
    record = msgspec.json.decode((tmp_path / "plain" / "commit.json").read_bytes())
    assert record["version"] == 2
    assert not {"referable", "bases"} & record.keys()
    (manifest,) = (tmp_path / "plain" / "rank-00000").glob("*.json")
    assert b"digests" not in manifest.read_bytes()


# -- stock PyTorch ---------------------------------------------------------------------------------------------


def test_stock_reads_what_is_there_and_says_what_to_do_about_the_rest(run: Path) -> None:
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    own = {"model": {"layers.0.lora_a": torch.zeros(2, 200)}}
    reader = dcp.FileSystemReader(str(run / "step-1"))
    dcp.load(own, storage_reader=reader)
    assert bits(own["model"]["layers.0.lora_a"]) == bits(lora_state(1)["model"]["layers.0.lora_a"])
    other = {"model": {"layers.0.weight": torch.zeros(100, 200)}}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(other, storage_reader=dcp.FileSystemReader(str(run / "step-1")))
    assert "FileNotFoundError" in str(caught.value)
    assert "ckpt cp --materialise" in str(caught.value)
    assert "../step-0/rank-00000/" in str(caught.value)


def test_stock_reads_a_checkpoint_that_only_others_refer_to(run: Path, tmp_path: Path) -> None:
    found = emptied(lora_state())
    dcp.load(found, storage_reader=dcp.FileSystemReader(str(run / "step-0")))
    assert digest(found) == digest(lora_state())
    dcp_to_torch_save(str(run / "step-0"), str(tmp_path / "torch.pt"))


# -- bad input -------------------------------------------------------------------------------------------------


def test_bases_that_cannot_be(run: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    ckpt.save(lora_state(), elsewhere / "step-0", digests=True)
    ckpt.save(lora_state(), run / "plain")
    ckpt.save({"t": torch.ones(3)}, run / "model", format="safetensors")
    state = lora_state(1)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"base": run / "step-1"}, ConfigurationError, "the place that is saved to"),
        ({"base": elsewhere / "step-0"}, ConfigurationError, "does not lie in the folder"),
        ({"base": run / "none"}, NotFound, "cannot be the base"),
        ({"base": run / "plain"}, ConfigurationError, "digests=True"),
        ({"base": run / "model"}, ConfigurationError, "digests=True"),
        ({"base": ""}, ConfigurationError, "base must be"),
        ({"base": 3}, ConfigurationError, "base must be"),
        ({"base": run / "step-0", "frozen": "model.*"}, ConfigurationError, "frozen must be a list"),
        ({"base": run / "step-0", "frozen": [3]}, ConfigurationError, "frozen must be a list"),
        ({"frozen": ["model.*"]}, ConfigurationError, "give base="),
        ({"digests": "yes"}, ConfigurationError, "digests must be"),
        ({"base": run / "step-0", "planner": DefaultSavePlanner(enable_plan_caching=True)}, ConfigurationError,
         "enable_plan_caching"),
        ({"base": run / "step-0", "format": "safetensors"}, ConfigurationError, "takes no base"),
    ]  # fmt: skip
    for save in (ckpt.save, ckpt.async_save):
        for options, kind, text in cases:
            with pytest.raises(kind, match=text):
                save(state, run / "step-1", **options)
    assert not (run / "step-1").exists()
    for name in ("a:b", "a%20b"):
        with pytest.raises(ConfigurationError, match="cannot be referred to"):
            ckpt.save(state, run / name, base=run / "step-0")


def test_a_base_that_names_what_is_saved_over(run: Path) -> None:
    """A copy by hand of what referred to it: nothing else told that it is in use."""
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    shutil.copytree(run / "step-1", run / "copy")
    ckpt.remove(run / "step-1")
    with pytest.raises(ConfigurationError, match="that this save replaces"):
        ckpt.save(lora_state(2), run / "step-0", base=run / "copy")
    assert digest(loaded(run / "step-0", lora_state())) == digest(lora_state(0))


def test_frozen_that_names_nothing_is_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        ckpt.save(
            lora_state(1), run / "step-1", base=run / "step-0", frozen=["model.layers.*.weight", "none"]
        )
        assert "frozen=" not in caplog.text
        ckpt.save(lora_state(1), run / "step-2", base=run / "step-0", frozen=["layers.*.weight"])
    assert "frozen= names nothing that the base" in caplog.text
    assert "'layers.*.weight'" in caplog.text


def test_a_damaged_base(run: Path) -> None:
    (index,) = (run / "step-0" / "rank-00000").glob("*.index")
    whole = index.read_bytes()
    index.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    ckpt.references.base._last.clear()  # this process has saved it, and needs no index
    with pytest.raises(IntegrityError, match="cannot be the base"):
        ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    index.write_bytes(whole)
    (manifest,) = (run / "step-0" / "rank-00000").glob("*.json")
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"digests":"', b'"digests":"A', 1))
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    assert isinstance(caught.value.failures[0], IntegrityError)
    assert not (run / "step-1" / "commit.json").exists()


def test_a_base_that_need_not_be_there(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As the manager asks for it."""
    request: Any = References(str(run / "none"), Patterns(["model.*"]), required=False)
    with caplog.at_level(logging.WARNING):
        ckpt.save(lora_state(1), run / "step-1", base=request)
    assert "everything is saved again" in caplog.text
    record = record_of(run / "step-1")
    assert record.is_referable
    assert record.owners == {}
    assert digest(loaded(run / "step-1", lora_state())) == digest(lora_state(1))


@pytest.mark.parametrize("frozen", [(), ("model.layers.*.weight",)])
def test_a_base_whose_data_is_gone(run: Path, frozen: tuple[str, ...]) -> None:
    """A save that names its base does not do without: it says so, and commits nothing."""
    (data,) = (run / "step-0" / "rank-00000").glob("*.distcp")
    data.unlink()
    with pytest.raises(SaveFailed) as caught:
        ckpt.save(lora_state(1), run / "step-1", base=run / "step-0", frozen=frozen)
    assert isinstance(caught.value.failures[0], NotVisible)
    assert data.name in str(caught.value)
    assert not (run / "step-1" / "commit.json").exists()


def test_an_owner_that_is_gone(run: Path) -> None:
    """The error names the checkpoint that needs the object, and the object by its owner; what else is stored loads."""
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    (data,) = (run / "step-0" / "rank-00000").glob("*.distcp")
    data.unlink()
    reader = ckpt.CheckpointReader(run / "step-1", visibility_timeout_s=0.0)
    with pytest.raises(CheckpointException) as caught:
        dcp.load(emptied(lora_state()), storage_reader=reader)
    (failure, _) = caught.value.failures[0]
    assert isinstance(failure, NotVisible)
    assert str(failure).startswith(f"rank 0: {run}/step-1/../step-0/{data.parent.name}/{data.name}")
    own = {"model": {"layers.0.lora_a": torch.zeros(2, 200)}, "step": 0}
    ckpt.load(own, run / "step-1", options=LoadOptions(strict=False))
    assert own["step"] == 1


def test_an_owner_that_is_damaged(run: Path) -> None:
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    (data,) = (run / "step-0" / "rank-00000").glob("*.distcp")
    raw = bytearray(data.read_bytes())
    raw[len(raw) // 2] ^= 1
    data.write_bytes(raw)
    with pytest.raises(IntegrityError, match=r"/step-1/\.\./step-0/rank-00000/"):
        ckpt.load(emptied(lora_state()), run / "step-1")


def test_entries_carried_by_name(run: Path) -> None:
    """The state holds none of them; the base must."""
    request: Any = References(
        str(run / "step-0"), Patterns(()), carried=frozenset({"model.layers.0.weight", "step"})
    )
    ckpt.save({"other": torch.ones(3)}, run / "step-1", base=request)
    found = {"model": {"layers.0.weight": torch.zeros(100, 200)}, "step": 9, "other": torch.zeros(3)}
    ckpt.load(found, run / "step-1")
    assert found["step"] == 0
    assert bits(found["model"]["layers.0.weight"]) == bits(lora_state()["model"]["layers.0.weight"])  # type: ignore[index]
    missing: Any = References(str(run / "step-0"), Patterns(()), carried=frozenset({"nothing"}))
    with pytest.raises(ConfigurationError, match=r"'nothing'\* is to be carried"):
        ckpt.save({"other": torch.ones(3)}, run / "step-2", base=missing)
    clash: Any = References(str(run / "step-0"), Patterns(()), carried=frozenset({"step"}))
    with pytest.raises((SaveFailed, CheckpointError), match="the state holds it too"):
        ckpt.save({"step": 1}, run / "step-2", base=clash)
    assert not (run / "step-2" / "commit.json").exists()


def test_hostile_references_are_refused(run: Path) -> None:
    """An index may name only files of manifests that the commit lists."""
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    commit = run / "step-1" / "commit.json"
    from ckpt.consistency.seal import seal_json, unseal_json

    record = msgspec.json.decode(unseal_json(commit.read_bytes(), url="", key=""))
    for changes in (
        {"manifests": [ref for ref in record["manifests"] if not ref["path"].startswith("../")], "bases": []},
        {"bases": [record["bases"][0] | {"path": "../../step-0"}]},
        {"version": 2},
    ):
        commit.write_bytes(seal_json(msgspec.json.encode(record | changes)))
        with pytest.raises(FormatError):
            ckpt.load(emptied(lora_state()), run / "step-1")


def test_what_was_just_saved_is_only_looked_at(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are at hand; whether it still stands is asked all the same."""
    opened: list[str] = []

    def noted(store: Any, settings: Any) -> Any:
        opened.append(store.url)
        return open_checkpoint(store, settings)

    monkeypatch.setattr(ckpt.references.base, "open_checkpoint", noted)
    ckpt.save(lora_state(1), run / "step-1", base=run / "step-0")
    ckpt.save(lora_state(2), run / "step-2", base=run / "step-1")
    assert opened == []
    ckpt.save(lora_state(2), run / "step-3", base=run / "step-1")
    assert opened == [str(run / "step-1")]
    ckpt.remove(run / "step-3")
    with pytest.raises((NotFound, NotCommitted), match="cannot be the base"):
        ckpt.save(lora_state(2), run / "step-4", base=run / "step-3")
    for step in (1, 2):
        assert digest(loaded(run / f"step-{step}", lora_state())) == digest(lora_state(step))


def test_what_learns_is_not_frozen_under_the_name_of_what_does_not() -> None:
    """DDP's `module.` is taken out of names; a model may have a part of that name, too."""
    model = torch.nn.Module()
    model.module = torch.nn.Sequential(torch.nn.Linear(4, 3)).requires_grad_(False)
    model.register_module("0", torch.nn.Linear(4, 3))
    assert ckpt.frozen(model) == ["module.0.weight", "module.0.bias"]
    wrapped = torch.nn.Module()
    wrapped.module = model
    assert not {"0.weight", "module.0.weight"} & set(ckpt.frozen(wrapped))


def test_frozen_names_are_no_patterns() -> None:
    model = torch.nn.Module()
    model.register_parameter("a[0]", torch.nn.Parameter(torch.zeros(2), requires_grad=False))
    model.register_parameter("a0", torch.nn.Parameter(torch.zeros(2)))
    patterns = Patterns(ckpt.frozen(model, "model."))
    assert patterns.match("model.a[0]")
    assert not patterns.match("model.a0")
