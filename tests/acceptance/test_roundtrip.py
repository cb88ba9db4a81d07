"""`ckpt roundtrip`: model shapes, meshes, values, and the whole with processes."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from support.commands import flip, options_of, run, run_json, run_process
from support.ranks import fork_context
from support.servers import S3Server
from support.tiers import examples
from torch.distributed.checkpoint.planner import SavePlan

import ckpt
import ckpt.acceptance.processes
import ckpt.acceptance.roundtrip
from ckpt.acceptance.known_values import compare, fill
from ckpt.acceptance.meshes import parse_mesh
from ckpt.acceptance.models import Parameter, parameters_of
from ckpt.acceptance.plans import RankShard, save_plans, shard_nbytes, shard_on
from ckpt.acceptance.processes import Processes, check_memory
from ckpt.acceptance.tasks import LoadTask, RankFigures, SaveTask, Setup
from ckpt.backends.posix import PosixStore
from ckpt.errors import AlreadyExists, CheckpointError, ConfigurationError, FormatError, IntegrityError
from ckpt.transfer.boxes import Box, tiling_fault

MESHES = [("fsdp", 4), ("fsdp", 3), ("hsdp", 4), ("hsdp3xfsdp2", 6), ("tp2", 2), ("tp2xfsdp4", 8), ("tp4", 8)]
INTERRUPTED = "What the interrupted save wrote was removed; the same command starts over."
SMALL = [
    Parameter("model.a", (37, 24), 0),
    Parameter("model.b", (24, 37), 1),
    Parameter("model.norm", (24,)),
    Parameter("model.one", (1,)),
    Parameter("model.deep", (5, 6, 7), 1),
]


@pytest.mark.parametrize(
    ("model", "elements"),
    [
        ("t5-small", 60_506_624),
        ("t5-11b", 11_307_321_344),
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("granite-7b", 6_738_415_616),
        ("gpt-22b", 22_074_273_792),
        ("gpt-175b", 174_615_846_912),
        ("gpt-1t", 1_008_038_758_400),
    ],
)
def test_models_have_their_known_size(model: str, elements: int) -> None:
    """The first five are what their published checkpoints hold, the last three within 1 % of their names."""
    weights = parameters_of(model)
    assert sum(parameter.elements for parameter in weights) == elements
    assert len({parameter.fqn for parameter in weights}) == len(weights)
    with_optimizer = parameters_of(model, "adamw")
    assert sum(parameter.elements for parameter in with_optimizer) == 3 * elements


@pytest.mark.parametrize(("text", "ranks"), MESHES)
def test_a_mesh_cuts_without_gap_or_overlap(text: str, ranks: int) -> None:
    mesh = parse_mesh(text, ranks)
    for parameter in [*SMALL, *parameters_of("t5-small")[:12]]:
        boxes = [mesh.box(parameter, rank) for rank in range(ranks)]
        distinct = {box for box in boxes if box is not None}
        assert tiling_fault(sorted(distinct), parameter.shape) is None
        if parameter.tp_dim is not None:
            replicas = mesh.replicas
            assert sum(box is not None for box in boxes) == replicas * len(distinct)


def test_a_mesh_cuts_as_fsdp2_does() -> None:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    mesh = parse_mesh("fsdp", 5)
    for parameter, rank in itertools.product(SMALL, range(5)):
        sizes, offsets = _compute_local_shape_and_global_offset(parameter.shape, (5,), [rank], [Shard(0)])
        box = mesh.box(parameter, rank)
        if box is None:
            assert 0 in sizes
        else:
            assert (tuple(offsets), tuple(o + n for o, n in zip(offsets, sizes, strict=True))) == box


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("fsdp4", 8), ("", 1), ("tp3xfsdp4", 8), ("tp0", 4), ("hsdp", 7), ("xfsdp", 4), ("tp", 0), ("ddp", 2)],
)
def test_meshes_that_do_not_fit_are_refused(text: str, ranks: int) -> None:
    with pytest.raises(ConfigurationError, match=r"mesh|world size"):
        parse_mesh(text, ranks)


@pytest.mark.parametrize("name", ["bf16", "fp32", "fp64", "fp8"])
@settings(max_examples=examples(40))
@given(data=st.data())
def test_any_slice_can_be_computed_by_itself(name: str, data: st.DataObject) -> None:
    dtype = ckpt.acceptance.roundtrip.DTYPES[name]
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    begin = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    end = tuple(data.draw(st.integers(b + 1, n)) for b, n in zip(begin, shape, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt.acceptance.known_values._RUN_ELEMENTS", 1 << 4)
        patch.setattr(
            "ckpt.acceptance.known_values._SCRATCH_ELEMENTS", data.draw(st.sampled_from([1, 7, 64]))
        )
        ckpt.acceptance.known_values._table.cache_clear()
        whole = torch.empty(shape, dtype=dtype)
        fill(whole, "w", shape, ((0,) * len(shape), shape))
        part = torch.empty([b - a for a, b in zip(begin, end, strict=True)], dtype=dtype)
        fill(part, "w", shape, (begin, end))
        expected = whole[tuple(slice(a, b) for a, b in zip(begin, end, strict=True))]
        assert part.view(torch.uint8).tolist() == expected.contiguous().view(torch.uint8).tolist()
        assert compare(part, "w", shape, (begin, end)) == 0
    ckpt.acceptance.known_values._table.cache_clear()


def test_wrong_elements_are_counted() -> None:
    columns = 1 << 19
    shape, box = (3, columns), ((0, 0), (3, columns))
    tensor = torch.empty(shape, dtype=torch.bfloat16)
    fill(tensor, "w", shape, box)
    bits = tensor.view(torch.int16)
    assert compare(tensor, "w", shape, box) == 0
    assert compare(tensor, "v", shape, box) > 2.9 * columns
    assert compare(tensor, "w", shape, box, seed=1) > 2.9 * columns
    bits[1, 77] ^= 1
    assert compare(tensor, "w", shape, box) == 1
    bits[1, 77] ^= 1
    fill(tensor, "w", shape, box)
    tensor[[0, 2]] = tensor[[2, 0]]
    assert compare(tensor, "w", shape, box) > 1.95 * columns
    fill(tensor, "w", shape, box)
    tensor[:, 1:] = tensor[:, :-1].clone()
    assert compare(tensor, "w", shape, box) > 2.9 * columns


# -- ranks, in this process ----------------------------------------------------------------------------


def saved(place: Path, mesh: str, ranks: int, dtype: torch.dtype = torch.bfloat16) -> Setup:
    """SMALL as `ranks` ranks save it."""
    setup = Setup(str(place), {}, 2, dtype, 0)
    plans, metadata = save_plans(SMALL, parse_mesh(mesh, ranks), dtype)
    tasks = [SaveTask(rank, plan) for rank, plan in enumerate(plans)]
    arena = torch.empty(max(shard_nbytes(task.shard, dtype.itemsize) for task in tasks), dtype=torch.uint8)
    progress: list[int | str] = []
    figures = [task.run(setup, arena, progress.append) for task in tasks]
    sent_bytes = sum(rank.counts.sent_bytes for rank in figures)
    assert sum(news for news in progress if isinstance(news, int)) == sent_bytes
    assert sum(rank.shard_bytes for rank in figures) == sum(p.elements for p in SMALL) * dtype.itemsize
    writer = ckpt.CheckpointWriter(place)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    writer.prepare_local_plan(SavePlan([]))
    writer.finish(metadata, [rank.results for rank in figures])
    writer.close()
    return setup


def load(setup: Setup, mesh: str, ranks: int) -> list[RankFigures]:
    tasks = [LoadTask(rank, shard_on(SMALL, parse_mesh(mesh, ranks), rank)) for rank in range(ranks)]
    arena = torch.empty(max(shard_nbytes(t.shard, setup.dtype.itemsize) for t in tasks), dtype=torch.uint8)
    arena.fill_(0xA5)
    return [task.run(setup, arena, lambda news: None) for task in tasks]


@pytest.mark.parametrize(("mesh", "ranks"), MESHES)
def test_every_mesh_comes_back_on_every_other(tmp_path: Path, mesh: str, ranks: int) -> None:
    setup = saved(tmp_path / "step", mesh, ranks)
    for other, count in [("fsdp", 1), ("fsdp", 3), ("tp2xfsdp2", 4)]:
        assert [rank.wrong for rank in load(setup, other, count)] == [{}] * count


def test_stock_reads_it_and_finds_the_same_values(tmp_path: Path) -> None:
    saved(tmp_path / "step", "tp2xfsdp2", 4, torch.float32)
    state = {p.fqn: torch.zeros(p.shape) for p in SMALL}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "step"), no_dist=True)
    for parameter in SMALL:
        whole: Box = (0,) * len(parameter.shape), parameter.shape
        assert compare(state[parameter.fqn], parameter.fqn, parameter.shape, whole) == 0


def test_a_flipped_byte_and_other_values_are_found(tmp_path: Path) -> None:
    setup = saved(tmp_path / "step", "fsdp", 2)
    other = Setup(setup.url, {}, 2, setup.dtype, seed=1)
    wrong = [rank.wrong for rank in load(other, "fsdp", 3)]
    assert set().union(*wrong) == {parameter.fqn for parameter in SMALL}
    file = next((tmp_path / "step").glob("rank-00001/*.distcp"))
    flip(file, file.stat().st_size // 2)
    with pytest.raises(IntegrityError, match="checksum") as caught:
        load(setup, "fsdp", 3)
    assert caught.value.key == str(file.relative_to(tmp_path / "step"))


def test_another_model_is_not_taken_for_this_one(tmp_path: Path) -> None:
    setup = saved(tmp_path / "step", "fsdp", 2)
    shard: RankShard = {"model.a": ((36, 24), ((0, 0), (36, 24)))}
    with pytest.raises(FormatError, match=r"model\.a"):
        LoadTask(0, shard).run(setup, torch.empty(36 * 24 * 2, dtype=torch.uint8), lambda news: None)


# -- processes -----------------------------------------------------------------------------------------


class _Dies(SaveTask):
    def run(self, setup: Setup, arena: torch.Tensor, tell: Any) -> RankFigures:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class _FailsAfterwards(SaveTask):
    """Its data are written, then it fails, as the one rank whose disk is full does."""

    def run(self, setup: Setup, arena: torch.Tensor, tell: Any) -> RankFigures:
        figures = super().run(setup, arena, tell)
        if self.rank == 1:
            raise ConfigurationError("on purpose")
        return figures


@pytest.mark.long
def test_a_process_that_dies_is_named(tmp_path: Path) -> None:
    setup = Setup(str(tmp_path / "step"), {}, 2, torch.bfloat16, 0)
    with (
        closing(Processes(setup, 1, 64)) as processes,
        pytest.raises(CheckpointError, match=r"rank 7 ended.*memory"),
    ):
        processes.run([_Dies(7, SavePlan([]))], lambda news: None, lambda resident: None)


def test_a_failed_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "step"
    (place / "rank-00000").mkdir(parents=True)
    (place / "rank-00000" / "0123456789abcdef-0.distcp").write_bytes(b"another save's")
    monkeypatch.setattr(ckpt.acceptance.roundtrip, "SaveTask", _FailsAfterwards)
    # Forked from one that has imported everything; the tests as a user spawn them.
    context = fork_context()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    with pytest.raises(ConfigurationError, match="on purpose") as caught:
        ckpt.roundtrip(place, "t5-small", world_size=2, dtype="fp8", processes=1)
    assert caught.value.rank == 1
    left = [str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()]
    assert left == ["rank-00000/0123456789abcdef-0.distcp"]


def test_sigterm_cleans_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ctrl-C does: `timeout` sends it."""

    def end(processes: Processes, tasks: Any, report: Any, tick: Any) -> list[RankFigures]:
        signal.raise_signal(signal.SIGTERM)
        raise CheckpointError("it went on")

    monkeypatch.setattr(Processes, "run", end)
    context = fork_context()
    monkeypatch.setattr("multiprocessing.get_context", lambda method: context)
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        ran = run("roundtrip", tmp_path / "a", "--world-size", 1, "--model", "t5-small")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (ran.code, ran.err) == (130, f"error: interrupted. {INTERRUPTED}\n")
    assert not any((tmp_path / "a").rglob("*"))


