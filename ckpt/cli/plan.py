"""`ckpt plan`: say beforehand what the checkpoints of a run cost."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt.cli.options import (
    SIZE_UNITS,
    TIME_UNITS,
    Json,
    StorageOptions,
    parse_quantity,
    parse_storage_options,
)
from ckpt.cli.printing.output import Output, command
from ckpt.errors import ConfigurationError
from ckpt.words import shown

if TYPE_CHECKING:
    from ckpt.planning.models import Model
    from ckpt.planning.plan import Cluster

_MODELS = ("t5-11b", "gpt-22b", "gpt-175b", "gpt-1t")
_MAX_MODELS = 4
_LONG_TIMES = {**TIME_UNITS, "w": 7 * 86400, "y": 365 * 86400}
_RATES = {
    **{f"{unit}/s": factor for unit, factor in SIZE_UNITS.items()},
    "mbit/s": 1e6 / 8, "gbit/s": 1e9 / 8, "tbit/s": 1e12 / 8,
}  # fmt: skip
_TABLE = re.compile(r"(\d+(?:\.\d+)?(?:e\d+)?)\s*x\s*(\d+)", re.IGNORECASE)

_MODEL, _CLUSTER, _SAVES, _PRICES, _TABLES = (
    "The model",
    "The cluster",
    "The saves",
    "Prices",
    "Tables of embeddings",
)

_Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MODEL]...",
        help="Up to four: names such as gpt-22b, numbers of parameters such as 70B, or URLs of checkpoints. "
        "By default t5-11b, gpt-22b, gpt-175b and gpt-1t.",
    ),
]
_Ranks = Annotated[int, typer.Option(metavar="N", min=1, help="Number of ranks.", rich_help_panel=_CLUSTER)]
_Mesh = Annotated[
    str,
    typer.Option(
        metavar="MESH", help="fsdp, hsdp2xfsdp4, tp8xpp16xfsdp, tp8xpp64xdp32, ...", rich_help_panel=_CLUSTER
    ),
]
_RanksPerNode = Annotated[
    int, typer.Option(metavar="N", min=1, help="Ranks of one machine.", rich_help_panel=_CLUSTER)
]
_Dtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="bf16, fp16, fp32, fp64 or fp8.", rich_help_panel=_MODEL)
]
_Optimizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="none, sgd or adamw (default); of a table none, rowwise-adagrad (default), adagrad or adam.",
        rich_help_panel=_MODEL,
    ),
]
_OptimizerDtype = Annotated[
    str, typer.Option(metavar="DTYPE", help="Of the optimizer's states.", rich_help_panel=_MODEL)
]
_MasterWeights = Annotated[
    bool,
    typer.Option(
        "--master-weights", help="The optimizer keeps the weights once more.", rich_help_panel=_MODEL
    ),
]
_NodeBandwidth = Annotated[
    str, typer.Option(metavar="RATE", help="Network of a machine.", rich_help_panel=_CLUSTER)
]
_StoreBandwidth = Annotated[
    str, typer.Option(metavar="RATE", help="Of the whole store.", rich_help_panel=_CLUSTER)
]
_CopyBandwidth = Annotated[
    str,
    typer.Option(
        metavar="RATE", help="Of a machine, from its accelerators into its memory.", rich_help_panel=_CLUSTER
    ),
]
_Mtbf = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Mean time between failures of a machine; by default 264d, as Llama 3's.",
        rich_help_panel=_CLUSTER,
    ),
]
_Downtime = Annotated[
    str,
    typer.Option(metavar="TIME", help="From a failure until the processes load.", rich_help_panel=_CLUSTER),
]
_Control = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="What else a save stops the work for: planning, messages of ranks.",
        rich_help_panel=_SAVES,
    ),
]
_Interval = Annotated[
    str | None,
    typer.Option(
        metavar="TIME",
        help="Work between two saves: 10m, 2h. By default the best; for tables 30m.",
        rich_help_panel=_SAVES,
    ),
]
_Keep = Annotated[
    int, typer.Option(metavar="N", min=1, help="Checkpoints that stay.", rich_help_panel=_SAVES)
]
_Sync = Annotated[
    bool, typer.Option("--sync", help="Saves stop the work until they are durable.", rich_help_panel=_SAVES)
]
_RankThreads = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Parallel transfers of a rank; they set the size of parts.",
        rich_help_panel=_SAVES,
    ),
]
_Store = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Whose prices: aws-s3, gcs, ibm-cos, none, or one of --prices.",
        rich_help_panel=_PRICES,
    ),
]
_PriceFile = Annotated[
    str | None,
    typer.Option(
        metavar="FILE", help="TOML to use in the place of the built-in prices.", rich_help_panel=_PRICES
    ),
]
_ShowPrices = Annotated[
    bool,
    typer.Option(
        "--show-prices", help="Print the built-in prices, for you to edit.", rich_help_panel=_PRICES
    ),
]
_Plot = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="Draw the first model's useful time over interval and ranks (SVG)."),
]
_Table = Annotated[
    str | None,
    typer.Option(
        metavar="ROWSxWIDTH",
        help="Plan a table of embeddings instead, such as 1e9x64.",
        rich_help_panel=_TABLES,
    ),
]
_Touched = Annotated[
    str,
    typer.Option(
        metavar="LIST",
        help="Of a table: per cent of the rows that change between saves.",
        rich_help_panel=_TABLES,
    ),
]
_NodeMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="Memory of a machine, for tables.", rich_help_panel=_CLUSTER)
]

EXAMPLES = """
ckpt plan gpt-175b --ranks 4096 --mesh tp8xpp16xfsdp
ckpt plan 70B --interval 10m --plot useful.svg
ckpt plan --table 1e9x64 --ranks 8 --touched 0.1,1,10
"""


def plan(
    models: _Models = None,
    ranks: _Ranks = 1024,
    mesh: _Mesh = "fsdp",
    ranks_per_node: _RanksPerNode = 8,
    dtype: _Dtype = "bf16",
    optimizer: _Optimizer = None,
    optimizer_dtype: _OptimizerDtype = "fp32",
    master_weights: _MasterWeights = False,
    node_bandwidth: _NodeBandwidth = "5GB/s",
    store_bandwidth: _StoreBandwidth = "200GB/s",
    copy_bandwidth: _CopyBandwidth = "50GB/s",
    mtbf: _Mtbf = None,
    downtime: _Downtime = "5m",
    control: _Control = "0s",
    interval: _Interval = None,
    keep: _Keep = 3,
    sync: _Sync = False,
    threads: _RankThreads = 16,
    store: _Store = "aws-s3",
    prices: _PriceFile = None,
    show_prices: _ShowPrices = False,
    plot: _Plot = None,
    table: _Table = None,
    touched: _Touched = "0.1,0.3,1,3,10",
    node_memory: _NodeMemory = "12TB",
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Say what checkpoints cost: bytes, requests, time, money.

    Counts objects and requests as this library makes them, and computes the best interval between saves and the
    useful share of the run's time. docs/planning.md has each formula, and how it was checked.
    """
    with command(json) as output:
        from ckpt.planning.plan import LLAMA3_NODE_MTBF_S, Cluster
        from ckpt.planning.prices import price_text, prices_of

        if show_prices:
            typer.echo(price_text(), nl=False)
            return
        cluster = Cluster(
            ranks, ranks_per_node, mesh,
            node_bytes_per_s=_rate("--node-bandwidth", node_bandwidth),
            store_bytes_per_s=_rate("--store-bandwidth", store_bandwidth),
            copy_bytes_per_s=_rate("--copy-bandwidth", copy_bandwidth),
            node_mtbf_s=LLAMA3_NODE_MTBF_S if mtbf is None else _time("--mtbf", mtbf),
            downtime_s=_time("--downtime", downtime), control_s=_time("--control", control),
            threads=threads, keep=keep, is_async=not sync, prices=prices_of(store, prices),
            interval_s=None if interval is None else _time("--interval", interval),
        )  # fmt: skip
        with output.working("planning"):
            if table is not None:
                described = table, dtype, "rowwise-adagrad" if optimizer is None else optimizer
                _plan_table(output, described, cluster, touched, node_memory)
                return
            states = "adamw" if optimizer is None else optimizer, optimizer_dtype, master_weights
            chosen = _models(models or _MODELS, dtype, *states, storage_options)
            _plan_models(output, chosen, cluster, plot)


