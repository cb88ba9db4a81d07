"""Simulate saves and loads of large models on 8 to 16,384 ranks, and check the simulation against real jobs.

    python -m benchmarks.scale.simulate --model gpt-22b --layout fsdp --ranks 1024
    python -m benchmarks.scale.simulate --model gpt-1t --layout tp8pp64dp32 --ranks 16384
    python -m benchmarks.scale.simulate --model gpt-22b --layout fsdp --layout hsdp128 --ranks 1024 4096 16384
    python -m benchmarks.scale.simulate --model gpt-22b --replicas 2 8 64
    python -m benchmarks.scale.simulate --check --ranks 8 16

Rank 0 runs the product's code from `ckpt.save` to the commit record, and `ckpt.load`; the messages of the other
ranks are made by the product's code too. CPU seconds and memory are measured, on rank 0; bytes of tensors are not
moved. `by model` are wall times: CPU, a network with latency and bandwidth, a store with a token bucket for each
prefix, and the bytes of a rank. `--check` runs real jobs of small models as well, and compares.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.scale.case import OPERATIONS, Case, Operation, simulate
from benchmarks.scale.counting import LOAD_PHASES, SAVE_PHASES, Counts
from benchmarks.scale.network import Bucket, Network, Storage
from ckpt.acceptance.models import MODELS

_REQUESTS = ("GET", "PUT", "LIST", "DELETE")


@dataclass(frozen=True)
class Model:
    """The network and the store whose wall times are shown."""

    network: Network
    storage: Storage

    def seconds(self, case: Case, name: str, phase: str) -> float:
        """Return how long a phase takes: rank 0 works, waits for messages, and for storage with all others."""
        operation = case.operations[name]
        counts, own = operation.phases.get(phase, Counts()), operation.requests.get(phase, Counter())
        moves, nbytes, requests = phase in ("write", "read"), 0, Counter(own)
        if phase == "write" and operation.others is not None:
            nbytes, requests = max(own["sent_bytes"], case.most_bytes), own + operation.others
        elif phase == "read":  # as much on all ranks as on rank 0
            nbytes, requests = own["read_bytes"], Counter(GET=own["GET"] * case.ranks)
        elif phase == "manifests":
            requests = Counter(GET=2 * case.files)
        steps = 1 if moves else sum(own[kind] for kind in _REQUESTS)
        waits = self.storage.seconds(requests, steps=steps if own else 0, rank_bytes=nbytes)
        passing = self.network.seconds(counts)
        # Parts are passed on while others are read.
        return counts.cpu_s + (max(waits, passing) if phase == "read" else waits + passing)


def run(model: str, text: str, ranks: int) -> Case:
    """Simulate a case in a process of its own, whose memory is that of this case."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(simulate, list(MODELS[model]()), text, ranks).result()


def phases_of(operation: Operation, name: str) -> list[str]:
    """List the phases of an operation, in order."""
    order = LOAD_PHASES if name == "load" else SAVE_PHASES
    return [phase for phase in order if phase in operation.phases]


def table(case: Case, title: str, model: Model) -> str:
    """Show each phase."""
    head = f"{'phase':<16}{'to rank 0':>12}{'from rank 0':>13}{'requests':>10}{'store bytes':>13}{'CPU s':>9}{'by model s':>12}"
    lines = [f"{title}: {case.data_bytes / 1e9:,.1f} GB, of rank 0 in each phase", head]
    for name in OPERATIONS:
        operation = case.operations[name]
        lines.append(f"{name}, at most {operation.peak_mib:,.0f} MiB more:")
        for phase in phases_of(operation, name):
            counts, own = operation.phases[phase], operation.requests.get(phase, Counter())
            stored = own["sent_bytes"] + own["read_bytes"]
            lines.append(
                f"  {phase:<14}{_size(counts.received_bytes):>12}{_size(counts.sent_bytes):>13}"
                f"{sum(own[kind] for kind in _REQUESTS):>10,}{_size(stored):>13}{counts.cpu_s:>9.3f}"
                f"{model.seconds(case, name, phase):>12.3f}"
            )
        if operation.others is not None:
            total = sum(operation.requests.values(), Counter()) + operation.others
            requests = sum(total[kind] for kind in _REQUESTS)
            lines.append(f"  all ranks: {requests:,} requests, {_size(total['sent_bytes'])} to the store")
    return "\n".join(lines)


def summary(case: Case, title: str, model: Model) -> str:
    """Show the bars of a case in a line."""
    first, later, load = (case.operations[name] for name in OPERATIONS)
    commit = sum(first.phases[phase].cpu_s for phase in ("receipts", "index", "commit"))
    walls = [
        sum(model.seconds(case, name, phase) for phase in phases_of(case.operations[name], name))
        for name in OPERATIONS
    ]
    opening = sum(load.phases[phase].cpu_s for phase in ("opening", "plan", "manifests"))
    return (
        f"{title:<34}{first.phases['plan'].cpu_s:>9.2f}{first.peak_mib:>8,.0f}{1000 * later.phases['plan'].cpu_s:>10.1f}"
        f"{commit:>9.2f}{opening:>9.2f}" + "".join(f"{wall:>9.1f}" for wall in walls)
    )


