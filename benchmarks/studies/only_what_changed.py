"""Measure saves that name what did not change: bytes, time, restores.

    python -m benchmarks.studies.only_what_changed

Shapes are those of t5-11b, with as many of its 24 layers as memory allows (`--layers`; two take 10 GB),
in bfloat16, and LoRA adapters of 0.3 % of the parameters with AdamW, in float32. The server is the
suite's own, which counts. Entries take turns: the trainable state alone, all of it with a declared
base, all of it compared. The bars are those of docs/only-what-changed.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckpt
from benchmarks.report.results import machine
from benchmarks.run.meter import Reading, metered
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from ckpt.acceptance.models import t5
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.consistency.digests import PayloadDigest, StoredDigest
from ckpt.references.digests import Comparison, compare
from ckpt.transfer.buffer_pool import StagingPool
from ckpt.transfer.tensor_memory import memory_of

_RANK = 16
_ADAPTED = (".q.weight", ".v.weight")
"""What PEFT adapts of a T5 by default."""
_MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2, help="of the 24 in each stack")
    parser.add_argument(
        "--adapted-layers", type=int, default=24, help="of them; the adapters of all 24 take 481 MB"
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--megabytes-per-s", type=float, help="that the server takes; default: all it can")
    parser.add_argument("--output", type=Path, help="write the figures here (JSON)")
    arguments = parser.parse_args()
    given = arguments.megabytes_per_s
    bytes_per_s = None if given is None else int(given * 1e6)
    state = make_state(arguments.layers, arguments.adapted_layers)
    figures: dict[str, Any] = {
        "machine": machine(),
        "layers": arguments.layers,
        "server_bytes_per_s": bytes_per_s,
    }
    with sink(bytes_per_s=bytes_per_s) as endpoint:  # which drops large objects
        figures |= _Study(endpoint, *state).run(arguments.rounds)
    with sink(keep=True) as endpoint:
        figures["restore"] = _Study(endpoint, *state).restore()
    text = json.dumps(figures, indent=1)
    if arguments.output:
        arguments.output.write_text(text + "\n")
    print(text)
    return 0


def make_state(layers: int, adapted_layers: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make the frozen parameters, and the trainable state, of a model with adapters."""
    generator = torch.Generator().manual_seed(0)
    frozen: dict[str, Any] = {}
    adapters: dict[str, Any] = {}
    for parameter in t5(32128, 1024, 128, 65536, 128, layers):
        frozen[parameter.fqn] = torch.randn(parameter.shape, dtype=torch.bfloat16, generator=generator)
    for parameter in t5(32128, 1024, 128, 65536, 128, adapted_layers):
        if parameter.fqn.endswith(_ADAPTED):
            out, inside = parameter.shape
            name = parameter.fqn.removesuffix(".weight")
            adapters[f"{name}.lora_A.weight"] = torch.randn(_RANK, inside, generator=generator)
            adapters[f"{name}.lora_B.weight"] = torch.randn(out, _RANK, generator=generator)
    moments = {
        name: {"step": torch.tensor(1.0), "exp_avg": tensor + 1, "exp_avg_sq": tensor + 2}
        for name, tensor in adapters.items()
    }
    return frozen, {"adapters": adapters, "optimizer": moments, "step": 0}


