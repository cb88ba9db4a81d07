"""Compare saves and loads of a few real ranks by two versions of this library, call by call in turns.

    python -m benchmarks.scale.two_versions OTHER_CHECKOUT [--ranks 2 4 8] [--place posix s3] [--rounds 15]

Both jobs live at the same time, and only one of them works. A call takes as long as its slowest rank; CPU seconds are
those of all ranks. Each rank holds shards of many small tensors, so that what the ranks tell one another counts. `first` saves
find nothing remembered; in a `load` ranks may ask whether others want the same, in a `load alone` not.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KINDS = ("save first", "save later", "load", "load alone")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", help="a checkout of the version to compare with")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4, 8])
    parser.add_argument("--place", nargs="*", default=["posix", "s3"], choices=["posix", "s3"])
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    print(f"{'':28} {'other':>15} {'this':>15}   this / other: of medians, median of turns, CPU")
    for place in arguments.place:
        for ranks in arguments.ranks:
            compare(Path(arguments.other), place, ranks, arguments.tensors, arguments.rounds)


def compare(other: Path, place: str, ranks: int, tensors: int, rounds: int) -> None:
    """Print a line for each kind of call."""
    with _place(place) as (url, options), contextlib.ExitStack() as stack:
        jobs = {
            name: stack.enter_context(
                contextlib.closing(_Job(checkout, f"{url}/{name}", options, ranks, tensors))
            )
            for name, checkout in (("other", other), ("this", ROOT))
        }
        took: dict[tuple[str, str], list[tuple[float, float]]] = {
            (kind, name): [] for kind in KINDS for name in jobs
        }
        for turn in range(-2, rounds):
            for kind in KINDS:
                for name in sorted(jobs, reverse=bool(turn % 2)):
                    measured = jobs[name].call(kind)
                    if turn >= 0:
                        took[kind, name].append(measured)
    for kind in KINDS:
        other_s, this_s = took[kind, "other"], took[kind, "this"]
        medians = [statistics.median(wall_s for wall_s, _ in each) for each in (other_s, this_s)]
        cpus = [statistics.median(cpu_s for _, cpu_s in each) for each in (other_s, this_s)]
        of_turns = statistics.median(b[0] / a[0] for a, b in zip(other_s, this_s, strict=True))
        print(
            f"{place:5} {ranks} ranks {kind:12} {1e3 * medians[0]:12.1f} ms {1e3 * medians[1]:12.1f} ms   "
            f"{medians[1] / medians[0]:.3f}  {of_turns:.3f}  {cpus[1] / cpus[0]:.3f}",
            flush=True,
        )


@contextlib.contextmanager
def _place(kind: str) -> Iterator[tuple[str, dict[str, str]]]:
    from benchmarks.run.servers import ACCESS_KEY, BUCKET, SECRET_KEY, sink

    if kind == "posix":
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            yield folder, {}
    else:
        with sink(keep=True) as endpoint:
            yield f"s3://{BUCKET}", {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY}


class _Job:
    """Processes of `ranks` ranks that import this library from `checkout`, and do what they are told."""

    def __init__(self, checkout: Path, url: str, options: dict[str, str], ranks: int, tensors: int) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout), "CKPT_CONFIG": "", "OMP_NUM_THREADS": "1"}
        rendezvous = tempfile.mktemp()
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    __file__,
                    "--rank",
                    json.dumps([rank, ranks, rendezvous, url, options, tensors]),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
                cwd="/",
            )
            for rank in range(ranks)
        ]
        for process in self._processes:
            assert process.stdout is not None
            library = process.stdout.readline().strip()
            if not library.startswith(str(checkout)):
                raise RuntimeError(f"a rank imported {library!r} instead of {checkout}")

    def call(self, kind: str) -> tuple[float, float]:
        """Let all ranks make a call; return the seconds of the slowest, and CPU seconds of all."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{kind}\n")
            process.stdin.flush()
        answers = []
        for process in self._processes:
            assert process.stdout is not None
            answers.append(json.loads(process.stdout.readline()))
        return max(wall_s for wall_s, _ in answers), sum(cpu_s for _, cpu_s in answers)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def _rank(rank: int, ranks: int, rendezvous: str, url: str, options: dict[str, str], tensors: int) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    import ckpt

    torch.set_num_threads(1)
    path = f"{rendezvous}.port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        Path(f"{path}.new").write_text(str(store.port))
        Path(f"{path}.new").rename(path)
    else:
        while not Path(path).exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(Path(path).read_text()), is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    size = torch.Size([16 * ranks, 256])
    state: dict[str, Any] = {
        f"layers.{number}.weight": DTensor.from_local(
            torch.ones(16, 256), mesh, [Shard(0)], shape=size, stride=(256, 1)
        )
        for number in range(tensors)
    }
    plans: Any = None
    with contextlib.suppress(ImportError):
        from ckpt.writing.column_save import PLANS as plans
    alone: dict[str, Any] = {} if plans is None else {"read_once": False}
    calls: dict[str, Callable[[], object]] = {
        "save first": lambda: ckpt.save(dict(state), url, storage_options=options),
        "save later": lambda: ckpt.save(dict(state), url, storage_options=options),
        "load": lambda: ckpt.load(state, url, storage_options=options),
        "load alone": lambda: ckpt.load(state, url, storage_options=options, **alone),
    }
    print(ckpt.__file__, flush=True)
    for line in sys.stdin:
        if line.strip() == "save first" and plans is not None:
            plans.memory.clear()
        dist.barrier()
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        calls[line.strip()]()
        print(json.dumps([time.perf_counter() - begun_s, time.process_time() - cpu_s]), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        _rank(*json.loads(sys.argv[2]))
    else:
        main()