@pytest.mark.long
def test_as_a_user_on_files(tmp_path: Path) -> None:
    place = tmp_path / "step"
    ran = run_process(
        "roundtrip", place, "--dtype", "fp8", "--world-size", "3", "--mesh", "fsdp", "--keep", "--json"
    )
    assert ran.code == 0, ran.err
    report = ran.json
    payload = 60_506_624
    assert report["ok"] is report["kept"] is True
    assert report["parameters"] == report["payload_bytes"] == payload
    shards = [rank["shard_bytes"] for rank in report["save"]["ranks"]]
    assert shards == pytest.approx([payload / 3] * 3, rel=0.02)
    stored = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    assert payload < report["save"]["counts"]["sent_bytes"] <= stored < 1.02 * payload
    assert report["load"]["ranks"][0]["shard_bytes"] == payload
    assert 1.0 <= report["read_per_needed"] < 1.02
    assert 0 < report["save"]["peak_beyond_shard_bytes"] < 512 << 20
    assert 0 < report["load"]["peak_beyond_shard_bytes"] < 512 << 20
    assert len(report["timeline"]) >= 2
    assert ckpt.verify(place).ok
    assert run("roundtrip", place, "--dtype", "fp8").code == 1  # something is there
    flip(next(place.glob("rank-00001/*.distcp")), 1_000_000)
    ran = run_process("roundtrip", place, "--dtype", "fp8", "--phase", "load", "--load-world-size", "1")
    assert ran.code == 1
    assert "rank-00001/" in ran.err
    assert "checksum" in ran.err


