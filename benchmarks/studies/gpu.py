"""Measure saves and loads of states on a GPU, against bare copies and stock DCP.

    python -m benchmarks.studies.gpu [--gib 8] [--rounds 3] [--place /dev/shm] [--only CASE ...] [--json FILE]

Each measurement is a process of its own, in turns; medians, and the least and the most. The bare copies are between the
state and page-locked memory that was used before. `device` is the GPU memory beyond the state: torch's, and the driver's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

import ckpt
from benchmarks.run.meter import metered

_TENSORS = 64
_SMALL_TENSORS, _SMALL_ELEMENTS = 20_000, 2_048
_TIMEOUT_S = 120

State = dict[str, torch.Tensor]
Figures = dict[str, float]


def _state(gib: float) -> State:
    """Make `_TENSORS` tensors of bfloat16, with random values."""
    elements = int(gib * (1 << 30)) // 2 // _TENSORS
    generator = torch.Generator("cuda").manual_seed(1)
    state = {}
    for number in range(_TENSORS):
        tensor = torch.empty(elements, dtype=torch.bfloat16, device="cuda")
        state[f"layers.{number}.weight"] = tensor.normal_(generator=generator)
    return state


def _many_small() -> State:
    flat = torch.randn(_SMALL_TENSORS, _SMALL_ELEMENTS, device="cuda", dtype=torch.bfloat16)
    return {f"layers.{number}.bias": flat[number].clone() for number in range(_SMALL_TENSORS)}


def _measured(work: Callable[[], Any]) -> tuple[Figures, Any]:
    """Carry out `work`, and measure it until the GPU is done."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, free = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    with metered() as reading:
        result = work()
        torch.cuda.synchronize()
    figures = {
        "s": reading.wall_s,
        "cpu_s": reading.cpu_s,
        "device_mb": (torch.cuda.max_memory_allocated() - before) / 1e6,
        "driver_mb": max(0, free - torch.cuda.mem_get_info()[0]) / 1e6,
    }
    return figures, result


def _bare_copies(gib: float, place: Path) -> Figures:
    """Copy the state into page-locked memory, and back; the first copy of each is not counted."""
    state = _state(gib)
    locked = {name: torch.empty_like(tensor, device="cpu", pin_memory=True) for name, tensor in state.items()}

    def copy(targets: State, sources: State) -> float:
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        for name, tensor in sources.items():
            targets[name].copy_(tensor, non_blocking=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began_s

    out = [copy(locked, state) for _ in range(4)]
    back = [copy(state, locked) for _ in range(4)]
    return {"to_host_s": statistics.median(out[1:]), "to_device_s": statistics.median(back[1:])}


def _memory(gib: float, place: Path) -> Figures:
    """Get page-locked memory: as torch does, and as this library does."""
    from ckpt.transfer.buffer_pool import fresh_memory
    from ckpt.transfer.tensor_memory import lock_pages

    nbytes, figures = int(gib * (1 << 30)), {}
    torch.cuda.init()  # type: ignore[no-untyped-call]
    for name in ("torch_s", "ours_s"):
        began_s = time.perf_counter()
        if name == "torch_s":
            block = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        else:
            block = torch.from_numpy(fresh_memory(nbytes))
            lock_pages(block)
        figures[name] = time.perf_counter() - began_s
        assert block.is_pinned()
        del block
    return figures


def _stock_save(state: Any, place: Path) -> None:
    dcp.save(state, checkpoint_id=place, no_dist=True)


def _ckpt_save(state: Any, place: Path) -> None:
    ckpt.save(state, place, no_dist=True)


def _torch_save(state: Any, place: Path) -> None:
    torch.save(state, place)


def _stock_load(state: Any, place: Path) -> None:
    dcp.load(state, checkpoint_id=place, no_dist=True)


def _ckpt_load(state: Any, place: Path) -> None:
    ckpt.load(state, place, no_dist=True)


def _saves(save: Callable[[Any, Path], None], small: bool = False) -> Callable[[float, Path], Figures]:
    def case(gib: float, place: Path) -> Figures:
        state = _many_small() if small else _state(gib)
        first, _ = _measured(lambda: save(state, place / "step-1"))
        _delete(place / "step-1")
        _change(state)
        second, _ = _measured(lambda: save(state, place / "step-2"))
        return {"first_s": first["s"], **second}

    return case


def _loads(
    save: Callable[[Any, Path], None], load: Callable[[Any, Path], None], small: bool = False
) -> Callable[[float, Path], Figures]:
    def case(gib: float, place: Path) -> Figures:
        state = _many_small() if small else _state(gib)
        save(state, place / "step-1")
        sums = {
            name: tensor.view(torch.int16).sum(dtype=torch.int64).item() for name, tensor in state.items()
        }
        for tensor in state.values():
            tensor.zero_()
        first, _ = _measured(lambda: load(state, place / "step-1"))
        for name, tensor in state.items():
            assert tensor.view(torch.int16).sum(dtype=torch.int64).item() == sums[name], name
        second, _ = _measured(lambda: load(state, place / "step-1"))
        return {"first_s": first["s"], **second}

    return case


def _stalls(begin: Callable[[Any, Path], Any], small: bool = False) -> Callable[[float, Path], Figures]:
    """Measure how long asynchronous saves keep the trainer: the first, and the median of three that follow."""

    def case(gib: float, place: Path) -> Figures:
        state = _many_small() if small else _state(gib)
        readings, rest_s = [], []
        for step in range(4):
            figures, future = _measured(lambda: begin(state, place / f"step-{step}"))  # noqa: B023
            began_s = time.perf_counter()
            future.result()
            rest_s.append(time.perf_counter() - began_s)
            readings.append(figures)
            _delete(place / f"step-{step}")
            _change(state)
        later = {name: statistics.median(each[name] for each in readings[1:]) for name in readings[0]}
        return {"first_s": readings[0]["s"], "rest_s": statistics.median(rest_s[1:]), **later}

    return case


def _managed(mode: Any) -> Callable[[float, Path], Figures]:
    """A trainer that restores, and saves after each second step."""

    def case(gib: float, place: Path) -> Figures:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl", init_method=f"file://{place}/store", rank=0, world_size=1
        )
        state, readings = _state(gib), []
        ckpt.save(state, place / "run" / "step-00000000")
        with ckpt.CheckpointManager(place / "run", save=2, keep=1, async_mode=mode) as manager:
            manager.restore(state)
            for step in range(1, 9):
                figures, begun = _measured(lambda: manager.step(step, state))  # noqa: B023
                if begun:
                    readings.append(figures)
                    manager.wait_durable()
                    time.sleep(1)  # or the next one would wait until the one before it is removed
                elif step == 1:  # until the memory for the first save is ready, and locked
                    time.sleep(5)
                    manager.step(1, state)
                _change(state)
        later = {name: statistics.median(each[name] for each in readings[1:]) for name in readings[0]}
        return {"first_s": readings[0]["s"], **later}

    return case


