"""Every store runs the conformance suite, against the real thing where there is one."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.buckets import BucketTests
from support.servers import ACCESS_KEY, SECRET_KEY, IamServer, S3Server
from support.strict_s3 import StrictS3

from ckpt.backends import memory
from ckpt.backends.base import MIB, Store, put_bytes
from ckpt.backends.registry import open_store
from ckpt.testing import StoreTests


class TestMemory(StoreTests):
    def make_store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/root")

    def raw_get(self, store: Store, key: str) -> bytes | None:
        versions = memory._places[store.url.split("/")[2]].objects.get(f"root/{key}")
        return versions[-1].data if versions else None

    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        place = memory._places[store.url.split("/")[2]]
        place.objects.setdefault(f"root/{key}", []).append(memory._Version(data, -1, -1e9, None))  # type: ignore[arg-type]


class TestPosix(StoreTests):
    @pytest.fixture(autouse=True)
    def _root(self, tmp_path: Path) -> None:
        self.root = tmp_path / "some" / "place"

    def make_store(self) -> Store:
        return open_store(str(self.root))

    def raw_get(self, store: Store, key: str) -> bytes | None:
        path = self.root / key
        return path.read_bytes() if path.is_file() else None

    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        (self.root / key).parent.mkdir(parents=True, exist_ok=True)
        (self.root / key).write_bytes(data)

    def raw_pending(self, store: Store) -> int:
        return len(list(self.root.rglob("*.ckpt-tmp")))


class TestS3(BucketTests):
    def make_store(self) -> Store:
        return self.s3_store()


class TestStrictS3(TestS3):
    """The same store without moto: what `make test` runs."""

    @pytest.fixture
    def s3_server(self, server: StrictS3) -> S3Server:
        server.requires_checksums = False  # the client around the store sends none
        return server


class TestCosHmac(BucketTests):
    def make_store(self) -> Store:
        return open_store(f"cos://{self.bucket}/run/x", {**self.server.options, "part_size_bytes": 5 * MIB})


class TestCosIam(BucketTests):
    secret_values = ("ibm-api-key-secret",)

    @pytest.fixture(autouse=True)
    def _iam(self, iam: IamServer) -> None:
        self.iam = iam

    def make_store(self) -> Store:
        return open_store(
            f"cos://{self.bucket}/run/x",
            {
                "endpoint_url": self.server.endpoint_url,
                "ibm_api_key_id": self.iam.api_key,
                "ibm_service_instance_id": "crn:v1:bluemix:public:cloud-object-storage:global:a/1:2::",
                "ibm_auth_endpoint": self.iam.url,
                "part_size_bytes": 5 * MIB,
            },
        )

    def test_asks_for_a_token_once(self, store: Store) -> None:
        before = len(self.iam.tokens)
        for index in range(5):
            self.raw_put(store, f"k{index}", b"x")
            store.stat(f"k{index}")
        assert len(self.iam.tokens) == before + 1

    def test_a_trusted_profile_in_place_of_the_key(self, tmp_path: Path) -> None:
        (tmp_path / "sa-token").write_text(self.iam.pod_token)
        options = {
            "endpoint_url": self.server.endpoint_url,
            "iam_profile_id": self.iam.profile_id,
            "cr_token_filename": str(tmp_path / "sa-token"),
            "ibm_auth_endpoint": self.iam.url,
        }
        with contextlib.closing(open_store(f"cos://{self.bucket}/run/x", options)) as store:
            put_bytes(store, "k", b"abc")
            assert store.stat("k").size_bytes == 3


class TestS3fs(BucketTests):
    def make_store(self) -> Store:
        return open_store(
            f"fsspec+s3://{self.bucket}/run/x",
            {"key": ACCESS_KEY, "secret": SECRET_KEY, "endpoint_url": self.server.endpoint_url},
        )


class TestFsspecMemory(StoreTests):
    @pytest.fixture(autouse=True)
    def _emptied(self) -> Iterator[None]:
        yield
        self._files().clear()

    def make_store(self) -> Store:
        self.place = f"/{uuid.uuid4().hex}/root"
        return open_store(f"fsspec+memory:/{self.place}")

    def _files(self) -> dict[str, Any]:
        from fsspec.implementations.memory import MemoryFileSystem

        files: dict[str, Any] = MemoryFileSystem.store
        return files

    def raw_get(self, store: Store, key: str) -> bytes | None:
        file = self._files().get(f"{self.place}/{key}")
        return bytes(file.getvalue()) if file else None

    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        from fsspec.implementations.memory import MemoryFileSystem

        MemoryFileSystem().pipe_file(f"{self.place}/{key}", data)

    def raw_pending(self, store: Store) -> int:
        return len([path for path in self._files() if path.endswith(".ckpt-tmp")])


class TestFsspecLocal(TestPosix):
    def make_store(self) -> Store:
        return open_store(f"fsspec+file://{self.root}")
