"""The commands on checkpoints that name bytes of others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import file_names, options_of, run, run_json
from support.servers import S3Server

import ckpt
from ckpt.errors import IntegrityError, StillReferred


def state(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of which `w0` to `w<seed>` differ from those of `state(0)`."""
    made = {f"w{number}": torch.arange(1000.0) * (number + 1) for number in range(6)}
    for number in range(seed):
        made[f"w{number}"] += seed
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a`, `b` that refers to it, and `c` that refers to both."""
    root = tmp_path_factory.mktemp("run")
    ckpt.save(state(0), root / "a", digests=True, no_dist=True)
    ckpt.save(state(1), root / "b", base=root / "a", no_dist=True)
    changed = state(1)
    changed["w1"] += 1
    ckpt.save(changed, root / "c", base=root / "b", no_dist=True)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "run"))


def expected() -> dict[str, torch.Tensor]:
    made = state(1)
    made["w1"] += 1
    return made


def assert_loads(place: Path) -> None:
    loaded = {name: torch.zeros(1000) for name in expected()}
    ckpt.load(loaded, place, no_dist=True)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected().items())


def test_listed_and_inspected(saved: Path) -> None:
    listed = {each["path"]: each for each in run_json("ls", saved)["checkpoints"]}
    assert [listed[name]["bases"] for name in "abc"] == [[], ["a"], ["a", "b"]]
    assert [listed[name]["referred_bytes"] > listed[name]["size_bytes"] for name in "abc"] == [
        False,
        True,
        True,
    ]
    assert " + " in run("ls", saved).out
    shown = run_json("inspect", saved / "c")
    assert [base["path"] for base in shown["bases"]] == ["../a", "../b"]
    assert shown["referred_bytes"] == sum(base["referred_bytes"] for base in shown["bases"])
    assert "refers to" in run("inspect", saved / "c").out
    assert "refers to" not in run("inspect", saved / "a").out


def test_verified_through(root: Path) -> None:
    for name in "abc":
        assert run_json("verify", root / name)["ok"]
        assert ckpt.verify(root / name).strays == []
    (data,) = (root / "a" / "rank-00000").glob("*.distcp")
    data.unlink()
    (damage,) = ckpt.verify(root / "c").damages
    assert (damage.kind, damage.key) == ("missing", f"../a/rank-00000/{data.name}")
    assert damage.fqns == ("w2", "w3", "w4", "w5")
    (manifest,) = (root / "b" / "rank-00000").glob("*.json")
    manifest.write_bytes(b"?")
    (damage,) = ckpt.verify(root / "c").damages[:1]
    assert {damage.fqns for damage in ckpt.verify(root / "c").damages} >= {("w0",)}


def test_a_copy_of_its_own(root: Path, tmp_path: Path) -> None:
    place = tmp_path / "elsewhere" / "c"
    assert run("cp", root / "c", place).code == 2
    assert not place.parent.exists()
    copied = run_json("cp", root / "c", place, "--materialise")
    assert copied["sent_files"] == 3
    assert run_json("cp", root / "c", place, "--materialise")["already_there"]
    shutil.rmtree(root / "a")
    assert_loads(place)
    verified = ckpt.verify(place)
    assert (verified.damages, verified.strays, verified.warnings) == ([], [], [])
    assert run_json("inspect", place)["bases"] == []
    assert run_json("inspect", place)["version"] == 2
    stock = {name: torch.zeros(1000) for name in expected()}
    dcp.load(stock, checkpoint_id=place, no_dist=True)
    assert all(torch.equal(stock[name], tensor) for name, tensor in expected().items())


def test_a_copy_beside_it_refers_too(root: Path) -> None:
    assert run_json("cp", root / "c", root / "best")["sent_files"] == 1
    assert run_json("cp", root / "c", root / "best")["already_there"]
    ckpt.remove(root / "c")
    for name in "ab":
        with pytest.raises(StillReferred) as caught:
            ckpt.remove(root / name)
        assert "../best" in caught.value.referrers
    assert_loads(root / "best")
    ckpt.remove(root / "best")
    ckpt.remove(root / "b")
    ckpt.remove(root / "a")
    assert file_names(root) == set()


def test_an_interrupted_copy_goes_on(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "c"
    with monkeypatch.context() as patch:
        patch.setattr("ckpt.tools.copy.Coordinator.commit", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ckpt.copy(root / "c", place, materialise=True)
    again = ckpt.copy(root / "c", place, materialise=True)
    assert (again.sent_files, again.kept_files) == (0, 3)
    assert_loads(place)


def test_a_damaged_owner_is_not_copied(root: Path, tmp_path: Path) -> None:
    (data,) = (root / "a" / "rank-00000").glob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    data.write_bytes(damaged)
    with pytest.raises(IntegrityError) as caught:
        ckpt.copy(root / "c", tmp_path / "c", materialise=True)
    assert caught.value.key == f"../a/rank-00000/{data.name}"
    assert not (tmp_path / "c" / "commit.json").exists()


def test_compared(root: Path, tmp_path: Path) -> None:
    ckpt.copy(root / "c", tmp_path / "c", materialise=True)
    assert run("diff", root / "c", tmp_path / "c").code == 0
    assert {each["fqn"] for each in run_json("diff", root / "b", root / "c", code=1)["differences"]} == {"w1"}


def test_removal_says_who_refers(root: Path) -> None:
    refused = run("rm", root / "a")
    assert refused.code == 1
    assert "../b, ../c refer to its bytes" in refused.err
    assert run("rm", root / "a", "--dry-run").code == refused.code
    assert_loads(root / "c")


def test_converted(root: Path, tmp_path: Path) -> None:
    ckpt.convert(root / "c", tmp_path / "model.safetensors")
    shutil.rmtree(root)
    from safetensors.torch import load_file

    loaded = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected().items())


def test_on_s3(s3: S3Server) -> None:
    root = f"s3://{s3.new_bucket()}/run"
    options: dict[str, Any] = {"storage_options": s3.options, "no_dist": True}
    ckpt.save(state(0), f"{root}/a", digests=True, **options)
    ckpt.save(state(1), f"{root}/b", base=f"{root}/a", **options)
    asked = options_of(s3.options)
    assert "../b refers to its bytes" in run("rm", f"{root}/a", *asked).err
    assert run_json("cp", f"{root}/b", f"{root}/c", *asked)["sent_files"] == 1
    assert run_json("verify", f"{root}/c", *asked)["ok"]
    assert run_json("gc", root, "--grace", "0s", *asked)["items"] == []
    for name in "bca":
        assert run("rm", f"{root}/{name}", *asked).code == 0
    bucket = root.split("/")[2]
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)
