"""The public surface: names, signatures, errors, and how light the import is."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.ranks import exit_code_of

import ckpt


def test_importing_is_light() -> None:
    code = "import sys, ckpt; heavy = {'torch', 'boto3', 'fsspec', 'msgspec', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    subprocess.run([sys.executable, "-c", code], check=True)
    code = "import sys, ckpt; ours = {m for m in sys.modules if m.startswith('ckpt.')} | {'typer', 'rich'} & set(sys.modules); assert not ours, ours"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.smoke
def test_importing_the_functions_imports_no_sdk() -> None:
    assert exit_code_of(_import_again) == 0


def _import_again() -> None:
    sdks = {"boto3", "ibm_boto3", "s3fs"}
    for name in list(sys.modules):
        if name.partition(".")[0] in {*sdks, "ckpt"}:
            del sys.modules[name]
    importlib.import_module("ckpt.api")
    assert not sdks & set(sys.modules)


def test_help_is_light() -> None:
    """No library that moves bytes, and none of our modules but the commands, before a command needs it."""
    code = """
import contextlib, io, sys
from ckpt.cli.app import app
with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    app(["--help"])
heavy = {"torch", "numpy", "msgspec", "boto3", "ibm_boto3", "fsspec", "s3fs", "safetensors"} & set(sys.modules)
assert not heavy, heavy
ours = {name for name in sys.modules if name.startswith("ckpt.") and not name.startswith("ckpt.cli")}
assert ours <= {"ckpt.errors", "ckpt.logs", "ckpt.backends", "ckpt.backends.options", "ckpt.backends.paths", "ckpt.backends.retries", "ckpt.transfer", "ckpt.transfer.reports", "ckpt.whole_files", "ckpt.words"}, ours
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_commands_that_make_no_tensor_start_without_torch(tmp_path: Path) -> None:
    """Importing it takes three times as long as they run; so it does before a mistake is reported."""
    state = {"w": torch.randn(30, 20), "b": torch.randn(9, dtype=torch.bfloat16), "n": torch.tensor(7)}
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "name": "all", "fused": None}]
    place, other = str(tmp_path / "run" / "step-5"), str(tmp_path / "run" / "step-6")
    ckpt.save({"model": state, "step": 5, "groups": groups}, place)
    ckpt.save({"model": {**state, "w": torch.zeros(30, 20)}, "step": 6, "groups": groups}, other)
    commands: list[tuple[int, list[str]]] = [
        (0, ["ls", str(tmp_path)]),
        (0, ["verify", place]),
        (0, ["verify", place, "--sample", "5%"]),
        (0, ["scrub", str(tmp_path / "run"), "--from", str(tmp_path), "--dry-run"]),
        (0, ["inspect", place, "--json"]),
        (0, ["inspect", place]),
        (0, ["cat", place, "model.w"]),
        (0, ["cat", place, "model.w[3:5, 1]"]),
        (0, ["cat", place, "model.b"]),
        (0, ["cat", place, "model"]),
        (0, ["cat", place, "model.w", "--stats"]),
        (0, ["cat", place, "model.b", "--npy", str(tmp_path / "b.npy")]),
        (0, ["cat", place, "step"]),
        (0, ["cat", place, "groups"]),
        (1, ["diff", place, other]),
        (0, ["diff", place, place, "--full"]),
        (0, ["inspect", place, "--tensor", "model.*"]),
        (0, ["cp", place, str(tmp_path / "copy")]),
        (0, ["gc", str(tmp_path), "--dry-run"]),
        (0, ["rm", place, "--dry-run"]),
        (0, ["watch", str(tmp_path / "run"), "--once"]),
        (0, ["plan", place, "--ranks", "8", "--plot", str(tmp_path / "plot.svg")]),
        (3, ["verify", str(tmp_path / "nothing")]),
        (2, ["verify", place, "--storage-options", "key"]),
        (2, ["cp", place, str(tmp_path / "b"), "--storage-options", "key"]),
        (2, ["diff", place, place, "--storage-options", "key"]),
        (2, ["convert", place, str(tmp_path / "c"), "--to", "tensorflow"]),
        (2, ["convert", place, str(tmp_path / "c"), "--max-shard-size", "5 parsecs"]),
    ]
    code = """
import json, sys
import ckpt.cli.app
for expected, arguments in json.loads(sys.argv[1]):
    try:
        ckpt.cli.app.app(arguments)
    except SystemExit as ended:
        assert (ended.code or 0) == expected, (arguments, ended.code)
    assert "torch" not in sys.modules, arguments
"""
    subprocess.run([sys.executable, "-c", code, json.dumps(commands)], check=True)


