"""What `ckpt plan` counts is what a server sees of a real save, load and removal."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from support import simulated_plans
from support.ranks import run_ranks
from support.simulated_plans import placed_plan, placements_for, structure_of
from support.strict_s3 import Request, StrictS3
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import ckpt
from ckpt.acceptance.meshes import parse_mesh as acceptance_mesh
from ckpt.acceptance.models import Parameter, gpt
from ckpt.acceptance.plans import save_plans, shard_nbytes, shard_on
from ckpt.acceptance.tasks import LoadTask, SaveTask, Setup
from ckpt.embeddings import DenseRows, Tables, TableShard
from ckpt.format.index import encode_index
from ckpt.format.runs import TensorRuns
from ckpt.planning import requests
from ckpt.planning.layout import layout_of, parse_mesh
from ckpt.planning.models import Model, Tensor
from ckpt.planning.requests import Requests, remove_requests, restore_requests, save_requests, stored
from ckpt.planning.table_requests import table_bytes, table_restore_requests, table_save_requests
from ckpt.planning.tables import chain_saves, table_of
from ckpt.transfer import fetcher
from ckpt.transfer.file_body import BytesPayload
from ckpt.writing.layout import Entry, spread
from ckpt.writing.stock_metadata import DEFAULT_MAX_BYTES

PART_BYTES = 5 << 20
"""Of the strict server's options."""

PARAMETERS = [
    Parameter(f"model.{each.fqn}", each.shape, each.tp_dim) for each in gpt(256, 3, vocab=2048, positions=128)
]


def counted(server: StrictS3) -> Requests:
    """What the server has seen since the last call."""
    kinds = Counter(map(_kind, server.requests))
    server.requests.clear()
    return Requests(**{name: kinds[name] for name in ("puts", "gets", "lists", "deletes")})


def _kind(request: Request) -> str:
    if request.operation.startswith(("List", "GetObject")) and "list-type" in request.query:
        return "lists"
    kinds = {"PUT": "puts", "POST": "puts", "GET": "gets", "HEAD": "gets", "DELETE": "deletes"}
    return "deletes" if "delete" in request.query else kinds[request.method]


def stored_at(server: StrictS3, place: str) -> dict[str, int]:
    return {name: len(data) for name, data in server.objects.items() if name.startswith(f"{place}/")}


