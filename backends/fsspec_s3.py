"""Listings of a bucket through s3fs, page by page: s3fs itself takes a page that is cut off for the last one."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckpt.backends.fsspec_connection import FsspecConnection
from ckpt.backends.s3_protocol.requests import cut_off
from ckpt.errors import StorageError

_OBJECTS = "list_objects_v2", {"NextContinuationToken": "ContinuationToken"}
_UPLOADS = "list_multipart_uploads", {"NextKeyMarker": "KeyMarker", "NextUploadIdMarker": "UploadIdMarker"}
"""Methods, and of their answers what the next request gives back, under which name."""


def objects_of_s3(files: FsspecConnection, folder: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """List the objects below a folder: path, and facts as of `info`."""
    bucket, prefix = _split(folder)
    for page in _pages(files, *_OBJECTS, Bucket=bucket, Prefix=prefix):
        for entry in page.get("Contents", ()):
            yield f"{bucket}/{entry['Key']}", {**entry, "size": entry["Size"]}


def folders_of_s3(files: FsspecConnection, folder: str) -> Iterator[str]:
    """List the paths of the folders directly below a folder."""
    bucket, prefix = _split(folder)
    for page in _pages(files, *_OBJECTS, Bucket=bucket, Prefix=prefix, Delimiter="/"):
        for entry in page.get("CommonPrefixes", ()):
            yield f"{bucket}/{entry['Prefix']}".rstrip("/")


def uploads_of_s3(
    files: FsspecConnection, folder: str
) -> Iterator[tuple[str, Mapping[str, Any], Callable[[Any], None]]]:
    """List the unfinished uploads below a folder: path, facts (of no size), and how to abort each."""
    bucket, prefix = _split(folder)
    for page in _pages(files, *_UPLOADS, Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            abort = operator.methodcaller("abort_mpu", bucket, upload["Key"], upload["UploadId"])
            yield f"{bucket}/{upload['Key']}", {"size": 0, "mtime": upload.get("Initiated")}, abort


def _split(folder: str) -> tuple[str, str]:
    """Return bucket and prefix; the prefix ends in a slash, as directory buckets require."""
    bucket, _, name = folder.partition("/")
    return bucket, f"{name}/" if name else ""


def _pages(
    files: FsspecConnection, method: str, following: Mapping[str, str], **arguments: str
) -> Iterator[Mapping[str, Any]]:
    """Yield the pages of a listing. Raises StorageError if one is cut off and does not name another one."""
    call = operator.methodcaller("call_s3", method, **arguments)
    while True:
        page = files.run(call)
        yield page
        if not page.get("IsTruncated"):
            return
        marks = {name: page[element] for element, name in following.items() if page.get(element)}
        if not marks or marks.items() <= arguments.items():
            raise StorageError(cut_off(next(iter(following))), url=files.url)
        arguments |= marks
        call = operator.methodcaller("call_s3", method, **arguments)
