"""The second client's process; its orders come over a socket."""

from __future__ import annotations

from multiprocessing.connection import Connection

from ckpt.consistency.probes.clients import perform
from ckpt.errors import CheckpointError


def main(descriptor: int) -> None:
    """Serve until the other side hangs up."""
    with Connection(descriptor) as connection:
        try:
            store = connection.recv()
            while True:
                operation, arguments = connection.recv()
                try:
                    answer = True, perform(store, operation, arguments)
                except CheckpointError as error:
                    answer = False, error
                connection.send(answer)
        except (EOFError, OSError):
            return