def as_json(case: Case, title: str, model: Model) -> dict[str, Any]:
    """Return all figures as what JSON can hold."""
    operations = {}
    for name, operation in case.operations.items():
        phases = {
            phase: {
                **asdict(operation.phases[phase]),
                "requests": dict(operation.requests.get(phase, {})),
                "by_model_s": model.seconds(case, name, phase),
            }
            for phase in phases_of(operation, name)
        }
        others = None if operation.others is None else dict(operation.others)
        operations[name] = {"phases": phases, "others": others, "peak_mib": operation.peak_mib}
    figures = {"data_bytes": case.data_bytes, "most_bytes": case.most_bytes, "manifests": case.files}
    return {"title": title, "ranks": case.ranks, **figures, "operations": operations}


_SUMMARY = (
    f"{'':<34}{'plan':>9}{'memory':>8}{'later':>10}{'commit':>9}{'load':>9}{'first':>9}{'later':>9}{'load':>9}\n"
    f"{'':<34}{'CPU s':>9}{'MiB':>8}{'plan ms':>10}{'CPU s':>9}{'CPU s':>9}{'by model, s':>27}"
)


def replicas(model_name: str, shards: int, counts: Sequence[int], model: Model) -> list[dict[str, Any]]:
    """Load with R replicas of each shard, which read once, and as if each read for itself."""
    rows = []
    for count in counts:
        case = run(model_name, f"hsdp{shards}", shards * count)
        operation = case.operations["load"]
        own = operation.requests["read"]
        unique = case.data_bytes / shards
        once_s = model.seconds(case, "load", "read")
        each = Counter({"GET": own["GET"] * count * case.ranks})
        alone_s = model.storage.seconds(each, steps=1, rank_bytes=unique)
        rows.append(
            {
                "replicas": count,
                "ranks": case.ranks,
                "read": own["read_bytes"] * count / unique,
                "requests": own["GET"] * case.ranks,
                "manifest_requests": 2 * case.files,
                "passed_on_bytes": operation.phases["read"].received_bytes,
                "once_s": once_s,
                "each_for_itself_s": alone_s,
            }
        )
    return rows


def _size(nbytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:,.1f} {unit}"
    return f"{nbytes:,.0f} B"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt-22b", choices=sorted(MODELS))
    parser.add_argument(
        "--layout", action="append", help="fsdp, hsdp128 (shards), tp8pp64dp32; may be repeated"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024])
    parser.add_argument(
        "--replicas", type=int, nargs="+", help="loads that read once, by replicas of 8 shards"
    )
    parser.add_argument("--check", action="store_true", help="compare with real jobs of so many ranks")
    parser.add_argument("--rounds", type=int, default=5, help="of a check; CPU seconds are medians")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--latency-ms", type=float, default=0.05, help="of a message")
    parser.add_argument("--network-gbit", type=float, default=10.0, help="of a rank")
    parser.add_argument("--storage-latency-ms", type=float, default=30.0, help="of a request")
    parser.add_argument("--storage-mb", type=float, default=100.0, help="MB/s of a rank")
    parser.add_argument("--writes-per-s", type=float, default=3500.0, help="of a prefix")
    parser.add_argument("--reads-per-s", type=float, default=5500.0, help="of a prefix")
    parser.add_argument("--prefixes", type=int, default=1, help="into which the store spreads one checkpoint")
    return parser


def main() -> int:
    arguments = _parser().parse_args()
    if arguments.check:
        from benchmarks.scale.check import main as check

        return check(
            arguments.layout or ["fsdp", "hsdp4"], arguments.ranks, arguments.rounds, as_json=arguments.json
        )
    model = Model(
        Network(arguments.latency_ms / 1e3, arguments.network_gbit * 1e9 / 8),
        Storage(
            arguments.storage_latency_ms / 1e3,
            arguments.storage_mb * 1e6,
            Bucket(arguments.writes_per_s, arguments.writes_per_s),
            Bucket(arguments.reads_per_s, arguments.reads_per_s),
            arguments.prefixes,
        ),
    )
    if arguments.replicas:
        _print_replicas(arguments, model)
        return 0
    cases = [(text, ranks) for text in arguments.layout or ["fsdp"] for ranks in arguments.ranks]
    if len(cases) > 1 and not arguments.json:
        print(_SUMMARY, flush=True)
    for text, ranks in cases:
        case, title = run(arguments.model, text, ranks), f"{arguments.model} {text}, {ranks:,} ranks"
        if arguments.json:
            print(json.dumps(as_json(case, title, model)), flush=True)
        else:
            print((summary if len(cases) > 1 else table)(case, title, model), flush=True)
    return 0


def _print_replicas(arguments: argparse.Namespace, model: Model) -> None:
    rows = replicas(arguments.model, 8, arguments.replicas, model)
    if arguments.json:
        print(json.dumps(rows))
        return
    print(
        f"{arguments.model}, 8 shards of R replicas: a load that reads once, and one where each reads for itself"
    )
    print(
        f"{'R':>4}{'ranks':>8}{'read':>9}{'requests':>10}{'passed on':>12}{'once s':>9}{'each s':>9}{'faster':>8}"
    )
    for row in rows:
        print(
            f"{row['replicas']:>4}{row['ranks']:>8}{row['read']:>8.3f}x{row['requests'] + row['manifest_requests']:>10,}"
            f"{_size(row['passed_on_bytes']):>12}{row['once_s']:>9.1f}{row['each_for_itself_s']:>9.1f}"
            f"{row['each_for_itself_s'] / row['once_s']:>7.1f}x"
        )


if __name__ == "__main__":
    sys.exit(main())
