"""Read a checkpoint folder with stock PyTorch alone and print its digest as JSON.

python examples/read_with_stock.py FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings

import torch
from state_digest import digest
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def main() -> None:
    warnings.simplefilter("ignore")
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(sys.argv[1], file.name)
        state = torch.load(file.name, weights_only=True)
    assert "ckpt" not in sys.modules, "this must be stock PyTorch alone"
    state.pop("ckpt_structure", None)  # the notes that ckpt.save adds are no part of the trainer's state
    print(json.dumps(digest(state)))


if __name__ == "__main__":
    main()
