"""Print what `ckpt verify --signed` has found."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ckpt.cli.printing.output import MAX_LINES, Output
from ckpt.words import count, shown, size

if TYPE_CHECKING:
    from ckpt.provenance.check import SignedVerification


def as_json(result: SignedVerification) -> dict[str, Any]:
    """Make what --json prints."""
    checkpoints = [
        {
            **{f.name: getattr(each, f.name) for f in dataclasses.fields(each) if f.name != "statement"},
            "ok": each.ok,
        }
        for each in result.checkpoints
    ]
    return {
        "url": result.url,
        "quick": result.quick,
        "checkpoints": checkpoints,
        "faults": result.faults,
        "ok": result.ok,
    }


def print_signed(output: Output, result: SignedVerification) -> None:
    """Print a line for each checkpoint, and for each fault."""
    lines: list[str] = []
    for each in result.checkpoints:
        name = shown(each.path or each.url)
        lines += [f"[bold red]wrong:[/] {name}: {shown(fault)}" for fault in each.faults]
        if each.ok:
            step = "" if each.step is None else f", step {each.step}"
            amount = "" if result.quick else f", {size(each.checked_bytes)} read and compared"
            lines.append(f"[green]signed:[/] {name}{step}{amount}\n  {each.digest}")
    lines += [f"[bold red]wrong:[/] {shown(fault)}" for fault in result.faults]
    output.print(*lines[:MAX_LINES])
    output.print_hidden(len(lines) - MAX_LINES)
    bad = sum(not each.ok for each in result.checkpoints)
    amount = count(len(result.checkpoints), "checkpoint")
    if result.ok:
        output.print(
            f"[bold green]ok:[/] {amount} of {shown(result.url)}: signed by this key, and what was signed"
        )
    else:
        more = f", and {count(len(result.faults), 'fault')} of the whole" if result.faults else ""
        output.print(f"[bold red]not as signed:[/] {bad} of {amount} of {shown(result.url)}{more}")
