"""What the documentation tells an operator to allow is what the library asks for."""

from __future__ import annotations

import json
import re

from support.rooms import ROOT

_ACTIONS = {
    "abort_multipart_upload": "s3:AbortMultipartUpload",
    "complete_multipart_upload": "s3:PutObject",
    "create_multipart_upload": "s3:PutObject",
    "delete_object": "s3:DeleteObject",
    "delete_objects": "s3:DeleteObject",
    "get_object": "s3:GetObject",
    "head_object": "s3:GetObject",
    "list_multipart_uploads": "s3:ListBucketMultipartUploads",
    "list_objects_v2": "s3:ListBucket",
    "put_object": "s3:PutObject",
    "upload_part": "s3:PutObject",
}
"""By the request, as AWS documents them."""


def test_the_policy_allows_every_request() -> None:
    text = (ROOT / "docs/storage.md").read_text()
    policy, lifecycle = (json.loads(block) for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL))
    allowed = {action for statement in policy["Statement"] for action in statement["Action"]}
    (rule,) = lifecycle["Rules"]
    assert rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"] > 1  # `ckpt gc` waits a day
    source = "".join(path.read_text() for path in (ROOT / "backends/s3_protocol").glob("*.py"))
    sent = set(re.findall(r"client\.([a-z_0-9]+)\(", source)) - {"get_paginator", "close"}
    sent |= set(re.findall(r'\bpages\("([a-z_0-9]+)"', source))
    assert {"put_object", "list_objects_v2", "list_multipart_uploads"} <= sent
    assert {_ACTIONS[request] for request in sent} == allowed
