"""Follow a training: load the newest weights that it has saved, and use them until there are newer ones.

    python examples/follow_weights.py s3://bucket/run/models

The trainer saves `ckpt.save(model.state_dict(), f"{root}/step-{step}", format="safetensors")`; this program may run
on any number of other machines. A model that is being saved is never seen, and each byte that is loaded is checked.
"""

from __future__ import annotations

import argparse

import torch

import ckpt


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", help="the folder or URL into which the trainer saves its models")
    parser.add_argument("--timeout-s", type=float, help="end when nothing new came for as long")
    arguments = parser.parse_args()
    model = torch.nn.Linear(256, 256)  # as the trainer's
    # Of several that wait, only the last one: a worker that was busy does not load what is old already.
    models = ckpt.watch(arguments.root, skip_to_latest=True, poll_s=1, timeout_s=arguments.timeout_s)
    for checkpoint in models:
        try:
            ckpt.load(model.state_dict(), checkpoint.url)  # into the tensors of the model
        except ckpt.NotFound:
            continue  # removed by the trainer's retention; a newer one comes
        answer = generate(model)
        print(f"step {checkpoint.step}: {answer:.6f}", flush=True)


def generate(model: torch.nn.Module) -> float:
    """Do the work of this program with the weights; here: one number."""
    with torch.no_grad():
        return float(model(torch.ones(1, 256)).mean())


if __name__ == "__main__":
    main()