def test_the_version_is_that_of_the_package() -> None:
    assert ckpt.__version__ == importlib.metadata.version("ckpt-storage")


def test_public_surface() -> None:
    assert ckpt.__all__ == [
        "CheckpointManager", "CheckpointReader", "CheckpointWriter", "Checks", "LocalTier", "SaveFuture", "Stager", "async_save", "collect_garbage", "convert", "copy", "diff", "doctor", "drain",
        "embeddings", "errors", "frozen", "inspect", "install", "list_checkpoints", "load", "ops", "options", "per_rank", "remove", "roundtrip", "save", "scrub", "sign", "sign_export", "tune", "uninstall", "verify", "verify_signed", "watch",
    ]  # fmt: skip
    assert dir(ckpt) == sorted(ckpt.__all__)
    for name in ckpt.__all__:
        assert getattr(ckpt, name).__doc__
    with pytest.raises(AttributeError):
        ckpt.nothing  # noqa: B018


def test_signatures() -> None:
    import inspect

    def parameters(function: object) -> str:
        return ", ".join(inspect.signature(function).parameters)  # type: ignore[arg-type]

    storage = "state_dict, url, storage_options"
    assert (
        parameters(ckpt.CheckpointWriter)
        == "url, storage_options, overwrite, threads, memory_budget_bytes, max_bandwidth_bytes_per_s, tags, timeout_s, "
        "stock_metadata_max_bytes, checks, block_digests"
    )
    assert (
        parameters(ckpt.CheckpointReader)
        == "url, storage_options, verify, visibility_timeout_s, threads, memory_budget_bytes, trusted_objects, "
        "timeout_s, expect"
    )
    assert ckpt.embeddings.__all__ == [
        "Column", "DenseRows", "RowStore", "TableShard", "Tables", "UpdateGate", "home_of"
    ]  # fmt: skip
    assert parameters(ckpt.embeddings.UpdateGate) == "sources, max_queued, epoch"
    assert parameters(ckpt.embeddings.TableShard) == (
        "name, rows, shard, shards, quantize, max_deltas, max_delta_ratio, max_aside_bytes, compare, allow_gaps"
    )
    for of_tables in (ckpt.embeddings.Tables.save, ckpt.embeddings.Tables.async_save):
        assert parameters(of_tables) == "self, state_dict, url, frozen, gate, options"
    for save, more in ((ckpt.save, ""), (ckpt.async_save, ", local")):
        assert (
            parameters(save)
            == f"{storage}, overwrite, planner, process_group, no_dist, threads, memory_budget_bytes, "
            "max_bandwidth_bytes_per_s, tags, timeout_s, format, max_shard_size, config_from, base, frozen, digests, "
            f"stock_metadata_max_bytes, checks, block_digests{more}, options"
        )
    assert (
        parameters(ckpt.load) == f"{storage}, verify, visibility_timeout_s, planner, process_group, no_dist, "
        "threads, memory_budget_bytes, trusted_objects, timeout_s, read_once, local, expect, options"
    )


def test_errors_are_listed_and_drawn() -> None:
    from ckpt import errors

    classes = [
        v for v in vars(errors).values() if isinstance(v, type) and issubclass(v, errors.CheckpointError)
    ]
    public = {c.__name__ for c in classes if not c.__name__.startswith("_")}
    assert public == set(errors.__all__)
    for name in public:
        assert f"{name} " in (errors.__doc__ or "") or f"{name}\n" in (errors.__doc__ or ""), name


def test_every_error_pickles_with_its_context() -> None:
    import pickle

    from ckpt import errors

    for name in errors.__all__:
        kind = getattr(errors, name)
        if issubclass(kind, errors._RankFailures):
            error = kind("text", url="u", failures={3: errors.NotFound("gone", key="k", rank=3)})
            copy = pickle.loads(pickle.dumps(error))
            assert str(copy.failures[3]) == "rank 3: k: gone"
        else:
            error = kind("text", url="u", key="k", rank=2, start=0, stop=9)
            copy = pickle.loads(pickle.dumps(error))
            assert str(copy) == "rank 2: u/k: bytes 0-9: text"
        assert (type(copy), copy.args, copy.url) == (kind, ("text",), "u")
