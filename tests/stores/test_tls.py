"""TLS connections to S3: bytes in large pieces, sessions taken up again, authorities read once."""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.clock import skip_pauses_of_s3
from support.forward_proxy import certificate
from support.strict_s3 import StrictS3, strict_s3
from urllib3.util.wait import wait_for_read

from ckpt.backends.base import MIB, Store, put_bytes, read_bytes
from ckpt.backends.registry import open_store
from ckpt.backends.s3_protocol import tls as tls_module
from ckpt.backends.s3_protocol.tls import Sessions, TlsSocket, use_large_pieces
from ckpt.errors import ConfigurationError

DATA = secrets.token_bytes(13 * MIB + 5)
VERSIONS = [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3]


@pytest.fixture(params=["s3", "cos"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextlib.contextmanager
def served(
    folder: Path, scheme: str = "s3", version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3, **more: Any
) -> Iterator[tuple[StrictS3, Store]]:
    """A server that speaks TLS, and a store there."""
    context, trusted = certificate(folder)
    context.maximum_version = version
    with strict_s3(tls=context) as server:
        given = {"part_size_bytes": 5 * MIB, "client_kwargs": {"verify": str(trusted)}, "max_attempts": 2}
        store = open_store(f"{scheme}://bucket/root", {**server.options, **given, **more}, threads=2)
        yield server, store
        store.close()


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_come_as_they_went(
    scheme: str, version: ssl.TLSVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[TlsSocket] = []
    init = TlsSocket.__init__

    def noted(self: TlsSocket, *arguments: Any) -> None:
        init(self, *arguments)
        made.append(self)

    monkeypatch.setattr(TlsSocket, "__init__", noted)
    with served(tmp_path, scheme, version) as (server, store):
        for size in (0, 1, 16 << 10, (16 << 10) + 1, 300_000, len(DATA)):
            put_bytes(store, f"k{size}", DATA[:size])
            assert server.objects[f"root/k{size}"] == DATA[:size]
            assert read_bytes(store, f"k{size}") == DATA[:size]
        assert {sock.version() for sock in made} == {"TLSv1.2" if version is VERSIONS[0] else "TLSv1.3"}


def test_a_new_connection_takes_up_the_session(tmp_path: Path) -> None:
    with served(tmp_path) as (_, store):
        put_bytes(store, "k", DATA)
        pool = store._s3.repeated._forms["UploadPart"].pool  # type: ignore[attr-defined]
        first = pool._get_conn()
        with contextlib.closing(pool._get_conn()) as second:
            second.close()
            second.connect()
            assert second.is_verified
            assert second.sock.session_reused
            assert second.sock.getpeercert() == first.sock.getpeercert() != {}
            second.request("GET", "/bucket/root/k")
            reply = second.getresponse()
            assert (getattr(reply, "data", b"") or reply.read()) == DATA
        first.close()


def test_no_session_is_taken_up_with_another_server() -> None:
    sessions, session = Sessions(), cast(ssl.SSLSession, object())
    sessions.keep(("a", 443), session)
    assert sessions.of(("a", 443)) is session
    assert sessions.of(("b", 443)) is None
    assert sessions.of(("a", 444)) is None
    sessions.forget(for_good=True)
    sessions.keep(("a", 443), session)
    assert sessions.of(("a", 443)) is None


def test_the_authorities_are_read_once(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    load = ssl.SSLContext.load_verify_locations

    def counted(self: ssl.SSLContext, cafile: Any = None, *more: Any) -> None:
        loaded.append(cafile)
        load(self, cafile, *more)

    monkeypatch.setattr(ssl.SSLContext, "load_verify_locations", counted)
    with served(tmp_path, scheme) as (server, store):
        put_bytes(store, "k", DATA)  # in two threads, over connections of their own
        assert loaded == [str(tmp_path / "server.pem")]
        server.close_connections = True
        read_bytes(store, "k")
        assert len({request.connection for request in server.requests}) > 2
        assert len(loaded) == 1
        certificate(tmp_path)  # the file has another one from now on
        read_bytes(store, "k")
        assert len(loaded) == 2


def test_a_certificate_that_nobody_trusts(scheme: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    _, trusted = certificate(other)
    with (
        served(tmp_path, scheme, client_kwargs={"verify": str(trusted)}) as (server, store),
        pytest.raises(ConfigurationError, match=r"(?i)certificate verify failed"),
    ):
        put_bytes(store, "k", b"x")
    assert not server.objects


def test_a_certificate_of_another_host(tmp_path: Path) -> None:
    with served(tmp_path) as (server, _):
        options = {**server.options, "client_kwargs": {"verify": str(tmp_path / "server.pem")}}
        options["endpoint_url"] = server.endpoint_url.replace("127.0.0.1", "localhost")
        store = open_store("s3://bucket/root", {**options, "max_attempts": 1}, threads=1)
        with pytest.raises(ConfigurationError, match="hostname 'localhost' doesn't match"):
            put_bytes(store, "k", b"x")
        store.close()


def test_a_reply_that_is_cut_off_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_pauses_of_s3(monkeypatch)
    with served(tmp_path) as (server, store):
        put_bytes(store, "k", DATA)
        cuts = iter(["cut", "cut"])
        server.rule = lambda request: next(cuts, "pass") if request.operation == "GetObject" else "pass"
        assert read_bytes(store, "k") == DATA
        assert next(cuts, None) is None


@pytest.mark.parametrize("ends", ["with more bytes", "with a farewell"])
def test_a_connection_with_something_left_on_it_is_not_used_again(ends: str, pair: Pair) -> None:
    go_on = threading.Event()

    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(b"reply")
        if ends == "with more bytes":
            far.sendall(bytes(9000))
        else:
            with contextlib.suppress(OSError):
                far.settimeout(0.1)
                far.unwrap()
        assert go_on.wait(60)

    with pair.connected(serve) as near:
        with near.makefile("rb") as file:
            assert file.read(5) == b"reply"
            assert wait_for_read(near, 60)  # as urllib3 looks at a connection before it uses it again
        go_on.set()


@pytest.mark.parametrize("size", [1, 100, 8192, 16 << 10, 300_000])
@pytest.mark.parametrize("version", VERSIONS)
def test_nothing_is_received_beyond_what_is_asked_for(size: int, version: ssl.TLSVersion, pair: Pair) -> None:
    """The bytes come in pieces of all sizes: records are cut in the middle, and in their heads."""
    pair.context.maximum_version = version
    done = threading.Event()

    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(secrets.token_bytes(size))
        far.sendall(b"next")
        assert done.wait(60)

    with pair.connected(serve, through=_in_pieces) as near:
        got = bytearray()
        while len(got) < size:
            got += near.recv(size - len(got))
        assert near._incoming.pending == 0
        assert near._left == 0
        assert near._head == b""
        assert wait_for_read(near, 60)
        assert near.recv(100) == b"next"
        done.set()


def test_a_server_that_trickles_is_given_up(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()

    def trickle() -> None:
        with contextlib.suppress(OSError):
            for byte in b"\x16\x03\x03\x40\x00" + bytes(600):
                far.sendall(bytes([byte]))
                time.sleep(0.05)

    thread = threading.Thread(target=trickle)
    thread.start()
    near.settimeout(0.3)
    with far:
        with pytest.raises(TimeoutError):
            TlsSocket(near, pair.context, "host", pair.sessions)
        far.shutdown(socket.SHUT_RDWR)
        thread.join(60)


def test_a_handshake_that_a_session_breaks_is_done_without_one(pair: Pair) -> None:
    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(b"x")

    with pair.connected(serve) as near:
        assert near.recv(1) == b"x"
        server = near._server
    assert pair.sessions.of(server) is not None
    with socket.create_server(("127.0.0.1", 0)) as listener:
        plain = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    far.close()
    sessions = Sessions()
    port = plain.getpeername()[1]
    sessions.keep(("host", port, *server[2:]), pair.sessions.of(server))
    with pytest.raises(OSError, match=r"EOF|reset"):
        TlsSocket(plain, pair.context, "host", sessions)
    assert sessions.of(("host", port, *server[2:])) is None


def test_a_name_is_needed_where_it_is_to_be_checked(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        with near, pytest.raises(ValueError, match="server_hostname"):
            TlsSocket(near, pair.context, None, pair.sessions)


def test_nothing_is_sent_unencrypted(pair: Pair) -> None:
    def serve(far: ssl.SSLSocket) -> None:
        assert far.recv(100) == b"x"
        far.sendall(b"y")

    with pair.connected(serve) as near:
        for call in (near.sendmsg, near.sendfile, near.sendto, near.recvmsg, near.recvfrom, near.dup):
            with pytest.raises(NotImplementedError):
                call([b"x"])
        for flagged in (lambda: near.send(b"x", socket.MSG_OOB), lambda: near.recv(1, socket.MSG_PEEK)):
            with pytest.raises(ValueError, match="flags"):
                flagged()
        near.sendall(b"x")
        assert near.recv(1) == b"y"


def test_a_client_of_another_kind_is_left_as_it_is() -> None:
    class Context(ssl.SSLContext):
        """As pyOpenSSL's, say."""

    context = Context(ssl.PROTOCOL_TLS_CLIENT)
    kept: dict[str, Any] = {"ssl_context": context}
    session = SimpleNamespace(_manager=SimpleNamespace(connection_pool_kw=kept))
    use_large_pieces(SimpleNamespace(_endpoint=SimpleNamespace(http_session=session)))
    assert not vars(context)
    kept.clear()
    use_large_pieces(SimpleNamespace(_endpoint=SimpleNamespace(http_session=session)))
    use_large_pieces(SimpleNamespace())


class Pair:
    """A `TlsSocket`, and the other end in a thread, which does as it is told."""

    def __init__(self, folder: Path) -> None:
        self._server, trusted = certificate(folder, "host")
        self.context = ssl.create_default_context(cafile=str(trusted))
        self.sessions = Sessions()
        self.problems: list[BaseException] = []

    @contextlib.contextmanager
    def connected(
        self,
        serve: Callable[[ssl.SSLSocket], None],
        timeout_s: float = 60,
        through: Callable[[socket.socket], socket.socket] = lambda far: far,
    ) -> Iterator[TlsSocket]:
        """`through` may put something between both."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        between = through(far)

        def run() -> None:
            try:
                between.settimeout(60)
                with self._server.wrap_socket(between, server_side=True) as wrapped:
                    serve(wrapped)
            except BaseException as error:
                self.problems.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        near.settimeout(timeout_s)
        sock = TlsSocket(near, self.context, "host", self.sessions)
        try:
            yield sock
        finally:
            sock.close()
            thread.join(60)
            assert not thread.is_alive()


def _in_pieces(far: socket.socket) -> socket.socket:
    """Give the other end another connection, of which the bytes go on to `far` in pieces of all sizes."""
    ours, theirs = socket.socketpair()
    chance = random.Random(1)

    def relay(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(int(10 ** chance.uniform(0, 4.5))):
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def run() -> None:
        with ours, far:
            other = threading.Thread(target=relay, args=(far, ours))
            other.start()
            relay(ours, far)
            other.join(60)

    far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    threading.Thread(target=run).start()
    return theirs


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    assert not pair.problems


def test_bytes_of_all_sizes_both_ways(pair: Pair) -> None:
    chance = random.Random(1)
    sizes = [1, 16 << 10, *(int(10 ** chance.uniform(0, 6.5)) for _ in range(40))]

    def serve(far: ssl.SSLSocket) -> None:
        with far.makefile("rb") as file:
            for size in sizes:
                data = file.read(size)
                position = 0
                while position < size:
                    step = int(10 ** chance.uniform(0, 5.5))  # records of all sizes
                    far.sendall(data[position : position + step])
                    position += step

    with pair.connected(serve) as near:
        for size in sizes:
            data = secrets.token_bytes(size)
            near.sendall(data)
            got = bytearray(size)
            view = memoryview(got)
            while view.nbytes:
                filled = near.recv_into(view, chance.choice([0, 1, min(view.nbytes, 5000)]))
                assert filled
                view = view[filled:]
            assert got == data


def test_what_is_there_is_given_without_waiting(pair: Pair) -> None:
    go_on = threading.Event()

    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(b"first")
        go_on.wait(60)
        far.sendall(b"second")

    with pair.connected(serve) as near:
        assert near.recv(100) == b"first"
        go_on.set()
        assert near.recv(3) == b"sec"
        assert near.recv(100) == b"ond"


@pytest.mark.parametrize("says_so", [True, False])
def test_the_end_of_a_connection_is_the_end_of_its_bytes(says_so: bool, pair: Pair) -> None:
    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(b"all")
        if says_so:
            with contextlib.suppress(OSError):
                far.unwrap()

    with pair.connected(serve) as near, near.makefile("rb") as file:
        assert file.read() == b"all"
        assert file.read() == b""


def test_a_silent_server_is_not_waited_for(pair: Pair) -> None:
    done = threading.Event()
    with pair.connected(lambda _: assert_true(done.wait(60)), timeout_s=0.2) as near:
        with pytest.raises(TimeoutError):
            near.recv(1)
        done.set()


def assert_true(value: bool) -> None:
    assert value


def test_another_thread_ends_a_read(pair: Pair) -> None:
    ended = threading.Event()
    with pair.connected(lambda _: assert_true(ended.wait(60))) as near:
        timer = threading.Timer(0.1, socket.socket.shutdown, [near, socket.SHUT_RDWR])
        timer.start()
        assert near.recv(1) == b""
        timer.join()
        ended.set()


def test_bytes_that_were_changed_on_their_way_are_an_error(pair: Pair) -> None:
    def serve(far: ssl.SSLSocket) -> None:
        far.sendall(b"good")
        socket.socket.sendall(far, b"\x17\x03\x03\x00\x20" + bytes(32))  # a record that no key has made
        with contextlib.suppress(OSError):
            far.recv(1)

    with pair.connected(serve) as near:
        assert near.recv(4) == b"good"
        with pytest.raises(ssl.SSLError):
            near.recv(1)


def test_a_handshake_that_fails_leaves_no_connection_open(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    far.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    with far, pytest.raises(ssl.SSLError):
        TlsSocket(near, pair.context, "host", pair.sessions)
    assert near.fileno() == -1


def test_little_memory_is_used_for_much(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However much is sent at once, it is encrypted piece by piece."""
    size, pending = 20 * MIB, []
    flush = TlsSocket._flush

    def noted(self: TlsSocket) -> None:
        pending.append(self._outgoing.pending)
        flush(self)

    monkeypatch.setattr(TlsSocket, "_flush", noted)

    def serve(far: ssl.SSLSocket) -> None:
        with far.makefile("rb") as file:
            assert file.read(size) == bytes(size)
        far.sendall(b"all")

    with pair.connected(serve) as near:
        near.sendall(bytes(size))
        assert near.recv(3) == b"all"
    assert max(pending) < 2 * tls_module._SENT_SIZE_BYTES
