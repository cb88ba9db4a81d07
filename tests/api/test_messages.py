"""What a person reads when something is wrong, or takes long: short, complete, with what to do."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import run_ranks
from torch import nn

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.errors import AccessDenied, ConfigurationError, LoadFailed, NotFound, SaveFailed, StorageFull
from ckpt.ranks import waits
from ckpt.ranks.group import Ranks
from ckpt.tools.preflight import check_place

_CODE = """
import json, sys, torch, traceback, ckpt
state = {"w": torch.zeros(3)}
options = {"endpoint_url": "http://127.0.0.1:9", "unreachable_timeout_s": 0.2, "max_attempts": 1}
more = {"url": "s3://bucket/run", "storage_options": options}
calls = {
    "load": lambda: ckpt.load(state, **more),
    "save": lambda: ckpt.save(state, **more),
    "list_checkpoints": lambda: ckpt.list_checkpoints("s3://bucket/run", storage_options=options),
    "verify": lambda: ckpt.verify(**more),
    "restore": lambda: ckpt.CheckpointManager("s3://bucket/run", save=1, storage_options=options).restore(state),
}
found = {}
for name, call in calls.items():
    try:
        call()
    except ckpt.errors.CheckpointError:
        found[name] = traceback.format_exc()
print(json.dumps(found))
"""


def child(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a program without credentials of this machine."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
    environment |= {"AWS_EC2_METADATA_DISABLED": "true", "HOME": "/nonexistent", **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.mark.parametrize("has_credentials", [False, True])
def test_a_traceback_ends_at_the_call(has_credentials: bool) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"} if has_credentials else {}
    tracebacks: dict[str, str] = json.loads(child(_CODE, **keys).stdout)
    assert len(tracebacks) == 5
    for call, text in tracebacks.items():
        lines = text.splitlines()
        assert len(lines) < 15, (call, text)
        reason = "Could not connect to the endpoint" if has_credentials else "Unable to locate credentials"
        assert reason in lines[-1]
        assert "rank 0" not in lines[-1], "there is no other"


def test_whole_tracebacks_can_be_had(tmp_path: Path) -> None:
    tracebacks: dict[str, str] = json.loads(child(_CODE, CKPT_DEBUG="1").stdout)
    assert "s3_protocol" in tracebacks["list_checkpoints"]


def test_a_cause_in_the_callers_own_code_stays(tmp_path: Path) -> None:
    class Mine:
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise KeyError("mine")

    ckpt.save({"mine": Mine()}, tmp_path)
    with pytest.raises(LoadFailed, match="KeyError: 'mine'"):
        ckpt.load({"mine": Mine()}, tmp_path)


def test_a_refused_load_names_all_that_does_not_fit(tmp_path: Path) -> None:
    saved = {"a": torch.zeros(2), "b": torch.zeros(3, 3), "c": torch.zeros(1), "d": torch.zeros(2)}
    ckpt.save({"model": saved}, tmp_path)
    wanted = {"a": torch.zeros(4), "b": torch.zeros(3, 4), "c": torch.zeros(1), "e": torch.zeros(2)}
    with pytest.raises(LoadFailed) as caught:
        ckpt.load({"model": wanted}, tmp_path)
    assert str(caught.value) == (
        "the load failed: 'model.a' is (2,) in the checkpoint, and (4,) in the program; 'model.b' is (3, 3) in the "
        "checkpoint, and (3, 4) in the program; the checkpoint lacks 1 key(s): model.e; the program has no place for 1 "
        "key(s): model.d, which the checkpoint has; on_shape='resize' of LoadOptions loads the part that both have; "
        "strict=False loads the rest"
    )
    with pytest.raises(LoadFailed, match=r"'model.a' is .*'model.b' is") as caught:
        ckpt.load({"model": wanted}, tmp_path, options=ckpt.options.LoadOptions(strict=False))
    assert "key(s)" not in str(caught.value)


# -- mix-ups ---------------------------------------------------------------------------------------------


def _step(**parts: Any) -> Callable[[Path], object]:
    def run(place: Path) -> object:
        with ckpt.CheckpointManager(place, save=1) as manager:
            return manager.step(1, **parts)

    return run


_MODEL = nn.Linear(2, 2)
_STATE = torch.optim.SGD(_MODEL.parameters(), lr=0.1).state_dict()
_ENDPOINT = {"endpoint_url": "127.0.0.1:9", "key": "a", "secret": "b"}
_MIXED_UP: dict[str, tuple[type[Exception], str, Callable[[Path], object]]] = {
    "a state dict for a model": (
        ConfigurationError, r"not OrderedDict: give the model itself, not its state_dict\(\)", _step(model=_MODEL.state_dict()),
    ),
    "a state dict for an optimizer": (
        ConfigurationError, r"not dict: give the optimizer itself, not its state_dict\(\)", _step(model=_MODEL, optimizer=_STATE),
    ),
    "keep_last": (
        TypeError, "CheckpointManager has no argument 'keep_last': did you mean keep=?",
        lambda place: ckpt.CheckpointManager(place, save=1, keep_last=3),  # type: ignore[call-arg]
    ),
    "storage_option": (
        TypeError, "save has no argument 'storage_option': did you mean storage_options=?",
        lambda place: ckpt.save({}, place, storage_option={}),  # type: ignore[call-arg]
    ),
    "an endpoint without a scheme": (
        SaveFailed, "Invalid endpoint: 127.0.0.1:9; write it with http:// or https://",
        lambda place: ckpt.save({"w": torch.zeros(1)}, "s3://bucket/c", storage_options=_ENDPOINT),
    ),
    "the id of a model on a hub": (
        NotFound, r"if meta-llama/Llama-3.1-8B is one, load the folder that huggingface_hub.snapshot_download\('meta",
        lambda place: ckpt.load({"w": torch.zeros(1)}, "meta-llama/Llama-3.1-8B"),
    ),
}  # fmt: skip


def test_a_step_that_is_not_there_is_no_id_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFound, match=r"first/step-1: there is nothing here$"):
        ckpt.load({"w": torch.zeros(1)}, "first/step-1")


@pytest.mark.parametrize("mistake", _MIXED_UP)
def test_a_mix_up_is_answered_with_what_to_write(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    kind, text, call = _MIXED_UP[mistake]
    with pytest.raises(kind, match=text):
        call(tmp_path / "run")


def test_a_folder_that_is_not_there_is_no_hub_id_where_a_part_of_it_is(tmp_path: Path) -> None:
    with pytest.raises(NotFound) as caught:
        ckpt.inspect(tmp_path / "runs" / "step-1")
    assert caught.value.message == "there is nothing here"


def test_free_space_is_in_a_unit_that_shows_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PosixStore, "free_bytes", lambda store: 3 << 20)
    with pytest.raises(StorageFull, match=r"only 3\.00 MiB are free, but the checkpoint takes 10\.00 MiB"):
        check_place(tmp_path, needed_bytes=10 << 20)


# -- waits, and a resume -----------------------------------------------------------------------------------


def test_a_resume_is_one_line_without_logging_set_up(tmp_path: Path) -> None:
    code = (
        "import torch, ckpt\n"
        "model = torch.nn.Linear(1, 1)\n"
        f"with ckpt.CheckpointManager({str(tmp_path)!r}, save=1) as manager:\n"
        "    restored = manager.restore(model=model)\n"
        "    if restored is None:\n"
        "        manager.step(1, model=model)\n"
    )
    assert child(code).stderr == ""
    (line,) = child(code).stderr.splitlines()
    assert re.fullmatch(
        rf"ckpt: step 1 restored in \S+ s: {tmp_path}/step-00000001, saved \d+ (s|min) ago", line
    )
    quiet = "import logging; logging.getLogger('ckpt').setLevel(logging.WARNING)\n"
    assert child(quiet + code).stderr == "", "the program has chosen"
    heard = child("import logging; logging.basicConfig(level=logging.INFO)\n" + code).stderr
    assert "INFO:ckpt.manager:step 1 restored in " in heard
    assert "ckpt: step 1" not in heard


def test_a_long_wait_says_what_it_waits_for(tmp_path: Path) -> None:
    alone, late = run_ranks(2, _late, str(tmp_path))
    call = f"CheckpointManager of {tmp_path}"
    event = f"the other ranks to enter the {call}: every rank has to make this call"
    assert alone == [f"rank 0 has been waiting for 0 s for {event}"]
    assert late == []


def _late(rank: int, root: str) -> list[str]:
    waits._LOOK_EVERY_S = 0.02
    waits._SILENT_S = 0.2
    heard = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    ranks = Ranks(None, no_dist=False, purpose="manager")
    ranks.connect()
    ranks.most([0])
    logging.getLogger("ckpt.ranks.waits").addHandler(handler)
    if rank:
        time.sleep(1.0)
    ckpt.CheckpointManager(root, save=1, preflight=False)
    logging.getLogger("ckpt.ranks.waits").removeHandler(handler)
    return heard


def test_the_thread_that_looks_at_waits_ends_with_them() -> None:
    ranks = type("Two", (), {"size": 2, "rank": 0})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waits, "_LOOK_EVERY_S", 0.01)
        for _ in range(3):
            with waits.waiting_for(ranks, "nothing"):
                assert any(thread.name == "ckpt-waits" for thread in threading.enumerate())
        deadline = time.monotonic() + 10
        while any(thread.name == "ckpt-waits" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_access_denied_of_a_load_keeps_its_type() -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("HOME", "/nonexistent")
        with pytest.raises(AccessDenied) as caught:
            ckpt.load(
                {"w": torch.zeros(1)}, "s3://bucket/c", storage_options={"endpoint_url": "http://127.0.0.1:9"}
            )
    assert caught.value.rank is None
