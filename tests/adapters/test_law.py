"""One law for every framework: killed in the middle of a save, a run goes on as if nothing had happened.

Two ranks train with an adapter and die in a save, by SIGKILL. The next start, on another number of
ranks where the framework allows it, finds the newest durable checkpoint, passes over the torn one,
and ends bit for bit as the framework's own uninterrupted run, saved by its own means. Its data are those of a run that
nothing disturbed, token by token, though loops and frameworks fetch ahead of the training.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from support.rooms import ROOT
from support.servers import S3Server

import ckpt
from adapters.environments import end, python_of
from adapters.life import Kill, Life, noted_tokens, saves_s, timed, tokens_by_step

_TORN_STEP = 6


@dataclass(frozen=True)
class Host:
    """A framework, as the law meets it.

    Attributes:
        name: of `hosts/<name>.py`, and of the pins `<name>.txt`.
        variant: another way to save with the same script, in the names of the tests.
        torn_place: a part of the name of the checkpoint of the step that is torn.
        environment: the host whose pins are used, if not its own.
        resumed_world_size: ranks of the second life.
        spawns: the script starts its ranks itself.
        first_rank_saves: the others never write, so it is the first that dies.
        life_timeout_s: how long one life may take: many times what it takes, as machines can be loaded.
        options: of `Life`.
        environ: variables of its processes.
    """

    name: str
    torn_place: str = f"step-{_TORN_STEP}"
    environment: str | None = None
    resumed_world_size: int = 1
    spawns: bool = False
    variant: str = ""
    first_rank_saves: bool = False
    life_timeout_s: int = 480
    options: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"{self.name}-{self.variant}" if self.variant else self.name


_RAY = {
    # A loaded machine needs long to start its daemons and to import torch; Ray would give up after 30 and 60 s.
    "RAY_raylet_start_wait_time_s": "240",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",  # of the worker that lost its peer
    # A report waits until Ray has asked for the one before it: by default every two seconds, longer than a save.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
}

HOSTS = [
    Host("plain_dcp", resumed_world_size=4),
    Host("torch_checkpointing", resumed_world_size=4),
    Host("torch_checkpointing", variant="sync", resumed_world_size=4, options={"async": False}),
    Host("torchtitan", "step-00000006", resumed_world_size=4),
    Host("lightning_fit", environment="lightning", resumed_world_size=4, options={"strategy": "sharded"}),
    Host(
        "lightning_fit",
        environment="lightning",
        variant="async",
        options={"strategy": "sharded", "async_save": True},
    ),
    *(
        Host(
            "lightning_fit",
            environment="lightning",
            variant=v,
            first_rank_saves=True,
            options={"strategy": v},
        )
        for v in ("full", "ddp")
    ),
    Host("lightning_fabric", "step-00000006", environment="lightning", resumed_world_size=4),
    Host("ray_train", "step-00000006", environment="ray", spawns=True, life_timeout_s=600, environ=_RAY),
    Host("huggingface", "step-00000006", options={"fsdp": "SHARDED_STATE_DICT"}),
    Host("huggingface", "step-00000006", variant="ddp", resumed_world_size=4),
    Host(
        "accelerate_loop",
        "step-00000006",
        environment="huggingface",
        resumed_world_size=4,
        options={"fsdp": "FULL_STATE_DICT"},
    ),
    Host("megatron_core", "iter_0000006", resumed_world_size=4),
    Host("fms_fsdp", "step-00000006", resumed_world_size=4),
]

# Rank 1 dies with its data unwritten; rank 0 with all data written, and nothing committed.
KILLS = {"local": Kill(1, "", "data"), "s3": Kill(0, "", "commit")}


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """Digests of uninterrupted runs, by host: made by the first test that needs them."""
    return {}


@pytest.mark.timeout(2400)
@pytest.mark.parametrize("store", KILLS)
@pytest.mark.parametrize(
    "host", [pytest.param(h, marks=pytest.mark.xdist_group(h.environment or h.name), id=h.id) for h in HOSTS]
)
def test_a_killed_run_ends_as_an_uninterrupted_one(
    host: Host, store: str, tmp_path: Path, s3: S3Server, references: dict[str, dict[str, str]]
) -> None:
    python = python_of(host.environment or host.name)
    if host.id not in references:
        whole = run_life(host, python, life_of(host, tmp_path / "native", native=True), world_size=2)
        assert whole["resumed_step"] is None
        references[host.id] = whole["digests"]

    life, environ = life_of(host, tmp_path / "ours"), {}
    if store == "s3":
        life = replace(life, root=f"s3://{s3.new_bucket()}/run")
        environ = s3_environment(s3)
    kill = replace(KILLS[store], place=host.torn_place)
    if host.first_rank_saves:
        kill = replace(kill, rank=0)
    with pytest.raises(Killed):
        run_life(host, python, replace(life, kill=kill), world_size=2, environ=environ)
    with patched_environment(environ):
        states = {listed.step: listed.state for listed in ckpt.list_checkpoints(life.root, depth=3)}
    assert states.get(_TORN_STEP) != "committed", states

    before = noted_tokens(life)
    resumed = run_life(host, python, life, world_size=host.resumed_world_size, environ=environ)
    first_step = _TORN_STEP - life.save_every
    assert resumed["resumed_step"] == first_step
    assert resumed["digests"] == references[host.id]
    kept = {step: tokens for step, tokens in before.items() if step <= first_step}
    assert kept | noted_tokens(life) == tokens_by_step(life.steps)


def test_a_save_that_other_processes_write_is_measured_whole() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", burn], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        with timed():
            assert child.stdout is not None
            child.stdout.readline()
        with timed():
            child.communicate(b"\n", timeout=60)
    (_, while_it_lives_s), (_, as_it_ends_s) = saves_s[-2:]
    assert while_it_lives_s > 0.25 > as_it_ends_s  # it is counted, and once


def life_of(host: Host, folder: Path, *, native: bool = False) -> Life:
    for name in ("root", "scratch"):
        (folder / name).mkdir(parents=True)
    return Life(
        root=str(folder / "root"),
        scratch=str(folder / "scratch"),
        report=str(folder / "report.json"),
        native=native,
        options=host.options,
    )


class Killed(Exception):
    """A rank has ended itself by SIGKILL, where its life says."""


def run_life(
    host: Host, python: Path, life: Life, *, world_size: int, environ: Mapping[str, str] | None = None
) -> Any:
    """Start a script on all ranks, wait for its end, and return its report.

    Raises Killed if a rank died where its life says, once the others are gone too, as torchrun ends
    them.
    """
    life.death.unlink(missing_ok=True)
    script = Path(__file__).with_name("hosts") / f"{host.name}.py"
    common = {
        **os.environ, **life.encode(), **host.environ, **(environ or {}),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size),
        "PYTHONSAFEPATH": "1",  # a script has the name of its framework
    }  # fmt: skip
    # As torchrun does: a port that is only chosen here may be taken when the first rank comes to it.
    rendezvous = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if not host.spawns:
        common |= {"MASTER_PORT": str(rendezvous.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = range(1 if host.spawns else world_size)
    logs = [Path(life.scratch) / f"rank-{rank}.log" for rank in ranks]
    with contextlib.ExitStack() as stack:
        # Short, for the sockets of a framework; removed here, as a life that is killed leaves it.
        temporary = tempfile.TemporaryDirectory(prefix="law-", ignore_cleanup_errors=True)
        common["TMPDIR"] = stack.enter_context(temporary)
        processes = []
        for rank, log in zip(ranks, logs, strict=True):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            output = stack.enter_context(open(log, "w"))
            process = subprocess.Popen(
                [python, script], env={**common, **own}, stdout=output, stderr=output,
                cwd=life.scratch, start_new_session=True,
            )  # fmt: skip
            processes.append(process)
            stack.callback(end, process)
        statuses = wait_for_end(processes, host.life_timeout_s)
    texts = "\n".join(f"-- {log.name}\n{log.read_text()[-6000:]}" for log in logs)
    if -signal.SIGKILL in statuses and life.death.exists():  # without it the system ran out of memory, say
        raise Killed(texts)
    late = f", not ended after {host.life_timeout_s} s" if {None} <= {*statuses} <= {None, 0} else ""
    assert statuses == [0] * len(processes), f"{host.name} on {world_size} ranks: {statuses}{late}\n{texts}"
    return json.loads(Path(life.report).read_text())


def wait_for_end(processes: list[subprocess.Popen[bytes]], timeout_s: int) -> list[int | None]:
    """Wait until all have ended well, or one has not; return the statuses."""
    deadline = time.monotonic() + timeout_s
    while True:
        statuses = [process.poll() for process in processes]
        if None not in statuses or time.monotonic() > deadline:
            return statuses
        if any(status not in (0, None) for status in statuses):
            time.sleep(0.5)  # the rank that died first may be another one
            return [process.poll() for process in processes]
        time.sleep(0.05)


def s3_environment(s3: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": s3.endpoint_url,
        "AWS_ACCESS_KEY_ID": s3.access_key,
        "AWS_SECRET_ACCESS_KEY": s3.secret_key,
        "AWS_REGION": "us-east-1",
    }


@contextlib.contextmanager
def patched_environment(environ: Mapping[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ.items():
            patch.setenv(name, value)
        yield
