"""`ckpt plan`: intervals against published values and simulated failures, layouts, costs, the command."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from support.commands import run, run_json, run_on_terminal

import ckpt
from ckpt.acceptance.meshes import Mesh as AcceptanceMesh
from ckpt.acceptance.models import parameters_of
from ckpt.acceptance.plans import shard_nbytes, shard_on
from ckpt.errors import ConfigurationError
from ckpt.planning.intervals import daly_interval_s, useful_time, young_interval_s
from ckpt.planning.layout import Mesh, layout_of, parse_mesh
from ckpt.planning.models import Model, Tensor, model_of
from ckpt.planning.plan import Cluster, chart_lines, plan
from ckpt.planning.prices import GB, MONTH_S, TB, price_text, prices_of
from ckpt.planning.requests import Requests
from ckpt.planning.tables import chain_saves, stored_bytes, table_of

# -- intervals and useful time -------------------------------------------------------------------------


@pytest.mark.parametrize(("mtbf_min", "best_min"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_intervals_are_those_of_the_paper(mtbf_min: float, best_min: float) -> None:
    """Daly 2006, figures 3 to 5: a dump of 5 minutes."""
    assert daly_interval_s(300, 60 * mtbf_min) / 60 == pytest.approx(best_min, rel=0.006)
    assert young_interval_s(300, 60 * mtbf_min) / 60 == pytest.approx((2 * 5 * mtbf_min) ** 0.5)


@pytest.mark.parametrize("mtbf_s", [900.0, 10_000.0, 500_000.0])
def test_the_interval_loses_least(mtbf_s: float) -> None:
    def useful(work_s: float) -> float:
        return useful_time(work_s, stall_s=20, lag_s=50, restart_s=300, mtbf_s=mtbf_s).useful

    best = max(useful(20 * 1.02**step) for step in range(400))
    assert useful(daly_interval_s(20, mtbf_s)) == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(
    ("work_s", "stall_s", "lag_s", "restart_s", "mtbf_s"),
    [(600, 30, 0, 300, 3600), (300, 5, 200, 600, 2000), (1000, 100, 900, 0, 1500), (60, 1, 300, 60, 5000)],
)
def test_useful_time_is_that_of_a_simulation(
    work_s: float, stall_s: float, lag_s: float, restart_s: float, mtbf_s: float
) -> None:
    """A clock with random failures, to which nothing of the formula is known."""
    expected = useful_time(work_s, stall_s=stall_s, lag_s=lag_s, restart_s=restart_s, mtbf_s=mtbf_s)
    shares = simulated_shares(work_s, stall_s, lag_s, restart_s, mtbf_s, failures=6_000, seed=5)
    assert shares == pytest.approx([expected.useful, expected.stall, expected.restart], abs=0.015)
    assert expected.useful + expected.stall + expected.restart + expected.lost == pytest.approx(1)


def simulated_shares(
    work_s: float, stall_s: float, lag_s: float, restart_s: float, mtbf_s: float, *, failures: int, seed: int
) -> list[float]:
    """Run a job: restart, then work and stall in turns; a save counts once it is durable, if that comes first."""
    chance = random.Random(seed)
    now_s = useful_s = stalled_s = restarting_s = 0.0
    for _ in range(failures):
        fails_s = now_s + chance.expovariate(1 / mtbf_s)
        clock_s = now_s + restart_s
        restarting_s += min(clock_s, fails_s) - now_s
        while True:
            clock_s += work_s + stall_s
            if clock_s + lag_s > fails_s:
                break
            useful_s += work_s
            stalled_s += stall_s
        now_s = fails_s
    return [useful_s / now_s, stalled_s / now_s, restarting_s / now_s]


def test_a_run_that_fails_too_often_gets_nowhere() -> None:
    assert useful_time(1e9, stall_s=1, lag_s=0, restart_s=1, mtbf_s=60).useful == 0


# -- models and layouts --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mesh"),
    [
        ("fsdp4", AcceptanceMesh(1, 4, 1)),
        ("fsdp3", AcceptanceMesh(1, 3, 1)),
        ("hsdp2xfsdp3", AcceptanceMesh(2, 3, 1)),
        ("tp2xfsdp3", AcceptanceMesh(1, 3, 2)),
        ("tp8xdp2", AcceptanceMesh(2, 1, 8)),
    ],
)
def test_ranks_hold_what_the_acceptance_test_gives_them(text: str, mesh: AcceptanceMesh) -> None:
    model = model_of("t5-small", dtype="bf16", optimizer="adamw", optimizer_dtype="bf16")
    layout = layout_of(model, parse_mesh(text, mesh.world_size))
    parameters = parameters_of("t5-small", "adamw")
    for rank in range(mesh.world_size):
        shard = shard_on(parameters, mesh, rank)
        held = layout.held_bytes[0, rank // mesh.tp % mesh.shards, rank % mesh.tp]
        assert held == pytest.approx(shard_nbytes(shard, 2), abs=64 * len(shard))
    assert layout.per_node(layout.held_bytes, 2) <= 2 * layout.held_bytes.max()


def test_pipeline_stages_share_the_layers() -> None:
    model = model_of("gpt-22b", optimizer="none")
    whole, stages = (layout_of(model, parse_mesh(text, 8)) for text in ("fsdp8", "pp4xfsdp2"))
    assert stages.held_bytes.sum() == pytest.approx(whole.held_bytes.sum()) == model.nbytes
    of_stage = stages.held_bytes.sum(axis=(1, 2))
    assert of_stage.min() > 0.8 * of_stage.mean()
    with pytest.raises(ConfigurationError, match="64 pipeline stages, and gpt-22b only 48 layers"):
        layout_of(model, parse_mesh("pp64", 64))


@pytest.mark.parametrize("text", ["1B", "7B", "70B", "1.5T", "3e11"])
def test_a_number_of_parameters_makes_a_gpt_of_that_size(text: str) -> None:
    wanted = {"B": 1e9, "T": 1e12}.get(text[-1], 1.0) * float(text.rstrip("BT"))
    assert model_of(text).parameters == pytest.approx(wanted, rel=0.02)


def test_a_model_has_the_dtypes_that_it_is_given() -> None:
    model = model_of("t5-small", dtype="bf16", optimizer="adamw", master_weights=True)
    assert model.nbytes == model.parameters * (2 + 3 * 4)


def test_a_checkpoint_is_planned_by_its_shapes(tmp_path: Path) -> None:
    import torch

    ckpt.save({"layers": [{"w": torch.zeros(64, 32)}, {"w": torch.zeros(64, 32)}]}, tmp_path / "c")
    model = model_of(str(tmp_path / "c"))
    assert [(tensor.shape, tensor.item_bytes, tensor.block) for tensor in model.tensors] == [
        ((64, 32), 4, 0),
        ((64, 32), 4, 1),
    ]
    facts = run_json("plan", tmp_path / "c", "--ranks", "2", "--mesh", "pp2", "--ranks-per-node", "1")
    assert facts["plans"][0]["checkpoint"]["objects"] == 7


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("tp3xfsdp", 8, "needs a multiple of 3 ranks, not 8"),
        ("tp2xfsdp4", 16, "has 8 ranks, not 16"),
        ("fsdpxdp", 8, "only one axis"),
        ("ring", 8, "not understood"),
        ("fsdp2xfsdp4", 8, "not understood"),
        ("tp0", 8, "not understood"),
        ("fsdp", 0, "from 1 to"),
    ],
)
def test_meshes_that_do_not_fit_are_refused(text: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse_mesh(text, ranks)


def test_meshes_of_the_field() -> None:
    assert parse_mesh("tp8xpp64xdp32", 16384) == Mesh(pp=64, dp=32, tp=8, free="dp")
    assert parse_mesh("TP8xPP64xFSDP", 16384) == Mesh(pp=64, fsdp=32, tp=8)
    assert parse_mesh("hsdp", 8) == Mesh(dp=2, fsdp=4)


# -- time and money ------------------------------------------------------------------------------------


def test_times_and_costs_are_those_of_a_calculation_by_hand() -> None:
    tensor = Tensor("w", (8 * 10**9,), 1, None, 0)
    model = Model("eight", "8 GB", 8 * 10**9, (tensor,))
    prices = prices_of("aws-s3")
    cluster = Cluster(
        ranks=8, ranks_per_node=4, node_bytes_per_s=1e9, store_bytes_per_s=4e9, copy_bytes_per_s=10e9,
        latency_s=0, node_mtbf_s=20 * 86400, downtime_s=100, keep=2, interval_s=1000, prices=prices,
    )  # fmt: skip
    planned = plan(model, cluster)
    # Two nodes send 4 GB each at 1 GB/s; the copy of 4 GB at 10 GB/s comes before. 1 GB are 30 parts of 32 MiB.
    assert planned.stall_s == pytest.approx(0.4)
    assert planned.durable_s == pytest.approx(4.4, rel=1e-3)
    assert planned.restore_s == pytest.approx(4, rel=1e-3)
    assert planned.job_mtbf_s == 10 * 86400
    assert planned.save.puts == 8 * (30 + 2 + 1) + 3
    saves, restores = MONTH_S / 1000.4, MONTH_S / (10 * 86400)
    writes = saves * (planned.save.puts + 2)  # a removal lists twice
    reads = saves * (planned.save.gets + 6) + restores * (8 * (1 + 30) + 4)
    assert planned.dollars.requests == pytest.approx((0.005 * writes + 0.0004 * reads) / 1000)
    assert planned.dollars.storage == pytest.approx(3 * 8e9 / GB * 0.023, rel=1e-3)
    sync = plan(model, Cluster(**{**vars(cluster), "is_async": False}))
    assert sync.stall_s == sync.durable_s == pytest.approx(4, rel=1e-3)


def test_prices_have_tiers() -> None:
    prices = prices_of("aws-s3")
    by_hand = 50 * 1024 * 0.023 + 450 * 1024 * 0.022 + 100 * 1024 * 0.021
    assert prices.storage_dollars(600 * TB) == pytest.approx(by_hand)
    assert prices.request_dollars(Requests(puts=1000, gets=5000, lists=1000, deletes=9)) == pytest.approx(
        0.012
    )


def test_an_interval_is_not_shorter_than_an_upload() -> None:
    model = model_of("gpt-175b")
    planned = plan(model, Cluster(ranks=4096, node_bytes_per_s=1e7, copy_bytes_per_s=1e12))
    assert planned.daly_s < planned.durable_s - planned.stall_s == planned.interval_s


def test_prices_can_be_edited(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(price_text().replace("[gcs]", "[ours]").replace("writes = 0.005", "writes = 5.0"))
    facts = run_json("plan", "t5-11b", "--prices", path, "--store", "ours")
    usual = run_json("plan", "t5-11b", "--store", "gcs")
    ratio = (each["plans"][0]["dollars_per_month"]["requests"] for each in (facts, usual))
    assert next(ratio) > 100 * next(ratio)
    assert run("plan", "--show-prices").out == price_text()


# -- tables --------------------------------------------------------------------------------------------


def test_a_chain_is_bounded_as_the_library_bounds_it() -> None:
    table = table_of(1_000_000, 64, "fp32", "rowwise-adagrad")
    assert table.row_bytes == 64 * 4 + 4
    rare, often = (chain_saves(table, rate, 100) for rate in (0.001, 0.1))
    assert [save.kind for save in rare[:14]] == ["base", *["delta"] * 12, "merge"]
    assert max(len(save.generations) for save in rare) == 13
    assert sum(save.kind == "base" for save in rare) == 1
    assert max(save.chain_bytes for save in often) <= 1.45 * table.nbytes
    assert rare[1].rows == 1000
    assert rare[1].nbytes == 1000 * (8 + table.row_bytes)
    assert stored_bytes(rare, 3) < 1.2 * table.nbytes < 2 * table.nbytes <= stored_bytes(often, 3)


def test_a_hundred_trillion_parameters() -> None:
    arguments = ["--table", "781250000000x128", "--dtype", "fp16", "--ranks", "30", "--ranks-per-node", "1"]
    facts = run_json("plan", *arguments, "--touched", "0.1,1,10%", "--interval", "1h")["tables"]
    assert [each["touched"] for each in facts] == pytest.approx([0.001, 0.01, 0.1])
    assert facts[0]["rows"] * facts[0]["width"] == 10**14
    assert facts[0]["base"]["bytes"] == 781_250_000_000 * 260
    assert facts[0]["delta"]["bytes"] == 781_250_000 * 268
    assert facts[0]["base"]["durable_s"] == pytest.approx(781_250_000_000 * 260 / 30 / 5e9)
    assert facts[0]["full_ratio"] > facts[1]["full_ratio"] > facts[2]["full_ratio"] > 1
    ran = run("plan", *arguments, "--dtype", "fp32")
    assert ran.code == 2
    assert "does not fit 30 machines with 12 TB each" in ran.err


# -- the command ---------------------------------------------------------------------------------------


def test_the_tables_fit_a_terminal() -> None:
    terminal = run_on_terminal("plan", "--plot", "/dev/null")
    assert terminal.code == 0
    assert "…" not in terminal.out
    sync = ("plan", "t5-11b", "70B", "--ranks", "16384", "--mesh", "tp8xpp16xfsdp", "--sync")
    table = ("plan", "--table", "1e12x128", "--ranks", "64", "--ranks-per-node", "1")
    for text in (terminal.out.replace("\r", ""), run(*sync).out, run(*table).out):
        lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in text.splitlines()]
        assert max(map(len, lines)) <= 80
        assert 25 <= len(lines) <= 45


def test_json_has_all_of_it() -> None:
    (facts,) = run_json("plan", "gpt-22b", "--ranks", "64", "--mesh", "hsdp2xfsdp32")["plans"]
    assert set(facts) == {
        "model", "about", "parameters", "tensors", "mesh", "checkpoint", "save", "restore", "remove", "interval",
        "time", "dollars_per_month", "cluster",
    }  # fmt: skip
    assert facts["restore"]["read_bytes"] == pytest.approx(facts["checkpoint"]["data_bytes"])
    assert facts["save"]["requests"] == {**facts["save"]["requests"], "lists": 0, "deletes": 0}
    assert sum(facts["time"].values()) == pytest.approx(1)


def test_the_plot_has_a_line_for_each_number_of_ranks(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    assert run("plan", "gpt-22b", "--plot", path).code == 0
    picture = ElementTree.parse(path).getroot()
    texts = [text for text in picture.itertext() if "ranks: " in text]
    assert [text.partition(" ")[0] for text in texts] == ["64", "256", "1,024", "4,096", "16,384"]
    assert "prefers-color-scheme: dark" in path.read_text()
    lines = chart_lines(model_of("gpt-22b"), Cluster(ranks=16, mesh="tp8xfsdp"))
    assert [line.name for line in lines] == [
        "64 ranks",
        "256 ranks",
        "1,024 ranks",
        "4,096 ranks",
        "16,384 ranks",
    ]
    for line in lines:
        assert line.best[1] >= max(share for _, share in line.points) - 1e-3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-5"], "is no model: give one of t5-small, t5-11b"),
        (["gpt-22b"] * 5, "up to 4 models"),
        (["7K"], "from 1M to 1000T"),
        (["--mesh", "tp3xfsdp"], "needs a multiple of 3 ranks, not 1,024"),
        (["--node-bandwidth", "0GB/s"], "network bandwidth of a node must be above 0"),
        (["--store-bandwidth", "fast"], "--store-bandwidth: 'fast' is not understood; write 5GB/s"),
        (["--mtbf", "0s"], "mean time between failures must be above 0"),
        (["--mtbf", "often"], "--mtbf: 'often' is not understood"),
        (["--ranks", "12"], "12 ranks do not fill nodes of 8"),
        (["--dtype", "int3"], "the dtype must be one of bf16"),
        (["--optimizer", "lion"], "the optimizer must be one of none, sgd, adamw"),
        (["--store", "azure"], "no prices for 'azure'; there are for aws-s3, gcs, ibm-cos, none"),
        (["--prices", "nothing.toml"], "cannot be read"),
        (["--plot", "/nothing/here.svg"], "cannot be written"),
        (["--table", "many"], "--table: 'many' is not understood"),
        (["--table", "1e6x8", "--touched", "0"], "must be above 0"),
        (["--table", "1e6x8", "--touched", "x"], "--touched: 'x' is not understood"),
        (["--table", "1e6x8", "--optimizer", "adamw"], "rowwise-adagrad, adagrad, adam, not 'adamw'"),
    ],
)
def test_mistakes_are_named(arguments: list[str], message: str) -> None:
    ran = run("plan", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_wrong_prices_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    for wrong in ("storage = [[5, 1]]", "storage = [[inf, -1]]", "storage = [[9, 1], [5, 2], [inf, 1]]"):
        path.write_text(f'[x]\nname="x"\nsource=""\nchecked=""\nwrites=0\nreads=0\n{wrong}\n')
        with pytest.raises(ConfigurationError, match=r"storage|negative"):
            prices_of("x", str(path))
    path.write_text(price_text().replace("writes =", "write ="))
    with pytest.raises(ConfigurationError, match="unknown field `write`"):
        prices_of("aws-s3", str(path))


def test_numbers_are_json() -> None:
    assert json.loads(run("plan", "--json").out)["plans"][3]["parameters"] == 1_008_038_758_400
    assert np.isfinite(plan(model_of("gpt-1t"), Cluster()).dollars.total)