def _stock_async(kept: bool) -> Callable[[Any, Path], Any]:
    stagers: list[Any] = []  # it keeps its memory

    def begin(state: Any, place: Path) -> Any:
        if not kept:
            return dcp.async_save(state, checkpoint_id=place, no_dist=True)
        if not stagers:
            stagers.append(DefaultStager(StagingOptions()))
        response: Any = dcp.async_save(state, checkpoint_id=place, no_dist=True, async_stager=stagers[0])
        response.staging_completion.result()  # before the next step of the optimizer
        return response.upload_completion

    return begin


def _ckpt_async(state: Any, place: Path) -> Any:
    return ckpt.async_save(state, place, no_dist=True)


CASES: dict[str, Callable[[float, Path], Figures]] = {
    "bare copies": _bare_copies,
    "page-locked memory": _memory,
    "save: ckpt-storage": _saves(_ckpt_save),
    "save: stock DCP": _saves(_stock_save),
    "save: torch.save": _saves(_torch_save),
    "load: ckpt-storage": _loads(_ckpt_save, _ckpt_load),
    "load: stock DCP": _loads(_stock_save, _stock_load),
    "async: ckpt.async_save": _stalls(_ckpt_async),
    "async: CheckpointManager, thread": _managed("thread"),
    "async: CheckpointManager, process": _managed("process"),
    "async: stock DCP": _stalls(_stock_async(kept=False)),
    "async: stock DCP, stager kept": _stalls(_stock_async(kept=True)),
    "20,000 x 4 KB save: ckpt-storage": _saves(_ckpt_save, small=True),
    "20,000 x 4 KB save: stock DCP": _saves(_stock_save, small=True),
}


def _change(state: State) -> None:
    for tensor in state.values():
        tensor.add_(0.5)
    torch.cuda.synchronize()


def _delete(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, default=8.0, help="of the state")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--place", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--only", nargs="+", default=[""], help="words of the cases to run")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    place = arguments.place / "ckpt-gpu-study"
    if arguments.case:
        warnings.simplefilter("ignore")
        print(json.dumps(CASES[arguments.case](arguments.gib, place)))
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU here")
    cases = [name for name in CASES if any(word in name for word in arguments.only)]
    measured: dict[str, list[Figures]] = {name: [] for name in cases}
    for _ in range(arguments.rounds):
        for name in cases:
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            figures = _run(name, arguments.gib, arguments.place)
            if figures is not None:
                measured[name].append(figures)
    shutil.rmtree(place, ignore_errors=True)
    machine = {
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "gib": arguments.gib,
        "place": str(arguments.place),
        "rounds": arguments.rounds,
    }
    print(json.dumps(machine))
    for name, readings in measured.items():
        shown = [f"{key} {_shown([each[key] for each in readings])}" for key in (readings or [{}])[0]]
        print(f"{name:<38}{', '.join(shown) or 'failed'}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"machine": machine, "measured": measured}, indent=1) + "\n")


def _run(name: str, gib: float, place: Path) -> Figures | None:
    command = [sys.executable, "-m", "benchmarks.studies.gpu", "--case", name, "--gib", str(gib)]
    try:
        done = subprocess.run(
            [*command, "--place", str(place)], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"{name}: {error}\n{error.stderr!s}"[-3000:], file=sys.stderr)
        return None
    figures: Figures = json.loads(done.stdout.splitlines()[-1])
    print(f"  {name}: {', '.join(f'{key} {value:.3f}' for key, value in figures.items())}", file=sys.stderr)
    return figures


def _shown(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    main()
