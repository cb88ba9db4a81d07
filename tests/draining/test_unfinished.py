"""A drain that is started again sends only the parts of a file that are missing, and touches no upload but its own."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import start
from support.states import digest, random_tensor
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.draining import unfinished

MIB = 1 << 20
DURABLE = "s3://bucket/run"
PART_BYTES = 5 * MIB
THREADS = 2
PARTS = 13


@pytest.fixture
def local(tmp_path: Path) -> Path:
    state = {"large": random_tensor(15 * MIB, seed=1)}
    ckpt.save(state, tmp_path / "local" / "step-1", no_dist=True, tags={"step": "1"})
    return tmp_path / "local"


def drain(local: Path | str, options: dict[str, Any]) -> list[str]:
    return [each.state for each in ckpt.drain(local, DURABLE, storage_options=options, threads=THREADS)]


def killed_after(parts: int, local: Path, server: StrictS3) -> None:
    """SIGKILL a drain that has sent so many parts of its file."""
    enough = threading.Event()

    def rule(request: Request) -> str:
        if sum(len(upload.parts) for upload in server.uploads.values()) >= parts:
            enough.set()
        return "pass"

    server.rule = rule
    with start(drain, str(local), server.options) as process:
        assert enough.wait(60)
        process.kill()
        process.join()
    server.settle()
    server.rule = lambda request: "pass"


def sent_bytes(server: StrictS3) -> int:
    return sum(int(request.headers["content-length"]) for request in server.sent("UploadPart"))


def notes(local: Path) -> list[str]:
    return [name for name in os.listdir(local) if name.startswith(".ckpt-upload-")]


def is_whole(server: StrictS3) -> bool:
    loaded = {"large": torch.zeros(15 * MIB)}
    ckpt.load(loaded, f"{DURABLE}/step-1", no_dist=True, storage_options=server.options)
    return bool(digest(loaded["large"]) == digest(random_tensor(15 * MIB, seed=1)))


def key_of(server: StrictS3) -> str:
    (upload,) = server.uploads.values()
    return upload.name


def test_killed_in_the_middle_of_a_file(local: Path, server: StrictS3) -> None:
    killed_after(6, local, server)
    (upload,) = server.uploads.values()
    missing = PARTS - len(upload.parts)
    assert 0 < missing <= PARTS - 6
    assert len(notes(local)) == 1
    server.requests.clear()
    assert drain(local, server.options) == ["durable"]
    assert sent_bytes(server) <= (missing + THREADS) * PART_BYTES
    assert len(server.sent("UploadPart")) == missing
    assert not server.sent("CreateMultipartUpload")
    assert not server.uploads
    assert not notes(local)
    assert is_whole(server)


def test_killed_again_and_again(local: Path, server: StrictS3) -> None:
    for parts in (2, 5, 9):
        killed_after(parts, local, server)
    assert drain(local, server.options) == ["durable"]
    assert len(server.sent("CreateMultipartUpload")) == 1
    assert len(server.sent("UploadPart")) <= PARTS + 3 * THREADS
    assert is_whole(server)


def test_the_bytes_that_were_sent_are_told(local: Path, server: StrictS3) -> None:
    killed_after(6, local, server)
    (upload,) = server.uploads.values()
    there_bytes = sum(map(len, upload.parts.values()))
    (done,) = ckpt.drain(local, DURABLE, storage_options=server.options)
    (file,) = (local / "step-1").glob("rank-*/*.distcp")
    assert done.sent_bytes == file.stat().st_size - there_bytes


def test_the_part_size_is_that_of_the_upload(local: Path, server: StrictS3) -> None:
    killed_after(6, local, server)
    options = {**server.options, "part_size_bytes": 8 * MIB}
    server.requests.clear()
    assert drain(local, options) == ["durable"]
    assert not server.sent("CreateMultipartUpload")
    assert is_whole(server)


@pytest.mark.parametrize("fault", ["bytes", "size", "number", "gone", "unlisted"])
def test_an_upload_that_does_not_match_is_begun_anew(local: Path, server: StrictS3, fault: str) -> None:
    killed_after(6, local, server)
    (upload_id,) = server.uploads
    upload = server.uploads[upload_id]
    first = min(upload.parts)
    if fault == "bytes":
        upload.parts[first] = bytes(PART_BYTES)
        upload.checksums[first] = ""  # the ETag tells
    elif fault == "size":
        upload.parts[first] = upload.parts[first][:-1]
    elif fault == "number":
        upload.parts[PARTS + 1] = b"x"
        upload.checksums[PARTS + 1] = ""
    elif fault == "gone":
        del server.uploads[upload_id]
    else:
        server.rule = lambda request: (501, "NotImplemented") if request.operation == "ListParts" else "pass"
    server.requests.clear()
    assert drain(local, server.options) == ["durable"]
    assert len(server.sent("CreateMultipartUpload")) == 1
    assert len(server.sent("UploadPart")) == PARTS
    assert not server.uploads
    assert is_whole(server)


def test_uploads_of_others_stay(local: Path, server: StrictS3) -> None:
    """Of the same object too: another program's, or another drain's."""
    killed_after(6, local, server)
    client, key = server.client(), key_of(server)
    checksum = {"ChecksumAlgorithm": "CRC64NVME", "ChecksumType": "FULL_OBJECT"}
    others = [
        client.create_multipart_upload(Bucket="bucket", Key=name, **checksum)["UploadId"]
        for name in (key, "run/step-1/other")
    ]
    for upload_id in others:  # what is as young as a request of ours may be a twin of it
        server.uploads[upload_id].began_s -= 3600
    assert drain(local, server.options) == ["durable"]
    assert sorted(server.uploads) == sorted(others)


def test_two_drains_at_a_time(local: Path, server: StrictS3) -> None:
    """The second neither uses nor aborts the upload of the first, which is alive."""
    goes_on, is_under_way = threading.Event(), threading.Event()

    def rule(request: Request) -> str:
        if len(server.sent("UploadPart")) >= 6 and not goes_on.is_set():
            is_under_way.set()
        return "pass"

    body_of = unfinished.Note.write
    states: list[str] = []

    def hold(note: unfinished.Note, data: bytes) -> None:
        body_of(note, data)
        is_under_way.set()
        goes_on.wait(60)

    server.rule = rule
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unfinished.Note, "write", hold)
        first = threading.Thread(target=lambda: states.extend(drain(local, server.options)))
        first.start()
        assert is_under_way.wait(60)
        patch.setattr(unfinished.Note, "write", body_of)
        assert drain(local, server.options) == ["durable"]
        assert len(server.uploads) == 1
        assert not server.sent("AbortMultipartUpload")
        goes_on.set()
        first.join(60)
    assert states == ["durable"]
    assert not server.uploads
    assert is_whole(server)


def test_garbage(local: Path, server: StrictS3) -> None:
    """An upload that a drain will go on with is young; an old one is aborted, and the drain begins anew."""
    killed_after(6, local, server)
    young = ckpt.collect_garbage(DURABLE, storage_options=server.options)
    assert (young.items, len(server.uploads)) == ([], 1)
    old = ckpt.collect_garbage(DURABLE, storage_options=server.options, grace_s=0)
    assert [item.unfinished for item in old.items] == [True]
    assert not server.uploads
    assert drain(local, server.options) == ["durable"]
    assert is_whole(server)


def test_an_upload_that_gc_may_abort_is_not_gone_on_with(local: Path, server: StrictS3) -> None:
    killed_after(6, local, server)
    (note,) = notes(local)
    os.utime(local / note, (time.time() - 50_000, time.time() - 50_000))
    assert drain(local, server.options) == ["durable"]
    assert len(server.sent("CreateMultipartUpload")) == 2
    assert is_whole(server)


def test_notes_go_with_their_checkpoint(local: Path, server: StrictS3) -> None:
    killed_after(6, local, server)
    assert notes(local)
    ckpt.remove(local / "step-1")
    assert drain(local, server.options) == []
    assert not notes(local)


def test_where_no_file_can_be_kept(tmp_path: Path) -> None:
    with unfinished.Unfinished(None).note("step-1", "s3://b/r", "k") as note:
        note.write(b"x")
        assert note.read() is None
    with unfinished.Unfinished(str(tmp_path / "missing")).note("step-1", "s3://b/r", "k") as note:
        note.write(b"x")
        assert note.read() is None
