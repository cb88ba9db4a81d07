"""`ckpt roundtrip`: check that a storage gives back what it is given, at a model's size."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.cli.options import Json, StorageOptions, parse_storage_options, url_of
from ckpt.cli.printing.output import EXIT_PROBLEM, Output, command, sigterm_as_ctrl_c, table
from ckpt.words import count, shown, size

if TYPE_CHECKING:
    from ckpt.acceptance.roundtrip import Roundtrip

_MAX_LINES = 20


_Model = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="A model whose shapes to use: t5-small, t5-11b, llama-2-7b, llama-2-13b, granite-7b, gpt-22b, "
        "gpt-175b or gpt-1t.",
    ),
]
_LoadWorldSize = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Number of ranks that load; by default half of those that save."),
]
_Mesh = Annotated[
    str, typer.Option(metavar="MESH", help="Sharding for the save: fsdp, hsdp, hsdp2xfsdp4, tp2xfsdp4, ...")
]
_Processes = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="N", help="Ranks that run at the same time; the default depends on cores and memory."
    ),
]
_RankThreads = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Parallel transfers of each rank.")
]
_Phase = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="both; save, which keeps the checkpoint; load, of a kept one; or plan, which writes nothing.",
    ),
]

EXAMPLES = """
ckpt roundtrip s3://bucket/try --model t5-11b --world-size 8
ckpt roundtrip /mnt/try --optimizer adamw --mesh hsdp2xfsdp4
"""


def roundtrip(
    url: Annotated[str, url_of("An empty place to save to")],
    model: _Model = "t5-small",
    world_size: Annotated[int, typer.Option(min=1, metavar="N", help="Number of ranks that save.")] = 8,
    load_world_size: _LoadWorldSize = None,
    dtype: Annotated[str, typer.Option(metavar="DTYPE", help="bf16, fp16, fp32, fp64 or fp8.")] = "bf16",
    optimizer: Annotated[str, typer.Option(metavar="NAME", help="none or adamw.")] = "none",
    mesh: _Mesh = "fsdp",
    load_mesh: Annotated[str, typer.Option(metavar="MESH", help="Sharding for the load.")] = "fsdp",
    processes: _Processes = None,
    threads: _RankThreads = None,
    phase: _Phase = "both",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the checkpoint.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed of the values.")] = 0,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Save and load a model's size of known values, and compare.

    The acceptance test for a new bucket or file system: every element is compared. Ranks are
    simulated, a few at a time, each in a process with its own connections; it needs neither a GPU
    nor torchrun. Exit code 1 if an element came back wrong.
    """
    interrupted = "What the interrupted save wrote was removed; the same command starts over."
    with command(json, if_interrupted=interrupted, patience_s=math.inf) as output, sigterm_as_ctrl_c():
        options = parse_storage_options(storage_options)
        with output.progress("roundtrip") as bar:
            done = {"saving": 0, "loading": 0}

            def progress(phase_name: str, moved: int, total: int) -> None:
                done[phase_name] = moved
                bar(sum(done.values()), total * (2 if phase == "both" else 1))

            result = ckpt.roundtrip(
                url, model, world_size=world_size, load_world_size=load_world_size, dtype=dtype, optimizer=optimizer,
                mesh=mesh, load_mesh=load_mesh, storage_options=options, processes=processes, threads=threads,
                phase=phase, keep=keep, seed=seed, progress=progress,
            )  # fmt: skip
        if output.as_json:
            output.json(_as_json(result))
        else:
            _print(output, result)
        if result.wrong:
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, result: Roundtrip) -> None:
    output.print(
        f"{shown(result.model)}: {count(result.parameters, 'element')}, {size(result.payload_bytes)}, at {shown(result.url)}"
    )
    if result.plan is not None:
        ranks = result.plan.shard_bytes
        output.print(
            f"planned in {result.plan.plan_s:.1f} s: {count(result.plan.items, 'slice')} "
            f"for {count(len(ranks), 'rank')}, "
            f"{size(min(ranks))} to {size(max(ranks))} each"
        )
    if result.save is None and result.load is None:
        return
    rows = table("", ">ranks", ">at once", ">data", ">seconds", ">GB/s", ">requests", ">peak beyond shard")
    for name, phase in (("save", result.save), ("load", result.load)):
        if phase is not None:
            counts = phase.counts
            requests = counts.puts + counts.parts + counts.reads + counts.stats + counts.others
            rows.add_row(
                name, f"{len(phase.ranks)}", f"{phase.processes}", size(phase.nbytes),
                f"{phase.wall_s + phase.commit_s:.1f}", f"{phase.bytes_per_s / 1e9:.2f}", f"{requests:,}",
                size(phase.peak_beyond_shard_bytes),
            )  # fmt: skip
    output.print(rows)
    if result.sent_per_payload is not None:
        output.print(f"sent {result.sent_per_payload:.4f} x the bytes of the tensors")
    if result.read_per_needed is not None:
        output.print(f"read {result.read_per_needed:.4f} x the bytes needed")
    wrong = list(result.wrong.items())
    output.print(
        *(f"[bold red]wrong:[/] {shown(fqn)}: {count(n, 'element')}" for fqn, n in wrong[:_MAX_LINES])
    )
    output.print_hidden(len(wrong) - _MAX_LINES)
    if wrong:
        elements = f"[bold red]{count(sum(result.wrong.values()), 'element')}[/]"
        output.print(f"{elements} in {count(len(wrong), 'tensor')} differ from what was saved")
    elif result.load is not None:
        output.print("[bold green]ok:[/] every element is what was saved")
    if result.kept:
        output.print(f"kept the checkpoint at {shown(result.url)}")


def _as_json(result: Roundtrip) -> dict[str, Any]:
    facts = dataclasses.asdict(result)
    for name, phase in (("save", result.save), ("load", result.load)):
        if phase is not None:
            for computed in ("bytes_per_s", "transfer_share", "peak_beyond_shard_bytes"):
                facts[name][computed] = getattr(phase, computed)
            for rank in facts[name]["ranks"]:
                del rank["wrong"], rank["results"]
    units = ("seconds", "moved_bytes", "resident_bytes")
    return facts | {
        "ok": not result.wrong,
        "sent_per_payload": result.sent_per_payload,
        "read_per_needed": result.read_per_needed,
        "wrong": result.wrong,
        "timeline": [dict(zip(units, point, strict=True)) for point in result.timeline],
    }
