"""The S3 store against a server that is strict about checksums and uploads, and misbehaves on request."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from support.clock import SkippingClock, skip_pauses_of_s3
from support.strict_s3 import Action, Request, StrictS3, Upload

from ckpt.backends.base import MIB, PutMode, Store, put_bytes, read_bytes
from ckpt.backends.bodies import BytesBody, Part
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol.errors import Replaced
from ckpt.backends.s3_protocol.http_bodies import PartReader
from ckpt.backends.s3_protocol.requests import S3Requests
from ckpt.consistency.checksums import CheckedBuffers, block_crcs
from ckpt.errors import (
    AccessDenied,
    AlreadyExists,
    IntegrityError,
    NotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
    Truncated,
)
from ckpt.testing import CheckedBody

DATA = secrets.token_bytes(13 * MIB + 5)
NAME = "root/k"  # the object behind key "k"


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)


def on(operation: str, *actions: str | tuple[int, str]) -> Callable[[Request], str | tuple[int, str]]:
    """A rule: the n-th request of this operation meets the n-th action, later ones the last."""
    left = list(actions)

    def rule(request: Request) -> str | tuple[int, str]:
        if request.operation != operation:
            return "pass"
        return left.pop(0) if len(left) > 1 else left[0]

    return rule


def read(store: Store, start: int, stop: int) -> bytes:
    target = bytearray(stop - start)
    store.read_into("k", start, [memoryview(target)])
    return bytes(target)


# -- writing -------------------------------------------------------------------------------------------


@pytest.mark.smoke
@pytest.mark.parametrize("mode", list(PutMode))
@pytest.mark.parametrize("size", [0, 1000, len(DATA)])
def test_every_byte_is_sent_with_a_checksum(server: StrictS3, store: Store, size: int, mode: PutMode) -> None:
    store.put("k", CheckedBody(DATA[:size]), mode=mode)
    assert server.objects[NAME] == DATA[:size]
    assert not server.uploads
    assert len(server.sent("UploadPart")) == (3 if size > 5 * MIB else 0)


def test_a_server_that_knows_no_checksums_of_parts(server: StrictS3, store: Store) -> None:
    """Swift refuses a list of parts that names them; it is sent again without, and from then on at once."""
    server.knows_checksums_of_parts = False
    for key in ("k", "k2"):
        store.put(key, CheckedBody(DATA))
        assert server.objects[NAME.removesuffix("k") + key] == DATA
    assert len(server.sent("CompleteMultipartUpload")) == 3
    assert len(server.sent("UploadPart")) == 6


@pytest.mark.parametrize("size", [1000, len(DATA)])
def test_damage_on_the_way_is_refused(server: StrictS3, store: Store, size: int) -> None:
    class Damaged(CheckedBody):
        def part(self, start: int, stop: int) -> contextlib.AbstractContextManager[Part]:
            part = super().part(start, stop).__enter__()
            return contextlib.nullcontext(Part([memoryview(bytes(part.nbytes))], part.crc64nvme))

    with pytest.raises(StorageError, match="BadDigest") as caught:
        store.put("k", Damaged(DATA[:size]))
    assert caught.value.settled
    assert not server.objects
    assert not server.uploads


@pytest.mark.parametrize("mode", list(PutMode))
@pytest.mark.parametrize("then", ["pass", (500, "InternalError"), (412, "PreconditionFailed")])
def test_a_completion_whose_reply_was_lost(server: StrictS3, store: Store, mode: PutMode, then: Any) -> None:
    """A retry finds no upload, no server, or the object that the first try made."""
    server.rule = on("CompleteMultipartUpload", "lose", then)
    store.put("k", CheckedBody(DATA), mode=mode)
    assert server.objects[NAME] == DATA
    assert len(server.sent("CreateMultipartUpload")) == 1


def test_a_completion_that_did_not_happen(server: StrictS3, store: Store) -> None:
    """What stands there is another object of the same size."""
    server.objects[NAME] = bytes(len(DATA))
    server.rule = on("CompleteMultipartUpload", (500, "InternalError"))
    with pytest.raises(StorageUnavailable) as caught:
        store.put("k", CheckedBody(DATA))
    assert not caught.value.settled
    assert server.objects[NAME] == bytes(len(DATA))
    assert not server.uploads


@pytest.mark.parametrize("slow", ["none", "CreateMultipartUpload", "ListMultipartUploads"])
def test_an_upload_whose_begin_was_lost(
    server: StrictS3, store: Store, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long the server takes to begin the other one, and to list both."""
    clock = SkippingClock()
    monkeypatch.setattr("ckpt.backends.s3_protocol.multipart.time", clock)
    server.uploads["older"] = Upload(NAME, time.time() - 3600)
    server.uploads["other"] = Upload(NAME + "2", time.time())
    lose = on("CreateMultipartUpload", "lose", "pass")

    def rule(request: Request) -> Action:
        if request.operation == slow:
            clock.sleep(600)
            server.clock_offset_s += 600
        return lose(request)

    server.rule = rule
    store.put("k", CheckedBody(DATA))
    assert server.objects[NAME] == DATA
    assert set(server.uploads) == {"older", "other"}