class _Study:
    """One model, saved again and again to one server."""

    def __init__(self, endpoint: Endpoint, frozen: dict[str, Any], trainable: dict[str, Any]) -> None:
        self._endpoint, self._frozen, self._trainable = endpoint, frozen, trainable
        self._options = {
            "endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION,
        }  # fmt: skip
        self._saves = 0
        self._last = ""  # that may be referred to

    def run(self, rounds: int) -> dict[str, Any]:
        frozen_bytes, trainable_bytes = _nbytes(self._frozen), _nbytes(self._trainable)
        first, sent = self._save(lambda url: self._whole(url, digests=True))
        names = [f"model.{name}" for name in self._frozen]
        runs: dict[str, list[tuple[Reading, int]]] = {"alone": [], "declared": [], "compared": []}
        self._last = first
        for number in range(rounds + 1):
            saves: dict[str, Callable[[str], Any]] = {
                "alone": lambda url: self._put(self._trainable, url),
                "declared": lambda url: self._whole(url, base=self._last, frozen=names),
                "compared": lambda url: self._whole(url, base=self._last),
            }
            names_in_turn = [*saves] * 2
            for name in names_in_turn[number % 3 : number % 3 + 3]:
                self._train()
                url = self._url()
                reading, received = self._measured(saves[name], url)
                self._last = self._last if name == "alone" else url
                if number:  # the first warms up
                    runs[name].append((reading, received))
        speeds = _speeds(self._frozen)
        figures = {name: _summary(values, trainable_bytes) for name, values in runs.items()}
        alone = figures["alone"]
        for name in ("declared", "compared"):
            figures[name]["wall_ratio"] = figures[name]["wall_s"] / alone["wall_s"]
            figures[name]["wall_beyond_alone_s"] = figures[name]["wall_s"] - alone["wall_s"]
            figures[name]["cpu_beyond_alone_s"] = figures[name]["cpu_s"] - alone["cpu_s"]
        sizes = {"frozen_bytes": frozen_bytes, "trainable_bytes": trainable_bytes, "first_save_bytes": sent}
        return {**sizes, **speeds, **figures}

    def _train(self) -> None:
        """Change all of the trainable state."""
        self._trainable["step"] += 1
        for tensor in _tensors(self._trainable):
            tensor += 1

    def _whole(self, url: str, **options: Any) -> Any:
        return self._put({"model": self._frozen, **self._trainable}, url, **options)

    def _put(self, state: dict[str, Any], url: str, **options: Any) -> Any:
        return ckpt.save(state, url, storage_options=self._options, no_dist=True, **options)

    def _save(self, save: Callable[[str], Any]) -> tuple[str, int]:
        url = self._url()
        self._endpoint.reset()
        save(url)
        return url, int(self._endpoint.report()["received_bytes"])

    def _measured(self, save: Callable[[str], Any], url: str) -> tuple[Reading, int]:
        self._endpoint.reset()
        with metered() as reading:
            save(url)
        return reading, int(self._endpoint.report()["received_bytes"])

    def _url(self) -> str:
        self._saves += 1
        return f"s3://{BUCKET}/run/step-{self._saves}"

    def restore(self) -> dict[str, Any]:
        """Load the same state from a whole save and from one with a base; compare bytes and values."""
        base, _ = self._save(lambda url: self._whole(url, digests=True))
        self._train()
        whole, _ = self._save(self._whole)
        names = [f"model.{name}" for name in self._frozen]
        referring, _ = self._save(lambda url: self._whole(url, base=base, frozen=names))
        read: dict[str, int] = {}
        for name, url in (("whole", whole), ("referring", referring)):
            target = _emptied({"model": self._frozen, **self._trainable})
            self._endpoint.reset()
            ckpt.load(target, url, storage_options=self._options, no_dist=True)
            read[name] = int(self._endpoint.report()["sent_bytes"])
            expected = _tensors({"model": self._frozen, **self._trainable})
            for found, tensor in zip(_tensors(target), expected, strict=True):
                if not torch.equal(found, tensor):
                    sys.exit(f"{name}: not what was saved")
        return {**read, "ratio": read["referring"] / read["whole"], "equal": True}


def _tensors(state: Any) -> Iterator[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)


def _emptied(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: _emptied(value) for name, value in state.items()}
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else None


def _nbytes(state: Any) -> int:
    return sum(tensor.nbytes for tensor in _tensors(state))


def _speeds(state: Any) -> dict[str, float]:
    """Compare a state with its digests as a save does, and read its memory with as many threads: GB/s of each."""
    tensors = list(_tensors(state))
    todo = []
    for tensor in tensors:
        digest = PayloadDigest(0, tensor.nbytes)
        for start in range(0, tensor.nbytes, BLOCK_SIZE_BYTES):
            digest.add(start, memory_of(tensor)[start : start + BLOCK_SIZE_BYTES])
        stored = StoredDigest(0, tensor.nbytes, BLOCK_SIZE_BYTES, digest.digest(), digest.probe)
        todo.append(Comparison(lambda tensor=tensor: tensor, stored))  # type: ignore[misc]
    pool = StagingPool()
    digest_s, read_s = [], []
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for _ in range(5):
            with metered() as reading:
                equal = compare(todo, pool, lambda: None)
            digest_s.append(reading.wall_s)
            if not all(equal):
                sys.exit("a tensor does not equal itself")
            with metered() as reading:
                list(threads.map(_read, tensors))
            read_s.append(reading.wall_s)
    nbytes = _nbytes(state)
    return {
        "digest_gb_per_s": nbytes / statistics.median(digest_s) / 1e9,
        "read_gb_per_s": nbytes / statistics.median(read_s) / 1e9,
    }


def _read(tensor: torch.Tensor) -> int:
    memory = memory_of(tensor)
    return int(np.frombuffer(memory[: memory.nbytes // 8 * 8], dtype=np.uint64).max(initial=0))


def _summary(values: list[tuple[Reading, int]], trainable_bytes: int) -> dict[str, float]:
    walls = [reading.wall_s for reading, _ in values]
    return {
        "wall_s": statistics.median(walls),
        "least_wall_s": min(walls),
        "cpu_s": statistics.median(reading.cpu_s for reading, _ in values),
        "sent_mib": max(sent for _, sent in values) / _MIB,
        "sent_ratio": max(sent for _, sent in values) / trainable_bytes,
    }


if __name__ == "__main__":
    sys.exit(main())
