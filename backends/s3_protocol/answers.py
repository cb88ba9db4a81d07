"""Tell the answers of S3 from those of others: a proxy's page, an error under the status 200, nothing at all."""

from __future__ import annotations

import re
from typing import Any

_DOCUMENTS = {
    "ListObjectsV2": b"ListBucketResult",
    "CreateMultipartUpload": b"UploadId",
    "CompleteMultipartUpload": b"CompleteMultipartUploadResult",
    "DeleteObjects": b"DeleteResult",
}
"""What is in the document that answers: without it nothing would be listed, begun, completed or deleted."""
_STREAMED = frozenset({"GetObject"})
_ERROR = re.compile(rb"\s*(?:<\?xml[^>]*\?>\s*)?<(?:\w+:)?Error[\s>]")
_CODE = re.compile(rb"<Code>(\w{1,100})</Code>")
_FOREIGN_STATUS = 502


def refuse_foreign(operation: str, reply: Any, parsed: dict[str, Any]) -> None:
    """Make a success that S3 did not send a failure that may pass, as a gateway's (502): the SDK tries again."""
    about = parsed.setdefault("ResponseMetadata", {})
    status = about.get("HTTPStatusCode", reply.status_code)
    if not 100 <= status < 300 or operation in _STREAMED:
        return
    code = str(_FOREIGN_STATUS)
    problem = ""
    if status < 200:
        problem = f"{status} is no final answer"
    elif _ERROR.match(reply.content):
        problem = f"an error under the status {status}"
        if found := _CODE.search(reply.content):
            code = found[1].decode()
    elif _DOCUMENTS.get(operation, b"") not in reply.content:
        problem = "the answer is not that of an S3 server"
    if problem:
        reply.status_code = about["HTTPStatusCode"] = _FOREIGN_STATUS
        parsed["Error"] = {"Code": code, "Message": problem}