def test_a_store_that_keeps_too_little(server: StrictS3, store: Store) -> None:
    server.rule = on("CompleteMultipartUpload", "shorten")
    with pytest.raises(IntegrityError, match="kept 13631492 of 13631493 bytes"):
        store.put("k", CheckedBody(DATA))
    assert NAME in server.objects  # it may be another writer's by now


def test_a_client_that_may_not_look(server: StrictS3, store: Store) -> None:
    server.rule = on("HeadObject", (403, "AccessDenied"))
    store.put("k", CheckedBody(DATA))
    assert server.objects[NAME] == DATA


def test_conditional_writes_in_flight(server: StrictS3, store: Store) -> None:
    conflict = (409, "ConditionalRequestConflict")
    server.rule = on("PutObject", conflict, conflict, "pass")
    store.put("k", CheckedBody(b"x"), mode=PutMode.CREATE)
    assert server.objects[NAME] == b"x"
    server.rule = on("CompleteMultipartUpload", conflict, "pass")
    store.put("large", CheckedBody(DATA), mode=PutMode.CREATE)
    assert len(server.sent("CreateMultipartUpload")) == 2
    assert not server.uploads
    server.rule = on("PutObject", conflict)
    with pytest.raises(StorageUnavailable, match="ConditionalRequestConflict"):
        store.put("k3", CheckedBody(b"x"), mode=PutMode.CREATE)


def test_a_server_that_ignores_conditions(server: StrictS3, store: Store) -> None:
    server.knows_conditions = False
    assert not store.capabilities.conditional_create
    store.put("k", CheckedBody(b"first"), mode=PutMode.CREATE)
    assert server.sent("PutObject")[-1].headers["if-none-match"] == "*"
    with pytest.raises(AlreadyExists) as caught:
        store.put("k", CheckedBody(b"second"), mode=PutMode.CREATE)
    assert caught.value.settled
    assert server.objects[NAME] == b"first"


@pytest.mark.parametrize("size", [5, len(DATA)])
def test_conditions_that_are_refused_are_sent_once(server: StrictS3, store: Store, size: int) -> None:
    """Swift answers 501: then look, and write without the condition."""
    put_bytes(store, "other", b"x")  # of a server that is not known yet, it could mean the checksum
    server.rule = lambda request: (501, "NotImplemented") if "if-none-match" in request.headers else "pass"
    for key in ("k", "k2"):
        store.put(key, CheckedBody(DATA[:size]), mode=PutMode.CREATE)
        with pytest.raises(AlreadyExists):
            store.put(key, CheckedBody(DATA[:size]), mode=PutMode.CREATE)
    assert len([request for request in server.requests if "if-none-match" in request.headers]) == 1
    assert not server.uploads


