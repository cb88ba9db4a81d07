"""The main job, end to end: train, be killed in the middle of a save, resume on other numbers of ranks.

    make demo

An S3 server runs beside it as a process of its own: moto's, because it has S3's semantics (conditional
writes, multipart uploads) and needs nothing but a pip install; it is slow, so the rates say little.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
from rich.console import Console
from rich.table import Table

from ckpt.backends.registry import open_store

EXAMPLES = Path(__file__).parents[2] / "examples"
BUCKET, KEY, SECRET = "demo", "demo-access-key", "demo-secret-key"
STEPS, SAVE_EVERY = 40, 10
DEADLINE_S = 150

console = Console(highlight=False, soft_wrap=True)


@dataclass
class Demo:
    """What the phases share: the server, the storage options, and what was seen."""

    endpoint_url: str
    folder: Path
    checks: list[tuple[str, bool]] = field(default_factory=list)
    saves: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def options(self) -> dict[str, Any]:
        # Small parts, so that also this small model takes several.
        return {"endpoint_url": self.endpoint_url, "key": KEY, "secret": SECRET, "part_size_bytes": 5 << 20}

    @property
    def root(self) -> str:
        return f"s3://{BUCKET}/run"

    def check(self, what: str, holds: bool) -> None:
        self.checks.append((what, holds))
        console.print(f"  [bold {'green' if holds else 'red'}]{'ok' if holds else 'FAILED'}[/]  {what}")

    def client(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )

    def keys(self, step: int) -> list[str]:
        return [found.key for found in open_store(f"{self.root}/step-{step:06d}", self.options).list()]

    def is_committed(self, step: int) -> bool:
        return "commit.json" in self.keys(step)


def main() -> int:
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ckpt-demo-") as folder, s3_server() as endpoint_url:
        demo = Demo(endpoint_url, Path(folder))
        demo.client().create_bucket(Bucket=BUCKET)
        killed_at = train_and_be_killed(demo)
        resume_on_three_ranks(demo, killed_at)
        resume_on_one_rank(demo)
        read_with_stock_pytorch(demo)
        summary(demo, time.monotonic() - started_s)
        return 0 if all(holds for _, holds in demo.checks) else 1


def train_and_be_killed(demo: Demo) -> int:
    """2 ranks; SIGKILL to every process of the job while a save is in flight. Returns that save's step."""
    headline("2 ranks train; the whole job is killed in the middle of a save")
    for step in range(3 * SAVE_EVERY, STEPS + 1, SAVE_EVERY):
        job = Job(demo, ranks=2)
        while not demo.keys(step) and not uploads(demo, step):
            if not job.show_output():
                break
            time.sleep(0.01)
        job.kill()
        if not demo.is_committed(step):
            break
        console.print(f"  the save of step {step} was faster than the kill; once more")
    objects, unfinished = len(demo.keys(step)), len(uploads(demo, step))
    left = f"{objects} objects and {unfinished} unfinished uploads"
    demo.check(f"the job died while step {step} was being saved: it left {left}", objects + unfinished > 0)
    demo.saves.append((f"step-{step:06d}", f"killed; left {left}", "not committed"))
    demo.check(f"step {step} is not committed", not demo.is_committed(step))
    demo.check(f"step {step - SAVE_EVERY} is committed", demo.is_committed(step - SAVE_EVERY))
    return step


def resume_on_three_ranks(demo: Demo, killed_at: int) -> None:
    headline("3 ranks resume from the last committed checkpoint and finish")
    expected = stock_digest(demo, killed_at - SAVE_EVERY)
    reports = run(demo, ranks=3)
    demo.check(
        f"resumed at step {killed_at - SAVE_EVERY}", reports["loaded"]["step"] == killed_at - SAVE_EVERY
    )
    demo.check(
        f"3 ranks hold what 2 ranks saved, bit for bit ({len(expected)} entries)",
        reports["loaded"]["digest"] == expected,
    )
    demo.check(f"finished at step {STEPS}", reports["final"]["step"] == STEPS)
    (demo.folder / "final.json").write_text(json.dumps(reports["final"]["digest"]))


def resume_on_one_rank(demo: Demo) -> None:
    headline("1 rank resumes from the final checkpoint")
    reports = run(demo, ranks=1)
    final = json.loads((demo.folder / "final.json").read_text())
    demo.check("1 rank holds what 3 ranks saved, bit for bit", reports["loaded"]["digest"] == final)


