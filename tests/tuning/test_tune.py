"""`ckpt tune`: real saves and loads, nothing left behind, a file that is read afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.commands import options_of, run, run_json

import ckpt
from benchmarks.run.servers import ACCESS_KEY, BUCKET, REGION, SECRET_KEY, Endpoint, sink
from ckpt.backends.base import MIB
from ckpt.errors import ConfigurationError
from ckpt.settings import Settings, settings_for
from ckpt.tuning import tune as tuning
from ckpt.tuning.config_file import write_section
from ckpt.tuning.trial import Hopeless, Times, Trials

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of settings of a working directory of its own."""
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.delenv("CKPT_CONFIG", raising=False)
    monkeypatch.setattr(tuning, "_MIN_MIB", 1)
    monkeypatch.setattr(tuning, "_WARM_UP_BYTES", MIB)
    monkeypatch.setattr(tuning, "_MAX_ROUNDS", 3)
    return tmp_path / "work" / "ckpt.toml"


# -- trials --------------------------------------------------------------------------------------------


def test_a_hopeless_trial_is_cut_short_and_removed(tmp_path: Path) -> None:
    moved: list[int] = []
    trials = Trials(tmp_path / "a" / "b", {}, 32 * MIB, moved.append)
    whole = trials.run(Settings(threads=2, files_per_rank=1))
    assert sum(moved) == pytest.approx(64 * MIB, rel=0.01)
    assert min(whole.save_s, whole.load_s) > 0
    for is_hopeless, least, most in [
        (lambda times: sum(moved) >= 9 * MIB, 9, 25),
        (lambda times: times.load_s > 0, 32, 56),
    ]:
        moved.clear()
        with pytest.raises(Hopeless) as raised:
            trials.run(Settings(threads=1, part_size_bytes=8 * MIB, files_per_rank=1), is_hopeless)
        assert least * MIB <= sum(moved) <= most * MIB
        assert (raised.value.times.load_s > 0) == (least == 32)
        assert [*tmp_path.rglob("*.distcp")] == []
    trials.close()
    assert os.listdir(tmp_path) == ["work"]


def test_a_folder_that_was_there_stays(tmp_path: Path) -> None:
    place = tmp_path / "runs"
    place.mkdir()
    trials = Trials(place, {}, MIB, lambda nbytes: None)
    trials.run(Settings())
    trials.close()
    assert os.listdir(place) == []


def test_an_error_of_the_storage_is_told(tmp_path: Path) -> None:
    (tmp_path / "is-a-file").write_text("")
    with pytest.raises(ckpt.errors.StorageError, match="is-a-file"):
        ckpt.tune(tmp_path / "is-a-file", seconds=5, megabytes=1)


# -- the whole -----------------------------------------------------------------------------------------


def test_it_tunes_a_folder_and_writes_what_saves_read(tmp_path: Path, file: Path) -> None:
    file.write_text('# mine\n["s3://other"]\nthreads = 7\n')
    place = tmp_path / "new" / "runs"
    seen: list[tuple[str, float, float]] = []
    tuned = ckpt.tune(place, max_trials=4, megabytes=2, write=True, progress=lambda *step: seen.append(step))
    assert os.listdir(tmp_path) == ["work"]
    assert tuned.state_bytes == 2 * MIB
    assert tuned.path == "ckpt.toml"
    assert len(tuned.trials) == 4
    assert tuned.defaults.rounds >= 3
    assert min(tuned.best.save_s, tuned.best.load_s, tuned.defaults.save_s, tuned.defaults.load_s) > 0
    assert settings_for(place / "step-1") == tuned.best.settings
    assert settings_for("s3://other").threads == 7
    assert file.read_text().startswith("# mine\n")
    assert {total_s for _, _, total_s in seen} == {300.0}
    gone = [gone_s for _, gone_s, _ in seen]
    assert gone == sorted(gone)
    assert any("round" in doing for doing, _, _ in seen)


@pytest.mark.slow
def test_it_tunes_a_bucket_through_the_command(file: Path) -> None:
    with sink(keep=True) as endpoint:
        options = options_of(options_for(endpoint))
        ran = run("tune", f"s3://{BUCKET}/runs", "--max-trials", 2, "--megabytes", 6, "--write", *options)
        assert ran.code == 0, ran.err
        assert objects_of(endpoint) == []
    first, _, *rows, gain, written = ran.out.splitlines()
    assert first.startswith(f"s3://{BUCKET}/runs: 6.00 MiB a trial, 2 trials")
    assert [row.split()[0] for row in rows] == ["defaults", "best"]
    assert "of 3 rounds in turns" in gain
    assert written == "written: ckpt.toml"
    assert f"{settings_for(f's3://{BUCKET}/runs/step-1').threads}" == rows[1].split()[1]