def _plan_models(output: Output, models: Sequence[Model], cluster: Cluster, plot: str | None) -> None:
    from ckpt.cli.printing.plans import models_as_json, print_models
    from ckpt.planning.plan import plan as plan_of

    plans = [plan_of(model, cluster) for model in models]
    if plot is not None:
        _plot(plot, models[0], cluster)
    if output.as_json:
        output.json(models_as_json(plans))
        return
    print_models(output, plans)
    if plot is not None:
        output.print(f"drawn: {shown(plot)} ({shown(models[0].name)})")


def _plan_table(
    output: Output, described: tuple[str, str, str], cluster: Cluster, touched: str, node_memory: str
) -> None:
    from ckpt.cli.printing.plans import print_tables, tables_as_json
    from ckpt.planning.table_plan import plan_table
    from ckpt.planning.tables import table_of

    text, dtype, optimizer = described
    table = table_of(*_rows_and_width(text), dtype, optimizer)
    memory_bytes = parse_quantity("--node-memory", node_memory, SIZE_UNITS, "512GB or 12TB")
    plans = [plan_table(table, cluster, rate, memory_bytes) for rate in _per_cent(touched)]
    if output.as_json:
        output.json(tables_as_json(plans))
    else:
        print_tables(output, plans)


def _models(
    names: Sequence[str],
    dtype: str,
    optimizer: str,
    optimizer_dtype: str,
    master_weights: bool,
    storage_options: Sequence[str] | None,
) -> list[Model]:
    from ckpt.planning.models import model_of

    if len(names) > _MAX_MODELS:
        raise ConfigurationError(f"give up to {_MAX_MODELS} models at a time, not {len(names)}")
    options = parse_storage_options(storage_options)
    return [
        model_of(
            name,
            dtype=dtype,
            optimizer=optimizer,
            optimizer_dtype=optimizer_dtype,
            master_weights=master_weights,
            storage_options=options,
        )
        for name in names
    ]


def _plot(path: str, model: Model, cluster: Cluster) -> None:
    from ckpt.planning.chart import draw
    from ckpt.planning.plan import chart_lines

    picture = draw(f"{model.name}: useful time", chart_lines(model, cluster))
    try:
        Path(path).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"the plot cannot be written to {path}: {error.strerror}") from None


def _rate(option: str, text: str) -> float:
    return parse_quantity(option, text, _RATES, "5GB/s or 100Gbit/s")


def _time(option: str, text: str) -> float:
    return parse_quantity(option, text, _LONG_TIMES, "30s, 10m, 2h, 264d or 1y")


def _per_cent(text: str) -> list[float]:
    try:
        return [float(part.strip().removesuffix("%")) / 100 for part in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"--touched: {text!r} is not understood; write 0.1,1,10") from None


def _rows_and_width(text: str) -> tuple[int, int]:
    match = _TABLE.fullmatch(text.strip())
    if match is None:
        raise ConfigurationError(f"--table: {text!r} is not understood; write ROWSxWIDTH, such as 1e9x64")
    return int(float(match[1])), int(match[2])
