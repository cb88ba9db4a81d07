"""The conformance suite for stores of buckets: around the store goes a client of its own."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt.backends.base import MIB, ObjectStat, Store
from ckpt.backends.registry import open_store
from ckpt.testing import StoreTests
from support.servers import SECRET_KEY, S3Server


class BucketTests(StoreTests):
    """Any store of a bucket, on the moto server unless a subclass names another."""

    secret_values = (SECRET_KEY,)

    @pytest.fixture
    def s3_server(self, s3: S3Server) -> S3Server:
        return s3

    @pytest.fixture(autouse=True)
    def _bucket(self, s3_server: S3Server) -> None:
        self.server, self.bucket, self.client = s3_server, s3_server.new_bucket(), s3_server.client()

    @property
    def options(self) -> dict[str, Any]:
        return {**self.server.options, "part_size_bytes": 5 * MIB}

    def s3_store(self) -> Store:
        return open_store(f"s3://{self.bucket}/run/x", self.options)

    def raw_get(self, store: Store, key: str) -> bytes | None:
        try:
            return bytes(self.client.get_object(Bucket=self.bucket, Key=f"run/x/{key}")["Body"].read())
        except self.client.exceptions.NoSuchKey:
            return None

    def raw_put(self, store: Store, key: str, data: bytes) -> None:
        self.client.put_object(Bucket=self.bucket, Key=f"run/x/{key}", Body=data)

    def raw_pending(self, store: Store) -> int:
        return len(self.client.list_multipart_uploads(Bucket=self.bucket).get("Uploads", ()))

    def creates_atomically(self, store: Store) -> bool:
        assert not store.capabilities.conditional_create  # it cannot know what this server does
        return True

    def test_abandon_aborts_orphaned_uploads(self, store: Store) -> None:
        for key in ("run/x/p/k", "run/x/p/k", "run/x/q/k", "other/k"):
            upload = self.client.create_multipart_upload(Bucket=self.bucket, Key=key)["UploadId"]
            self.client.upload_part(
                Bucket=self.bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * MIB
            )
        seen: list[ObjectStat] = []

        def spare(found: ObjectStat) -> bool:
            seen.append(found)
            return False

        assert store.abandon("p/", choose=spare) == 0
        assert {found.key for found in seen} == {"p/k"}
        assert all(found.modified_at_s is not None for found in seen)
        assert store.abandon(choose=lambda found: found.key == "p/k") == 2
        assert store.abandon() == 1
        assert self.raw_pending(store) == 1  # not ours: outside of the root
