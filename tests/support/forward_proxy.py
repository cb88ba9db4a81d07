"""A forward proxy, as companies put before the internet: it passes requests on, or opens tunnels (CONNECT)."""

from __future__ import annotations

import base64
import contextlib
import datetime
import http.client
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from support.http_core import Handler, http_server


@dataclass
class ForwardProxy:
    """All that it is asked for, whatever its name, is at `upstream`, a host and port; `asked` are the names."""

    upstream: str
    url: str = ""
    credentials: str = ""
    asked: list[str] = field(default_factory=list)


@contextlib.contextmanager
def forward_proxy(upstream: str, credentials: str = "") -> Iterator[ForwardProxy]:
    proxy = ForwardProxy(upstream, credentials=credentials)
    with http_server(_Handler, proxy=proxy) as port:
        proxy.url = f"http://127.0.0.1:{port}"
        yield proxy


class _Handler(Handler):
    proxy: ForwardProxy

    def do_CONNECT(self) -> None:
        if not self._may_pass(self.path):
            return
        host, _, port = self.proxy.upstream.rpartition(":")
        with socket.create_connection((host, int(port))) as upstream:
            self.send_response_only(200)
            self.end_headers()
            self.wfile.flush()
            back = threading.Thread(target=_relay, args=(upstream, self.connection), daemon=True)
            back.start()
            _relay(self.connection, upstream)
            back.join()
        self.close_connection = True

    def serve(self) -> None:
        target = urlsplit(self.path)
        body = self.rfile.read(self.length)
        if not self._may_pass(target.netloc):
            return
        upstream = http.client.HTTPConnection(self.proxy.upstream)
        headers = {
            name: value for name, value in self.headers.items() if name.lower() != "proxy-authorization"
        }
        query = f"?{target.query}" if target.query else ""
        upstream.request(self.command, target.path + query, body, headers)
        reply = upstream.getresponse()
        self.answer(reply.status, dict(reply.getheaders()), reply.read())
        upstream.close()

    def _may_pass(self, name: str) -> bool:
        self.proxy.asked.append(name)
        wanted = self.proxy.credentials
        given = self.headers.get("proxy-authorization", "")
        if not wanted or given == f"Basic {base64.b64encode(wanted.encode()).decode()}":
            return True
        self.answer(407, {"proxy-authenticate": "Basic"}, b"")
        return False


def _relay(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


def certificate(folder: Path, *names: str) -> tuple[ssl.SSLContext, Path]:
    """Make a certificate for these names; return what a server needs of it, and the file for clients that trust it."""
    key, subject = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")]),
    )
    now = datetime.datetime.now(datetime.timezone.utc)
    kinds = [x509.DNSName(name) for name in names] + [x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(kinds), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    trusted, private = folder / "server.pem", folder / "server.key"
    trusted.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted, private)
    return context, trusted
