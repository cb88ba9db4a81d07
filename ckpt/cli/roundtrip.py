"""`ckpt roundtrip`: does this storage give back what it is given, at a model's size?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from ckpt.cli.common import (
    EXIT_PROBLEM,
    Json,
    Output,
    StorageOptions,
    command,
    parse_storage_options,
    shown,
    size,
)

if TYPE_CHECKING:
    from ckpt.acceptance.roundtrip import Part, Roundtrip

__all__ = ["roundtrip"]

_MAX_LINES = 20


def roundtrip(
    url: Annotated[
        str,
        typer.Argument(
            metavar="URL", help="Where to save: nothing may be there yet. A path, s3://bucket/key, ..."
        ),
    ],
    model: Annotated[
        str,
        typer.Option(
            help="Shapes of t5-small, t5-11b, llama-2-7b, llama-2-13b, granite-7b, gpt-22b, gpt-175b or gpt-1t."
        ),
    ] = "t5-small",
    world_size: Annotated[int, typer.Option(min=1, help="Ranks that save.")] = 8,
    load_world_size: Annotated[
        int | None, typer.Option(min=1, help="Ranks that load; default half of those that save.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, fp64 or fp8.")] = "bf16",
    optimizer: Annotated[str, typer.Option(help="none or adamw.")] = "none",
    mesh: Annotated[str, typer.Option(help="fsdp, hsdp, hsdp2xfsdp4, tp2xfsdp4, ...")] = "fsdp",
    load_mesh: Annotated[str, typer.Option(help="The same, of the ranks that load.")] = "fsdp",
    processes: Annotated[
        int | None, typer.Option(min=1, help="Ranks at the same time; default by cores and free memory.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Transfers at the same time of each rank.")
    ] = None,
    phase: Annotated[
        str,
        typer.Option(
            help="both, save (which keeps the checkpoint), load (what was saved so), or plan (and write nothing)."
        ),
    ] = "both",
    keep: Annotated[bool, typer.Option("--keep", help="Leave the checkpoint there.")] = False,
    seed: Annotated[int, typer.Option(help="Of the values.")] = 0,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Save a model's shapes with known values as many ranks, load as others, compare every element.

    The acceptance test for a new bucket or file system. Ranks are simulated, a few at a time, each in a process
    with its own connections; no GPU and no torchrun is needed. Exit code 1: something came back wrong.
    """
    with command(json, to_go_on="What the interrupted save wrote was removed; run it again.") as output:
        from ckpt.acceptance.roundtrip import roundtrip as run

        options = parse_storage_options(storage_options)
        with output.progress("saving and loading") as bar:
            done = {"saving": 0, "loading": 0}

            def progress(what: str, moved: int, total: int) -> None:
                done[what] = moved
                bar(sum(done.values()), total * (2 if phase == "both" else 1))

            found = run(
                url, model, world_size=world_size, load_world_size=load_world_size, dtype=dtype, optimizer=optimizer,
                mesh=mesh, load_mesh=load_mesh, storage_options=options, processes=processes, threads=threads,
                phase=phase, keep=keep, seed=seed, progress=progress,
            )  # fmt: skip
        if output.as_json:
            output.json(_as_json(found))
        else:
            _print(output, found)
        if found.wrong:
            raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, found: Roundtrip) -> None:
    output.print(
        f"{shown(found.model)}: {found.parameters:,} elements, {size(found.payload_bytes)}, at {shown(found.url)}"
    )
    if found.plan is not None:
        ranks = found.plan.shard_bytes
        output.print(
            f"planned in {found.plan.plan_s:.1f} s: {found.plan.items:,} slices for {len(ranks):,} ranks, "
            f"{size(min(ranks))} to {size(max(ranks))} each"
        )
    if found.save is None and found.load is None:
        return
    table = Table(
        "", "ranks", "at once", "data", "seconds", "GB/s", "operations", "peak beyond shard", box=None
    )
    for name, part in (("save", found.save), ("load", found.load)):
        if part is not None:
            table.add_row(
                name, f"{len(part.ranks)}", f"{part.processes}", size(part.nbytes),
                f"{part.wall_s + part.commit_s:.1f}", f"{part.bytes_per_s / 1e9:.2f}",
                f"{part.counts.puts + part.counts.parts + part.counts.reads + part.counts.stats + part.counts.others:,}",
                size(part.peak_beyond_shard_bytes),
            )  # fmt: skip
    output.print(table)
    if found.sent_per_payload is not None:
        output.print(f"sent {found.sent_per_payload:.4f} x the tensors' bytes")
    if found.read_per_needed is not None:
        output.print(f"read {found.read_per_needed:.4f} x the bytes needed")
    for fqn, count in list(found.wrong.items())[:_MAX_LINES]:
        output.print(f"[bold red]wrong:[/] {shown(fqn)}: {count:,} elements")
    if found.wrong:
        output.print(
            f"[bold red]{sum(found.wrong.values()):,} elements[/] of {len(found.wrong):,} tensors are wrong"
        )
    elif found.load is not None:
        output.print("[bold green]ok:[/] every element came back as it was saved")
    if found.kept:
        output.print(f"the checkpoint is kept at {shown(found.url)}")


def _as_json(found: Roundtrip) -> dict[str, Any]:
    return {
        "url": found.url,
        "ok": not found.wrong,
        "model": found.model,
        "parameters": found.parameters,
        "payload_bytes": found.payload_bytes,
        "sent_per_payload": found.sent_per_payload,
        "read_per_needed": found.read_per_needed,
        "plan": None if found.plan is None else vars(found.plan),
        "save": _part_as_json(found.save),
        "load": _part_as_json(found.load),
        "wrong": found.wrong,
        "kept": found.kept,
        "timeline": [
            {"seconds": seconds, "moved_bytes": moved, "resident_bytes": resident}
            for seconds, moved, resident in found.timeline
        ],
    }


def _part_as_json(part: Part | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {
        "processes": part.processes,
        "wall_s": part.wall_s,
        "commit_s": part.commit_s,
        "bytes_per_s": part.bytes_per_s,
        "transfer_share": part.transfer_share,
        "peak_beyond_shard_bytes": part.peak_beyond_shard_bytes,
        "counts": vars(part.counts),
        "ranks": [
            {
                "rank": rank.rank, "shard_bytes": rank.shard_bytes, "values_s": rank.values_s,
                "transfer_s": rank.transfer_s, "peak_bytes": rank.peak_bytes, "counts": vars(rank.counts),
            }
            for rank in part.ranks
        ],
    }  # fmt: skip
