"""Plan the checkpoints of a training run: what they cost in bytes, requests, seconds, useful time and money."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckpt.backends.base import transfer_size_bytes
from ckpt.errors import ConfigurationError
from ckpt.planning.chart import Line
from ckpt.planning.intervals import UsefulTime, daly_interval_s, useful_time, young_interval_s
from ckpt.planning.layout import layout_of, parse_mesh
from ckpt.planning.models import Model
from ckpt.planning.prices import MONTH_S, Prices, prices_of
from ckpt.planning.requests import (
    COMMIT_STEPS,
    OPEN_STEPS,
    Requests,
    Stored,
    remove_requests,
    restore_requests,
    save_requests,
    stored,
)

LLAMA3_NODE_MTBF_S = 16_384 / 8 * 54 * 86400 / 419
"""Of one node with 8 GPUs: 419 unexpected interruptions in 54 days on 16,384 GPUs (arXiv:2407.21783, 3.3.4)."""

_POOL_BYTES = 256 << 20
_CHART_POINTS = 81
_CHART_RANKS = (64, 256, 1024, 4096, 16384)


@dataclass(frozen=True)
class Cluster:
    """The machines, the storage, and how the run saves. Bandwidths are in bytes per second.

    Attributes:
        node_bytes_per_s, store_bytes_per_s: network of one node; the store as a whole.
        copy_bytes_per_s: of one node, from the accelerators into its memory.
        node_mtbf_s: mean time between failures of one node that end the job.
        downtime_s: from a failure until the processes run again and load.
        latency_s: of one small request.
        control_s: what else stops the work in a save: planning, and messages between the ranks. It is not
            computed, as it was measured for few ranks only (docs/planning.md).
        threads: parallel transfers of a rank, which decide the size of parts.
        keep: checkpoints that stay.
        is_async: saves are copied into memory, and written in the background.
        interval_s: work between two saves; None: the best by Daly's formula.
    """

    ranks: int = 1024
    ranks_per_node: int = 8
    mesh: str = "fsdp"
    node_bytes_per_s: float = 5e9
    store_bytes_per_s: float = 200e9
    copy_bytes_per_s: float = 50e9
    node_mtbf_s: float = LLAMA3_NODE_MTBF_S
    downtime_s: float = 300.0
    latency_s: float = 0.03
    control_s: float = 0.0
    threads: int = 16
    keep: int = 3
    is_async: bool = True
    interval_s: float | None = None
    prices: Prices = field(default_factory=lambda: prices_of("aws-s3"))

    def __post_init__(self) -> None:
        positive = {
            "the ranks per node": self.ranks_per_node,
            "the network bandwidth of a node": self.node_bytes_per_s,
            "the bandwidth of the store": self.store_bytes_per_s,
            "the bandwidth of copies": self.copy_bytes_per_s,
            "the mean time between failures": self.node_mtbf_s,
            "the number of threads": self.threads,
            "the number of checkpoints to keep": self.keep,
        }
        if self.interval_s is not None:
            positive["the interval"] = self.interval_s
        for name, value in positive.items():
            if not 0 < value < math.inf:
                raise ConfigurationError(f"{name} must be above 0, not {value:g}")
        times = {"downtime": self.downtime_s, "latency": self.latency_s, "control time": self.control_s}
        for name, value in times.items():
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"the {name} must not be negative, not {value:g}")
        if self.ranks % self.ranks_per_node and self.ranks > self.ranks_per_node:
            raise ConfigurationError(
                f"{self.ranks:,} ranks do not fill nodes of {self.ranks_per_node}: give --ranks-per-node"
            )

    @property
    def nodes(self) -> int:
        return -(-self.ranks // self.ranks_per_node)


@dataclass(frozen=True)
class Dollars:
    """What the store charges for a month.

    Attributes:
        storage: of the checkpoints that stay, and the one that is being written.
        requests: of all saves, removals and restores.
    """

    storage: float
    requests: float

    @property
    def total(self) -> float:
        return self.storage + self.requests


@dataclass(frozen=True)
class Plan:
    """What the checkpoints of a run cost.

    Attributes:
        stored: one checkpoint.
        save, restore, remove: requests of one of each, of all ranks together.
        read_bytes: from the store, of one restore; replicas read together, and pass on.
        stall_s: how long a save stops the work.
        durable_s: from its begin until the checkpoint is committed.
        restore_s: of the transfer; `Cluster.downtime_s` comes before it.
        node_memory_bytes: the most that saves take of one node's memory, beyond the tensors.
        job_mtbf_s: mean time between failures of the job.
        young_s, daly_s: the best work between two saves, to first and to higher order.
        interval_s: that of the plan: not shorter than an upload takes.
        time: where the time of the run goes.
        saves_per_month, dollars: of a run that goes on for a month.
    """

    model: Model
    cluster: Cluster
    mesh: str
    stored: Stored
    save: Requests
    restore: Requests
    remove: Requests
    read_bytes: float
    stall_s: float
    durable_s: float
    restore_s: float
    node_memory_bytes: float
    job_mtbf_s: float
    young_s: float
    daly_s: float
    interval_s: float
    time: UsefulTime
    saves_per_month: float
    dollars: Dollars

    @property
    def restart_s(self) -> float:
        """From a failure to the first step after it."""
        return self.cluster.downtime_s + self.restore_s


def plan(model: Model, cluster: Cluster) -> Plan:
    """Plan the checkpoints of a run.

    Raises:
        ConfigurationError: the mesh does not fit the ranks or the model.
    """
    layout = layout_of(model, parse_mesh(cluster.mesh, cluster.ranks))
    transfer_bytes = transfer_size_bytes(cluster.threads)
    what = stored(model, layout, threads=cluster.threads)
    save = save_requests(layout, what, part_bytes=transfer_bytes)
    restore = restore_requests(layout, what, request_bytes=transfer_bytes)
    remove = remove_requests(what)

    per_node = layout.per_node(layout.held_bytes, cluster.ranks_per_node)
    written = layout.per_node(what.rank_bytes, cluster.ranks_per_node)
    upload_s = _transfer_s(cluster, written, what.data_bytes, save.writes, cluster.prices.writes_per_s)
    upload_s += cluster.latency_s * COMMIT_STEPS
    copy_s = per_node / cluster.copy_bytes_per_s if cluster.is_async else 0.0
    durable_s = cluster.control_s + copy_s + upload_s
    stall_s = cluster.control_s + copy_s if cluster.is_async else durable_s
    read_of_node = layout.per_node(what.rank_bytes * layout.mesh.dp, cluster.ranks_per_node)
    # What comes into a node, from the store or from replicas.
    restore_s = _transfer_s(cluster, read_of_node, what.data_bytes, restore.reads, cluster.prices.reads_per_s)
    restore_s += cluster.latency_s * OPEN_STEPS

    mtbf_s = cluster.node_mtbf_s / cluster.nodes
    daly_s = daly_interval_s(stall_s, mtbf_s)
    # The manager begins no save before the last one is durable.
    interval_s = max(daly_s if cluster.interval_s is None else cluster.interval_s, durable_s - stall_s)
    time = useful_time(
        interval_s,
        stall_s=stall_s,
        lag_s=durable_s - stall_s,
        restart_s=cluster.downtime_s + restore_s,
        mtbf_s=mtbf_s,
    )
    saves = MONTH_S / (interval_s + stall_s)
    requests = (save + remove).times(saves) + restore.times(MONTH_S / mtbf_s)
    prices = cluster.prices
    return Plan(
        model=model,
        cluster=cluster,
        mesh=str(layout.mesh),
        stored=what,
        save=save,
        restore=restore,
        remove=remove,
        read_bytes=what.data_bytes,
        stall_s=stall_s,
        durable_s=durable_s,
        restore_s=restore_s,
        node_memory_bytes=(per_node if cluster.is_async else 0.0)
        + _POOL_BYTES * min(cluster.ranks, cluster.ranks_per_node),
        job_mtbf_s=mtbf_s,
        young_s=young_interval_s(stall_s, mtbf_s),
        daly_s=daly_s,
        interval_s=interval_s,
        time=time,
        saves_per_month=saves,
        dollars=Dollars(
            prices.storage_dollars((cluster.keep + 1) * what.nbytes), prices.request_dollars(requests)
        ),
    )


def _transfer_s(
    cluster: Cluster, node_bytes: float, all_bytes: float, requests: float, requests_per_s: float
) -> float:
    """Return how long a transfer takes that all nodes make together: the slowest of three limits."""
    limits = [node_bytes / cluster.node_bytes_per_s, all_bytes / cluster.store_bytes_per_s]
    return max([*limits, requests / requests_per_s if requests_per_s else 0.0])


def chart_lines(model: Model, cluster: Cluster, ranks: Sequence[int] = ()) -> list[Line]:
    """Compute useful time over the interval, for each number of ranks that the mesh can have.

    By default these are 64 to 16,384 and that of the cluster; the axis of the mesh that has no number grows.

    Raises:
        ConfigurationError: the mesh fits none of them.
    """
    mesh = parse_mesh(cluster.mesh, cluster.ranks)
    plans = []
    for count in ranks or sorted({*_CHART_RANKS, cluster.ranks}):
        axis = getattr(mesh, mesh.free) * count / cluster.ranks
        if axis >= 1 and axis.is_integer():
            text = str(mesh.with_free(int(axis)))
            plans.append(plan(model, dataclasses.replace(cluster, mesh=text, ranks=count)))
    if not plans:
        raise ConfigurationError(f"the mesh {cluster.mesh!r} fits none of these numbers of ranks")
    plans = plans[-5:]
    begin_s = max(5.0, min(each.interval_s for each in plans) / 8)
    end_s = max(each.interval_s for each in plans) * 8
    lines = []
    for each in plans:
        points = []
        for at in range(_CHART_POINTS):
            work_s = begin_s * (end_s / begin_s) ** (at / (_CHART_POINTS - 1))
            lag_s = each.durable_s - each.stall_s
            time = useful_time(
                work_s,
                stall_s=each.stall_s,
                lag_s=lag_s,
                restart_s=each.restart_s,
                mtbf_s=each.job_mtbf_s,
            )
            if work_s >= lag_s and time.useful > 0.001:
                points.append((work_s, time.useful))
        lines.append(Line(f"{each.cluster.ranks:,} ranks", points, (each.interval_s, each.time.useful)))
    return lines