def options_for(endpoint: Endpoint) -> dict[str, Any]:
    return {"endpoint_url": endpoint.url, "key": ACCESS_KEY, "secret": SECRET_KEY, "region": REGION}


def objects_of(endpoint: Endpoint) -> list[str]:
    """List what is in the bucket, and the uploads that were begun there and not ended."""
    import boto3

    client = boto3.client(
        "s3", endpoint_url=endpoint.url, region_name=REGION, aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SECRET_KEY,
    )  # fmt: skip
    objects = client.list_objects_v2(Bucket=BUCKET).get("Contents", ())
    uploads = client.list_multipart_uploads(Bucket=BUCKET).get("Uploads", ())
    return [each["Key"] for each in (*objects, *uploads)]


class Modelled:
    """Trials whose times follow from the settings: the optimum is known, and nothing is random."""

    best_threads = 24

    def __init__(self, *_: object) -> None:
        self.runs: list[Settings] = []

    def run(self, settings: Settings, is_hopeless: Callable[[Times], bool] | None = None) -> Times:
        threads = settings.threads or tuning.default_settings().threads or 0
        away = max(threads / self.best_threads, self.best_threads / threads)
        times = Times(0.01 * away, 0.02)
        if is_hopeless is not None and is_hopeless(times):
            raise Hopeless(times)
        return times

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("write", "is_written"), [(None, True), (False, False), (True, True)])
def test_a_gain_is_written(
    monkeypatch: pytest.MonkeyPatch, file: Path, write: bool | None, is_written: bool
) -> None:
    monkeypatch.setattr(tuning, "Trials", Modelled)
    monkeypatch.setattr(tuning, "default_threads", lambda: 4)
    tuned = ckpt.tune("s3://bucket", seconds=3000, max_trials=50, megabytes=1, write=write)
    assert tuned.is_noteworthy
    assert tuned.gain == pytest.approx((1 - 1 / 6) / 2, abs=0.05)
    assert 20 <= (tuned.best.settings.threads or 0) <= 29
    assert any(trial.state == "cut short" for trial in tuned.trials)
    assert file.exists() == is_written == (tuned.path is not None)


@pytest.mark.parametrize(("write", "is_written"), [(None, False), (True, True)])
def test_defaults_that_are_best_are_not_written_unless_asked(
    monkeypatch: pytest.MonkeyPatch, file: Path, write: bool | None, is_written: bool
) -> None:
    monkeypatch.setattr(tuning, "Trials", Modelled)
    monkeypatch.setattr(tuning, "default_threads", lambda: 24)
    arguments = ["--write"] if write else []
    ran = run("tune", "s3://bucket", "--seconds", 3000, "--max-trials", 20, "--megabytes", 1, *arguments)
    assert ran.code == 0
    assert "the defaults are within 3 % of the best" in ran.out
    facts = run_json(
        "tune", "s3://bucket", "--seconds", 3000, "--max-trials", 5, "--megabytes", 1, "--no-write"
    )
    assert set(facts["best"]) == {"settings", "save_s", "load_s", "rounds"}
    assert (facts["path"], facts["is_noteworthy"], len(facts["trials"])) == (None, False, 5)
    assert file.exists() == is_written == ("written: ckpt.toml" in ran.out)


# -- interrupts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)],
    ids=lambda number: number.name,
)
@pytest.mark.parametrize("where", ["folder", pytest.param("bucket", marks=pytest.mark.long)])
def test_ctrl_c_leaves_nothing(tmp_path: Path, file: Path, number: signal.Signals, where: str) -> None:
    with sink(keep=True) as endpoint:
        if where == "folder":
            place, options = str(tmp_path / "runs"), []
        else:
            place, options = f"s3://{BUCKET}/runs", options_of(options_for(endpoint))

        def left() -> list[str]:
            return objects_of(endpoint) if options else [str(path) for path in tmp_path.rglob("*.distcp")]

        command = [sys.executable, "-c", "import ckpt.cli; ckpt.cli.main()", "tune", place]
        command += ["--seconds", "60", "--megabytes", "24", *options]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            while not left():
                assert process.poll() is None
                time.sleep(0.02)
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert process.returncode == 130, err
        assert "What the trials wrote was removed" in err
        assert left() == []
    assert os.listdir(tmp_path) == ["work"]
    assert not file.exists()