@pytest.mark.parametrize(
    ("actions", "kind", "settled"),
    [
        ([(403, "AccessDenied")], AccessDenied, True),
        ([(403, "QuotaExceeded")], StorageFull, True),
        ([(403, "XMinioAdminBucketQuotaExceeded")], StorageFull, True),
        ([(400, "RequestTimeout")], StorageUnavailable, False),
        ([(500, "InternalError")], StorageUnavailable, False),
        ([(500, "InternalError"), (403, "AccessDenied")], AccessDenied, False),
        (["lose", (403, "AccessDenied")], AccessDenied, False),
    ],
)
def test_errors_say_whether_the_put_is_settled(
    server: StrictS3, store: Store, actions: list[Any], kind: type[StorageError], settled: bool
) -> None:
    server.rule = on("PutObject", *actions)
    with pytest.raises(kind) as caught:
        store.put("k", CheckedBody(b"x"))
    assert caught.value.settled is settled


@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart"])
def test_failures_before_the_completion_are_settled(server: StrictS3, store: Store, operation: str) -> None:
    server.rule = on(operation, (500, "InternalError"))
    with pytest.raises(StorageUnavailable) as caught:
        store.put("k", CheckedBody(DATA))
    assert caught.value.settled
    assert not server.uploads


def test_replies_without_an_etag(server: StrictS3, store: Store) -> None:
    server.rule = on("UploadPart", "bare")
    with pytest.raises(StorageError, match="ETag"):
        store.put("k", CheckedBody(DATA))
    assert not server.uploads


@pytest.mark.parametrize("calls", [0, 2])
def test_threads_cannot_be_started(
    server: StrictS3, store: Store, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """Where some were, they send all parts."""
    submit, left = ThreadPoolExecutor.submit, [None] * calls

    def submit_some(self: Any, *arguments: Any) -> Any:
        if not left:
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")
        left.pop()
        return submit(self, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_some)
    monkeypatch.setattr("ckpt.lanes.usable_cores", lambda: 8)
    if calls:
        store.put("k", CheckedBody(DATA))
        assert server.objects[NAME] == DATA
        return
    with pytest.raises(StorageError, match="wait for saves before the program") as caught:
        store.put("k", CheckedBody(DATA))
    assert caught.value.settled
    assert not server.uploads
    assert server.requests[-1].operation == "AbortMultipartUpload"


def test_parts_under_way_are_waited_for(server: StrictS3, store: Store) -> None:
    """An abort while one is running would leave it behind."""
    under_way: list[int] = []
    two_there = threading.Event()

    class Slow(CheckedBody):
        @contextlib.contextmanager
        def part(self, start: int, stop: int) -> Iterator[Part]:
            if start == 0:
                assert two_there.wait(60)
                raise StorageError("the first part cannot be had", url="", key="k")
            under_way.append(start)
            with super().part(start, stop) as part:
                two_there.set()
                time.sleep(0.2)
                yield part
            under_way.remove(start)

    with pytest.raises(StorageError, match="the first part"):
        store.put("k", Slow(DATA))
    assert not under_way
    assert not server.uploads
    assert server.requests[-1].operation == "AbortMultipartUpload"


def test_a_put_after_the_main_thread_ended(server: StrictS3) -> None:
    code = f"""
import threading, time
from ckpt.backends.bodies import BytesBody
from ckpt.backends.registry import open_store
from ckpt.errors import StorageError
store = open_store("s3://bucket/root", { ({**server.options})!r})
def work():
    threading.main_thread().join()
    try:
        store.put("k", BytesBody(bytes(13 << 20)))
    except StorageError as error:
        print("StorageError", error.settled)
threading.Thread(target=work).start()
"""
    server.requires_checksums = False
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "StorageError True\n", "")


# -- reading -------------------------------------------------------------------------------------------