@pytest.mark.long
def test_as_a_user_on_s3(s3: S3Server) -> None:
    bucket = s3.new_bucket()
    url, options = f"s3://{bucket}/step", options_of(s3.options)
    ran = run_process("roundtrip", url, "--dtype", "fp8", "--world-size", "2", *options)
    assert ran.code == 0, ran.err
    assert "every element is what was saved" in ran.out
    assert "Contents" not in s3.client().list_objects_v2(Bucket=bucket)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--model", "gpt-5"], "t5-11b, llama"),
        (["--optimizer", "sgd"], "none, adamw"),
        (["--dtype", "int3"], "bf16, fp16"),
        (["--mesh", "tp3xfsdp4"], "the world size is 8"),
        (["--load-mesh", "hsdp", "--load-world-size", "3"], "the world size is 3"),
        (["--phase", "half"], "both, save, load or plan"),
        (["--model", "gpt-1t"], "larger world size"),
        (["--processes", "4000", "--world-size", "4096", "--model", "gpt-1t"], "larger world size or fewer"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Path, arguments: list[str], text: str
) -> None:
    if "4096" in arguments:
        arguments = ["--processes", "64", "--world-size", "64", "--model", "llama-2-13b"]
    ran = run("roundtrip", tmp_path / "step", *arguments)
    assert ran.code == 2
    assert text in ran.err
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_an_error_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PosixStore, "free_bytes", lambda store: 10**8)
    ran = run("roundtrip", tmp_path / "step", "--dtype", "fp32")
    assert ran.code == 4
    assert "only 95.37 MiB are free, but the checkpoint takes 233.12 MiB" in ran.err
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_refuses_is_an_error_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("roundtrip", tmp_path / "file" / "step")
    assert ran.code == 3
    assert "Not a directory" in ran.err
    ran = run(
        "roundtrip",
        "s3://bucket/step",
        *options_of({"endpoint_url": "http://127.0.0.1:9", "key": "a", "secret": "b", "max_attempts": 1}),
    )
    assert ran.code == 4, ran.err


