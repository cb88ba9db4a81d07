"""An SFTP server on a loopback port that serves a folder of this machine, in threads of this process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface

USER, PASSWORD = "tester", "sftp-test-secret"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]
    def check_auth_password(self, username: str, password: str) -> int:
        is_right = (username, password) == (USER, PASSWORD)
        return int(paramiko.AUTH_SUCCESSFUL if is_right else paramiko.AUTH_FAILED)

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)


def _answer(error: OSError) -> int:
    return int(SFTPServer.convert_errno(error.errno or 0))


class _Files(SFTPServerInterface):  # type: ignore[misc]
    """The file system of this machine: paths are as they are."""

    def list_folder(self, path: str) -> Any:
        try:
            return [
                SFTPAttributes.from_stat(os.lstat(os.path.join(path, name)), name)
                for name in os.listdir(path)
            ]
        except OSError as error:
            return _answer(error)

    def stat(self, path: str) -> Any:
        try:
            return SFTPAttributes.from_stat(os.stat(path))
        except OSError as error:
            return _answer(error)

    def lstat(self, path: str) -> Any:
        try:
            return SFTPAttributes.from_stat(os.lstat(path))
        except OSError as error:
            return _answer(error)

    def open(self, path: str, flags: int, attr: SFTPAttributes) -> Any:
        try:
            fd = os.open(path, flags, 0o666)
        except OSError as error:
            return _answer(error)
        handle = SFTPHandle(flags)
        mode = "rb" if not flags & (os.O_WRONLY | os.O_RDWR) else "wb"
        handle.readfile = os.fdopen(fd, mode)
        handle.writefile = handle.readfile
        return handle

    def _done(self, call: Any, *arguments: Any) -> int:
        try:
            call(*arguments)
        except OSError as error:
            return _answer(error)
        return int(paramiko.SFTP_OK)

    def remove(self, path: str) -> int:
        return self._done(os.remove, path)

    def rename(self, oldpath: str, newpath: str) -> int:
        return self._done(os.rename, oldpath, newpath)

    posix_rename = rename

    def mkdir(self, path: str, attr: SFTPAttributes) -> int:
        return self._done(os.mkdir, path)

    def rmdir(self, path: str) -> int:
        return self._done(os.rmdir, path)

    def canonicalize(self, path: str) -> str:
        return os.path.realpath(path)


@contextlib.contextmanager
def sftp_server(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Serve until the end of the block; yield the URL of `folder` and the storage options."""
    key = paramiko.RSAKey.generate(2048)
    listening = socket.create_server(("127.0.0.1", 0))
    transports: list[paramiko.Transport] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:  # closed
                return
            transport = paramiko.Transport(connection)
            transports.append(transport)
            transport.add_server_key(key)
            transport.set_subsystem_handler("sftp", SFTPServer, _Files)
            with contextlib.suppress(paramiko.SSHException, EOFError):
                transport.start_server(server=_Login())

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    options = {
        "username": USER,
        "password": PASSWORD,
        "port": listening.getsockname()[1],
        "allow_agent": False,
        "look_for_keys": False,
    }
    try:
        yield f"sftp://127.0.0.1{folder}", options
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)
        for transport in transports:
            transport.close()