def test_connections_are_kept(server: StrictS3, store: Store) -> None:
    server.objects[NAME] = DATA
    for start in range(0, 10 * MIB, MIB):
        assert read(store, start, start + 100) == DATA[start : start + 100]
    assert len({request.connection for request in server.requests}) == 1


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("action", ["200", "whole", "shifted", "unnamed"])
def test_only_the_bytes_asked_for(server: StrictS3, store: Store, action: str, start: int) -> None:
    server.objects[NAME] = DATA
    server.rule = on("GetObject", action)
    if action == "200":
        assert read(store, start, start + 1000) == DATA[start : start + 1000]
        return
    with pytest.raises(StorageError, match=r"range|bytes"):
        read(store, start, start + 1000)


def test_a_whole_object_where_ranges_are_ignored(server: StrictS3, store: Store) -> None:
    server.objects[NAME] = DATA
    server.rule = on("GetObject", "whole")
    assert read(store, 0, len(DATA)) == DATA
    with pytest.raises(Truncated, match="ends at byte 13631493"):
        read(store, 5, len(DATA) + 5)  # as long as the object, but not the same bytes


@pytest.mark.parametrize("action", ["cut", "stall"])
def test_a_read_goes_on_where_it_broke(server: StrictS3, action: str) -> None:
    server.objects[NAME] = DATA
    server.rule = on("GetObject", action, "pass")
    store = open_store("s3://bucket/root", {**server.options, "read_timeout_s": 1})
    assert read(store, 0, len(DATA)) == DATA
    _, second = server.sent("GetObject")
    assert int(second.headers["range"].split("=")[1].split("-")[0]) >= len(DATA) // 2 - MIB
    store.close()


@pytest.mark.parametrize("honest", [True, False])
def test_two_objects_are_never_mixed(server: StrictS3, store: Store, honest: bool) -> None:
    server.objects[NAME] = DATA

    def rule(request: Request) -> str:
        if request.operation == "GetObject" and len(server.sent("GetObject")) == 1:
            return "cut"
        server.objects[NAME] = DATA[::-1]
        if not honest:
            request.headers.pop("if-match", None)
        return "pass"

    server.rule = rule
    with pytest.raises(StorageError, match="replaced while it was being read"):
        read(store, 0, len(DATA))


@pytest.mark.parametrize(
    ("size", "action", "looks", "reads"),
    [
        (1000, "pass", 0, 1),
        (MIB, "pass", 0, 1),
        (len(DATA), "pass", 0, 2),
        (len(DATA), "cut", 0, 2),
        (1000, "200", 0, 1),
        (1000, "whole", 0, 1),
        (len(DATA), "whole", 1, 2),
        (1000, "shifted", 1, 2),
        (1000, "unnamed", 1, 2),
        (0, "pass", 1, 1),
    ],
)
def test_an_objects_size_comes_with_its_first_bytes(
    server: StrictS3, store: Store, size: int, action: str, looks: int, reads: int
) -> None:
    """Where the server tells it; else it is asked for before."""
    server.objects[NAME] = DATA[:size]
    server.rule = on("GetObject", action, "whole" if action == "whole" else "pass")
    assert read_bytes(store, "k", size_bytes=size) == DATA[:size]
    assert (len(server.sent("HeadObject")), len(server.sent("GetObject"))) == (looks, reads)


def test_an_object_of_another_size_is_not_read(server: StrictS3, store: Store) -> None:
    server.objects[NAME] = DATA
    with pytest.raises(IntegrityError, match="holds 13631493 bytes, more than the 5 such an object may have"):
        read_bytes(store, "k", max_bytes=5)
    with pytest.raises(IntegrityError, match="holds 13631493 bytes, expected 5"):
        read_bytes(store, "k", size_bytes=5)
    assert len(server.sent("GetObject")) == 2
    assert read_bytes(store, "k") == DATA


