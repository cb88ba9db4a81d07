"""Recognise files that are not what their names say: pointers of Git LFS, pages of a web server, empty files."""

from __future__ import annotations

from ckpt.backends.base import ObjectStat, Store

_HEAD_BYTES = 512
_LFS = b"version https://git-lfs.github.com/"
_PAGES = (b"<!doctype", b"<html", b"<head", b"<?xml", b"<error")


def mistaken_for(data: bytes | bytearray | memoryview) -> str | None:
    """Describe a file by its first bytes, and say what to do; None if they look like none of these."""
    head = bytes(data[:_HEAD_BYTES])
    if not head:
        return "is an empty file: its copy or download failed; get it again"
    if head.startswith(_LFS):
        return "is a pointer of Git LFS, not the file: run `git lfs pull` in its repository, or download the file"
    if head.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith(_PAGES):
        return "is a page of a web server (HTML or XML), not the file: its address gave an error or a login; download it again"
    return None


def mistaken_file(store: Store, stat: ObjectStat) -> str | None:
    """Describe the file of a store as `mistaken_for` does. Raises errors of the store."""
    head = bytearray(min(_HEAD_BYTES, stat.size_bytes))
    if head:
        store.read_into(stat.key, 0, [memoryview(head)])
    return mistaken_for(head)
