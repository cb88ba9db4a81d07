"""Be one process of a run: a dense trainer, or an embedding server."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import rpc

from examples.recommender.board import Board
from examples.recommender.checkpoints import committed, remove_old, url_of
from examples.recommender.ledger import Ledger
from examples.recommender.options import Options
from examples.recommender.server import Server, serve
from examples.recommender.trainer import Trainer


def work(rank: int, options: Options, board: Board, ledger: Ledger | None) -> None:
    """Run until the last step; the first ranks are trainers, the others servers.

    `ledger`: what all rows must tell. Servers then check theirs after a restore.
    """
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)  # torch's own RPC does
    timeout = timedelta(seconds=options.timeout_s)
    dist.init_process_group("gloo", rank=rank, world_size=options.processes, timeout=timeout)
    trainers = dist.new_group(list(range(options.trainers)), timeout=timeout)
    rpc.init_rpc(  # type: ignore[no-untyped-call]
        f"trainer{rank}" if rank < options.trainers else f"server{rank - options.trainers}",
        rank=rank,
        world_size=options.processes,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=4, rpc_timeout=options.timeout_s
        ),
    )
    steps = [committed(options) if rank == 0 else []]
    dist.broadcast_object_list(steps)
    step = max(steps[0], default=0)
    if rank < options.trainers:
        _train(rank, options, trainers, step, board)
    else:
        _serve(rank, options, step, board, ledger)
    rpc.shutdown(timeout=int(options.timeout_s))
    dist.destroy_process_group()


def _serve(rank: int, options: Options, step: int, board: Board, ledger: Ledger | None) -> None:
    server = Server(options, rank - options.trainers, step)
    if step:
        server.tables.restore(url_of(options, step), storage_options=options.storage_options)
        if ledger is not None:
            ledger.check_rows(step, server.rows, f"server {rank - options.trainers} after its restore")
    serve(server)
    dist.barrier()
    saved: Future[Any] | None = None
    for cut in filter(options.is_cut, range(step + 1, options.steps + 1)):
        if saved is not None:
            saved.exception()  # updates go on while the last save ends; if it failed, this one has its rows
        saved = server.save(cut, begin=partial(board.begin_save, rank, cut))
        saved.add_done_callback(partial(_end_save, board, rank, cut))
    if saved is not None:
        saved.result()


def _end_save(board: Board, rank: int, step: int, saved: Future[Any]) -> None:
    board.end_save(rank, step, durable=False)


def _train(rank: int, options: Options, group: Any, step: int, board: Board) -> None:
    trainer = Trainer(options, rank, group)
    if step:
        trainer.restore(step)
        if rank == 0 and options.print_every:
            print(f"step {step:6d}   restored from {url_of(options, step)}", flush=True)
    dist.barrier()
    saved: Future[Any] | None = None
    begun_s, begun_step = time.monotonic(), step
    for now, loss in trainer.steps():
        board.steps[rank] = now
        if rank == 0 and options.print_every and now % options.print_every == 0:
            rate = (now - begun_step) / (time.monotonic() - begun_s)
            print(f"step {now:6d}   loss {loss:.4f}   {rate:.0f} steps/s", flush=True)
        if options.is_cut(now):
            board.begin_save(rank, now)
            saved = _cut(rank, options, trainer, now, board)
    if saved is not None:
        saved.result()


def _cut(rank: int, options: Options, trainer: Trainer, step: int, board: Board) -> Future[None]:
    """Begin a save; the future ends when it is durable, and older ones are removed."""
    begun_s = time.monotonic()
    saved = trainer.cut(step)
    held_up_s = time.monotonic() - begun_s
    ended: Future[None] = Future()

    def end(done: Future[Any]) -> None:
        error = done.exception()
        board.end_save(rank, step, durable=error is None)
        try:
            if rank == 0 and error is None:
                text = f"step {step:6d}   saved in {time.monotonic() - begun_s:.2f} s; "
                text += f"the training stood still for {held_up_s:.2f} s"
                if gone := remove_old(options):
                    text += f"; removed {', '.join(map(str, gone))}"
                if options.print_every:
                    print(text, flush=True)
        finally:  # a save that failed is logged, and the next one has what it would have had
            ended.set_result(None) if error is None else ended.set_exception(error)

    saved.add_done_callback(end)
    return ended
