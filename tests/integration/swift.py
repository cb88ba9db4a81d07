"""OpenStack Swift on one disk, each of its servers a process on loopback, with the S3 API in front."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import daemons
from support.servers import SECRET_KEY, S3Server, free_port, wait_for_port

_SERVERS = ("account", "container", "object")
PROGRAMS = ("swift-proxy-server", *(f"swift-{name}-server" for name in _SERVERS),
            "swift-ring-builder", "swift-object-updater", "memcached", "unshare")  # fmt: skip

_HASHES = """
[swift-hash]
swift_hash_path_suffix = tests
swift_hash_path_prefix = tests
"""

_STORAGE = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
devices = {folder}/disks
mount_check = false
swift_dir = {folder}/etc
recon_cache_path = {folder}
user = root
workers = 0
[pipeline:main]
pipeline = {name}-server
[app:{name}-server]
use = egg:swift#{name}
[object-updater]
recon_cache_path = {folder}
"""

_PROXY = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
swift_dir = {folder}/etc
user = root
workers = 0
[pipeline:main]
pipeline = catch_errors cache s3api tempauth copy slo dlo proxy-server
[filter:catch_errors]
use = egg:swift#catch_errors
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached_port}
[filter:s3api]
use = egg:swift#s3api
location = us-east-1
s3_acl = no
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = {secret} .admin
[filter:copy]
use = egg:swift#copy
[filter:slo]
use = egg:swift#slo
[filter:dlo]
use = egg:swift#dlo
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
"""


class Swift:
    """All servers, running; `server` is the S3 API."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._ports = {name: free_port() for name in _SERVERS}
        (folder / "etc").mkdir()
        (folder / "disks" / "d1").mkdir(parents=True)
        (folder / "etc" / "swift.conf").write_text(_HASHES)
        self._running: dict[str, daemons.Process] = {}
        for name in _SERVERS:
            self._build_ring(name)
            config = _STORAGE.format(name=name, port=self._ports[name], folder=folder)
            (folder / "etc" / f"{name}.conf").write_text(config)
        for name in _SERVERS:
            self.start(name)
        self.server = self._start_proxy()

    def start(self, name: str) -> None:
        """Start the `account`, `container` or `object` server."""
        self._running[name] = self._daemon(f"swift-{name}-server", self._folder / "etc" / f"{name}.conf")
        wait_for_port(self._ports[name], self._running[name])

    def stop(self, name: str) -> None:
        daemons.stop(self._running.pop(name))

    def update_listings(self) -> None:
        """Run the updater once: it tells the container server what it missed."""
        config = self._folder / "etc" / "object.conf"
        daemons.run(self._with_configuration("swift-object-updater", config, "once"))

    def _start_proxy(self) -> S3Server:
        port, memcached_port = free_port(), free_port()
        memcached = ["memcached", "-u", "root", "-l", "127.0.0.1", "-p", str(memcached_port)]
        process = daemons.start(memcached, self._folder / "memcached.log")
        self._stack.callback(daemons.stop, process)
        config = self._folder / "etc" / "proxy.conf"
        config.write_text(
            _PROXY.format(port=port, folder=self._folder, memcached_port=memcached_port, secret=SECRET_KEY)
        )
        process = self._daemon("swift-proxy-server", config)
        wait_for_port(port, process)
        return S3Server(f"http://127.0.0.1:{port}", process, access_key="test:tester")

    def _build_ring(self, name: str) -> None:
        builder = self._folder / "etc" / f"{name}.builder"
        daemons.run(["swift-ring-builder", builder, "create", "4", "1", "0"])
        daemons.run(["swift-ring-builder", builder, "add", f"r1z1-127.0.0.1:{self._ports[name]}/d1", "1"])
        daemons.run(["swift-ring-builder", builder, "rebalance"])

    def _daemon(self, program: str, config: Path) -> daemons.Process:
        process = daemons.start(self._with_configuration(program, config), self._folder / f"{program}.log")
        self._stack.callback(daemons.stop, process)
        return process

    def _with_configuration(self, *command: str | Path) -> list[str | Path]:
        """Swift reads /etc/swift, whatever it is told: `command` sees ours there, and nobody else does."""
        script = 'mount --bind "$0" /etc/swift && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, self._folder / "etc", *command]


@contextlib.contextmanager
def swift_servers(folder: Path) -> Iterator[Swift]:
    with contextlib.ExitStack() as stack:
        yield Swift(folder, stack)