@pytest.mark.parametrize("size", [0, 5, MIB, 2 * MIB, 3 * MIB, 4 * MIB])
def test_a_whole_object_is_of_one_version(server: StrictS3, store: Store, size: int) -> None:
    """Also where it is replaced, by one of any size, between the requests for it."""
    server.objects[NAME], newer = DATA[: 3 * MIB], DATA[::-1][:size]

    def rule(request: Request) -> str:
        if len(server.sent("GetObject")) == 2:
            server.objects[NAME] = newer
        return "pass"

    server.rule = rule
    assert read_bytes(store, "k") == newer


def test_a_whole_object_that_is_replaced_again_and_again(server: StrictS3, store: Store) -> None:
    def rule(request: Request) -> str:
        server.objects[NAME] = bytes([len(server.sent("GetObject"))]) * (2 * MIB)
        return "pass"

    server.rule = rule
    with pytest.raises(StorageError, match="was replaced while it was being read") as caught:
        read_bytes(store, "k")
    assert caught.value.key == "k"
    assert len(server.sent("GetObject")) == 4 * 3  # the SDK asks once more, where the answer is no


@pytest.mark.parametrize(
    "reply",
    [
        (206, {"content-range": "bytes 0-9/" + "9" * 5000}),
        (206, {"content-range": "bytes 0-9/*"}),
        (200, {"content-length": "-5"}),
        (412, {}),
    ],
)
def test_odd_replies_to_a_request_for_all(server: StrictS3, store: Store, reply: Any) -> None:
    """The size is asked for then, and errors are those of this library."""
    server.objects[NAME] = b"0123456789"
    read = S3Requests._get
    status, headers = reply

    def odd(self: S3Requests, key: str, start: int, stop: int, etag: str) -> Any:
        if stop == 10:
            return read(self, key, start, stop, etag)
        if status == 412:
            raise Replaced(None)
        answer, body = read(self, key, start, stop, etag)
        length = int(headers.get("content-length", 10))
        return {
            "ContentLength": length,
            "ContentRange": headers.get("content-range"),
            **_status(answer, status),
        }, body

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3Requests, "_get", odd)
        assert read_bytes(store, "k", max_bytes=10) == b"0123456789"


def _status(reply: Any, status: int) -> dict[str, Any]:
    return {"ResponseMetadata": {**reply["ResponseMetadata"], "HTTPStatusCode": status}}


def test_connections_are_kept_where_nothing_is_there(server: StrictS3, store: Store) -> None:
    put_bytes(store, "k", b"x")
    assert read_bytes(store, "k") == b"x"
    for _ in range(3):
        with pytest.raises(NotFound):
            read_bytes(store, "nothing")
        assert read_bytes(store, "k") == b"x"
    assert len({request.connection for request in server.requests}) == 1
    assert len(server.requests) == 1 + 1 + 2 * 3


