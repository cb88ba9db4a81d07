"""Print plans of checkpoints, as tables that fit 80 columns, and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ckpt.cli.printing.output import Output
from ckpt.words import printable, size

if TYPE_CHECKING:
    from ckpt.planning.plan import Cluster, Plan
    from ckpt.planning.requests import Requests
    from ckpt.planning.table_plan import TablePlan

P = TypeVar("P")
_LINE = 78
_NAME = 13
_LARGE_INDEX_BYTES = 1 << 30


def print_models(output: Output, plans: Sequence[Plan]) -> None:
    """Print a column for each model, and below them what was assumed."""
    rows: list[tuple[str, Callable[[Plan], str] | None]] = [
        ("", lambda p: _short(p.model.name)),
        ("parameters", lambda p: _number(p.model.parameters)),
        ("ONE CHECKPOINT", None),
        ("size", lambda p: size(p.stored.nbytes)),
        ("largest file", lambda p: size(float(p.stored.rank_bytes.max()))),
        ("objects", lambda p: f"{p.stored.objects:,}"),
        ("ONE SAVE", None),
        ("put requests", lambda p: f"{p.save.puts:,.0f}"),
        ("get requests", lambda p: f"{p.save.gets:,.0f}"),
        ("work stops for", lambda p: _time(p.stall_s)),
        ("durable after", lambda p: _time(p.durable_s)),
        ("memory of a node", lambda p: size(p.node_memory_bytes)),
        ("ONE RESTORE", None),
        ("read", lambda p: size(p.read_bytes)),
        ("get requests", lambda p: f"{p.restore.gets:,.0f}"),
        ("takes", lambda p: _time(p.restore_s)),
        ("ONE REMOVAL", None),
        (
            "get, list, delete",
            lambda p: f"{p.remove.gets:,.0f}, {p.remove.lists:.0f}, {p.remove.deletes:.0f}",
        ),
        ("INTERVAL", None),
        ("failure every", lambda p: _time(p.job_mtbf_s)),
        ("Young", lambda p: _time(p.young_s)),
        ("Daly", lambda p: _time(p.daly_s)),
        ("of this plan", lambda p: _time(p.interval_s)),
        ("TIME OF THE RUN", None),
        ("useful", lambda p: _share(p.time.useful)),
        ("stopped by saves", lambda p: _share(p.time.stall)),
        ("restarting", lambda p: _share(p.time.restart)),
        ("done again", lambda p: _share(p.time.lost)),
        ("DOLLARS A MONTH", None),
        ("storage", lambda p: f"{p.dollars.storage:,.0f}"),
        ("requests", lambda p: f"{p.dollars.requests:,.0f}"),
    ]
    _print_table(output, rows, plans)
    output.print("")
    cluster, first = plans[0].cluster, plans[0]
    shapes = "; ".join(dict.fromkeys(each.model.about for each in plans))
    _print_wrapped(
        output,
        [
            f"{cluster.ranks:,} ranks, {cluster.ranks_per_node} a node, {first.mesh}",
            "saves in the background" if cluster.is_async else "saves stop the work",
            *_assumed(cluster),
            f"{_time(cluster.downtime_s)} down after a failure",
            f"{_time(cluster.control_s)} of control in a save (--control)",
            shapes,
            *(
                ["where the interval is above Daly's, an upload takes as long"]
                * any(map(_waits_for_uploads, plans))
            ),
        ],
    )


def _waits_for_uploads(plan: Plan) -> bool:
    return plan.cluster.interval_s is None and plan.interval_s > 1.001 * plan.daly_s


def print_tables(output: Output, plans: Sequence[TablePlan]) -> None:
    """Print a column for each share of touched rows."""
    first = plans[0]
    rows: list[tuple[str, Callable[[TablePlan], str] | None]] = [
        ("touched a save", lambda p: f"{100 * p.touched:g} %"),
        ("ONE SAVE", None),
        ("base", lambda p: size(p.base.bytes)),
        ("  durable after", lambda p: _time(p.base.durable_s)),
        ("  of all saves", lambda p: _share(p.base.share)),
        ("delta", lambda p: size(p.delta.bytes)),
        ("  durable after", lambda p: _time(p.delta.durable_s)),
        ("merge", lambda p: size(p.merge.bytes) if p.merge.share else "none"),
        ("  durable after", lambda p: _time(p.merge.durable_s) if p.merge.share else ""),
        ("  of all saves", lambda p: _share(p.merge.share)),
        ("less than full", lambda p: f"{p.full_ratio:.1f} x"),
        ("put requests", lambda p: f"{p.save_requests.puts:,.0f}"),
        ("ONE RESTORE", None),
        ("longest chain", lambda p: size(p.restore_bytes)),
        ("takes, at most", lambda p: _time(p.restore_s)),
        ("  on the mean", lambda p: _time(p.restore_mean_s)),
        ("get requests", lambda p: f"{p.restore_requests.gets:,.0f}"),
        ("IN THE STORE", None),
        ("at most", lambda p: size(p.store_bytes)),
        ("entries of an index", lambda p: _number(p.entries.count)),
        ("DOLLARS A MONTH", None),
        ("storage", lambda p: f"{p.dollars.storage:,.0f}"),
        ("requests", lambda p: f"{p.dollars.requests:,.0f}"),
    ]
    _print_table(output, rows, plans)
    output.print("")
    cluster, table = first.cluster, first.table
    _print_wrapped(
        output,
        [
            f"{_number(table.rows)} rows x {table.width}, {table.row_bytes:,} bytes each, {size(table.nbytes)}",
            f"{cluster.nodes:,} nodes: {size(first.node_bytes)} of {size(first.node_memory_bytes)} each",
            f"a save every {_time(first.interval_s)}",
            *_assumed(cluster),
        ],
    )
    if first.base.durable_s > first.interval_s:
        output.print("[yellow]a base takes longer than the interval:[/] the saves that follow wait for it")
    index_bytes = max(plan.entries.index_bytes for plan in plans)
    if index_bytes > _LARGE_INDEX_BYTES:
        output.print(f"[yellow]each save writes an index of up to {size(index_bytes)}[/]")


def _print_table(
    output: Output, rows: Sequence[tuple[str, Callable[[P], str] | None]], plans: Sequence[P]
) -> None:
    cells = [(name, *("" if cell is None else cell(plan) for plan in plans)) for name, cell in rows]
    output.print_columns(cells, right=range(1, len(plans) + 1))


def _assumed(cluster: Cluster) -> list[str]:
    return [
        f"a node sends {_rate(cluster.node_bytes_per_s)}, the store takes {_rate(cluster.store_bytes_per_s)}",
        f"a node fails every {_time(cluster.node_mtbf_s)}",
        f"{cluster.keep} checkpoints stay",
        f"prices: {cluster.prices.name}"
        + (f", looked up {cluster.prices.checked}" if cluster.prices.checked else ""),
    ]


def _print_wrapped(output: Output, parts: Sequence[str]) -> None:
    import textwrap

    from ckpt.words import shown

    for line in textwrap.wrap(
        "; ".join(parts), min(_LINE, output.width), break_long_words=False, break_on_hyphens=False
    ):
        output.print(f"[dim]{shown(line)}[/]")


def _short(name: str) -> str:
    name = printable(name).rstrip("/")
    last = name.rpartition("/")[2] or name
    return last if len(last) <= _NAME else f"{last[: _NAME - 1]}…"


def _number(number: float) -> str:
    for unit, factor in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if number >= factor:
            return f"{number / factor:.4g} {unit}"
    return f"{number:,.0f}"


def _share(share: float) -> str:
    return f"{100 * share:.2f} %"


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:.3g} GB/s"


def _time(seconds: float) -> str:
    for unit, length in (("y", 365 * 86400.0), ("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds >= 0.001 or not seconds else f"{1000 * seconds:.2g} ms"


# -- JSON ----------------------------------------------------------------------------------------------


def models_as_json(plans: Sequence[Plan]) -> dict[str, Any]:
    return {"plans": [_model_facts(plan) for plan in plans]}


def tables_as_json(plans: Sequence[TablePlan]) -> dict[str, Any]:
    return {"tables": [_table_facts(plan) for plan in plans]}


def _model_facts(plan: Plan) -> dict[str, Any]:
    stored = plan.stored
    return {
        "model": plan.model.name,
        "about": plan.model.about,
        "parameters": plan.model.parameters,
        "tensors": len(plan.model.tensors),
        "mesh": plan.mesh,
        "checkpoint": {
            "bytes": stored.nbytes,
            "data_bytes": stored.data_bytes,
            "record_bytes": stored.record_bytes,
            "largest_file_bytes": float(stored.rank_bytes.max()),
            "objects": stored.objects,
            "files_on_posix": stored.files,
            "slices": stored.items,
        },
        "save": {
            "requests": _requests(plan.save),
            "stall_s": plan.stall_s,
            "durable_s": plan.durable_s,
            "node_memory_bytes": plan.node_memory_bytes,
        },
        "restore": {
            "requests": _requests(plan.restore),
            "read_bytes": plan.read_bytes,
            "restore_s": plan.restore_s,
        },
        "remove": {"requests": _requests(plan.remove)},
        "interval": {
            "job_mtbf_s": plan.job_mtbf_s,
            "young_s": plan.young_s,
            "daly_s": plan.daly_s,
            "interval_s": plan.interval_s,
            "saves_per_month": plan.saves_per_month,
        },
        "time": dataclasses.asdict(plan.time),
        "dollars_per_month": _dollars(plan),
        "cluster": _cluster(plan.cluster),
    }


def _table_facts(plan: TablePlan) -> dict[str, Any]:
    kept = {
        each.name: getattr(plan, each.name)
        for each in dataclasses.fields(plan)
        if each.name not in ("table", "cluster", "dollars", "save_requests", "restore_requests")
    }
    for name in ("base", "delta", "merge", "entries"):
        kept[name] = dataclasses.asdict(kept[name])
    return {
        "rows": plan.table.rows,
        "width": plan.table.width,
        "row_bytes": plan.table.row_bytes,
        **kept,
        "save_requests": _requests(plan.save_requests),
        "restore_requests": _requests(plan.restore_requests),
        "dollars_per_month": _dollars(plan),
        "cluster": _cluster(plan.cluster),
    }


def _requests(requests: Requests) -> dict[str, float]:
    return {name: round(number, 3) for name, number in dataclasses.asdict(requests).items()}


def _dollars(plan: Plan | TablePlan) -> dict[str, float]:
    return {"storage": plan.dollars.storage, "requests": plan.dollars.requests, "total": plan.dollars.total}


def _cluster(cluster: Cluster) -> dict[str, Any]:
    facts = {each.name: getattr(cluster, each.name) for each in dataclasses.fields(cluster)}
    prices = cluster.prices
    return {**facts, "prices": {"name": prices.name, "source": prices.source, "checked": prices.checked}}