# -- mistakes ------------------------------------------------------------------------------------------


def test_without_optuna_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    ran = run("tune", tmp_path / "runs")
    assert ran.code == 2
    assert "pip install './ckpt-storage[tune]'" in ran.err
    assert os.listdir(tmp_path) == ["work"]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"seconds": 0}, "seconds must be a positive number"),
        ({"seconds": float("nan")}, "seconds must be a positive number"),
        ({"max_trials": 0}, "max_trials must be a whole number"),
        ({"megabytes": 0.5}, "megabytes must be a number from 1 on"),
        ({"memory_budget_bytes": MIB}, "memory_budget_bytes must be at least"),
        ({"storage_options": {"part_size_bytes": 8 * MIB}}, "part_size_bytes would win over all trials"),
        ({"path": "no/such/folder/ckpt.toml"}, "cannot be written"),
        ({"seconds": 0.001, "megabytes": 1}, "too long for 0.001 s: give at least --seconds"),
    ],
)
def test_wrong_arguments(tmp_path: Path, arguments: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigurationError, match=complaint):
        ckpt.tune(tmp_path / "runs", **arguments)
    assert os.listdir(tmp_path) == ["work"]


def test_a_file_that_is_not_one_of_settings_is_told_before_the_trials(tmp_path: Path, file: Path) -> None:
    file.write_text("answer = 42\n")
    with pytest.raises(ConfigurationError, match=r"ckpt\.toml.*stands in no section"):
        ckpt.tune(tmp_path / "runs", seconds=100)
    with pytest.raises(ConfigurationError, match="holds a password"):
        ckpt.tune("ftp://me:secret@host/runs", seconds=100, path="other.toml")


def test_a_section_is_replaced_and_the_others_stay(file: Path) -> None:
    before = '# first\n["s3://a"]\nthreads = 1  # mine\n\n["s3://b"]\n# old\nthreads = 2\n\n["s3://c"]\nthreads = 3\n'
    file.write_text(before)
    write_section(str(file), "s3://b/", Settings(threads=9, part_size_bytes=8 * MIB), ["found now"])
    text = file.read_text()
    assert text.startswith('# first\n["s3://a"]\nthreads = 1  # mine\n')
    assert "old" not in text
    assert text.endswith('["s3://b"]\n# found now\nthreads = 9\npart_size_bytes = 8388608\n')
    assert [settings_for(f"s3://{name}").threads for name in "abc"] == [1, 9, 3]
    file.write_text("['s3://b']\nthreads = 2\n")  # a spelling that is not ours
    with pytest.raises(ConfigurationError, match=r"ckpt\.toml"):
        write_section(str(file), "s3://b", Settings(threads=9), [])
    assert file.read_text() == "['s3://b']\nthreads = 2\n"
    assert [path.name for path in file.parent.iterdir()] == ["ckpt.toml"]


# -- the space -----------------------------------------------------------------------------------------


def test_the_space_follows_memory_and_size() -> None:
    bucket = tuning.space_of(1024 * MIB, 256 * MIB, has_parts=True)
    assert set(bucket) == {"threads", "part_size_bytes", "memory_budget_bytes"}
    assert bucket["part_size_bytes"].most == 128 * MIB
    assert (bucket["memory_budget_bytes"].least, bucket["memory_budget_bytes"].most) == (256 * MIB, 256 * MIB)
    assert "files_per_rank" not in tuning.space_of(32 * MIB, 256 * MIB, has_parts=False)
    mount = tuning.space_of(256 * MIB, 1024 * MIB, has_parts=False)
    assert mount["files_per_rank"].most == 8
    for point in tuning.first_points(tuning.default_settings(), mount):
        assert set(point) == set(mount)
    point = {"threads": 9, "part_size_bytes": 9 * MIB + 1, "memory_budget_bytes": 256 * MIB}
    assert tuning.settings_of(point, bucket) == Settings(9, 9 * MIB, None, 256 * MIB)
    assert tuning.settings_of({**point, "files_per_rank": 8}, mount).files_per_rank is None
    assert tuning.settings_of({**point, "files_per_rank": 3}, mount).files_per_rank == 3
