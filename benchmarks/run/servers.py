"""Start and stop the servers that clients are measured against."""

from __future__ import annotations

import contextlib
import datetime
import http.client
import ipaddress
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["ACCESS_KEY", "BUCKET", "REGION", "SECRET_KEY", "Endpoint", "rclone", "sink"]

ROOT = Path(__file__).parents[2]
ACCESS_KEY, SECRET_KEY, REGION, BUCKET = "AKBENCHMARK", "SKBENCHMARKSECRET", "us-east-1", "bench"


@dataclass(frozen=True)
class Endpoint:
    """An S3 endpoint.

    Attributes:
        url: where it is.
        certificate: the PEM file to trust, for TLS.
        counts: whether it answers to `counts` and `reset`.
        pid: of its process, if it is known.
    """

    url: str
    certificate: str | None = None
    counts: bool = True
    pid: int = 0

    def reset(self) -> None:
        """Count from zero."""
        self._control("reset")

    def clear(self) -> None:
        """Forget all objects."""
        self._control("clear")

    def report(self) -> dict[str, Any]:
        """Return the counts since the last `reset`."""
        return self._control("stats")

    def connect(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        if self.certificate is None:
            return http.client.HTTPConnection(parts.hostname, parts.port)
        context = ssl.create_default_context(cafile=self.certificate)
        return http.client.HTTPSConnection(parts.hostname, parts.port, context=context)

    def _control(self, action: str) -> dict[str, Any]:
        if not self.counts:
            return {}
        connection = self.connect()
        try:
            connection.request("GET", f"/-/{action}")
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@contextlib.contextmanager
def sink(
    *, keep: bool = False, tls_folder: Path | None = None, bytes_per_s: int | None = None
) -> Iterator[Endpoint]:
    """Start the suite's own endpoint, in a process of its own; TLS with a certificate made in
    `tls_folder`.

    Args:
        bytes_per_s: how much it sends, and takes of the bodies that it drops, over all connections;
            None is all it can.
    """
    command = [sys.executable, "-m", "benchmarks.sink"]
    certificate = None
    if keep:
        command.append("--keep")
    if bytes_per_s is not None:
        command += ["--bytes-per-s", str(bytes_per_s)]
    if tls_folder is not None:
        own, authority = _certificates(tls_folder)
        certificate = str(authority)
        command += ["--certificate", str(own)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert process.stdout is not None
        port = process.stdout.readline().decode().strip()
        if not port:
            raise RuntimeError("the sink server did not start")
        yield Endpoint(
            f"{'https' if certificate else 'http'}://127.0.0.1:{port}", certificate, pid=process.pid
        )
    finally:
        _stop(process)


@contextlib.contextmanager
def rclone(binary: Path, folder: Path) -> Iterator[Endpoint]:
    """Start `rclone serve s3` on a folder: a second, real server.

    Its hashing of objects is off: it limits reads.
    """
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(binary), "--config", os.devnull, "serve", "s3", str(folder), "--addr", f"127.0.0.1:{port}",
        "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--etag-hash", "", "--no-checksum", "--no-modtime",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port, process)
        yield Endpoint(f"http://127.0.0.1:{port}", counts=False)
    finally:
        _stop(process)


def _wait_for_port(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise RuntimeError(f"the server on port {port} did not start")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _certificates(folder: Path) -> tuple[Path, Path]:
    """Make a certificate for 127.0.0.1 with its key in one PEM file, and that of who signed it: some clients take no other."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)

    def signed(
        name: str,
        issuer: str,
        key: ec.EllipticCurvePrivateKey,
        by: ec.EllipticCurvePrivateKey,
        *,
        is_ca: bool,
    ) -> bytes:
        builder = (
            x509.CertificateBuilder(
                x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]),
                x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]),
                key.public_key(),
                x509.random_serial_number(),
            )
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=30))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if not is_ca:
            names = [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(by, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    key, signer = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    own, authority = folder / "certificate.pem", folder / "authority.pem"
    authority.write_bytes(signed("benchmark authority", "benchmark authority", signer, signer, is_ca=True))
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    own.write_bytes(plain + signed("127.0.0.1", "benchmark authority", key, signer, is_ca=False))
    return own, authority
