"""Draw the pictures of reports in the documentation: real checkpoints of a real run, in a real browser.

PYTHONPATH=tests .venv/bin/python tests/browser/pictures.py
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from support.browser import chromium, opened
from support.commands import run_json
from support.ranks import run_ranks

FOLDER = Path(__file__).parents[2] / "docs/pictures"
_RANKS, _LAYERS, _WIDTH = 4, 8, 128
_PROJECTIONS = {
    "self_attn.q_proj": (1, 1), "self_attn.k_proj": (1, 0.25), "self_attn.v_proj": (1, 0.25), "self_attn.o_proj": (1, 1),
    "mlp.gate_proj": (1, 3), "mlp.up_proj": (1, 3), "mlp.down_proj": (3, 1),
}  # fmt: skip
"""Rows and columns, in widths."""


def train(rank: int, root: str, steps: int) -> None:
    """Save a model of the usual shape with its optimizer after each of some steps, from where the run stands."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    import ckpt
    from ckpt.trainer_integration import keeping, saving
    from ckpt.trainer_integration.events import JsonLines

    mesh = init_device_mesh("cpu", (_RANKS,))

    def sharded(rows: float, columns: float, dtype: torch.dtype) -> torch.Tensor:
        return distribute_tensor(
            torch.randn(int(rows * _WIDTH), int(columns * _WIDTH)).to(dtype), mesh, [Shard(0)]
        )

    shapes = {
        f"layers.{n}.{name}.weight": shape for n in range(_LAYERS) for name, shape in _PROJECTIONS.items()
    }
    shapes |= {"embed_tokens.weight": (16, 1), "lm_head.weight": (16, 1)}
    model = {name: sharded(*shape, torch.bfloat16) for name, shape in shapes.items()}
    moments = {
        name: {each: sharded(*shape, torch.float32) for each in ("exp_avg", "exp_avg_sq")}
        for name, shape in shapes.items()
    }
    state: dict[str, Any] = {"model": model, "optimizer": {"state": moments}, "scheduler": {"lr": 3e-4}}
    options: dict[str, Any] = {"save": saving.every_steps(250), "keep": keeping.last(6)}
    with ckpt.CheckpointManager(root, events=[JsonLines(f"{root}/events.jsonl")], **options) as manager:
        restored = manager.restore(state)
        first = restored.step + 250 if restored else 250
        for step in range(first, first + 250 * steps, 250):
            time.sleep(0.5 + 0.3 * (step % 1000 == 0))
            manager.step(step, state)


def main(folder: Path = FOLDER) -> None:
    """Write a picture of the page of a checkpoint, and of that of a run, light and dark."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "llama-run"
        root.mkdir()
        for steps in (9, 8):  # the second start goes on where the first ended
            run_ranks(_RANKS, train, str(root), steps)
        latest = next(each["url"] for each in run_json("ls", root)["checkpoints"] if each["latest"])
        pages = {"report-checkpoint": (latest, 1010), "report-run": (str(root), 720)}
        with chromium() as browser:
            for name, (place, height) in pages.items():
                path = Path(scratch) / f"{name}.html"
                run_json("report", place, "-o", path)
                for scheme in ("light", "dark"):
                    with opened(browser, path, width=1100, scheme=scheme) as page:
                        page.evaluate(
                            f"document.querySelectorAll('.place').forEach(e => e.textContent = e.textContent.replace('{scratch}', '/data'))"
                        )
                        clip = {"x": 0, "y": 0, "width": 1100, "height": height}
                        page.screenshot(path=folder / f"{name}-{scheme}.png", clip=clip, full_page=True)


if __name__ == "__main__":
    main(*(Path(each) for each in sys.argv[1:2]))
