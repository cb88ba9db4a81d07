"""Serve what Kubeflow Trainer's status server serves to the pods of a TrainJob, over TLS."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/llm/status"


@dataclass
class StatusServer:
    """A server, the variables that Trainer gives pods for it, and the statuses that came."""

    variables: dict[str, str]
    token: Path
    posted: list[dict[str, Any]] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)


@contextlib.contextmanager
def status_server(folder: Path, token: str = "a.b.c") -> Iterator[StatusServer]:
    """Run the server on loopback: 403 for another token, 404 for another path, 422 for what is no status."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    certificate = _certificate(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    (folder / "token").write_text(token)
    names = {
        "URL": f"https://127.0.0.1:{server.server_port}{PATH}",
        "CA_CERT": str(certificate),
        "TOKEN": str(folder / "token"),
    }
    seen = StatusServer(
        {f"KUBEFLOW_TRAINER_SERVER_{name}": value for name, value in names.items()}, folder / "token"
    )

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Authorization"] != f"Bearer {token}":
                return self._answer(403, {"message": "Forbidden"})
            if self.path != PATH:
                return self._answer(404, {"message": "Not found"})
            try:
                status = json.loads(body)["trainerStatus"]
            except (ValueError, KeyError):
                return self._answer(422, {"message": "Invalid payload"})
            seen.posted.append(status)
            return self._answer(200, {"trainerStatus": status})

        def _answer(self, code: int, reply: dict[str, Any]) -> None:
            if code != 200:
                seen.refused.append(code)
                reply |= {"status": "Failure", "code": code}
            self.send_response(code)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_: object) -> None:
            pass

    server.RequestHandlerClass = Handler
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate(folder: Path) -> Path:
    """Write a key and its own certificate, which is also the authority's, as Trainer's is for a client."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.timezone.utc)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False
        )
        .sign(key, hashes.SHA256())
    )
    pem = folder / "ca.crt"
    pem.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return pem
