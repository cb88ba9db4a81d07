"""`ckpt verify`: check that a checkpoint is what was saved."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

import ckpt
from ckpt.backends.options import redact_url
from ckpt.cli.options import (
    Expect,
    Json,
    StorageOptions,
    Threads,
    Urls,
    check_expect,
    parse_quantity,
    parse_storage_options,
)
from ckpt.cli.printing.output import EXIT_PROBLEM, MAX_LINES, Output, command, for_each, table
from ckpt.errors import ConfigurationError, NotCommitted, NotFound
from ckpt.words import age, count, shown, size

if TYPE_CHECKING:
    from ckpt.consistency.sampling import Sampled
    from ckpt.tools.findings import Damage, Stray, Verification

_SHARES = {"": 1.0, "%": 0.01}

EXAMPLES = """
ckpt verify runs/step-100
ckpt verify s3://bucket/run
ckpt verify s3://bucket/run/step-100 s3://bucket/run/step-200 --quick
ckpt verify s3://bucket/run/step-100 --sample 5%
ckpt verify s3://bucket/run --signed --key public.pem --memory seen.json
"""


def verify(
    urls: Urls,
    quick: Annotated[
        bool, typer.Option("--quick", help="Check records and file sizes only; read no data.")
    ] = False,
    sample: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Read this share of the blocks, drawn evenly: 5%, 0.01."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Draw the blocks that a --sample with this seed has drawn."),
    ] = None,
    signed: Annotated[
        bool,
        typer.Option("--signed", help="Check signatures too, of URL or of all checkpoints in it, by --key."),
    ] = False,
    key: Annotated[
        str | None, typer.Option(metavar="KEY", help="The public key of the signatures, a PEM file.")
    ] = None,
    not_before: Annotated[
        int | None, typer.Option(metavar="STEP", help="The step that the newest signed one has at least.")
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Remember what is signed, and find what was put back or taken away."
        ),
    ] = None,
    run: Annotated[
        str | None, typer.Option(metavar="ID", help="The run that all signed ones must be of.")
    ] = None,
    expect: Expect = None,
    threads: Threads = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Check every byte and every record of checkpoints: of each URL, or of all in it if it is a folder of them.

    Also checks that the stored slices cover every tensor, and lists objects that do not belong to
    the checkpoint. With --sample it reads some of the blocks, and says how probably damage was missed.

    Of a stock PyTorch checkpoint it checks sizes, coverage and the CRCs in the files; of a safetensors
    model of another program, which has no checksums, the index, headers and sizes. Changes nothing.
    """
    with command(json, if_interrupted="Nothing was changed; verify starts over.") as output:
        more: dict[str, Any] = {
            "storage_options": parse_storage_options(storage_options), "quick": quick, "threads": threads
        }  # fmt: skip
        of_signed = {"run": run, "not_before": not_before, "memory": memory}
        if key is not None and signed:
            if (expect, sample, seed) != (None, None, None):
                raise ConfigurationError(
                    "--signed goes with neither --expect, as a signature names one checkpoint too, nor --sample and --seed"
                )
            signer = key
            for_each(output, urls, lambda url: _verify_signed(output, url, signer, {**more, **of_signed}))
            return
        if key is not None or signed or any(value is not None for value in of_signed.values()):
            raise ConfigurationError(
                "--signed needs --key, and --key, --run, --not-before and --memory need --signed"
            )
        more["sample"] = None if sample is None else parse_quantity("--sample", sample, _SHARES, "5% or 0.05")
        check_expect(expect, urls)
        more |= {"seed": seed, "expect": expect}
        for_each(output, urls, lambda url: _verify(output, url, more))


def _verify(output: Output, url: str, more: dict[str, Any]) -> None:
    """Verify the checkpoint at a URL; if it has none of its own, all that are below it."""
    try:
        with output.progress("verifying") as progress:
            result = ckpt.verify(url, progress=progress, **more)
    except NotCommitted:
        if more["expect"] is not None or not (below := _below(output, url, more["storage_options"])):
            raise
        for_each(output, below, lambda each: _verify_listed(output, each, more))
        return
    _show(output, result)


def _below(output: Output, root: str, options: Mapping[str, Any] | None) -> list[str]:
    """List the checkpoints of a folder that a save has committed; none if the folder is one itself."""
    with output.progress("listing") as progress:
        listed = ckpt.list_checkpoints(root, storage_options=options, progress=progress)
    if any(not each.path for each in listed):
        return []
    for each in listed:
        if each.state == "incomplete" and not output.as_json:
            output.print(f"[yellow]not checked:[/] {shown(each.path)} is not committed")
    committed = [each.path for each in listed if each.state != "incomplete"]
    return [os.path.join(root, path) for path in committed]


def _verify_listed(output: Output, url: str, more: dict[str, Any]) -> None:
    """Verify a checkpoint that was listed before; skip it if it was removed since."""
    try:
        with output.progress("verifying") as progress:
            result = ckpt.verify(url, progress=progress, **more)
    except NotFound:
        if not output.as_json:
            output.print(f"[yellow]not checked:[/] {shown(redact_url(url))} was removed after it was listed")
        return
    _show(output, result)


