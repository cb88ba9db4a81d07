"""The tests that every S3 server has to pass: the conformance suite, and runs of several processes."""

from __future__ import annotations

import contextlib
import secrets
import time

import jobs
import pytest
from support.buckets import BucketTests
from support.ranks import run_ranks

import ckpt
from ckpt.backends.base import MIB, Store, read_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol.store import S3ApiStore
from ckpt.consistency.probes import speed
from ckpt.consistency.probes.examine import Finding, Verdict
from ckpt.testing import CheckedBody
from ckpt.tools.gc import GarbageItem


class SystemTests(BucketTests):
    """A subclass names its server with the fixture `s3_server`."""

    def make_store(self) -> Store:
        return self.s3_store()

    def test_save_overwrite_load(self) -> None:
        place = self._places("run/step-1")
        for seed in (1, 2):
            run_ranks(2, jobs.save, place, self.options, seed)
            assert run_ranks(2, jobs.loads, place, self.options, seed) == [True, True]

    def test_signatures_of_our_own_are_taken(self) -> None:
        """The server checks them, which moto does not: the SDK sends none of seven parts, and one of two ranges."""
        by_sdk: list[str] = []
        options = {**self.options, "part_size_bytes": 5 * MIB}
        store = open_store(f"s3://{self.bucket}/run/x", options, threads=1)
        with contextlib.closing(store):
            assert isinstance(store, S3ApiStore)
            note = lambda event_name, **_: by_sdk.append(event_name.rpartition(".")[2])
            store._s3.client.meta.events.register("before-send.s3", note)
            data = secrets.token_bytes(7 * 5 * MIB - 1)
            store.put("a/ä +b", CheckedBody(data))
            for _ in range(2):
                assert read_bytes(store, "a/ä +b") == data
            assert store.retries == 0
        sent = (by_sdk.count("CreateMultipartUpload"), by_sdk.count("UploadPart"), by_sdk.count("GetObject"))
        assert sent == (1, 0, 1)

    def test_two_writers_never_mix(self) -> None:
        """The first save of a place, and then saves that replace one another."""
        url = f"s3://{self.bucket}/run/step-1"
        for number in range(3):
            seeds = (10 * number + 1, 10 * number + 2)
            ended = run_ranks(4, jobs.compete, url, self.options, seeds)
            assert ended[0] == ended[1]
            assert ended[2] == ended[3]
            assert "saved" in ended
            assert set(ended) <= {"saved", "CommitConflict"}
            (seed,) = jobs.stored_seeds(url, self.options, seeds)
            assert ended[2 * seeds.index(seed)] == "saved"

    def test_latest_rm_and_gc(self, store: Store) -> None:
        root = f"s3://{self.bucket}/run"
        for step in (1, 2):
            run_ranks(2, jobs.save, self._places(f"run/step-{step}"), self.options, step)
        run_ranks(2, jobs.die_in_mid_save, self._places("run/step-3"), self.options, 3, killed=[1])
        assert self.raw_pending(store) > 0
        assert self._states(root) == {1: "committed", 2: "committed latest", 3: "incomplete"}

        self._collect_garbage(root)
        assert self.raw_pending(store) == 0
        self.eventually(lambda: self._states(root) == {1: "committed", 2: "committed latest"})
        assert run_ranks(2, jobs.loads, self._places("run/step-2"), self.options, 2) == [True, True]

        ckpt.remove(f"{root}/step-2", storage_options=self.options)
        self.eventually(lambda: self._states(root) == {1: "committed latest"})
        assert run_ranks(2, jobs.loads, self._places("run/step-1"), self.options, 1) == [True, True]

    def doctor(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Finding]:
        """Run `ckpt doctor`, which leaves nothing behind; returns its findings by the name of the check."""
        monkeypatch.setattr(speed, "_SIZES_BYTES", (1 << 20, 6 << 20))
        url = f"s3://{self.bucket}/doctor"
        diagnosis = ckpt.doctor(url, storage_options=self.options, second_client=True)
        self.eventually(lambda: "Contents" not in self.client.list_objects_v2(Bucket=self.bucket))
        findings = {finding.check: finding for finding in diagnosis.findings}
        assert all(
            finding.verdict is Verdict.FINE for check, finding in findings.items() if "others" in check
        )
        assert findings["unfinished uploads"].verdict is Verdict.FINE
        careful = [finding for finding in findings.values() if finding.verdict is Verdict.CAREFUL]
        assert all(finding.advice for finding in careful)
        return findings

    def _places(self, key: str) -> list[str]:
        return [f"s3://{self.bucket}/{key}"] * 2

    def _collect_garbage(self, root: str) -> None:
        """Until nothing is too young: some servers date what was just written into the second to come."""
        items: list[GarbageItem] = []
        deadline = time.monotonic() + 10
        while True:
            report = ckpt.collect_garbage(root, storage_options=self.options, grace_s=0)
            items += report.items
            if not report.young:
                break
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert {(item.place, item.unfinished) for item in items} == {("step-3", True), ("step-3", False)}

    def _states(self, root: str) -> dict[int | None, str]:
        checkpoints = ckpt.list_checkpoints(root, storage_options=self.options)
        return {each.step: each.state + (" latest" if each.latest else "") for each in checkpoints}
