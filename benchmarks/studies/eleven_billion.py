"""Measure round trips at 11 billion parameters, and a write path at 136 GB.

    python -m benchmarks.studies.eleven_billion

Needs about 13 GB of free memory, 24 GB of disk at `--scratch`, and `rclone` in the environment.
Each step runs the command that a user would, writes its JSON to `--output`, and a plot of all over
time; docs/eleven-billion.md is the record.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report.results import machine
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, ROOT, SECRET_KEY, Endpoint, rclone, sink

_GIB = 1 << 30
_RUNS = ("posix", "long-files", "s3", "sink", "long-objects")
_ELEVEN = ("--model", "t5-11b", "--world-size", "8", "--load-world-size", "4")
# One file of 11.3 GB a rank.
_LONG_FILES = (
    "--model",
    "t5-11b",
    "--world-size",
    "2",
    "--load-world-size",
    "2",
    "--threads",
    "1",
    "--processes",
    "1",
)
_WITH_OPTIMIZER = ("--model", "t5-11b", "--dtype", "fp32", "--optimizer", "adamw", "--phase", "save")
_PLANNED = [("t5-11b", 8), ("llama-2-7b", 8), ("llama-2-13b", 16), ("granite-7b", 8), ("gpt-22b", 32),
            ("gpt-175b", 256), ("gpt-1t", 1024)]  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a checkpoint is saved, and the folder in which its objects are files; None where there
    are none.
    """

    url: str
    options: dict[str, Any]
    folder: Path | None


def main() -> int:
    arguments = _arguments()
    output: Path = arguments.output
    output.mkdir(parents=True, exist_ok=True)
    arguments.scratch.mkdir(parents=True, exist_ok=True)
    steps = {
        "posix": _on_files,
        "long-files": _in_long_files,
        "s3": _on_s3,
        "sink": _to_the_sink,
        "long-objects": _in_long_objects,
        "plans": _plans,
    }
    for name in arguments.only or steps:
        with tempfile.TemporaryDirectory(
            dir=arguments.scratch.resolve(), prefix="eleven-billion-"
        ) as scratch:
            report = {"machine": machine(), **steps[name](Path(scratch))}
        (output / f"{name}.json").write_text(json.dumps(report, indent=1))
    results = {path.stem: json.loads(path.read_text()) for path in sorted(output.glob("*.json"))}
    (output / "results.md").write_text(_table(results))
    _draw(results, output)
    print(_table(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*_RUNS, "plans"])
    parser.add_argument("--scratch", type=Path, default=ROOT / "benchmarks" / "scratch")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "eleven-billion")
    return parser.parse_args()


def _on_files(scratch: Path) -> dict[str, Any]:
    return _round_trip(Place(str(scratch / "step"), {}, scratch / "step"))


def _in_long_files(scratch: Path) -> dict[str, Any]:
    return _ckpt(Place(str(scratch / "step"), {}, None), *_LONG_FILES)


def _on_s3(scratch: Path) -> dict[str, Any]:
    binary = Path(sys.executable).with_name("rclone")
    with rclone(binary, scratch) as endpoint:
        return _round_trip(Place(f"s3://{BUCKET}/step", _options(endpoint), scratch / BUCKET / "step"))


def _round_trip(place: Place) -> dict[str, Any]:
    """Compare every element; then flip one byte, and the load has to fail."""
    report = _ckpt(place, *_ELEVEN, "--keep")
    assert place.folder is not None
    file = max(place.folder.glob("rank-00005/*.distcp"), key=lambda path: path.stat().st_size)
    at = file.stat().st_size // 2
    with file.open("r+b") as body:
        body.seek(at)
        byte = body.read(1)[0]
        body.seek(at)
        body.write(bytes([byte ^ 1]))
    flipped = _ckpt(place, *_ELEVEN, "--phase", "load", expected=1)
    return {"flip": {"file": file.name, "at": at, "error": flipped["error"]["message"]}, **report}


def _to_the_sink(_: Path) -> dict[str, Any]:
    return _discarded("--world-size", "32")


def _in_long_objects(_: Path) -> dict[str, Any]:
    """Save one object of 9.7 GB a rank."""
    return _discarded("--world-size", "14", "--processes", "1")


def _discarded(*arguments: str) -> dict[str, Any]:
    """Save 136 GB to a server that counts them and drops them."""
    with sink() as endpoint:
        place = Place(f"s3://{BUCKET}/step", _options(endpoint), None)
        report = _ckpt(place, *_WITH_OPTIMIZER, *arguments)
        return {"server": endpoint.report(), **report}