def _show(output: Output, result: Verification) -> None:
    if output.as_json:
        output.json({**dataclasses.asdict(result), "ok": result.ok})
    else:
        _print(output, result)
    if not result.ok:
        raise typer.Exit(EXIT_PROBLEM)


def _verify_signed(output: Output, url: str, key: str, more: dict[str, Any]) -> None:
    from ckpt.cli.signing.verified import as_json, print_signed

    with output.progress("verifying") as progress:
        result = ckpt.verify_signed(url, key, progress=progress, **more)
    if output.as_json:
        output.json(as_json(result))
    else:
        print_signed(output, result)
    if not result.ok:
        raise typer.Exit(EXIT_PROBLEM)


def _print(output: Output, result: Verification) -> None:
    damages = len(result.damages) + result.damages_omitted
    output.print(*(f"[bold red]damaged:[/] {damage_line(damage)}" for damage in result.damages[:MAX_LINES]))
    output.print_hidden(damages - MAX_LINES)
    output.print(*(f"[yellow]warning:[/] {damage_line(warning)}" for warning in result.warnings))
    if result.strays is None and result.checked_files:  # else no record could be read
        output.print(
            "the storage did not list the folder, so objects that do not belong here were not looked for"
        )
    elif result.strays:
        _print_strays(output, result.strays)
    if result.format == "safetensors" and result.ok:
        output.print(
            f"a safetensors model of another program has no checksums: the bytes of "
            f"{count(result.unchecked_items, 'tensor')} could not be checked"
        )
    elif result.unchecked_items:
        output.print(
            f"{count(result.unchecked_items, 'item')} without CRCs: their bytes could not be checked"
        )
    if not result.stock_readers:
        output.print(
            f"stock PyTorch cannot read it: .metadata was left out as too large, and not checked; "
            f"`ckpt convert {shown(result.url)} DST --to dcp` makes a checkpoint with one"
        )
    if result.unchecked_digests is not None:
        output.print(f"the digests of its blocks {not_checked(result.unchecked_digests)}")
    if result.sample is not None:
        _print_sample(output, result.sample)
    amount = count(result.checked_files, "file")
    amount += (
        ", sizes and records only" if result.quick else f", {size(result.checked_bytes)} read and compared"
    )
    verdict = f"[bold red]{count(damages, 'damage')}[/] in" if damages else "[bold green]ok:[/]"
    output.print(f"{verdict} {shown(result.url)} ({amount})")


def not_checked(algorithm: str) -> str:
    """Say why digests of this algorithm were not checked, and what helps."""
    hint = "this version knows none of that kind"
    if algorithm == "blake3":
        hint = "that needs the package blake3: pip install './ckpt-storage\\[sign]'"
    return f"({shown(algorithm)}) were not checked; {hint}"


def _print_sample(output: Output, sample: Sampled) -> None:
    if sample.read_blocks == sample.blocks:
        output.print(f"read all of {count(sample.blocks, 'block')}: there are few")
        return
    output.print(
        f"read {sample.read_blocks:,} of {count(sample.blocks, 'block')}, drawn with --seed {sample.seed}; damage of 1 % of "
        f"the blocks is missed with a probability of at most {_chance(sample.missed_percent)}, of one block "
        f"{_chance(sample.missed_one)}"
    )


def _chance(probability: float) -> str:
    """Write a probability for people, rounded up: it is a limit."""
    if probability >= 0.001:
        return f"{math.ceil(probability * 1000) / 10:g} %"
    return "0" if probability == 0 else f"{probability * 100:.0e} %"


def damage_line(damage: Damage) -> str:
    """Write a damage for people, with what it touches."""
    parts = [shown(damage.key)] if damage.key else []
    if damage.start is not None and damage.stop is not None:
        parts.append(f"bytes {damage.start}-{damage.stop}")
    text = ": ".join([*parts, shown(damage.message)])
    if damage.fqns and damage.kind != "coverage":
        hidden = damage.fqn_count - len(damage.fqns)
        more = f" and {hidden:,} more" if hidden > 0 else ""
        text += f" (affects {', '.join(map(shown, damage.fqns))}{more})"
    return text


def _print_strays(output: Output, strays: list[Stray]) -> None:
    rows = table("stray", ">bytes", ">age", "")
    for stray in strays[:MAX_LINES]:
        origin = "left by a save" if stray.ours else "not written by this library"
        rows.add_row(
            shown(stray.key),
            "?" if stray.unfinished else size(stray.size_bytes),
            age(None if stray.modified_at_s is None else time.time() - stray.modified_at_s),
            "unfinished upload" if stray.unfinished else origin,
        )
    output.print(rows)
    output.print_hidden(len(strays) - MAX_LINES)
    output.print(f"{count(len(strays), 'stray')}: not needed by the checkpoint, and harmless")
