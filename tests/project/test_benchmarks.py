"""The benchmark suite works: its S3 endpoint, a save and a load through it, the floors, and the report."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from botocore.exceptions import ClientError

import benchmarks.__main__ as suite
from benchmarks.cases import CASES, Case, Column, Entry
from benchmarks.contenders import _MODULES
from benchmarks.jobs.transfer import _drop_caches
from benchmarks.report.limits import LIMITS
from benchmarks.report.results import Results
from benchmarks.report.tables import report
from benchmarks.report.targets import BARS, judge
from benchmarks.run.fork_server import Forks
from benchmarks.run.link import link
from benchmarks.run.runner import Runner
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from benchmarks.run.states import WARM_UP, StateSpec
from benchmarks.run.suite import run_case, steps_of
from benchmarks.run.task import Outcome, Task
from benchmarks.run.worker import JOBS, carry_out

MIB = 1 << 20
STATE = StateSpec(tensors=5, rows=512, columns=1024)  # 2 MiB each: more than the endpoint keeps when it drops


@pytest.fixture(scope="module")
def keeping() -> Iterator[Endpoint]:
    with sink(keep=True) as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def dropping() -> Iterator[Endpoint]:
    with sink() as endpoint:
        yield endpoint


def client(endpoint: Endpoint) -> Any:
    import boto3

    return boto3.client(
        "s3",
        endpoint_url=endpoint.url,
        aws_access_key_id=ACCESS_KEY,
        aws_secret_access_key=SECRET_KEY,
        region_name=REGION,
    )


def code_of(work: Any, **arguments: Any) -> str:
    with pytest.raises(ClientError) as caught:
        work(Bucket=BUCKET, **arguments)
    return str(caught.value.response["Error"]["Code"])


def test_objects(keeping: Endpoint) -> None:
    s3 = client(keeping)
    s3.put_object(Bucket=BUCKET, Key="o/a b+c", Body=b"0123456789")  # sent as aws-chunked, with a trailer
    got = s3.get_object(Bucket=BUCKET, Key="o/a b+c", Range="bytes=2-4")
    assert (got["Body"].read(), got["ContentRange"]) == (b"234", "bytes 2-4/10")
    assert s3.get_object(Bucket=BUCKET, Key="o/a b+c", Range="bytes=-3")["Body"].read() == b"789"
    assert s3.head_object(Bucket=BUCKET, Key="o/a b+c")["ContentLength"] == 10
    assert code_of(s3.put_object, Key="o/a b+c", Body=b"", IfNoneMatch="*") == "PreconditionFailed"
    assert code_of(s3.get_object, Key="o/a b+c", IfMatch='"other"') == "PreconditionFailed"
    assert code_of(s3.get_object, Key="o/a b+c", Range="bytes=10-") == "InvalidRange"
    assert code_of(s3.get_object, Key="o/nothing") == "NoSuchKey"
    assert code_of(s3.head_object, Key="o/nothing") == "404"
    s3.copy_object(Bucket=BUCKET, Key="o/copy", CopySource={"Bucket": BUCKET, "Key": "o/a b+c"})
    assert s3.get_object(Bucket=BUCKET, Key="o/copy")["Body"].read() == b"0123456789"
    s3.head_bucket(Bucket=BUCKET)


def test_listing_and_deleting(keeping: Endpoint) -> None:
    s3 = client(keeping)
    for name in ("l/1", "l/2&", "l/sub/3", "l/sub/4", "other"):
        s3.put_object(Bucket=BUCKET, Key=name, Body=b"x")
    page = s3.list_objects_v2(Bucket=BUCKET, Prefix="l/", Delimiter="/")
    assert [found["Key"] for found in page["Contents"]] == ["l/1", "l/2&"]
    assert [found["Prefix"] for found in page["CommonPrefixes"]] == ["l/sub/"]
    pages = s3.get_paginator("list_objects_v2").paginate(
        Bucket=BUCKET, Prefix="l/", PaginationConfig={"PageSize": 1}
    )
    found = [item["Key"] for page in pages for item in page["Contents"]]
    assert found == ["l/1", "l/2&", "l/sub/3", "l/sub/4"]
    s3.delete_objects(Bucket=BUCKET, Delete={"Objects": [{"Key": key} for key in found[:3]]})
    s3.delete_object(Bucket=BUCKET, Key=found[3])
    assert s3.list_objects_v2(Bucket=BUCKET, Prefix="l/")["KeyCount"] == 0


def test_multipart(keeping: Endpoint) -> None:
    s3 = client(keeping)
    target = {"Bucket": BUCKET, "Key": "m/parts"}
    upload = s3.create_multipart_upload(**target)["UploadId"]
    for number, data in ((2, b"second"), (1, b"first ")):
        s3.upload_part(**target, UploadId=upload, PartNumber=number, Body=data)
    parts = {"Parts": [{"PartNumber": number, "ETag": "e"} for number in (1, 2)]}
    s3.complete_multipart_upload(**target, UploadId=upload, MultipartUpload=parts)
    assert s3.get_object(**target, Range="bytes=4-7")["Body"].read() == b"t se"
    assert (
        code_of(s3.upload_part, Key="m/parts", UploadId=upload, PartNumber=1, Body=b"late") == "NoSuchUpload"
    )
    upload = s3.create_multipart_upload(**target)["UploadId"]
    s3.abort_multipart_upload(**target, UploadId=upload)
    assert code_of(s3.abort_multipart_upload, Key="m/parts", UploadId=upload) == "NoSuchUpload"


def test_large_bodies_are_dropped_and_counted(dropping: Endpoint) -> None:
    s3 = client(dropping)
    dropping.reset()
    s3.put_object(Bucket=BUCKET, Key="large", Body=bytes(3 * MIB))
    s3.put_object(Bucket=BUCKET, Key="small", Body=b"kept")
    counts = dropping.report()
    assert (counts["requests"], counts["received_bytes"]) == ({"PutObject": 2}, 3 * MIB + 4)
    assert s3.head_object(Bucket=BUCKET, Key="large")["ContentLength"] == 3 * MIB
    assert code_of(s3.get_object, Key="large") == "InvalidObjectState"
    assert s3.get_object(Bucket=BUCKET, Key="small")["Body"].read() == b"kept"
    assert dropping.report()["sent_by_key"] == {f"{BUCKET}/small": 4}


@pytest.mark.ranks
@pytest.mark.parametrize("contender", [pytest.param("ours", marks=pytest.mark.smoke), "sockets"])
def test_save_and_load_are_measured(contender: str, keeping: Endpoint) -> None:
    task = Task("save", contender, f"s3://{BUCKET}/saved-{contender}", STATE, keeping)
    saved = figures(task)
    assert saved["sent_mb"] * 1e6 >= STATE.nbytes
    assert saved["requests"] >= 1
    loaded = figures(Task("load", contender, task.place, STATE, keeping))
    assert STATE.nbytes <= loaded["read_bytes"] < STATE.nbytes + MIB
    for found in (saved, loaded):
        assert found["wall_s"] > 0
        assert found["cpu_s_per_gb"] > 0
        assert found["peak_mb"] >= 0


@pytest.mark.ranks
def test_a_save_to_the_dropping_endpoint(dropping: Endpoint) -> None:
    saved = figures(Task("save", "ours", f"s3://{BUCKET}/dropped", STATE, dropping))
    assert saved["sent_mb"] * 1e6 >= STATE.nbytes


@pytest.mark.ranks
def test_over_tls(tmp_path: Path) -> None:
    with sink(keep=True, tls_folder=tmp_path) as endpoint:
        for contender in ("ours", "sockets"):
            task = Task("save", contender, f"s3://{BUCKET}/{contender}", STATE, endpoint)
            assert figures(task)["sent_mb"] * 1e6 >= STATE.nbytes
            assert figures(Task("load", contender, task.place, STATE, endpoint))["read_bytes"] >= STATE.nbytes


@pytest.mark.ranks
def test_only_what_is_needed_is_read(keeping: Endpoint) -> None:
    place = f"s3://{BUCKET}/sharded"
    state = StateSpec(1, 2048, 4096)
    figures(Task("save_sharded", "ours", place, state, keeping, parameters={"ranks": 4}))
    whole = figures(Task("load_sharded", "ours", place, state, keeping, parameters={"ranks": 3}))
    assert whole["needed_bytes"] == state.nbytes
    assert 1 <= whole["read_per_needed"] < 1.5
    some = figures(Task("load_sharded", "ours", place, state, keeping, parameters={"ranks": 1, "rows": 4}))
    assert some["needed_bytes"] == 4 * 4096 * 4
    assert some["read_data_bytes"] <= 2 * MIB


@pytest.mark.ranks
@pytest.mark.parametrize(("contender", "refused"), [("ours", 1.0), ("torch_files", 0.0)])
def test_damage_is_refused_or_loaded(
    contender: str, refused: float, keeping: Endpoint, tmp_path: Path
) -> None:
    places: list[tuple[str, Endpoint | None]] = [(str(tmp_path / "saved"), None)]
    if contender == "ours":
        places.append((f"s3://{BUCKET}/damaged", keeping))
    for place, endpoint in places:
        assert figures(Task("load_damaged", contender, place, STATE, endpoint)) == {"refused": refused}


@pytest.mark.ranks
def test_nothing_is_in_the_page_cache(tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    figures(Task("prepare", "files", place, STATE, threads=1))
    with (
        (tmp_path / "saved" / "0").open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view,
    ):
        _drop_caches(place)
        libc = ctypes.CDLL(None, use_errno=True)
        pages = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
        start = np.frombuffer(view, np.uint8)
        assert libc.mincore(ctypes.c_void_p(start.ctypes.data), ctypes.c_size_t(len(view)), pages) == 0
        assert sum(each & 1 for each in pages) == 0
        del start
    for direct in (False, True):
        found = figures(Task("load_cold", "files", place, STATE, threads=1, options={"direct": direct}))
        assert found["wall_s"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("contender", ["files", "stock", "ours"])
def test_files(contender: str, tmp_path: Path) -> None:
    task = Task("save", contender, str(tmp_path / "saved"), STATE, threads=2)
    assert figures(task)["gb_per_s"] > 0
    assert figures(Task("load", contender, task.place, STATE, threads=2))["gb_per_s"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("contender", ["stock", "ours"])
def test_metadata_and_stalls(contender: str, tmp_path: Path) -> None:
    found = figures(Task("commit", contender, str(tmp_path / "metadata"), parameters={"ranks": 2}))
    assert found["opened_mb"] > 0
    assert found["open_s"] > 0
    assert figures(Task("async_save", contender, str(tmp_path / "stall"), STATE))["wall_s"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.long)])
def test_through_the_manager(mode: str, tmp_path: Path) -> None:
    """A save to a server that takes 4 MB/s lasts longer than a step, and is what the middle steps ran beside."""
    options = {"mode": mode}
    assert (
        figures(Task("async_save", "managed", str(tmp_path / "stall"), STATE, options=options))["wall_s"] > 0
    )
    state = StateSpec(1, 1024, 1024)
    with sink(bytes_per_s=4_000_000) as endpoint:
        task = Task("steps", "managed", f"s3://{BUCKET}/steps-{mode}", state, endpoint, options=options)
        found = figures(replace(task, parameters={"saves": 1}))
        assert found["steps"] > 1
        assert endpoint.report()["received_bytes"] >= 2 * state.nbytes


def test_a_wrong_load_is_an_error() -> None:
    state = WARM_UP.filled()
    WARM_UP.verify(state)
    state["layers.00001.weight"][5, 5] += 1
    with pytest.raises(ValueError, match="weight was loaded wrong"):
        WARM_UP.verify(state)


def test_the_table_of_cases() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        names = [entry.name for entry in case.entries]
        assert len(set(names)) == len(names), case.name
        for entry in case.entries:
            assert entry.contender in _MODULES
            assert (entry.job or case.job) in JOBS
            assert entry.written_by in ("", *names)
            assert entry.note


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_in_the_scratch_folder_stays(
    ends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody names the folder above a checkout, say."""
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "work").write_text("of years")
    used: list[Path] = []

    def run(cases: object, rounds: int, runner: Runner, *_: object) -> None:
        used.append(runner.scratch)
        (runner.scratch / "case-0").mkdir()
        if not ends:
            raise RuntimeError("ended early")

    monkeypatch.setattr(suite, "_run", run)
    monkeypatch.setattr(suite, "_draw", lambda *_: None)
    arguments = ["--only", "s3-save", "--scratch", str(tmp_path), "--output", str(tmp_path / "results")]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with contextlib.nullcontext() if ends else pytest.raises(RuntimeError, match="ended early"):
        suite.main()
    (own,) = used
    assert own.parent == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkout", "results"]
    assert (tmp_path / "checkout" / "work").read_text() == "of years"


