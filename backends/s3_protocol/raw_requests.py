"""What probes ask of an S3 server: single requests of an S3 store, as it sends them itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.backends.s3_protocol.errors import Conflict, NotImplementedByServer, UploadGone
from ckpt.errors import AlreadyExists, NotFound

if TYPE_CHECKING:
    from ckpt.backends.bodies import Body
    from ckpt.backends.raw_requests import Condition
    from ckpt.backends.s3_protocol.store import S3ApiStore

__all__ = ["S3Trials"]


class S3Trials:
    """The `Trials` of an S3 store: a part of it, in a file of its own."""

    def __init__(self, store: S3ApiStore, place: str) -> None:
        self._store, self.place = store, place

    def put(self, key: str, body: Body, *, create: bool = False, part_size_bytes: int | None = None) -> bool:
        try:
            if part_size_bytes is not None:
                self._store._put_multipart(key, body, part_size_bytes, create)
                return True
            with body.part(0, body.nbytes) as part:
                self._store._put_single(key, part, create)
            return True
        except NotImplementedByServer:
            return False
        except Conflict as error:
            raise AlreadyExists(str(error), url=self._store.url, key=key) from error
        except UploadGone as error:
            raise NotFound(str(error), url=self._store.url, key=key) from error

    def learn(self, condition: Condition | None) -> None:
        self._store._condition = condition

    def begin(self, key: str) -> str:
        return self._store._start_upload(key, checksums=False)

    def send_part(self, key: str, upload_id: str, number: int, body: Body) -> None:
        try:
            with body.part(0, body.nbytes) as part:
                self._store._send_part(key, part, upload_id, number)
        except UploadGone as error:
            raise NotFound(str(error), url=self._store.url, key=key) from error

    def uploads(self, key: str) -> list[str]:
        name = self._store._object(key)["Key"]
        return [
            str(upload["UploadId"])
            for page in self._store._upload_pages(name)
            for upload in page.get("Uploads", ())
            if upload["Key"] == name
        ]

    def abort(self, key: str, upload_id: str) -> None:
        with self._store._translated(key, "abort the upload"):
            self._store._client.abort_multipart_upload(**self._store._object(key), UploadId=upload_id)
