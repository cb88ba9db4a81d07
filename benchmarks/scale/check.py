"""Compare a simulated job with a real one of as many ranks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.scale.case import OPERATIONS, PART_BYTES, Case, simulate
from benchmarks.scale.counting import LOAD_PHASES, SAVE_PHASES
from benchmarks.scale.real_job import Costs, Measured, run_job
from ckpt.acceptance.models import Parameter, gpt
from ckpt.planning.layout import layout_of, parse_mesh
from ckpt.planning.models import Model, Tensor
from ckpt.planning.requests import restore_requests, save_requests, stored

PARAMETERS: Sequence[Parameter] = list(gpt(256, 3, vocab=2048, positions=128))
"""Of a model that is small enough for many ranks on one machine."""

CPU_FACTOR = 1.5

_MOVING = ("write", "read")
"""Phases whose CPU seconds are those of tensors' bytes."""


@dataclass(frozen=True)
class Row:
    """A figure of a simulation and of a real job.

    Attributes:
        slack: by what share of the measured figure the predicted one may be higher.
    """

    operation: str
    what: str
    predicted: float
    measured: float
    must_equal: bool
    slack: float = 0.0

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else float(self.measured == 0)

    @property
    def is_right(self) -> bool:
        most = self.measured * (1 + self.slack)
        return not self.must_equal or self.measured <= self.predicted <= most


def check(text: str, ranks: int, rounds: int) -> list[Row]:
    """Simulate a job, run it, and compare."""
    measured, costs = run_job(list(PARAMETERS), text, ranks, rounds)
    case = simulate(PARAMETERS, text, ranks, keeps_data=True, rounds=rounds)
    return [row for name in OPERATIONS for row in _rows(name, case, measured[name], costs, text)]


def _rows(name: str, case: Case, measured: Measured, costs: Costs, text: str) -> list[Row]:
    operation, rows = case.operations[name], []
    cpu, client_s = [0.0, 0.0], costs.client_s
    order = LOAD_PHASES if name == "load" else SAVE_PHASES
    for phase in [each for each in order if each in operation.phases]:
        ours, theirs = operation.phases[phase], measured.phases[phase]
        requests = operation.requests.get(phase, Counter()), measured.own_requests.get(phase, Counter())
        for what in ("sent_bytes", "received_bytes", "messages"):
            pair = getattr(ours, what), getattr(theirs, what)
            if any(pair):
                rows.append(Row(name, f"{phase}: {what.replace('_', ' ')}", *pair, True))
        for what, label in (("read_bytes", "bytes from the store"), ("sent_bytes", "bytes to the store")):
            if any(each[what] for each in requests):
                rows.append(Row(name, f"{phase}: {label}", requests[0][what], requests[1][what], True))
        if any(each[kind] for each in requests for kind in _KINDS):
            rows.append(Row(name, f"{phase}: requests", _count(requests[0]), _count(requests[1]), True))
        if phase not in _MOVING:
            if requests[0]:  # the first one makes the connection
                ours, client_s = replace(ours, cpu_s=ours.cpu_s + client_s), 0.0
            spent = costs.message_s * ours.messages + costs.request_s * _count(requests[0])
            pair = round(ours.cpu_s + spent, 5), round(theirs.cpu_s, 5)
            rows.append(Row(name, f"{phase}: CPU seconds", *pair, False))
            cpu = [some + more for some, more in zip(cpu, pair, strict=True)]
    total = _count(measured.requests)
    if operation.others is not None:
        own = sum(operation.requests.values(), Counter())
        rows.append(Row(name, "all ranks: requests", _count(own + operation.others), total, True))
        sent = own["sent_bytes"] + operation.others["sent_bytes"]
        rows.append(Row(name, "all ranks: bytes to the store", sent, measured.requests["sent_bytes"], True))
    if (planned := _planned(name, text, case.ranks)) is not None:
        # Of parts that replicas read, it counts one more request for each file that a part may begin in.
        slack = 0.05 if name == "load" else 0.0
        rows.append(Row(name, "all ranks: requests, by `ckpt plan`", planned, total, True, slack))
    rows.append(Row(name, _CPU, round(cpu[0], 4), round(cpu[1], 4), False))
    return rows


_CPU = "CPU seconds of rank 0, but for moving tensors"
_KINDS = ("GET", "PUT", "LIST", "DELETE")


def _count(requests: Counter[str]) -> int:
    return sum(requests[kind] for kind in _KINDS)


def _planned(name: str, text: str, ranks: int) -> float | None:
    """Count as `ckpt plan` does; None for layouts that it does not know or counts too many for."""
    if text.startswith("tp"):
        return None
    shards = int(text.removeprefix("hsdp") or ranks) if text.startswith("hsdp") else ranks
    tensors = tuple(
        Tensor(f"{group}.{each.fqn}", each.shape, 4, each.tp_dim, 0)
        for each in PARAMETERS
        for group in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    )
    model = Model("small", "", 0, tensors)
    layout = layout_of(model, parse_mesh(f"hsdp{ranks // shards}xfsdp{shards}", ranks))
    what = stored(model, layout, threads=8)
    if name == "load":
        return restore_requests(layout, what, request_bytes=PART_BYTES).gets
    # But for the three by which the first save of a process tries how the server treats conditions.
    requests = save_requests(layout, what, part_bytes=PART_BYTES)
    return requests.puts + requests.gets


def report(text: str, ranks: int, rows: Sequence[Row]) -> str:
    """Make a table, in which equal figures are summed up."""
    lines = [f"{text}, {ranks} ranks{'':>38}{'predicted':>14}{'measured':>14}{'ratio':>8}"]
    for name in OPERATIONS:
        some = [row for row in rows if row.operation == name]
        equal = [row for row in some if row.must_equal and row.is_right]
        figures = (
            f"{len(equal)} of {sum(row.must_equal for row in some)} counts of bytes, messages and requests"
        )
        lines.append(f"  {name}: {figures} are as predicted")
        shown = [row for row in some if not row.is_right or row.what.startswith("all") or row.what == _CPU]
        for row in shown:
            figures = f"{row.predicted:>14,.6g}{row.measured:>14,.6g}{row.ratio:>8.2f}"
            is_near = 1 / CPU_FACTOR <= row.ratio <= CPU_FACTOR
            wrong = "  differs" if not row.is_right else "" if is_near else f"  not within {CPU_FACTOR}"
            lines.append(f"    {row.what:<50}{figures}{wrong}")
    return "\n".join(lines)


def main(layouts: Sequence[str], sizes: Sequence[int], rounds: int, *, as_json: bool) -> int:
    """Check each size and layout; return 1 if bytes or requests differ."""
    is_right = True
    for ranks in sizes:
        for text in layouts:
            rows = check(text, ranks, rounds)
            is_right &= all(row.is_right for row in rows)
            if as_json:
                print(_json(text, ranks, rows), flush=True)
            else:
                print(report(text, ranks, rows), flush=True)
    if not is_right:
        print("a simulation and a job differ", file=sys.stderr)
    return 0 if is_right else 1


def _json(text: str, ranks: int, rows: Sequence[Row]) -> str:
    import json

    table: list[dict[str, Any]] = [{**asdict(row), "ratio": row.ratio} for row in rows]
    return json.dumps({"layout": text, "ranks": ranks, "rows": table})
