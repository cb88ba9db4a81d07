"""Save, load, and let a manager decide: `python examples/quickstart.py [FOLDER or URL]`."""

import sys
import tempfile

import torch

import ckpt
from ckpt.trainer_integration import keeping, saving

place = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
model = torch.nn.Linear(256, 256)
optimizer = torch.optim.AdamW(model.parameters())

ckpt.save({"model": model.state_dict()}, f"{place}/first")  # committed when this returns
ckpt.load({"model": model.state_dict()}, f"{place}/first")  # verified, in place

with ckpt.CheckpointManager(f"{place}/run", save=saving.every_steps(2), keep=keeping.last(3)) as manager:
    restored = manager.restore(model=model, optimizer=optimizer)
    for step in range(restored.step + 1 if restored else 1, 11):
        loss = model(torch.randn(8, 256)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step(step, model=model, optimizer=optimizer)

for checkpoint in ckpt.list_checkpoints(place):
    print(f"{checkpoint.path}: {checkpoint.state}, step {checkpoint.step}")