@pytest.mark.ranks
def test_a_failure_is_shown_and_stops_nothing(tmp_path: Path) -> None:
    entries = (
        Entry("good", "files", "floor", threads=1),
        Entry("bad", "sockets", "needs an endpoint"),
    )
    case = Case("case", "A case", "save", entries, (Column("gb_per_s", "GB/s"),), STATE)
    results = Results({}, {})
    done: list[str] = []
    with contextlib.closing(Runner(tmp_path, 1)) as runner:
        run_case(case, 1, runner, results, done.append)
    assert len(done) == steps_of(case, 1) == 2
    assert results.median("case", "good", "gb_per_s")
    text = report(results, [case])
    assert "| bad | failed |" in text
    assert "**Failed**: `AssertionError" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_measuring_processes_that_hang_or_are_gone(tmp_path: Path) -> None:
    task = Task("save", "files", str(tmp_path / "place"), STATE, threads=1)
    (tmp_path / "task").write_text(task.to_json())
    files = tmp_path / "task", tmp_path / "answer", tmp_path / "errors"
    with contextlib.closing(Forks(Path(sys.executable), os.environ)) as forks:
        with pytest.raises(TimeoutError, match="longer than 0 s"):
            forks.run(*files, os.environ, 0.0)
        with pytest.raises((OSError, ValueError)):
            forks.run(*files, os.environ, 60.0)
    broken = Forks(Path(sys.executable), {**os.environ, "PYTHONHOME": "/"})
    with contextlib.closing(broken), pytest.raises(OSError, match="Error: "):
        broken.run(*files, os.environ, 60.0)
    assert not (tmp_path / "answer").exists()


