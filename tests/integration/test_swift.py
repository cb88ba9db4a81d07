"""OpenStack Swift through its S3 API: preconditions are refused, and listings come when they come."""

from __future__ import annotations

from collections.abc import Iterator

import jobs
import pytest
from needs import needs
from support.ranks import run_ranks
from support.servers import S3Server
from swift import PROGRAMS, Swift, swift_servers
from systems import SystemTests

import ckpt
from ckpt.backends.base import PutMode, Store, put_bytes
from ckpt.consistency.probes.examine import Verdict

pytestmark = needs("swift", *PROGRAMS, root=True)


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    with swift_servers(tmp_path_factory.mktemp("swift")) as servers:
        yield servers


class TestSwift(SystemTests):
    visibility_timeout_s = 10.0

    @pytest.fixture
    def s3_server(self, swift: Swift) -> S3Server:
        return swift.server

    def creates_atomically(self, store: Store) -> bool:
        return False

    def test_preconditions_are_refused(self, store: Store) -> None:
        with pytest.raises(self.client.exceptions.ClientError, match="NotImplemented"):
            self.client.put_object(Bucket=self.bucket, Key="k", Body=b"x", IfNoneMatch="*")
        put_bytes(store, "k", b"x", mode=PutMode.CREATE)  # looks first instead
        assert self.raw_get(store, "k") == b"x"

    def test_doctor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """501 to a put with a condition; one that completes an upload in parts is honoured, of 1,000 parts at most."""
        findings = self.doctor(monkeypatch)
        assert findings["conditional put"].measured["if_none_match"] == "refused"
        assert "one writer at a time" in findings["conditional put"].advice
        assert findings["conditional upload in parts"].measured["if_none_match"] == "honoured"
        assert findings["checksums sent along"].verdict is Verdict.CAREFUL
        parts = findings["uploads in parts"]
        assert (parts.measured["part_1000"], parts.measured["part_10000"]) == (True, False)
        assert "give the storage option part_size_bytes" in parts.advice


def test_listings_that_lag(swift: Swift) -> None:
    """Saves that no listing shows yet load, are not touched by gc, and are found in the end."""
    options, bucket = swift.server.options, swift.server.new_bucket()
    root = f"s3://{bucket}/run"
    old, new = f"{root}/step-1", f"{root}/step-2"
    run_ranks(2, jobs.small_save, old, options, 1)

    swift.stop("container")  # objects are stored all the same
    try:
        run_ranks(2, jobs.small_save, old, options, 2)
        run_ranks(2, jobs.small_save, new, options, 3)
    finally:
        swift.start("container")
    for url, seed in ((old, 2), (new, 3)):
        assert run_ranks(2, jobs.small_loads, url, options, seed) == [True, True]
    assert _listed(root, options) == [(1, True)]

    ckpt.collect_garbage(root, storage_options=options, grace_s=0)
    for url, seed in ((old, 2), (new, 3)):
        assert run_ranks(2, jobs.small_loads, url, options, seed) == [True, True]

    swift.update_listings()
    assert _listed(root, options) == [(1, False), (2, True)]
    for url, seed in ((old, 2), (new, 3)):
        assert run_ranks(2, jobs.small_loads, url, options, seed) == [True, True]


def _listed(root: str, options: jobs.Options) -> list[tuple[int | None, bool]]:
    checkpoints = ckpt.list_checkpoints(root, storage_options=options)
    return [(each.step, each.latest) for each in checkpoints if each.state == "committed"]
