"""Digest a checkpoint: equal digests mean equal bits, whichever processes saved it."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

import ckpt
from ckpt.embeddings import Tables, TableShard
from ckpt.state import training_state
from examples.recommender.checkpoints import url_of
from examples.recommender.click_log import TABLES, ClickLog
from examples.recommender.hash_rows import HashRows
from examples.recommender.model import Ranker
from examples.recommender.options import Options


def digest(options: Options, step: int) -> dict[str, str]:
    """Return a hash for each column of each table, and for each value of the dense part."""
    url, storage_options = url_of(options, step), options.storage_options
    tables = {table: HashRows(options.width) for table in TABLES}
    Tables(*(TableShard(table, rows) for table, rows in tables.items())).restore(
        url, storage_options=storage_options
    )
    hashes = {}
    for table, rows in tables.items():
        ids = np.sort(rows.ids())
        hashes[f"{table}.ids"] = _hash(ids.tobytes())
        for column, values in rows.read(ids, rows.columns).items():
            hashes[f"{table}.{column}"] = _hash(values.numpy().tobytes())
    model, log = Ranker(options.width), ClickLog(options.seed)
    state = training_state(model=model, optimizer=torch.optim.Adam(model.parameters()), rng=False, log=log)
    ckpt.load(state, url, storage_options=storage_options, no_dist=True)
    for name, part in state.items():
        _add(hashes, name, part.state_dict())
    return hashes


def _add(hashes: dict[str, str], name: str, value: Any) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _add(hashes, f"{name}.{key}", inner)
    elif isinstance(value, torch.Tensor):
        hashes[name] = _hash(value.detach().numpy().tobytes())
    else:
        hashes[name] = repr(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
