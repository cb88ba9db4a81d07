"""Be a checkpointing mechanism of DLIO, the tool that runs MLPerf Storage's workloads.

DLIO takes it by its name, with this repository's folder in PYTHONPATH:

    ++workload.checkpoint.checkpoint_mechanism_classname=benchmarks.mlperf_storage.back_end.CkptCheckpointing

Its own mechanisms write files per rank, each for itself, and nothing says when all are there. Here the ranks write one
checkpoint per step, `<checkpoint_folder>/global_epoch1_step1`: committed, checked, and loaded into the tensors that are
there, as a trainer does. The folder is any URL that this library takes. A rank's names begin with the name of the file
that DLIO would write, so no two ranks have the same.
"""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from dlio_benchmark.checkpointing.base_checkpointing import BaseCheckpointing
from dlio_benchmark.checkpointing.pytorch_checkpointing import PyTorchCheckpointing

import ckpt

__all__ = ["CkptCheckpointing", "OfProcess"]

_OPTIONS = {
    "access_key_id": "key",
    "secret_access_key": "secret",
    "endpoint_url": "endpoint_url",
    "region": "region",
}
"""Of DLIO's `storage.storage_options`, with their names here. What is absent comes from the environment."""


class OfProcess:
    """Give DLIO the one mechanism of this process, as it asks for it."""

    _instance: Any = None

    @classmethod
    def get_instance(cls) -> Any:
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance


class CkptCheckpointing(OfProcess, PyTorchCheckpointing):
    """Save and load all ranks' states as one checkpoint.

    Files are synced, as the workloads ask. `CKPT_DLIO_FSYNC=0` in the environment leaves that out: DLIO's own setting
    cannot tell, since it reads `checkpoint.fsync` into a name that nobody reads.
    """

    def __init__(self) -> None:
        BaseCheckpointing.__init__(self, "ckpt")
        given = self.args.storage_options or {}
        self._options: dict[str, Any] = {
            ours: given[name] for name, ours in _OPTIONS.items() if name in given
        }
        if self.args.checkpoint_folder.startswith("s3://"):
            from benchmarks.mlperf_storage.own_mechanisms import mend_listing

            mend_listing()
        elif "://" not in self.args.checkpoint_folder:
            self._options["fsync"] = os.environ.get("CKPT_DLIO_FSYNC") != "0"
        self._states: dict[str, Any] = {}
        self._join_ranks()

    def save_checkpoint(self, epoch: int, step_number: int) -> None:
        """Save what DLIO would write into files; committed when this returns.

        Raises:
            ckpt.SaveFailed: on every rank.
        """
        self._states = {}
        super().save_checkpoint(epoch, step_number)
        ckpt.save(self._states, self._url(epoch, step_number), storage_options=self._options)

    def load_checkpoint(self, epoch: int, step_number: int) -> None:
        """Load a checkpoint into this rank's tensors, every block checked.

        Raises:
            ckpt.LoadFailed: on every rank.
        """
        self._states = {}
        super().load_checkpoint(epoch, step_number)
        ckpt.load(self._states, self._url(epoch, step_number), storage_options=self._options)

    def save_state(self, suffix: str, state: dict[str, Any], fsync: bool = False) -> None:
        """Note a part of the checkpoint that is being saved."""
        self._states[suffix.rpartition("/")[2]] = state

    def load_state(self, suffix: str, state: dict[str, Any]) -> None:
        """Note a part of the checkpoint that is being loaded."""
        self._states[suffix.rpartition("/")[2]] = state

    def finalize(self) -> None:
        dist.destroy_process_group()
        super().finalize()

    def _url(self, epoch: int, step_number: int) -> str:
        return f"{self.args.checkpoint_folder}/global_epoch{epoch}_step{step_number}"

    def _join_ranks(self) -> None:
        """Make a process group of MPI's ranks."""
        alone = self.MPI.nnodes() == 1
        host = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if alone else os.uname().nodename)
        host = self.comm.bcast(host)
        store = (
            dist.TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.comm.rank == 0 else None
        )
        port = self.comm.bcast(None if store is None else store.port)
        if store is None:
            store = dist.TCPStore(host, port)
        dist.init_process_group("gloo", store=store, rank=self.comm.rank, world_size=self.comm.size)