def test_bars_are_judged() -> None:
    results = Results({}, {})
    assert all(verdict.met is None for verdict in judge(results))
    for entry, wall_s in (("os.write", 1.0), ("ours", 1.1), ("stock, 2 threads", 2.2)):
        for noise in (-0.5, 0.0, 9.0):
            results.add("posix-save", entry, Outcome({"wall_s": wall_s + noise * (entry == "ours")}))
    found = {verdict.bar.what: verdict for verdict in judge(results) if verdict.value is not None}
    relative = found.pop("POSIX save, no fsync: speed relative to os.write")
    faster = found.pop("POSIX save, no fsync: times faster than stock at its best")
    best = found.pop("POSIX save, no fsync: times faster than the best peer")
    assert best.value == faster.value, "stock is the only one"
    assert relative.value == pytest.approx(1 / 1.1)
    assert faster.value == pytest.approx(2.0)
    assert relative.met
    assert faster.met
    assert not found
    assert len({bar.what for bar in BARS}) == len(BARS)
    assert LIMITS.keys() <= {bar.what for bar in BARS}


def test_a_missed_bar_is_told_with_its_limit() -> None:
    results = Results({}, {})
    for entry, wall_s in (("os.write", 1.0), ("ours", 2.0)):
        results.add("posix-save", entry, Outcome({"wall_s": wall_s}))
    what = "POSIX save, no fsync: speed relative to os.write"
    assert f"- **{what}.** {LIMITS[what]}" in report(results, CASES, docs="")
    assert f"](../../docs/{LIMITS[what].partition('](')[2][:20]}" in report(results, CASES)
    results.add("posix-save", "ours", Outcome({"wall_s": 0.1}))
    results.add("posix-save", "ours", Outcome({"wall_s": 0.1}))
    assert "those that are missed" not in report(results, CASES)


