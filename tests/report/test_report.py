"""`ckpt report`: the page holds the numbers of `ckpt inspect`, is bounded, and nothing stored becomes markup."""

from __future__ import annotations

import base64
import functools
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.commands import edit_commit, options_of, run, run_json
from support.servers import S3Server
from support.states import random_tensor, transformer_state

import ckpt
from ckpt.consistency.seal import unseal_json
from ckpt.format.figures import Timings, pack_ms
from ckpt.format.records import CommitRecord, ManifestRef, ObjectRef, encode
from ckpt.report.checkpoint import checkpoint_facts
from ckpt.report.page import page_of
from ckpt.tools.inspect import Inspection, ObjectInfo
from ckpt.trainer_integration import saving
from ckpt.trainer_integration.events import JsonLines

_PARTS = ("weights", "optimizer", "other")
_EVIL = "</script><script>alert(1)</script><!-- & \u2028 \u202e"


def embedded_in(page: str) -> Any:
    """What the script of the page reads."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(text)


def report(place: object, folder: Path, *options: object) -> Any:
    """The data of the page that the command writes."""
    out = folder / "page.html"
    said = run_json("report", place, "-o", out, *options)
    assert (said["path"], said["size_bytes"]) == (str(out), out.stat().st_size)
    data = embedded_in(out.read_text())
    assert said["kind"] == data["kind"]
    return data


def leaves(node: Any) -> Iterator[list[Any]]:
    if isinstance(node[1], list):
        for child in node[1]:
            yield from leaves(child)
    else:
        yield node


def sums(tree: Any, field: int) -> dict[Any, int]:
    added: dict[Any, int] = {}
    for leaf in leaves(tree):
        added[leaf[field]] = added.get(leaf[field], 0) + leaf[3]
    return added


def check_numbers(drawn: Any, known: Any) -> None:
    for name in ("url", "format", "version", "parameters", "stored_bytes", "referred_bytes", "bytes_by_dtype", "bytes_by_part", "seconds"):  # fmt: skip
        assert drawn[name] == known[name], name
    assert (drawn["tensors"], drawn["objects"], drawn["files"]) == tuple(
        len(known[n]) for n in ("tensors", "objects", "files")
    )
    by_part = sums(drawn["tree"], 1)
    assert {part: by_part.get(number, 0) for number, part in enumerate(_PARTS)} == known["bytes_by_part"]
    by_dtype = sums(drawn["tree"], 2)
    assert by_dtype.pop("object", 0) == sum(each["length"] for each in known["objects"])
    assert by_dtype == known["bytes_by_dtype"]
    assert sum(leaf[4] for leaf in leaves(drawn["tree"])) == known["referred_bytes"]
    columns = {"rank": "rank", "bytes": "data_bytes", "s": "write_s", "retries": "retries"}
    assert drawn["ranks"] == {
        name: [each[field] for each in known["ranks"]] for name, field in columns.items()
    }


def test_the_numbers_are_those_of_inspect(sharded_place: Path, tmp_path: Path) -> None:
    data = report(sharded_place, tmp_path)
    known = run_json("inspect", sharded_place)
    check_numbers(data["checkpoint"], known)
    assert data["checkpoint"]["commit"] == known["commit"]
    assert [rank["rank"] for rank in known["ranks"]] == [0, 1]
    assert all(rank["write_s"] > 0 and rank["data_bytes"] > 0 for rank in known["ranks"])
    assert list(known["seconds"]) == ["plan_s", "write_s", "index_s"]


def test_referred_bytes_are_told_apart(tmp_path: Path) -> None:
    state: dict[str, Any] = {"model": {"a": random_tensor(64, 64), "b": random_tensor(9)}, "step": 1}
    ckpt.save(state, tmp_path / "step-1", digests=True)
    state["model"]["b"] = random_tensor(9, seed=1)
    ckpt.save(state, tmp_path / "step-2", base=tmp_path / "step-1")
    drawn, known = (
        report(tmp_path / "step-2", tmp_path)["checkpoint"],
        run_json("inspect", tmp_path / "step-2"),
    )
    check_numbers(drawn, known)
    assert known["referred_bytes"] > 64 * 64 * 4
    assert {leaf[0]: leaf[4] > 0 for leaf in leaves(drawn["tree"])} == {"a": True, "b": False, "step": False}
    assert {info["fqn"]: info["referred_bytes"] > 0 for info in known["tensors"]} == {"model.a": True, "model.b": False}  # fmt: skip
    assert drawn["bases"] == known["bases"]


@pytest.mark.parametrize("kind", ["stock", "model", "foreign model", "without times"])
def test_every_kind_of_checkpoint_has_a_page(kind: str, tmp_path: Path) -> None:
    state: dict[str, Any] = {"model.a": random_tensor(8, 8), "model.b": random_tensor(3)}
    place = tmp_path / "c"
    if kind == "stock":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=dcp.FileSystemWriter(place))
    elif kind == "foreign model":
        from safetensors.torch import save_file

        place.mkdir()
        save_file(state, place / "model.safetensors")
    else:
        ckpt.save(state, place, format="safetensors" if kind == "model" else "ckpt")
    if kind == "without times":
        edit_commit(place, lambda commit: commit.pop("timings"))
    check_numbers(report(place, tmp_path)["checkpoint"], run_json("inspect", place))
    assert run("inspect", place).code == 0


@pytest.mark.parametrize("durations_ms", [(1, 2, 3, *[4] * 9), (1, 2, 3), (1,), ()])
def test_times_that_fit_no_rank_are_left_out(durations_ms: tuple[int, ...], tmp_path: Path) -> None:
    packed = base64.b64encode(pack_ms(*durations_ms) + b"\1").decode()
    ckpt.save({"a": random_tensor(3)}, tmp_path / "c")
    edit_commit(tmp_path / "c", lambda commit: commit.update(timings=[packed, [[7, 1]]]))
    (rank,) = run_json("inspect", tmp_path / "c")["ranks"]
    assert (rank["write_s"], rank["retries"]) == (None, 0)
    ckpt.load({"a": torch.empty(3)}, tmp_path / "c")


def test_the_records_grow_by_less_than_a_hundredth(tmp_path: Path) -> None:
    ckpt.save(transformer_state(), tmp_path / "c")
    records = [path for path in (tmp_path / "c").rglob("*") if path.is_file() and path.suffix != ".distcp"]
    commit = json.loads(unseal_json((tmp_path / "c/commit.json").read_bytes(), url="", key=""))
    grown = len(json.dumps({"timings": commit["timings"]}, separators=(",", ":"))) - 1
    assert grown <= 0.01 * (sum(path.stat().st_size for path in records) - grown)
    # Of many ranks: 5.3 bytes each, beside 144 in the commit record and a manifest of 4 kB for 20 tensors.
    many = _many_ranks(16_384)
    assert many.commit is not None
    without = len(encode(msgspec.structs.replace(many.commit, timings=msgspec.UNSET)))
    grown = len(encode(many.commit)) - without
    assert 5 * 16_384 < grown <= 0.01 * (without + 3_900 * 16_384)


def _many_ranks(ranks: int, entries: int = 0) -> Inspection:
    refs = [
        ManifestRef(path=f"rank-{rank:05}/{rank:016x}.json", size_bytes=5000, crc64nvme=f"{rank:016x}", rank=rank, files=2, items=9, data_bytes=12345 + rank)
        for rank in range(ranks)
    ]  # fmt: skip
    timings = Timings.of(
        2000, 60_000, 1500, [30_000 + rank * 7919 % 9973 for rank in range(ranks)], [(ranks - 1, 3)]
    )
    commit = CommitRecord(
        id="0" * 16, created_at="2026-01-01T00:00:00+00:00", library="ckpt-storage 1", torch="2.13.0", world_size=ranks,
        data_bytes=sum(ref.data_bytes for ref in refs), index=ObjectRef(path="i", size_bytes=1, crc64nvme="0" * 16),
        manifests=refs, timings=timings,
    )  # fmt: skip
    objects = {
        name: ObjectInfo(name, _PARTS[number % 3], 0, "f", 0, 100 + number)
        for number in range(entries)
        if (name := f"module{number % 5000}.{'deep.' * (number % 40)}object{number}")
    }
    return Inspection("/c", "ckpt-storage", 2, commit, {}, objects, {})


@pytest.mark.slow
def test_very_many_ranks_and_names_make_a_page_of_a_few_megabytes() -> None:
    inspection = _many_ranks(16_384, entries=60_000)
    facts = checkpoint_facts(inspection)
    page = page_of({"kind": "checkpoint", "made_at_s": 0.0, "checkpoint": facts}, "c")
    assert len(page) < 4_000_000
    by_part = sums(facts["tree"], 1)
    assert {part: by_part[number] for number, part in enumerate(_PARTS)} == inspection.bytes_by_part()
    assert sum(leaf[5] for leaf in leaves(facts["tree"])) == 60_000
    assert facts["ranks"]["retries"][-1] == 3
    assert len(facts["ranks"]["s"]) == 16_384


def test_no_stored_text_becomes_markup(tmp_path: Path) -> None:
    place = tmp_path / "<b>&'\""
    ckpt.save({_EVIL: random_tensor(4), "o": 1}, place, tags={_EVIL: _EVIL})
    (tmp_path / "e.jsonl").write_text(json.dumps({"kind": "failed", "at_s": 5, "step": 1, "reason": _EVIL}))
    for what in (place, tmp_path):
        run_json("report", what, "-o", tmp_path / "page.html", "--events", tmp_path / "e.jsonl")
        page = (tmp_path / "page.html").read_text()
        assert page.count("<script") == page.count("</script") == 2
        assert not re.search(r"alert\(1\)</script|<b>|\u2028|\u202e", page)
        assert (_EVIL in str(embedded_in(page))) or _EVIL.encode("unicode_escape").decode() in str(
            embedded_in(page)
        )
        assert page.isascii() or "ckpt report" in page  # the data are; the template need not be
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert "unsafe" not in policy[1]
    assert re.findall(r"default-src '(\w+)'", policy[1]) == ["none"]


def test_a_run_is_shown_with_its_events(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with ckpt.CheckpointManager(
        root, save=saving.every_steps(1), events=[JsonLines(tmp_path / "e.jsonl")]
    ) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": random_tensor(50, 50), "step": step}, metrics={"loss": 1 / step})
    with open(tmp_path / "e.jsonl", "a") as file:
        file.write(
            '{"kind": "failed", "at_s": 1e300}\nnot json\n{"kind": 3}\n[1]\n{"at_s": NaN, "kind": "failed"}\n'
        )
        file.write('{"kind": "failed", "at_s": 4.0, "step": 9, "reason": "no space", "upload_s": Infinity}\n')
    data = report(root, tmp_path, "--events", tmp_path / "e.jsonl")
    shown, listed = data["run"], run_json("ls", root)["checkpoints"]
    assert [each["path"] for each in shown["checkpoints"]] == [each["path"] for each in listed]
    assert [each["size_bytes"] for each in shown["checkpoints"]] == [each["size_bytes"] for each in listed]
    assert [each["metrics"] for each in shown["checkpoints"]] == [{"loss": 1 / step} for step in (1, 2, 3)]
    assert [save["step"] for save in shown["saves"]] == [1, 2, 3]  # whether or not they are kept
    assert all(save["upload_s"] > 0 and save["at_s"] > save["state_s"] for save in shown["saves"])
    assert (shown["failed"], [each["reason"] for each in shown["failures"]]) == (1, ["no space"])
    assert shown["interval_max_s"] >= shown["interval_median_s"] > 0
    assert len(shown["starts_s"]) == 1
    (latest,) = (each for each in listed if each["latest"])
    check_numbers(data["checkpoint"], run_json("inspect", latest["url"]))
    assert data["checkpoint"]["event"]["stall_s"] > 0
    # Without events, the checkpoints that are there tell of themselves; a local root may hold its events.
    bare = report(root, tmp_path)["run"]
    assert [save["step"] for save in bare["saves"]] == [each["step"] for each in listed]
    assert not bare["has_events"]
    (tmp_path / "e.jsonl").rename(root / "events.jsonl")
    assert report(root, tmp_path)["run"]["saves"] == shown["saves"]


def test_a_latest_that_cannot_be_shown_leaves_the_history(tmp_path: Path) -> None:
    ckpt.save({"a": random_tensor(3)}, tmp_path / "run/step-1")
    (index,) = (tmp_path / "run/step-1").rglob("*.index")
    index.write_bytes(bytes(index.stat().st_size))
    data = report(tmp_path / "run", tmp_path)
    assert data["run"]["count"] == 1
    assert data["checkpoint"] is None
    assert "step-1 cannot be shown" in data["problem"]


def test_it_draws_what_lies_in_a_bucket(s3: S3Server, tmp_path: Path) -> None:
    url, options = f"s3://{s3.new_bucket()}/run", s3.options
    ckpt.save({"model": {"a": random_tensor(5)}}, f"{url}/step-1", storage_options=options)
    given = options_of(options)
    for place in (url, f"{url}/step-1"):
        data = report(place, tmp_path, *given)
        check_numbers(data["checkpoint"], run_json("inspect", f"{url}/step-1", *given))


def test_the_page_replaces_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt.save({"a": random_tensor(3)}, tmp_path / "c")
    monkeypatch.chdir(tmp_path)
    Path("report.html").write_text("older")
    ran = run("report", "c")
    assert re.fullmatch(
        r"wrote report\.html \(\d+\.\d\d KiB\); open it in a browser: file:///\S+/report\.html\n", ran.out
    )
    assert embedded_in(Path("report.html").read_text())["kind"] == "checkpoint"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "report.html"]  # nothing temporary
    assert run("report", "c", "-o", "-").out.startswith("<!doctype html>")


def test_mistakes_are_named(tmp_path: Path) -> None:
    refused = functools.partial(run_json, "report")
    ckpt.save({"a": random_tensor(3)}, tmp_path / "c")
    page = tmp_path / "page.html"
    assert (
        "no such" in refused(tmp_path / "nowhere", "-o", page, code=3)["error"]["message"]
        or not page.exists()
    )
    assert f"-o {tmp_path}/report.html" in refused(tmp_path / "c", "-o", tmp_path, code=2)["error"]["message"]
    assert (
        "cannot be written"
        in refused(tmp_path / "c", "-o", tmp_path / "no" / "x", code=2)["error"]["message"]
    )
    assert "--json" in refused(tmp_path / "c", "-o", "-", code=2)["error"]["message"]
    missing = refused(tmp_path / "c", "-o", page, "--events", tmp_path / "none", code=3)
    assert "events" in missing["error"]["message"]
    no_events = refused(tmp_path / "c", "-o", page, "--events", tmp_path / "c/commit.json", code=2)
    assert "JsonLines" in no_events["error"]["message"]
    assert not page.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
