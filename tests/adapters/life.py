"""One life of a training run inside a framework: the model, the batches, the kill, and the report.

The law (`test_law.py`) starts `hosts/<host>.py` once for each rank, in the host's own environment,
with the life in the environment variable CKPT_LIFE. The script trains with `read_life`,
`toy_model`, `batch`, `Reading` and, at its end, `report`.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import resource
import signal
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.backends.s3_protocol.store import S3ApiStore
from ckpt.errors import NotFound
from ckpt.options import DataOptions
from ckpt.trainer_integration.dataloader import RescalableLoader
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.sources import MapSource

WIDTH = 64
SEQUENCES = 8
"""Of all ranks in a step; 1, 2 and 4 ranks share them."""
_FETCHED_AHEAD = 2
_LIFE = "CKPT_LIFE"


@dataclass(frozen=True)
class Kill:
    """Where a process of the run dies, by SIGKILL, with all it has started.

    Attributes:
        rank: the rank whose process dies.
        place: a part of the URL or key of the save that is torn.
        at: `data`, before its first data file is there; `commit`, before its commit record is;
            `committed`, right after that.
    """

    rank: int
    place: str
    at: str


@dataclass(frozen=True)
class Life:
    """One start of a training script.

    Attributes:
        root: of the run's checkpoints: a folder or a URL.
        scratch: a local folder for whatever else the framework writes.
        report: the JSON file that the first rank writes at the end.
        steps: after which the training ends.
        save_every: steps between two saves.
        native: save with the framework's own means, not with our adapter.
        width: of the toy model; its state has 3 * 4 * 4 * width * width bytes, and a few.
        kill: where the run dies; None: it lives to its end.
        options: further settings, of one host alone.
    """

    root: str
    scratch: str
    report: str
    steps: int = 10
    save_every: int = 2
    native: bool = False
    width: int = WIDTH
    kill: Kill | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def death(self) -> Path:
        """Name the mark that a process leaves when it dies where this life says."""
        return Path(self.scratch) / "died"

    def encode(self) -> dict[str, str]:
        """Return it as environment variables."""
        return {_LIFE: json.dumps(asdict(self))}


def read_life() -> Life:
    """Read the life that this process is part of."""
    values = json.loads(os.environ[_LIFE])
    kill = values.pop("kill")
    return Life(**values, kill=Kill(**kill) if kill else None)


def toy_model(width: int = WIDTH) -> nn.Module:
    """Make the same model everywhere; every dimension is divisible by 1 to 4 ranks and by SIMD widths."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width))


def batch(step: int, width: int = WIDTH) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the batch of a step, the same on all ranks: a mean over 1, 2 or 4 ranks is then exact."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, width, generator=generator), torch.randn(8, width, generator=generator)


def loss_of(model: nn.Module, step: int, width: int = WIDTH) -> torch.Tensor:
    """Compute the loss of a step."""
    inputs, targets = batch(step, width)
    return nn.functional.mse_loss(model(inputs), targets)


class Reading:
    """The data of a life: a loader, and a note of each sequence that was trained on.

    Iterating fetches batches ahead of their use, as a loop does that moves them to a device.
    """

    def __init__(self, life: Life) -> None:
        self._notes = Path(life.scratch) / f"tokens-of-rank-{dist.get_rank()}"
        self.loader = _loader(dist.get_rank(), dist.get_world_size())

    def __iter__(self) -> Iterator[Any]:
        fetched: deque[Any] = deque()
        for each in self.loader:
            fetched.append(each)
            if len(fetched) > _FETCHED_AHEAD:
                yield fetched.popleft()

    def trained(self, step: int, used: Mapping[str, Any]) -> None:
        """Record and note the batch that a step was made of."""
        self.loader.record(used)
        self.note(step, used["tokens"])

    def note(self, step: int, tokens: torch.Tensor) -> None:
        """Note the batch of a step; the host's adapter records it."""
        with open(self._notes, "a") as notes:
            notes.writelines(f"{json.dumps([step, sequence])}\n" for sequence in tokens.tolist())


