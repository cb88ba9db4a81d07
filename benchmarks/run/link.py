"""A slow link: a TCP proxy with latency, bandwidth and a window, in a process of its own.

    python -m benchmarks.run.link PORT [--latency-s 0.08] [--bytes-per-s N] [--window-bytes N]

It prints its port, and forwards connections to PORT on 127.0.0.1. A connection is made after one round trip,
and has at most a window of bytes on their way, as TCP does; the bandwidth is that of all connections
together, in each direction.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["link"]

_ROOT = Path(__file__).parents[2]
_CHUNK_BYTES = 1 << 17
_BURST_S = 0.05
WINDOW_BYTES = 4 << 20
"""About what Linux lets a connection have on its way without being told otherwise."""


@contextlib.contextmanager
def link(
    port: int, *, latency_s: float = 0.0, bytes_per_s: float = 0.0, window_bytes: int = WINDOW_BYTES
) -> Iterator[int]:
    """Start a link to a port of 127.0.0.1; yields the port of its near end.

    Args:
        latency_s: of a round trip.
        bytes_per_s: 0 is all it can.
    """
    arguments = [port, "--latency-s", latency_s, "--bytes-per-s", bytes_per_s, "--window-bytes", window_bytes]
    command = [sys.executable, "-m", "benchmarks.run.link", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=_ROOT)
    try:
        assert process.stdout is not None
        near = process.stdout.readline()
        if not near:
            raise RuntimeError("the link did not start")
        yield int(near)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


class _Direction:
    """One direction of the link, which all connections share."""

    def __init__(self, latency_s: float, bytes_per_s: float, window_bytes: int) -> None:
        self._one_way_s, self._bytes_per_s, self._window_bytes = latency_s / 2, bytes_per_s, window_bytes
        self._free_at_s = 0.0

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward bytes until the sender ends."""
        loop = asyncio.get_running_loop()
        on_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        room = asyncio.Semaphore(max(1, self._window_bytes // _CHUNK_BYTES))
        delivery = asyncio.create_task(self._deliver(on_way, writer, room))
        try:
            while True:
                await room.acquire()
                data = await reader.read(_CHUNK_BYTES)
                if self._bytes_per_s:
                    # A sleep that was too long is made up for, or one connection would never use the whole link.
                    begin_s = max(loop.time() - _BURST_S, self._free_at_s)
                    self._free_at_s = begin_s + len(data) / self._bytes_per_s
                    await asyncio.sleep(self._free_at_s - loop.time())
                on_way.put_nowait((loop.time() + self._one_way_s, data))
                if not data:
                    break
            await delivery
        finally:
            delivery.cancel()

    async def _deliver(
        self,
        on_way: asyncio.Queue[tuple[float, bytes]],
        writer: asyncio.StreamWriter,
        room: asyncio.Semaphore,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await on_way.get()
            await asyncio.sleep(due_s - loop.time())
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()
            loop.call_later(self._one_way_s, room.release)  # the acknowledgement comes back


async def _serve(arguments: argparse.Namespace) -> None:
    settings = arguments.latency_s, arguments.bytes_per_s, arguments.window_bytes
    up, down = _Direction(*settings), _Direction(*settings)

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await asyncio.sleep(arguments.latency_s)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", arguments.port)
            try:
                await asyncio.gather(up.carry(reader, far_writer), down.carry(far_reader, writer))
            finally:
                far_writer.close()
        writer.close()

    server = await asyncio.start_server(connect, "127.0.0.1", 0, backlog=256)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int)
    parser.add_argument("--latency-s", type=float, default=0.0)
    parser.add_argument("--bytes-per-s", type=float, default=0.0)
    parser.add_argument("--window-bytes", type=int, default=WINDOW_BYTES)
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
