"""The page of results and the README's chart are written from measured results."""

from __future__ import annotations

from pathlib import Path

from benchmarks.report.results import Results
from benchmarks.run.task import Outcome


def test_the_chart_shows_every_contender_and_its_speed(tmp_path: Path) -> None:
    from benchmarks.report.chart import draw_chart  # with matplotlib, which takes a second
    from benchmarks.report.publish import publish

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
            results.add(case, entry, Outcome({"gb_per_s": speed, "wall_s": 1 / speed}))
    results.add("posix-save", "safetensors", Outcome({"gb_per_s": 5.0, "wall_s": 0.2}))
    results.add("s3-load", "FsspecReader + s3fs", Outcome(error="it crashed"))
    results.write(tmp_path / "results.json")
    page, light, dark = publish(Results.read(tmp_path / "results.json"), tmp_path)
    text = page.read_text()
    assert "](../benchmarks/README.md)" in text
    assert "| 3.25 |" in text
    assert "it crashed" in text
    assert text.index("**not met**") < text.index("| met |") < text.index("not measured")
    for text in (light.read_text(), dark.read_text()):
        for shown in ("ckpt-storage, verified", "s3torchconnector", "stock PyTorch", "torch_checkpointing"):
            assert shown in text
        for shown in ("3.25 GB/s", "2.50 GB/s", "failed"):
            assert shown in text
    assert light.read_text() != dark.read_text()