def _loader(rank: int, world_size: int) -> RescalableLoader:
    """Make the loader of a rank. No token is twice among the documents."""
    documents = [[100 * number + at for at in range(3 + 7 * number % 20)] for number in range(60)]
    dataset = ShardedDataset(
        MapSource(documents), sequence_length=4, options=DataOptions(positions=True),
        rank=rank, world_size=world_size,
    )  # fmt: skip
    return RescalableLoader(dataset, batch_size=SEQUENCES // world_size)


def tokens_by_step(steps: int) -> dict[int, list[list[int]]]:
    """Return the sequences of each step of a run that nothing disturbs."""
    batches = itertools.islice(_loader(0, 1), steps)
    return {step: sorted(each["tokens"].tolist()) for step, each in enumerate(batches, 1)}


def noted_tokens(life: Life) -> dict[int, list[list[int]]]:
    """Return the sequences of each step that all ranks have noted, and remove the notes."""
    noted: dict[int, list[list[int]]] = {}
    for notes in Path(life.scratch).glob("tokens-of-rank-*"):
        for step, sequence in map(json.loads, notes.read_text().splitlines()):
            noted.setdefault(step, []).append(sequence)
        notes.unlink()
    return {step: sorted(sequences) for step, sequences in noted.items()}


def place(root: str, step: int) -> str:
    return f"{root}/step-{step}"


def latest(root: str) -> int | None:
    """Find the newest committed checkpoint: the first rank looks, and tells the others."""
    steps: list[int | None] = [None]
    if dist.get_rank() == 0:
        with contextlib.suppress(NotFound):
            committed = [each.step for each in ckpt.list_checkpoints(root) if each.state == "committed"]
            steps = [max(filter(None, committed), default=None)]
    dist.broadcast_object_list(steps)
    return steps[0]


saves_s: list[tuple[float, float]] = []


@contextlib.contextmanager
def timed() -> Iterator[None]:
    """Measure a save, as long as the training waits for it: wall and CPU seconds, for the report."""
    began_s, cpu_s = time.perf_counter(), _cpu_s()
    yield
    saves_s.append((time.perf_counter() - began_s, _cpu_s() - cpu_s))


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of all below it: some frameworks write in others."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    living = sum(_cpu_of_s(pid) for pid in _children(os.getpid()))
    return time.process_time() + ended.ru_utime + ended.ru_stime + living


def _cpu_of_s(pid: int) -> float:
    """Return the CPU seconds of a child, of what it has waited for, and of what it has started; 0 if it has ended."""
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/stat").read_text()
        ticks = sum(
            map(int, text.rpartition(")")[2].split()[11:15])
        )  # its own, and of its children that ended
        return ticks / os.sysconf("SC_CLK_TCK") + sum(map(_cpu_of_s, _children(pid)))
    return 0.0


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (thread / "children").read_text().split())
    return children


def report(
    life: Life,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    *,
    resumed_step: int | None,
    state: Mapping[str, Any] | None = None,
) -> None:
    """Write the digests of parameters and optimizer state; every rank calls it, the first one writes.

    Args:
        life: this life.
        model: plain, or wrapped in DDP, FSDP1 or FSDP2.
        optimizer: of the model.
        resumed_step: the last step of the checkpoint that the run went on from; None: it began anew.
        state: whole tensors by name, in place of model and optimizer.
    """
    if state is None:
        assert model is not None
        assert optimizer is not None
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = get_state_dict(model, optimizer, options=options)
        state = {"model": weights, "optimizer": moments}
    if not dist.is_initialized() or dist.get_rank() == 0:
        text = json.dumps({"resumed_step": resumed_step, "digests": digests(state), "saves_s": saves_s})
        Path(life.report).write_text(text)
    if dist.is_initialized():
        # A thread of torch's gloo that still lets go of a tensor of the last collective when Python ends aborts
        # the program (one of a hundred ends of a loop with FSDP2 and nothing of ours). Nothing tells when it has.
        time.sleep(0.5)


def digests(state: Any, name: str = "") -> dict[str, str]:
    """Map the names of all values to hashes of tensors, or to the values."""
    if isinstance(state, Mapping):
        items = [(str(key), value) for key, value in state.items()]
    elif isinstance(state, list | tuple):
        items = [(str(number), value) for number, value in enumerate(state)]
    elif isinstance(state, torch.Tensor):
        whole = state.full_tensor() if hasattr(state, "full_tensor") else state
        data = whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {name: f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(data).hexdigest()}"}
    else:
        return {name: repr(state)}
    return {
        key: value
        for part, inner in items
        for key, value in digests(inner, f"{name}.{part}" if name else part).items()
    }


def _kill_when_asked() -> None:
    """Have this process die where its life says; also in the processes that it starts with this script."""
    kill = read_life().kill
    if kill is None or int(os.environ.get("RANK", "0")) != kill.rank:
        return
    for store_type in (PosixStore, S3ApiStore):
        put = store_type.put

        def put_or_die(
            self: Any, key: str, body: Any, *, _put: Any = put, _kill: Kill = kill, **options: Any
        ) -> None:
            is_commit = key.rpartition("/")[2] == "commit.json"
            here = _kill.place in f"{self.url}/{key}" and is_commit == (_kill.at != "data")
            if here and _kill.at != "committed":
                die()
            _put(self, key, body, **options)
            if here:
                die()

        store_type.put = put_or_die  # type: ignore[method-assign]


def die() -> None:
    """SIGKILL this process and whatever it has started: the law gives each rank a session of its own."""
    read_life().death.touch()
    os.killpg(0, signal.SIGKILL)


if _LIFE in os.environ:
    _kill_when_asked()
