"""Run measurements: a fresh process for each, in the environment of who is measured."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.cases import Case, Entry
from benchmarks.run.fork_server import Forks
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, ROOT, SECRET_KEY, Endpoint, rclone, sink
from benchmarks.run.task import Outcome, Task

__all__ = ["PEERS_ENVIRONMENT", "Runner"]

PEERS_ENVIRONMENT = ROOT / "benchmarks" / ".venv-peers" / "bin"
_TIMEOUT_S = 600
_SLOW_BYTES_PER_S = 150_000_000


@dataclass
class Runner:
    """Run the measurements of cases; checkpoints on files lie below `scratch`. To be closed."""

    scratch: Path
    default_threads: int
    _forks: dict[Path, Forks] = field(default_factory=dict)

    def close(self) -> None:
        while self._forks:
            self._forks.popitem()[1].close()

    @contextlib.contextmanager
    def server(self, case: Case) -> Iterator[Endpoint | None]:
        """Start the server that a case needs."""
        if case.server == "rclone":
            with (
                tempfile.TemporaryDirectory(dir=self.scratch) as folder,
                rclone(PEERS_ENVIRONMENT / "rclone", Path(folder)) as endpoint,
            ):
                yield endpoint
        elif case.server:
            tls_folder = self.scratch if case.server.startswith("tls") else None
            bytes_per_s = _SLOW_BYTES_PER_S if case.server == "slow" else None
            keep = case.server.endswith("keep")
            with sink(keep=keep, tls_folder=tls_folder, bytes_per_s=bytes_per_s) as endpoint:
                yield endpoint
        else:
            yield None
        for left in self.scratch.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)

    def prepare(self, case: Case, entry: Entry, endpoint: Endpoint | None) -> Outcome:
        """Save the checkpoint that an entry loads."""
        return self._run(self._task(case, entry, entry, endpoint, case.prepare, -1), entry)

    def measure(self, case: Case, entry: Entry, endpoint: Endpoint | None, number: int) -> Outcome:
        """Take one measurement."""
        names = {other.name: other for other in case.entries}
        source = names[entry.written_by] if entry.written_by else entry
        task = self._task(case, entry, source, endpoint, entry.job or case.job, number)
        try:
            return self._run(task, entry)
        finally:
            if not case.prepare and endpoint is None:
                for left in Path(task.place).parent.glob(f"{Path(task.place).name}*"):
                    shutil.rmtree(left, ignore_errors=True)

    def _task(
        self, case: Case, entry: Entry, source: Entry, endpoint: Endpoint | None, job: str, number: int
    ) -> Task:
        # What is loaded stands where it was prepared; what is saved gets a place of its own.
        name = f"{case.name}-{case.entries.index(source)}" + ("" if case.prepare else f"-{number}")
        place = str(self.scratch / name) if endpoint is None else f"s3://{BUCKET}/{name}"
        preparing = number < 0
        return Task(
            job=job,
            contender=entry.contender,
            place=place,
            state=case.state,
            endpoint=endpoint,
            threads=self.default_threads if entry.threads < 0 else entry.threads,
            options=entry.options,
            parameters=case.prepare_parameters if preparing else entry.parameters,
        )

    def _run(self, task: Task, entry: Entry) -> Outcome:
        python = PEERS_ENVIRONMENT / "python" if entry.peer else Path(sys.executable)
        if not python.exists():
            return Outcome(error="the peers' environment is missing: make benchmarks/.venv-peers/ready")
        with tempfile.TemporaryDirectory() as folder:
            asked, answered, errors = (
                Path(folder) / name for name in ("task.json", "outcome.json", "errors")
            )
            asked.write_text(task.to_json())
            environment = _environment(task)
            if python not in self._forks:
                self._forks[python] = Forks(python, environment)
            try:
                status = self._forks[python].run(asked, answered, errors, environment, _TIMEOUT_S)
            except OSError as error:  # TimeoutError is one
                self._forks.pop(python).close()
                return Outcome(error=str(error))
            if answered.exists():
                return Outcome.from_json(answered.read_text())
            last = errors.read_text(errors="replace").strip().splitlines()[-4:]
            return Outcome(error=f"ended with status {status}: {' '.join(last)}")


def _environment(task: Task) -> dict[str, str]:
    """Set endpoint and credentials for peers that have no arguments for them."""
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_EC2_METADATA_DISABLED": "true",
        "PYTHONWARNINGS": "ignore",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    environment.pop("AWS_PROFILE", None)
    if task.endpoint is not None:
        environment["AWS_ENDPOINT_URL"] = task.endpoint.url
    return environment
