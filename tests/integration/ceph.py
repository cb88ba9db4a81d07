"""A Ceph cluster of one monitor, one manager and one disk, and a gateway that speaks S3, all on loopback."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import daemons
from support.servers import ACCESS_KEY, SECRET_KEY, S3Server, free_port, wait_for_port

PROGRAMS = ("ceph-mon", "ceph-mgr", "ceph-osd", "radosgw", "ceph", "monmaptool", "radosgw-admin")

_CONFIG = """
[global]
fsid = {fsid}
mon host = v1:127.0.0.1:{mon_port}
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = none
auth service required = none
auth client required = none
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon allow pool size one = true
mon warn on pool no redundancy = false
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 1
osd crush chooseleaf type = 0
ms bind msgr2 = false
run dir = {folder}
admin socket = {folder}/$name.asok
log file = {folder}/$name.log
crash dir = {folder}
[mon]
mon data = {folder}/mon
[mgr]
mgr data = {folder}/mgr
[osd]
osd data = {folder}/osd
osd objectstore = bluestore
osd memory target = 939524096
bluestore block size = 8589934592
[client.rgw.a]
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw data = {folder}/rgw
rgw run sync thread = false
rgw enable usage log = false
"""

_DISK_UP_S = 100


class Ceph:
    """A running cluster; `server` is its gateway."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._port = free_port()
        self._start_cluster()
        self.server = S3Server(f"http://127.0.0.1:{self._port}", self._start_gateway())
        self._run("radosgw-admin", "user", "create", "--uid=t", "--display-name=t",
                  f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")  # fmt: skip

    def kill_gateway(self) -> None:
        """SIGKILL."""
        assert self.server.process
        self.server.process.send_signal(signal.SIGKILL)
        self.server.process.wait()

    def restart_gateway(self) -> None:
        self.server.process = self._start_gateway()

    def _start_cluster(self) -> None:
        folder, fsid, mon_port = self._folder, str(uuid.uuid4()), free_port()
        for name in ("mon", "mgr", "osd", "rgw"):
            (folder / name).mkdir()
        config = _CONFIG.format(fsid=fsid, mon_port=mon_port, folder=folder, port=self._port)
        (folder / "ceph.conf").write_text(config)
        addresses = f"[v1:127.0.0.1:{mon_port}]"
        monmap = folder / "monmap"
        daemons.run(["monmaptool", "--create", "--fsid", fsid, "--addv", "a", addresses, monmap])
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._daemon("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        self._run("ceph", "osd", "new", disk, "0")
        self._daemon("ceph-mgr", "-i", "x")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self._daemon("ceph-osd", "-i", "0")
        self._run("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h")
        deadline = time.monotonic() + _DISK_UP_S
        while "1 up" not in self._run("ceph", "osd", "stat"):
            if time.monotonic() >= deadline:
                log = "".join(path.read_text(errors="replace")[-3000:] for path in folder.glob("osd.0.log"))
                raise TimeoutError(f"the cluster's disk is not up after {_DISK_UP_S} s:\n{log}")
            time.sleep(0.5)

    def _start_gateway(self) -> daemons.Process:
        process = self._daemon("radosgw", "-n", "client.rgw.a")
        wait_for_port(self._port, process)
        return process

    def _daemon(self, program: str, *arguments: str) -> daemons.Process:
        command = [program, "-f", "-c", self._folder / "ceph.conf", *arguments]
        process = daemons.start(command, self._folder / f"{program}.out")
        self._stack.callback(daemons.stop, process)
        return process

    def _run(self, program: str, *arguments: str | Path) -> str:
        command = [program, "-c", self._folder / "ceph.conf", *arguments]
        deadline = time.monotonic() + 180
        while True:
            try:
                return daemons.run(command)
            except RuntimeError as error:  # of a monitor that is just beginning, now and then
                if "command descriptions" not in str(error) or time.monotonic() >= deadline:
                    raise
            time.sleep(0.5)


@contextlib.contextmanager
def ceph_cluster() -> Iterator[Ceph]:
    """Boots in about 15 seconds and takes 0.8 GB of memory. One whose disk does not come up, which is rare, is begun anew."""
    with contextlib.ExitStack() as stack:
        try:
            cluster = _begun(stack)
        except TimeoutError:
            stack.close()
            cluster = _begun(stack)
        yield cluster


def _begun(stack: contextlib.ExitStack) -> Ceph:
    folder = Path(tempfile.mkdtemp(prefix="ceph-"))  # its sockets' paths have to be short
    stack.callback(shutil.rmtree, folder, ignore_errors=True)
    return Ceph(folder, stack)
