"""rclone as an S3 server, and as a mount of a bucket."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import daemons
from needs import RCLONE
from support.servers import ACCESS_KEY, SECRET_KEY, S3Server, free_port, wait_for_port


@contextlib.contextmanager
def rclone_server(folder: Path, *, hashes: bool = True) -> Iterator[S3Server]:
    """`rclone serve s3` on an empty folder; `hashes`: it reads an object through for the ETag of every answer."""
    port = free_port()
    (folder / "buckets").mkdir()
    command = [
        RCLONE, "--config", os.devnull, "serve", "s3", folder / "buckets", "--addr", f"127.0.0.1:{port}",
        "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--cache-dir", folder / "cache",
        *(() if hashes else ("--etag-hash", "")),
    ]  # fmt: skip
    process = daemons.start(command, folder / "rclone.log")
    try:
        wait_for_port(port, process)
        yield S3Server(f"http://127.0.0.1:{port}", process)
    finally:
        daemons.stop(process)


@contextlib.contextmanager
def rclone_mount(
    server: S3Server, bucket: str, mount_point: Path, cache_mode: str
) -> Iterator[daemons.Process]:
    """`rclone mount` of a bucket, with a memory for directories of one second."""
    environment = {
        "RCLONE_S3_PROVIDER": "Other",
        "RCLONE_S3_ENDPOINT": server.endpoint_url,
        "RCLONE_S3_ACCESS_KEY_ID": server.access_key,
        "RCLONE_S3_SECRET_ACCESS_KEY": server.secret_key,
        "RCLONE_S3_FORCE_PATH_STYLE": "true",
    }
    command = [
        RCLONE, "--config", os.devnull, "mount", f":s3:{bucket}", mount_point,
        "--cache-dir", mount_point.with_suffix(".cache"), "--dir-cache-time", "1s",
        "--vfs-cache-mode", cache_mode, "--vfs-write-back", "5s",
    ]  # fmt: skip
    with daemons.mounted(command, mount_point, mount_point.with_suffix(".log"), environment) as process:
        yield process
