"""Single requests to an S3 server, for probes, sent as the store sends them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from ckpt.backends.bodies import Body
from ckpt.backends.raw_requests import Condition
from ckpt.backends.s3_protocol.errors import Conflict, NotImplementedByServer, UploadGone
from ckpt.backends.s3_protocol.multipart import begin_upload, put_in_parts
from ckpt.backends.s3_protocol.requests import S3Requests
from ckpt.errors import AlreadyExists, NotFound


class S3RawRequests:
    """The `RawRequests` of an S3 store."""

    def __init__(self, s3: S3Requests) -> None:
        self._s3 = s3
        # The endpoint in use, which may come from the environment or from the SDK's configuration
        # files.
        self.bucket_url = f"{s3.client.meta.endpoint_url}/{s3.bucket}"

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        try:
            with self._upload_found(key):
                if part_size_bytes is not None:
                    put_in_parts(self._s3, key, body, part_size_bytes, create=create)
                else:
                    with body.part(0, body.nbytes) as part:
                        self._s3.put(key, part, create=create)
            return True
        except NotImplementedByServer:
            return False
        except Conflict as error:
            raise AlreadyExists(str(error), url=self._s3.url, key=key) from error

    def learn(self, condition: Condition | None) -> None:
        self._s3.condition = condition

    def begin(self, key: str) -> str:
        return begin_upload(self._s3, key, checksums=False)

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        with self._upload_found(key), body.part(0, body.nbytes) as part:
            self._s3.send_part(key, part, upload_id, number)

    def uploads(self, key: str) -> list[str]:
        name = self._s3.object(key)["Key"]
        return [
            str(upload["UploadId"])
            for page in self._s3.upload_pages(key)
            for upload in page.get("Uploads", ())
            if upload["Key"] == name
        ]

    def abort(self, key: str, upload_id: str) -> None:
        self._s3.abort_upload(key, upload_id)

    @contextlib.contextmanager
    def _upload_found(self, key: str) -> Iterator[None]:
        try:
            yield
        except UploadGone as error:
            raise NotFound(str(error), url=self._s3.url, key=key) from error