@pytest.mark.parametrize(
    ("model", "ranks", "largest"),
    [
        ("t5-11b", 8, 2 * 11_307_321_344 / 8),
        pytest.param("gpt-175b", 16, 2 * 174_615_846_912 / 16, marks=pytest.mark.long),
    ],
)
def test_only_planned(tmp_path: Path, model: str, ranks: int, largest: float) -> None:
    """Models that no machine has room for can be planned, as JSON and in words."""
    options = {"--model": model, "--world-size": ranks, "--phase": "plan"}
    arguments = ("roundtrip", tmp_path / "step", *itertools.chain(*options.items()))
    report = run_json(*arguments)
    shards = report["plan"]["shard_bytes"]
    assert len(shards) == ranks
    assert max(shards) == pytest.approx(largest, rel=0.02)
    assert sum(shards) == pytest.approx(report["payload_bytes"], rel=1e-4)
    assert report["save"] is report["load"] is None
    assert f"slices for {ranks} ranks" in run(*arguments).out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_the_error_of_a_failed_load_is_the_one_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise CheckpointError("cannot remove")

    def unloadable(*_: Any) -> None:
        raise CheckpointError("cannot load")

    monkeypatch.setattr(ckpt.acceptance.roundtrip, "remove", fails)
    monkeypatch.setattr(ckpt.acceptance.roundtrip._RoundtripRun, "load", unloadable)
    with pytest.raises(CheckpointError, match="cannot load"):
        ckpt.roundtrip(tmp_path / "step", "t5-small", world_size=1, dtype="fp8")
    assert ckpt.verify(tmp_path / "step").ok


def test_a_taken_place_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path / "step", "fsdp", 1)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(AlreadyExists):
        ckpt.roundtrip(tmp_path / "step", "t5-small", world_size=1)
    assert sorted(tmp_path.rglob("*")) == before


def test_memory_decides_how_many_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ckpt.acceptance.processes, "_available_bytes", lambda: 10 << 30)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(16))
    assert check_memory([1 << 30] * 8, None) == 6
    assert check_memory([1 << 30] * 4, None) == 4
    assert check_memory([9 << 30] * 8, None) == 1
    assert check_memory([1 << 30] * 8, 2) == 2
    for shards, processes in [([10 << 30], None), ([1 << 30] * 8, 8), ([1], 0)]:
        with pytest.raises(ConfigurationError):
            check_memory(shards, processes)
    monkeypatch.setattr(ckpt.acceptance.processes, "_available_bytes", lambda: None)
    assert check_memory([1 << 40] * 8, None) == 8


def test_threads_are_gone(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    load(saved(tmp_path / "step", "fsdp", 2), "fsdp", 1)
    assert set(threading.enumerate()) == before
