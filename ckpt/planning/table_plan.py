"""Plan the checkpoints of a table of embeddings over a month: bytes, seconds, requests, money."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.backends.base import transfer_size_bytes
from ckpt.errors import ConfigurationError
from ckpt.planning.plan import Cluster, Dollars
from ckpt.planning.prices import MONTH_S
from ckpt.planning.requests import Requests
from ckpt.planning.table_requests import (
    TableEntries,
    table_entries,
    table_restore_requests,
    table_save_requests,
)
from ckpt.planning.tables import Table, TableSave, chain_saves, stored_bytes

DEFAULT_INTERVAL_S = 1800.0
_SAVES = 200


@dataclass(frozen=True)
class Means:
    """Bytes, rows and seconds of one kind of save, on the mean; and how often it comes."""

    share: float
    bytes: float
    rows: float
    durable_s: float


@dataclass(frozen=True)
class TablePlan:
    """What the saves of a table cost when each interval touches the same share of its rows.

    Attributes:
        node_bytes: of the table in one machine's memory.
        base, delta, merge: what a save writes; a merge is a delta in the place of several.
        full_ratio: bytes of full saves, by those of these.
        restore_bytes, restore_s: of the longest chain; the mean is in `restore_mean_s`.
        entries: tensors that the index of a checkpoint lists.
        requests: of a mean save, and of a restore.
        store_bytes: the most that lies in the store.
    """

    table: Table
    cluster: Cluster
    touched: float
    interval_s: float
    node_bytes: float
    node_memory_bytes: float
    base: Means
    delta: Means
    merge: Means
    full_ratio: float
    restore_bytes: float
    restore_s: float
    restore_mean_s: float
    entries: TableEntries
    save_requests: Requests
    restore_requests: Requests
    store_bytes: float
    saves_per_month: float
    dollars: Dollars


def plan_table(table: Table, cluster: Cluster, touched: float, node_memory_bytes: float) -> TablePlan:
    """Plan the saves of a table that lies in the memory of the cluster's machines, a shard a rank.

    Raises:
        ConfigurationError: the table is larger than their memory, or `touched` no share.
    """
    node_bytes = table.nbytes / cluster.nodes
    if node_bytes > node_memory_bytes:
        raise ConfigurationError(
            f"a table of {table.nbytes / 1e12:.4g} TB does not fit {cluster.nodes:,} machines with "
            f"{node_memory_bytes / 1e12:.4g} TB each: give more --ranks, --node-memory or a smaller --dtype"
        )
    interval_s = DEFAULT_INTERVAL_S if cluster.interval_s is None else cluster.interval_s
    saves = chain_saves(table, touched, _SAVES)
    part_bytes = transfer_size_bytes(cluster.threads)
    mtbf_s = cluster.node_mtbf_s / cluster.nodes
    chains = [[saves[number] for number in save.generations] for save in saves]
    per_save = [table_save_requests(table, chain, cluster.ranks, part_bytes) for chain in chains]
    restores = [table_restore_requests(table, chain, cluster.ranks, part_bytes) for chain in chains]
    mean_save = sum(per_save, Requests()).times(1 / len(saves))
    mean_restore = sum(restores, Requests()).times(1 / len(saves))
    longest = max(saves, key=lambda save: save.chain_bytes)
    longest_chain = [saves[number] for number in longest.generations]
    reads_s = [_seconds(cluster, save.chain_bytes) for save in saves]
    store_bytes = stored_bytes(saves, cluster.keep)
    month = mean_save.times(MONTH_S / interval_s) + mean_restore.times(MONTH_S / mtbf_s)
    return TablePlan(
        table=table,
        cluster=cluster,
        touched=touched,
        interval_s=interval_s,
        node_bytes=node_bytes,
        node_memory_bytes=node_memory_bytes,
        base=_means(cluster, saves, "base"),
        delta=_means(cluster, saves, "delta"),
        merge=_means(cluster, saves, "merge"),
        full_ratio=table.nbytes * len(saves) / sum(save.nbytes for save in saves),
        restore_bytes=longest.chain_bytes,
        restore_s=_seconds(cluster, longest.chain_bytes),
        restore_mean_s=sum(reads_s) / len(saves),
        entries=table_entries(table, longest_chain, cluster.ranks),
        save_requests=mean_save,
        restore_requests=mean_restore,
        store_bytes=store_bytes,
        saves_per_month=MONTH_S / interval_s,
        dollars=Dollars(cluster.prices.storage_dollars(store_bytes), cluster.prices.request_dollars(month)),
    )


def _means(cluster: Cluster, saves: list[TableSave], kind: str) -> Means:
    chosen = [save for save in saves if save.kind == kind]
    count = max(1, len(chosen))
    nbytes = sum(save.nbytes for save in chosen) / count
    return Means(
        len(chosen) / len(saves), nbytes, sum(save.rows for save in chosen) / count, _seconds(cluster, nbytes)
    )


def _seconds(cluster: Cluster, nbytes: float) -> float:
    return max(nbytes / cluster.nodes / cluster.node_bytes_per_s, nbytes / cluster.store_bytes_per_s)
