"""Ray Train: FSDP2 on Ray's workers, saved by the manager of the adapter into Ray's experiment."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

_OBJECT_STORE_BYTES = 80 << 20


def train(config: dict[str, Any]) -> None:
    # Here, and not above: the workers get this function by value, and the kill asks for their rank.
    os.environ["RANK"] = str(ray.train.get_context().get_world_rank())
    if config["die_once"]:
        disarm_after_death()
    import torch
    import torch.distributed as dist
    from adapters.life import Reading, loss_of, read_life, report, timed, toy_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    life = read_life()
    torch.set_num_threads(1)
    model = toy_model(life.width)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    reading = Reading(life)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        loss_of(model, step, life.width).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    if life.native:
        for step in range(1, life.steps + 1):
            train_step(step)
            if step % life.save_every == 0:
                with timed():
                    save_natively(model, optimizer, step)
        report(life, model, optimizer, resumed_step=None)
        return

    from ckpt.trainer_integration.adapters.ray import CheckpointManager

    with CheckpointManager(save=life.save_every, keep=2, async_mode=config["async_mode"]) as manager:
        restored = manager.restore(model=model, optimizer=optimizer, loader=reading.loader)
        first = restored.step + 1 if restored else 1
        for step, data in zip(range(first, life.steps + 1), reading, strict=False):
            train_step(step)
            reading.trained(step, data)
            if step == config["drain_at"]:
                drain_this_node()
            with timed():
                parts = {"model": model, "optimizer": optimizer, "loader": reading.loader}
                manager.step(step, parts, metrics={"loss": 1.0 / step})
    report(life, model, optimizer, resumed_step=restored.step if restored else None)


def disarm_after_death() -> None:
    """Take the kill out of the life of a worker that Ray has started anew."""
    life = json.loads(os.environ["CKPT_LIFE"])
    mark = Path(life["scratch"]) / f"armed-{os.environ['RANK']}"
    if mark.exists():
        os.environ["CKPT_LIFE"] = json.dumps({**life, "kill": None})
    mark.touch()


def drain_this_node() -> None:
    """Announce that this node goes away soon, as a cloud does; wait until Ray has told the workers."""
    import time

    from ray._private.state import state
    from ray.core.generated import autoscaler_pb2

    if os.environ["RANK"] == "0":
        client = ray._raylet.GcsClient(address=ray.get_runtime_context().gcs_address)
        node = ray.get_runtime_context().get_node_id()
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        deadline_ms = int((time.time() + 120) * 1000)
        accepted, why = client.drain_node(node, reason, "a test", deadline_ms)
        assert accepted, why
        assert state.get_draining_nodes()
    give_up_s = time.monotonic() + 60
    while ray.train.get_preemption_info() is None:
        assert time.monotonic() < give_up_s, "Ray has not announced the drain"
        time.sleep(0.2)


def save_natively(model: Any, optimizer: Any, step: int) -> None:
    """Save as Ray's guide to distributed checkpoints does: each worker into a folder that Ray uploads."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    with tempfile.TemporaryDirectory() as folder:
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
        ray.train.report({"step": step}, checkpoint=ray.train.Checkpoint.from_directory(folder))


def run(life: Any, workers: int) -> None:
    """Run a life on local workers of a Ray of its own; note Ray's result."""
    from ckpt.trainer_integration.adapters.ray import url_of

    config = {"die_once": False, "drain_at": 0, "async_mode": "off", **life.options}
    try:
        ray.init(
            num_cpus=workers, object_store_memory=_OBJECT_STORE_BYTES, include_dashboard=False,
            log_to_driver=True, _temp_dir=tempfile.gettempdir(),
        )  # fmt: skip
        trainer = TorchTrainer(
            train,
            train_loop_config=config,
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ray.train.ScalingConfig(num_workers=workers),
            run_config=ray.train.RunConfig(
                name="run", storage_path=life.root,
                failure_config=ray.train.FailureConfig(max_failures=int(config["die_once"])),
            ),
        )  # fmt: skip
        result = trainer.fit()
        checkpoint = None if life.native else url_of(result.checkpoint)
        text = json.dumps({"checkpoint": checkpoint, "metrics": result.metrics})
        (Path(life.scratch) / "result.json").write_text(text)
    finally:
        ray.shutdown()


def main() -> None:
    from adapters.life import die, read_life

    life = read_life()
    try:
        run(life, int(os.environ["WORLD_SIZE"]))
    except ray.train.TrainingFailedError:
        if not life.death.exists():
            raise
        die()  # as if the job's first node had gone with the worker


if __name__ == "__main__":
    main()