def read_with_stock_pytorch(demo: Demo) -> None:
    headline("stock PyTorch reads the final checkpoint, copied down")
    final = json.loads((demo.folder / "final.json").read_text())
    demo.check("stock FileSystemReader gives the same, bit for bit", stock_digest(demo, STEPS) == final)


def stock_digest(demo: Demo, step: int) -> dict[str, str]:
    """Copy a checkpoint down and have a process without this library digest it."""
    folder = demo.folder / f"step-{step}"
    for key in demo.keys(step):
        target = folder / key
        target.parent.mkdir(parents=True, exist_ok=True)
        demo.client().download_file(BUCKET, f"run/step-{step:06d}/{key}", str(target))
    command = [sys.executable, str(EXAMPLES / "read_with_stock.py"), str(folder)]
    found: dict[str, str] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return found


def summary(demo: Demo, seconds: float) -> None:
    table = Table(title="\nWhat was written", show_edge=False, title_justify="left", title_style="bold")
    for column in ("checkpoint", "size, time and rate as the trainer saw them", "outcome"):
        table.add_column(column)
    for row in demo.saves:
        table.add_row(*row)
    console.print(table)
    aborted = open_store(demo.root, demo.options).abandon()
    survived = (
        "Every committed checkpoint survived; the killed save never became one and was repeated on resume."
    )
    console.print(f"\n{survived} Unfinished uploads aborted: {aborted}.")
    failed = [what for what, holds in demo.checks if not holds]
    verdict = (
        f"[bold red]{len(failed)} of {len(demo.checks)} checks FAILED"
        if failed
        else "[bold green]all checks hold"
    )
    console.print(f"{verdict}[/] ({len(demo.checks)} checks, {seconds:.0f} s)")


class Job:
    """A training run under torchrun."""

    def __init__(self, demo: Demo, ranks: int) -> None:
        self.demo = demo
        self.report = demo.folder / f"report-{ranks}-{time.monotonic_ns()}.json"
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
            "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
            str(EXAMPLES / "train_fsdp.py"), "--root", demo.root, "--storage-options", json.dumps(demo.options),
            "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--report", str(self.report),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
        }
        self.log = demo.folder / f"{self.report.stem}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.shown = 0
        self.deadline = time.monotonic() + DEADLINE_S

    def show_output(self) -> bool:
        """Print new lines of the job; False once it has ended."""
        ended = self.process.poll() is not None
        with self.log.open("rb") as log:
            log.seek(self.shown)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self.shown += len(line)
                self._show(line.decode(errors="replace").rstrip())
        if time.monotonic() > self.deadline:
            self.kill()
            raise TimeoutError(f"the job did not end in {DEADLINE_S} s:\n{self.log.read_text()[-3000:]}")
        return not ended

    def _show(self, line: str) -> None:
        if line.startswith("saved "):
            name, _, figures = line.removeprefix("saved ").rpartition(": ")
            self.demo.saves.append((name.removeprefix(f"{self.demo.root}/"), figures, "committed"))
        step = int(line.split()[1]) if line.startswith("step ") else 0
        if step % 5 == 0:
            console.print(f"    {line}", style="dim", markup=False)

    def kill(self) -> None:
        """SIGKILL to the launcher and to every rank."""
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        console.print("    SIGKILL to all processes of the job", style="bold")


def run(demo: Demo, ranks: int) -> dict[str, Any]:
    """A training run to its end; returns its reports."""
    job = Job(demo, ranks)
    while job.show_output():
        time.sleep(0.05)
    if job.process.returncode:
        console.print(job.log.read_text(), markup=False)
        raise SystemExit(f"training on {ranks} ranks failed with status {job.process.returncode}")
    reports: dict[str, Any] = json.loads(job.report.read_text())
    return reports


def uploads(demo: Demo, step: int) -> list[str]:
    """Multipart uploads in flight below a checkpoint."""
    found = demo.client().list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [upload["Key"] for upload in found if upload["Key"].startswith(f"run/step-{step:06d}/")]


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, children first."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                # The name in parentheses may hold anything; what follows it may not.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    below: list[int] = []
    todo = [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        below += children
        todo += children
    return below[::-1]


@contextmanager
def s3_server() -> Iterator[str]:
    """A moto server in a process of its own; gives its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if server.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("the S3 server did not start")
            time.sleep(0.05)
        console.print(f"S3 server (moto) on 127.0.0.1:{port}")
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


def headline(text: str) -> None:
    console.print(f"\n[bold]{text}[/]")


if __name__ == "__main__":
    sys.exit(main())