def test_rounds_that_are_run_later_count_as_much() -> None:
    machine = {"cpu": "one", "cores": 2}
    first, again = Results(machine, {"began": "at one"}), Results(machine, {"began": "at two"})
    first.add("posix-save", "ours", Outcome({"wall_s": 9.0}))
    first.add("posix-load", "ours", Outcome({"wall_s": 1.0}))
    again.add("posix-save", "ours", Outcome({"wall_s": 2.0}))
    joined = first.with_rounds_of(again)
    assert joined.median("posix-save", "ours", "wall_s") == 5.5
    assert joined.median("posix-load", "ours", "wall_s") == 1.0
    assert first.median("posix-save", "ours", "wall_s") == 9.0
    assert "- more rounds at at two: posix-save" in report(joined, CASES)
    with pytest.raises(ValueError, match="not of one machine"):
        first.with_rounds_of(Results({"cpu": "other", "cores": 2}, {}))


def figures(task: Task) -> dict[str, float]:
    outcome = carry_out(Task.from_json(task.to_json()))
    assert outcome.error is None
    assert Outcome.from_json(outcome.to_json()) == outcome
    return outcome.figures


def test_a_link_carries_every_byte(keeping: Endpoint) -> None:
    import torch

    import ckpt

    state, loaded = {"w": torch.randn(3, MIB)}, {"w": torch.empty(3, MIB)}
    with link(
        urlsplit(keeping.url).port or 0, latency_s=0.01, bytes_per_s=200e6, window_bytes=1 << 19
    ) as port:
        options = {
            "endpoint_url": f"http://127.0.0.1:{port}", "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION,
        }  # fmt: skip
        ckpt.save(state, f"s3://{BUCKET}/link/step-1", storage_options=options)
        ckpt.load(loaded, f"s3://{BUCKET}/link/step-1", storage_options=options)
    assert torch.equal(state["w"], loaded["w"])
