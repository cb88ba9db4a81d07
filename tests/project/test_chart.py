"""The README's chart is drawn from measured results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.results import Results
from benchmarks.run.task import Outcome


def test_the_chart_shows_every_contender_and_its_speed(tmp_path: Path) -> None:
    from benchmarks.report.chart import draw_chart  # with matplotlib, which takes a second

    results = Results({}, {})
    speeds = {
        "s3-save": {"ours": 3.25, "s3torchconnector": 1.0, "FsspecWriter + s3fs": 0.5},
        "s3-load": {"ours": 2.0, "s3torchconnector": 0.75},
        "posix-save": {"ours": 4.0, "stock, 1 thread": 2.0, "stock, 4 threads": 2.5},
        "posix-load": {"ours": 6.0, "stock": 1.5},
    }
    for case, entries in speeds.items():
        assert not draw_chart(results, tmp_path)
        for entry, speed in entries.items():
            results.add(case, entry, Outcome({"gb_per_s": speed}))
    results.add("s3-load", "FsspecReader + s3fs", Outcome(error="it crashed"))
    results.write(tmp_path / "results.json")
    light, dark = draw_chart(Results.read(tmp_path / "results.json"), tmp_path)
    for text in (light.read_text(), dark.read_text()):
        for shown in ("ckpt-storage, verified", "s3torchconnector", "stock PyTorch", "torch_checkpointing"):
            assert shown in text
        for shown in ("3.25 GB/s", "2.50 GB/s", "failed"):
            assert shown in text
    assert light.read_text() != dark.read_text()