@pytest.mark.parametrize("actions", [("pass",), ("cut", "pass"), ("cut", "cut", "pass")])
def test_blocks_are_checked_while_they_come(server: StrictS3, store: Store, actions: Any) -> None:
    server.objects[NAME] = DATA
    server.rule = on("GetObject", *actions)
    shown: list[int] = []

    class Watched(CheckedBuffers):
        def came(self, nbytes: int) -> None:
            shown.append(nbytes)
            super().came(nbytes)

    sizes = [5, 3 * MIB, 0, 700, len(DATA) - 705 - 3 * MIB]
    checked = Watched([memoryview(bytearray(size)) for size in sizes], MIB // 2)
    store.read_into("k", 0, checked)
    assert b"".join(checked) == DATA
    assert sum(shown) == len(DATA)
    assert checked.crcs() == block_crcs([memoryview(DATA)], MIB // 2)


def test_blocks_of_a_read_that_fails_are_checked_anew(server: StrictS3, store: Store) -> None:
    server.objects[NAME] = DATA
    server.rule = on("GetObject", "cut", (403, "AccessDenied"))
    checked = CheckedBuffers([memoryview(bytearray(len(DATA)))], MIB // 2)
    with pytest.raises(AccessDenied):
        store.read_into("k", 0, checked)
    assert bytes(checked[0][:MIB]) == DATA[:MIB]  # came, and was shown
    checked[0][:] = DATA[::-1]  # from another place
    assert checked.crcs() == block_crcs([memoryview(DATA[::-1])], MIB // 2)


# -- the rest ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("refusal", [(501, "NotImplemented"), (405, "MethodNotAllowed")])
def test_servers_without_batch_deletes(server: StrictS3, store: Store, refusal: tuple[int, str]) -> None:
    server.objects = {f"root/{i}": b"" for i in range(5)}
    server.rule = on("DeleteObjects", refusal)
    store.delete(["0", "2", "4"])
    assert set(server.objects) == {"root/1", "root/3"}


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
def test_errors_of_deletes_name_the_key(server: StrictS3, store: Store, keys: list[str]) -> None:
    server.rule = lambda request: (403, "AccessDenied")
    with pytest.raises(AccessDenied) as caught:
        store.delete(keys)
    assert caught.value.key == "a"


@pytest.mark.parametrize("signed", [False, True])
def test_config_kwargs_are_merged(server: StrictS3, signed: bool) -> None:
    """Signed payloads are read by awscrt in blocks of 4 KiB, which must not get more than they hold."""
    options = {
        **server.options,
        "config_kwargs": {
            "s3": {"addressing_style": "path", **({"payload_signing_enabled": True} if signed else {})},
            "retries": {"mode": "adaptive"},
        },
    }
    store: Any = open_store("s3://bucket/root", options)
    assert store._s3.client.meta.config.s3["payload_signing_enabled"] is signed
    assert store._s3.client.meta.config.retries == {"mode": "adaptive", "total_max_attempts": 2}
    store.put("k", CheckedBody(DATA))
    assert server.objects[NAME] == DATA
    hashes = {request.headers["x-amz-content-sha256"] for request in server.sent("UploadPart")}
    assert (hashes == {"UNSIGNED-PAYLOAD"}) is not signed
    store.close()


@pytest.mark.parametrize("size", [7, 4096, 16384, 1 << 20, 1 << 23])
def test_a_part_is_read_as_asked(size: int) -> None:
    end = min(5 * MIB, 10_000 * size)
    views = [memoryview(DATA)[:3], memoryview(b""), memoryview(DATA)[3:end]]
    reader = PartReader(Part(views))
    pieces = []
    while piece := reader.read(size):
        assert len(piece) <= size
        pieces.append(bytes(piece))
    assert b"".join(pieces) == DATA[:end]
    assert reader.seek(5) == 5
    assert reader.read() == DATA[5:end]
    assert reader.read(0) == reader.read() == b""


def test_uploads_are_large_sends(server: StrictS3, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call for every 16 KiB costs as much as the sending."""
    sends: list[int] = []
    lock = threading.Lock()
    original = PartReader.read

    def counted(self: PartReader, size: int | None = -1) -> memoryview | bytes:
        with lock:
            sends.append(size or 0)
        return original(self, size)

    monkeypatch.setattr(PartReader, "read", counted)
    store.put("k", CheckedBody(DATA))
    assert len(sends) < 12


@pytest.mark.smoke
def test_small_objects(server: StrictS3, store: Store) -> None:
    server.requires_checksums = False
    put_bytes(store, "k", b"abc")
    assert read_bytes(store, "k") == b"abc"
    store.put("k", BytesBody(DATA))
    assert read_bytes(store, "k") == DATA


@pytest.mark.parametrize(("given", "seen"), [({}, "ckpt-storage/"), ({"user_agent": "mine"}, "mine")])
def test_requests_name_this_library(server: StrictS3, given: dict[str, str], seen: str) -> None:
    server.requires_checksums = False
    with contextlib.closing(
        open_store("s3://bucket/run", {**server.options, "config_kwargs": given})
    ) as store:
        put_bytes(store, "a", b"x")
    assert all(request.headers["user-agent"].startswith(seen) for request in server.requests)