def _plans(scratch: Path) -> dict[str, Any]:
    place = Place(str(scratch / "step"), {}, None)
    models = {}
    for model, ranks in _PLANNED:
        one = _ckpt(place, "--model", model, "--world-size", str(ranks), "--phase", "plan")
        one["plan"]["shard_bytes"] = [min(one["plan"]["shard_bytes"]), max(one["plan"]["shard_bytes"])]
        models[model] = {**one, "ranks": ranks}
    return {"models": models}


def _ckpt(place: Place, *arguments: str, expected: int = 0) -> dict[str, Any]:
    command = ["roundtrip", place.url, *arguments, "--json", "--storage-options", json.dumps(place.options)]
    print("ckpt", *command[:-2], flush=True)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("ckpt")), *command],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode != expected:
        raise SystemExit(f"exit code {done.returncode}, not {expected}: {done.stdout[-2000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _options(endpoint: Endpoint) -> dict[str, Any]:
    return {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}


def _table(results: dict[str, Any]) -> str:
    lines = [
        "| | data | wall s | GB/s | of it transfer | operations | sent / payload, read / needed | peak beyond shard |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in _RUNS:
        for part in ("save", "load"):
            report = results.get(name, {}).get(part)
            if report is None:
                continue
            ranks = report["ranks"]
            nbytes = sum(rank["shard_bytes"] for rank in ranks)
            counts = report["counts"]
            operations = counts["parts"] + counts["reads"] + counts["stats"]
            if "server" in results[name]:
                operations = sum(results[name]["server"]["requests"].values())
            ratio = results[name]["sent_per_payload" if part == "save" else "read_per_needed"]
            lines.append(
                f"| {name}: {part}, {len(ranks)} ranks, {report['processes']} at a time | {nbytes / 1e9:.1f} GB "
                f"| {report['wall_s'] + report['commit_s']:.1f} | {report['bytes_per_s'] / 1e9:.2f} "
                f"| {report['transfer_share']:.2f} | {operations:,} "
                f"| {ratio:.4f} | {report['peak_beyond_shard_bytes'] / (1 << 20):.0f} MiB |"
            )
    lines += [
        "",
        "| planned | parameters | ranks | slices | largest shard, bf16 | s |",
        "|---|---|---|---|---|---|",
    ]
    for model, report in results.get("plans", {}).get("models", {}).items():
        plan = report["plan"]
        lines.append(
            f"| {model} | {report['parameters']:,} | {report['ranks']:,} | {plan['items']:,} "
            f"| {plan['shard_bytes'][1] / _GIB:.2f} GiB | {plan['plan_s']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def _draw(results: dict[str, Any], output: Path) -> None:
    """Draw throughput and resident memory over time, a row for each run."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams.update({"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "ckpt"})
    names = [name for name in _RUNS if name in results]
    figure = Figure(figsize=(10, 2.6 * max(1, len(names))), layout="constrained")
    grid = figure.subplots(max(1, len(names)), 2, squeeze=False)
    for (left, right), name in zip(grid, names, strict=True):
        points = [
            (point["seconds"], point["moved_bytes"], point["resident_bytes"])
            for point in results[name]["timeline"]
        ]
        times, rates = zip(*_rates(points), strict=True)
        left.plot(times, rates, color="#0b6e4f", linewidth=1)
        left.set_ylabel(f"{name}: GB/s moved")
        right.plot(
            [point[0] for point in points],
            [point[2] / _GIB for point in points],
            color="#c8553d",
            linewidth=1,
        )
        right.set_ylabel("GiB resident, all processes")
        for axis in (left, right):
            axis.set_ylim(bottom=0)
            axis.set_xlabel("s")
            for side in ("top", "right"):
                axis.spines[side].set_visible(False)
    for kind in ("svg", "png"):
        figure.savefig(
            output / f"over-time.{kind}", dpi=130, metadata={"Date": None} if kind == "svg" else None
        )


def _rates(points: list[tuple[float, int, int]], window: int = 4) -> Iterator[tuple[float, float]]:
    """Compute GB/s over two seconds."""
    yield 0.0, 0.0
    for before, after in zip(points, points[window:], strict=False):
        with contextlib.suppress(ZeroDivisionError):
            yield after[0], (after[1] - before[1]) / (after[0] - before[0]) / 1e9


if __name__ == "__main__":
    sys.exit(main())