def test_one_rank_and_parts(server: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ckpt.save`, `ckpt.load` and `ckpt.remove` of 16 MB in four parts, read in two requests."""
    monkeypatch.setattr(fetcher, "transfer_size_bytes", lambda threads: 8 << 20)
    state = {f"layers.{number}.weight": torch.randn(1000, 1000) for number in range(4)}
    tensors = tuple(Tensor(name, tuple(each.shape), 4, 0, 0) for name, each in state.items())
    layout = layout_of(Model("four", "", 0, tensors), parse_mesh("fsdp", 1))
    what = stored(Model("four", "", 0, tensors), layout, threads=4)
    _first_save(server)
    ckpt.save(state, "s3://bucket/one", storage_options=server.options)
    assert counted(server) == save_requests(layout, what, part_bytes=PART_BYTES)
    objects = stored_at(server, "one")
    assert len(objects) == what.objects
    assert sum(objects.values()) == pytest.approx(what.nbytes, rel=1e-3)
    ckpt.load(state, "s3://bucket/one", storage_options=server.options)
    assert counted(server) == restore_requests(layout, what, request_bytes=8 << 20)
    ckpt.remove("s3://bucket/one", storage_options=server.options)
    assert counted(server) == remove_requests(what)


def test_a_checkpoint_without_metadata(server: StrictS3, monkeypatch: pytest.MonkeyPatch) -> None:
    assert requests._MAX_STOCK_BYTES == DEFAULT_MAX_BYTES
    monkeypatch.setattr(requests, "_MAX_STOCK_BYTES", 0)
    model = Model("one", "", 0, (Tensor("w", (1000, 1000), 4, 0, 0),))
    layout = layout_of(model, parse_mesh("fsdp", 1))
    what = stored(model, layout, threads=4)
    _first_save(server)
    ckpt.save(
        {"w": torch.randn(1000, 1000)},
        "s3://bucket/none",
        storage_options=server.options,
        stock_metadata_max_bytes=0,
    )
    assert counted(server) == save_requests(layout, what, part_bytes=PART_BYTES)
    assert len(stored_at(server, "none")) == what.objects


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "mesh"), [("fsdp", (128,)), ("fsdp", (300,)), ("hsdp2xfsdp256", (2, 256))], ids=str
)
def test_index_of_many_ranks(text: str, mesh: tuple[int, ...]) -> None:
    """Tensors of 256 slices and more are runs in the index, others rows; a state is nested, as that of a training."""
    ranks = math.prod(mesh)
    named = [
        (f"{group}.{each.fqn}", each)
        for each in gpt(256, 3, vocab=2048, positions=1024)
        for group in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    ]
    sharded = placements_for(mesh, [None, 0][-len(mesh) :])
    held = [simulated_plans.Tensor(name, each.shape, sharded) for name, each in named]
    structures = [structure_of(held, mesh, rank) for rank in range(ranks)]
    _, columns = placed_plan(structures)
    columns.save_id = "0" * 16
    model = Model("gpt", "", 0, tuple(Tensor(name, each.shape, 4, None, 0) for name, each in named))
    layout = layout_of(model, parse_mesh(text, ranks))
    regular = sum(isinstance(each, TensorRuns) for each in columns.entries.values())
    assert layout.regular == regular
    assert stored(model, layout, threads=8).index_bytes == pytest.approx(len(encode_index(columns)), rel=0.1)


@pytest.mark.parametrize("text", ["fsdp4", "hsdp2xfsdp2", pytest.param("tp2xfsdp2", marks=pytest.mark.long)])
def test_some_ranks(server: StrictS3, text: str) -> None:
    """Each rank has a writer and a reader of its own, as in a job; slices are spread by DCP's planner."""
    model = Model("gpt", "", 0, tuple(Tensor(each.fqn, each.shape, 2, each.tp_dim, 0) for each in PARAMETERS))
    layout = layout_of(model, parse_mesh(text, 4))
    what = stored(model, layout, threads=4)
    _first_save(server)
    _save(f"s3://bucket/{text}", text, server)
    assert counted(server) == save_requests(layout, what, part_bytes=PART_BYTES)
    objects = stored_at(server, text)
    assert len(objects) == what.objects
    assert sum(objects.values()) == pytest.approx(what.nbytes, rel=0.01)
    opened = 0
    if layout.mesh.dp > 1:
        run_ranks(4, _load_together, f"s3://bucket/{text}", server.options)
    else:
        _load(f"s3://bucket/{text}", text, server)
        opened = 3 * 4  # `ckpt.load` gives the other three ranks what the first one read
    seen = counted(server).gets - opened
    expected = restore_requests(layout, what, request_bytes=64 << 20).gets
    if layout.mesh.tp == 1:
        assert seen == expected
    else:  # norms, which all hold, lie so near to one another here that one request reads them
        assert expected / 8 < seen <= expected


def _save(url: str, text: str, server: StrictS3) -> None:
    plans, metadata = save_plans(PARAMETERS, acceptance_mesh(text, 4), torch.bfloat16)
    setup = Setup(url, server.options, None, torch.bfloat16, 0)
    with contextlib.closing(ckpt.CheckpointWriter(url, storage_options=server.options)) as writer:
        writer.set_up_storage_writer(True, rank=0, use_collectives=True)
        writer.prepare_local_plan(SavePlan([]))
        tasks = [SaveTask(rank, each) for rank, each in enumerate(plans)]
        writer.finish(metadata, [task.run(setup, _arena(task), lambda news: None).results for task in tasks])


def _load(url: str, text: str, server: StrictS3) -> None:
    setup = Setup(url, server.options, None, torch.bfloat16, 0)
    for rank in range(4):
        task = LoadTask(rank, shard_on(PARAMETERS, acceptance_mesh(text, 4), rank))
        assert not task.run(setup, _arena(task), lambda news: None).wrong


def _load_together(rank: int, url: str, options: dict[str, Any]) -> None:
    """Load as HSDP does: two replicas of two shards."""
    mesh = init_device_mesh("cpu", (2, 2))
    placements = [Replicate(), Shard(0)]
    state = {
        each.fqn: distribute_tensor(torch.empty(each.shape, dtype=torch.bfloat16), mesh, placements)
        for each in PARAMETERS
    }
    ckpt.load(state, url, storage_options=options)


def _arena(task: SaveTask | LoadTask) -> torch.Tensor:
    return torch.empty(shard_nbytes(task.shard, 2), dtype=torch.uint8)


def test_files_of_a_rank_on_a_file_system() -> None:
    for large, threads in ((0, 4), (1, 4), (3, 4), (5, 4), (40, 16)):
        entries = [
            Entry(MetadataIndex(f"w{number}"), b"", _Bytes(32 << 20), b"", True) for number in range(large)
        ]
        entries.append(Entry(MetadataIndex("small"), b"", _Bytes(1000), b"", True))
        tensors = tuple(Tensor(entry.index.fqn, (entry.length,), 1, None, 0) for entry in entries)
        model = Model("files", "", 0, tensors)
        assert stored(model, layout_of(model, parse_mesh("fsdp", 1)), threads=threads).files == len(
            spread(entries, threads)
        )


class _Bytes(BytesPayload):
    """So many bytes, which nobody makes."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


@pytest.mark.long
def test_a_chain_of_a_table(server: StrictS3) -> None:
    """A base, deltas and a merge of 2 % of the rows each, chosen at random."""
    rows, rate, saves = 60_000, 0.02, 8
    values, adagrad = torch.zeros(rows, 32), torch.zeros(rows)
    shard = TableShard("user", DenseRows(0, values=values, adagrad=adagrad), max_deltas=4)
    tables, chance = Tables(shard), np.random.default_rng(3)
    table = table_of(rows, 32, "fp32", "rowwise-adagrad")
    planned = chain_saves(table, rate, saves, max_deltas=4)
    assert {each.kind for each in planned} == {"base", "delta", "merge"}
    _first_save(server)
    for number, each in enumerate(planned):
        if number:
            ids = chance.choice(rows, round(rows * rate), replace=False)
            with shard.writing(ids):
                values[ids] += 1.0
        tables.save({}, f"s3://bucket/run/{number}", storage_options=server.options)
        seen, chain = counted(server), [planned[at] for at in each.generations]
        expected = table_save_requests(table, chain, 1, PART_BYTES)
        assert seen.puts == expected.puts
        assert seen.gets <= expected.gets
        objects = {
            name: nbytes for name, nbytes in stored_at(server, f"run/{number}").items() if ".pin" not in name
        }
        assert len(objects) == 5
        assert sum(objects.values()) == pytest.approx(table_bytes(table, chain, 1), rel=0.01)
    tables.restore(f"s3://bucket/run/{saves - 1}", storage_options=server.options)
    assert counted(server).gets <= table_restore_requests(table, chain, 1, 64 << 20).gets


def _first_save(server: StrictS3) -> None:
    """Let this process try how the server treats conditions, which it does once."""
    ckpt.save({"w": torch.ones(1)}, "s3://bucket/first", storage_options=server.options)
    server.requests.clear()
