"""Draw the README's chart from a run's results, for light and dark pages.

It needs the cases s3-save, s3-load, posix-save and posix-load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.report.results import Results

__all__ = ["draw_chart"]

_OURS = "ckpt-storage"


@dataclass(frozen=True)
class _Panel:
    """One case, and its rows: a name, and the entries of which the fastest counts."""

    case: str
    title: str
    rows: Mapping[str, Sequence[str]]


_STOCK = ("stock, 1 thread", "stock, 2 threads", "stock, 4 threads")
_PANELS = (
    _Panel(
        "s3-save",
        "Save to S3",
        {
            _OURS: ["ours"],
            "s3torchconnector": ["s3torchconnector", "s3torchconnector, 4 threads"],
            "s3dlio, bytes alone": ["s3dlio, raw"],
            "multi-storage-client": ["multi-storage-client"],
            "FsspecWriter + s3fs": ["FsspecWriter + s3fs", "FsspecWriter + s3fs, 4 threads"],
        },
    ),
    _Panel(
        "s3-load",
        "Load from S3",
        {
            f"{_OURS}, verified": ["ours"],
            "s3torchconnector": ["s3torchconnector"],
            "s3dlio, bytes alone": ["s3dlio, raw"],
            "runai-model-streamer": ["runai-model-streamer"],
            "multi-storage-client": ["multi-storage-client"],
            "FsspecReader + s3fs": ["FsspecReader + s3fs"],
        },
    ),
    _Panel(
        "posix-save",
        "Save to files",
        {
            _OURS: ["ours"],
            "stock PyTorch": _STOCK,
            "torch_checkpointing": ["torch_checkpointing", "torch_checkpointing, 4 threads"],
            "safetensors": ["safetensors"],
            "fastsafetensors": ["fastsafetensors"],
            "Orbax": ["Orbax"],
        },
    ),
    _Panel(
        "posix-load",
        "Load from files",
        {
            f"{_OURS}, verified": ["ours"],
            "stock PyTorch": ["stock"],
            "torch_checkpointing": ["torch_checkpointing"],
            "safetensors": ["safetensors"],
            "fastsafetensors": ["fastsafetensors"],
            "runai-model-streamer": ["runai-model-streamer"],
            "Orbax": ["Orbax"],
        },
    ),
)


@dataclass(frozen=True)
class _Theme:
    name: str
    text: str
    ours: str
    peer: str


_THEMES = (
    _Theme("light", "#1f2328", "#0b6e4f", "#b6bec8"),
    _Theme("dark", "#e6edf3", "#3fb68b", "#57606a"),
)


def draw_chart(results: Results, folder: Path) -> list[Path]:
    """Write `speed-light.svg` and `speed-dark.svg`: GB/s of one rank, by contender; return the
    files.

    A case that the run has not measured makes no chart: the list is empty then.
    """
    if any(panel.case not in results.outcomes for panel in _PANELS):
        return []
    mpl.rcParams.update({"font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "ckpt"})
    files = []
    for theme in _THEMES:
        figure = Figure(figsize=(10, 5.5), layout="constrained")
        for axis, panel in zip(figure.subplots(2, 2).flat, _PANELS, strict=True):
            _bars(axis, panel, results, theme)
        path = folder / f"speed-{theme.name}.svg"
        figure.savefig(path, transparent=True, metadata={"Date": None})
        files.append(path)
    return files


def _bars(axis: Axes, panel: _Panel, results: Results, theme: _Theme) -> None:
    speeds = {name: _gb_per_s(results, panel.case, entries) for name, entries in panel.rows.items()}
    most = max(speed for speed in speeds.values() if speed is not None)
    for position, (name, speed) in enumerate(speeds.items()):
        color = theme.ours if name.startswith(_OURS) else theme.peer
        text = "failed" if speed is None else f"{speed:.2f} GB/s"
        axis.barh(position, speed or 0.0, 0.66, color=color)
        axis.text((speed or 0.0) + most * 0.02, position, text, va="center", color=theme.text, fontsize=9)
    axis.set_yticks(range(len(speeds)), list(speeds))
    axis.set_xlim(0, most * 1.3)
    axis.invert_yaxis()
    axis.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=theme.text)
    axis.tick_params(colors=theme.text, length=0)
    axis.set_xticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def _gb_per_s(results: Results, case: str, entries: Sequence[str]) -> float | None:
    """Return the fastest median of some settings."""
    medians = [results.median(case, entry, "gb_per_s") for entry in entries]
    return max((median for median in medians if median is not None), default=None)
