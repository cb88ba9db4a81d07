"""Ceph's gateway: a true S3 server, with preconditions that hold for one request and not for multipart uploads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jobs
import pytest
from ceph import PROGRAMS, Ceph, ceph_cluster
from needs import needs
from support.proxy import Call, FaultProxy, fault_proxy
from support.ranks import run_ranks
from support.servers import S3Server
from systems import SystemTests

import ckpt
from ckpt.backends.base import MIB
from ckpt.consistency.probes.examine import Verdict

pytestmark = needs("ceph", *PROGRAMS)


@pytest.fixture(scope="module")
def ceph() -> Iterator[Ceph]:
    with ceph_cluster() as cluster:
        yield cluster


class TestCeph(SystemTests):
    @pytest.fixture
    def s3_server(self, ceph: Ceph) -> S3Server:
        return ceph.server

    def test_preconditions_do_not_hold_for_multipart_uploads(self) -> None:
        """Why commit records, which have to be created by one, are put in one request."""
        here = {"Bucket": self.bucket, "Key": "k"}
        self.client.put_object(**here, Body=b"old", IfNoneMatch="*")
        with pytest.raises(self.client.exceptions.ClientError, match="PreconditionFailed"):
            self.client.put_object(**here, Body=b"new", IfNoneMatch="*")
        upload = {**here, "UploadId": self.client.create_multipart_upload(**here)["UploadId"]}
        etag = self.client.upload_part(**upload, PartNumber=1, Body=b"new")["ETag"]
        parts = {"Parts": [{"PartNumber": 1, "ETag": etag}]}
        self.client.complete_multipart_upload(**upload, MultipartUpload=parts, IfNoneMatch="*")
        assert self.client.get_object(**here)["Body"].read() == b"new"

    def test_doctor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        findings = self.doctor(monkeypatch)
        assert findings["conditional put"].measured["if_none_match"] == "honoured"
        assert findings["conditional upload in parts"].measured["if_none_match"] == "ignored"
        assert "looked for before" in findings["conditional upload in parts"].advice
        assert findings["create races with another process"].verdict is Verdict.FINE
        assert findings["checksums sent along"].verdict is Verdict.CAREFUL
        assert findings["uploads in parts"].verdict is Verdict.FINE


# -- the gateway dies ------------------------------------------------------------------------------------


def _at_part(call: Call) -> bool:
    return call.is_part


def _at_commit(call: Call) -> bool:
    return call.method == "PUT" and call.key.endswith("commit.json")


class _Killer:
    """A rule for the proxy: SIGKILL of the gateway at the first call that `chosen` is true of, or right after it."""

    def __init__(self, ceph: Ceph, chosen: Callable[[Call], bool], carried_out: bool) -> None:
        self._ceph, self._chosen, self._carried_out = ceph, chosen, carried_out
        self._lock, self._met, self.killed = threading.Lock(), False, False

    def __call__(self, call: Call) -> str:
        with self._lock:
            if self.killed:
                return "reset"
            if not self._met and self._chosen(call):
                self._met = True
                if self._carried_out:
                    return "lose"
            if not self._met:
                return "pass"
            self._ceph.kill_gateway()  # at the next call, when the reply to the chosen one is lost
            self.killed = True
            return "reset"


@pytest.mark.parametrize(
    ("chosen", "carried_out", "kinds", "loaded"),
    [
        (_at_part, False, {"StorageUnavailable"}, 1),
        (_at_commit, False, {"CommitUnknown"}, 1),
        (_at_commit, True, {"CommitUnknown"}, 2),
    ],
    ids=["in an upload", "before the commit", "after the commit"],
)
def test_gateway_is_killed_in_mid_save(
    ceph: Ceph, chosen: Callable[[Call], bool], carried_out: bool, kinds: set[str], loaded: int
) -> None:
    """Every rank learns of it in time, what was committed loads after a restart, and the next save works."""
    bucket = ceph.server.new_bucket()
    place, options = [f"s3://{bucket}/run/step-1"] * 2, {**ceph.server.options, "part_size_bytes": 5 * MIB}
    run_ranks(2, jobs.save, place, options, 1)
    with fault_proxy(ceph.server) as proxy:
        killer = _Killer(ceph, chosen, carried_out)
        proxy.rule = killer
        try:
            results = run_ranks(2, jobs.failing_save, place, _through(proxy), 2, timeout_s=60)
        finally:
            if killer.killed:
                ceph.restart_gateway()
    assert killer.killed
    for failures, message in results:
        assert set(failures) == kinds
        assert "rank" in message
    assert run_ranks(2, jobs.loads, place, options, loaded) == [True, True]
    _collect_garbage(ceph.server, bucket, options)
    assert run_ranks(2, jobs.loads, place, options, loaded) == [True, True]
    run_ranks(2, jobs.save, place, options, 3)
    assert run_ranks(2, jobs.loads, place, options, 3) == [True, True]


def _through(proxy: FaultProxy) -> dict[str, Any]:
    return {**proxy.options, "part_size_bytes": 5 * MIB, "max_attempts": 3, "connect_timeout_s": 2.0}


def _collect_garbage(server: S3Server, bucket: str, options: dict[str, Any]) -> None:
    """What the dead save left was there, and goes."""
    root = f"s3://{bucket}/run"
    removed = ckpt.collect_garbage(root, storage_options=options, grace_s=0)
    assert removed.items
    again = ckpt.collect_garbage(root, storage_options=options, grace_s=0)
    assert (again.items, again.young) == ([], 0)
    assert "Uploads" not in server.client().list_multipart_uploads(Bucket=bucket)
