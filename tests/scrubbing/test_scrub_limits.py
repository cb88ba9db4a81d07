"""`ckpt scrub --bytes`, night after night: it gets on, and says of what is damaged what became of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from support.commands import flip, run, run_json
from support.damage import blocks_of, flip_blocks, save_small_blocks

import ckpt
from ckpt.draining.marker import mark
from ckpt.scrubbing.scrub import Scrubbed


@pytest.fixture(autouse=True)
def _small_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckpt.transfer.relay_bodies.RUN_BYTES", 1 << 18)


def pass_of(root: Path, **options: object) -> list[Scrubbed]:
    """Scrub within a budget until the pass is finished."""
    done: list[Scrubbed] = []
    while not (done and done[-1].finished):
        assert len(done) < 20, done[-1]
        done.append(ckpt.scrub(root, max_bytes=6e5, **options))  # type: ignore[arg-type]
    return done


def test_bytes_of_others_are_got_past(tmp_path: Path) -> None:
    """Of a checkpoint alone those of its base count too; also while the base is no checkpoint any more."""
    state = {f"w{n}": torch.arange(60_000.0) + n for n in range(4)}
    ckpt.save(state, tmp_path / "a", digests=True, no_dist=True)
    for name, value in ("b", 0.0), ("c", 1.0):
        ckpt.save(
            {**state, "w0": torch.full((60_000,), value)}, tmp_path / name, base=tmp_path / "a", no_dist=True
        )
    done = pass_of(tmp_path / "b")
    total = sum(path.stat().st_size for name in "ab" for path in (tmp_path / name).rglob("*.distcp"))
    assert len(done) == 3
    assert sum(each.checked_bytes for each in done) == total
    assert [each.passed_bytes for each in done] == sorted(each.passed_bytes for each in done)
    (path, at) = blocks_of(tmp_path / "a")[-1]
    flip_blocks([(path, at)])
    assert pass_of(tmp_path / "b")[-1].damaged == [""]
    ran = run("scrub", tmp_path / "b", "--from", tmp_path / "c")
    assert (ran.code, "another checkpoint's: scrub that one, a beside it" in ran.out) == (1, True), ran.out
    flip_blocks([(path, at)])

    alone = ckpt.scrub(tmp_path, max_bytes=6e5)  # a goes before b, which is covered by it
    assert [each.path for each in alone.checkpoints] == ["a"]
    (tmp_path / "a" / "commit.json").unlink()
    done = pass_of(tmp_path)
    assert {each.path for one in done for each in one.checkpoints} == {"b", "c"}
    assert done[-1].ok
    assert sum(each.checked_bytes for each in done) > 2 * (total - 300_000)


def test_mending_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """What is damaged goes first, once a pass: neither its own end nor the other checkpoints starve."""
    root, second = tmp_path / "run", tmp_path / "second"
    for step in (1, 2):
        save_small_blocks(root / f"step-{step}", 24, seed=step)
    shutil.copytree(root, second)
    flip_blocks(blocks_of(root / "step-2")[-1:])
    assert run("scrub", root).code == 1
    done = pass_of(root, repair_from=second)
    assert done[-1].ok
    assert done[0].checkpoints[0].path == "step-2"
    assert [m.state for one in done for each in one.checkpoints for m in each.mended] == ["mended"]
    both = [blocks_of(place / "step-2")[0] for place in (root, second)]
    flip_blocks(both)
    assert run("scrub", root).code == 1
    done = pass_of(root, repair_from=second)
    assert done[-1].damaged == ["step-2"]
    assert sum(each.checked_bytes for each in done) == done[-1].total_bytes
    assert [m.state for one in done for each in one.checkpoints for m in each.mended] == ["not mended"]
    flip_blocks(both[1:])
    done = pass_of(root, repair_from=second)  # the next pass
    assert (done[-1].ok, done[0].checkpoints[0].path) == (True, "step-2")
    # Found by a scrub that did not mend, in the part before the cut: mended at once all the same.
    flip_blocks(blocks_of(root / "step-1")[:1])
    assert any(ckpt.scrub(root, max_bytes=6e5).damaged == ["step-1"] for _ in range(9))
    assert ckpt.scrub(root, repair_from=second).ok


def test_a_second_look_that_is_cut_off_hides_nothing(tmp_path: Path) -> None:
    """The index was mended, so the files are to be read anew: what was found in them first counts until then."""
    root, second = tmp_path / "run", tmp_path / "second"
    save_small_blocks(root / "step-1", 24)
    shutil.copytree(root, second)
    for place in (root, second):
        flip_blocks(blocks_of(place / "step-1")[-2:])
    (index,) = (root / "step-1").rglob("*.index")
    flip(index, 30)
    size = sum(path.stat().st_size for path in (root / "step-1").rglob("*.distcp"))
    ran = run_json("scrub", root, "--from", second, "--bytes", f"{size + 1000}B", code=1)
    assert sorted(each["state"] for each in ran["checkpoints"][0]["mended"]) == ["mended", "not mended"]
    assert ran["damaged"] == ["step-1"]
    assert run("scrub", root, "--status").code == 1


def test_a_conflict_in_the_second_place_is_none_here(tmp_path: Path, stock_place: Path) -> None:
    root, second = tmp_path / "run", tmp_path / "second"
    save_small_blocks(root / "step-1", 4)
    ckpt.copy(root / "step-1", second / "step-1")
    shutil.copy(stock_place / ".metadata", second / "step-1")
    (index,) = (root / "step-1").rglob("*.index")
    flip(index, 30)
    ran = run_json("scrub", root, "--from", second, code=1)
    (found,) = ran["checkpoints"]
    assert (found["state"], [each["state"] for each in found["mended"]]) == ("checked", ["not mended"])
    assert "another program" in found["mended"][0]["reason"]
    assert run("scrub", root, "--status").code == 1


def test_a_nodes_own_folder_is_found_out(tmp_path: Path) -> None:
    """From above, from within, and as the folder of a single checkpoint."""
    node, second = tmp_path / "nvme" / "run", tmp_path / "durable"
    save_small_blocks(node / "step-1", 4)
    shutil.copytree(node, second)
    mark(str(node), str(second))
    for root in node.parent, node, node / "step-1":
        for more in [], ["--dry-run"]:
            ran = run("scrub", root, "--from", second, *more)
            assert (ran.code, "a node's own folder" in ran.err) == (2, True), ran
        assert run("scrub", root).code == 0
