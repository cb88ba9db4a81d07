"""Pausing the garbage collector: for all threads until the last has ended, and never for a forked child."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import exit_code_of

import ckpt
from ckpt import api
from ckpt.collective import prepare_save
from ckpt.gc_pause import no_gc, rare_gc
from ckpt.local_first import saving


@contextlib.contextmanager
def paused_by_another_thread() -> Iterator[None]:
    begun, end = threading.Event(), threading.Event()

    def pause() -> None:
        with no_gc():
            begun.set()
            end.wait(60)

    thread = threading.Thread(target=pause)
    thread.start()
    begun.wait(60)
    yield
    end.set()
    thread.join()


def test_it_ends_with_the_last_thread() -> None:
    before = gc.get_threshold()
    with contextlib.ExitStack() as other:
        with no_gc():
            other.enter_context(paused_by_another_thread())
        assert gc.get_threshold()[0] == 0
    assert gc.get_threshold() == before


@pytest.mark.parametrize("enabled", [True, False])
def test_what_the_program_sets_meanwhile_stays(enabled: bool) -> None:
    was_enabled, thresholds = gc.isenabled(), gc.get_threshold()
    try:
        with no_gc():
            (gc.enable if enabled else gc.disable)()
        assert gc.isenabled() == enabled
        with no_gc():
            gc.set_threshold(5000, 7, 8)
        assert gc.get_threshold() == (5000, 7, 8)
    finally:
        gc.set_threshold(*thresholds)
        (gc.enable if was_enabled else gc.disable)()


def test_a_pause_within_a_rare_one() -> None:
    before = gc.get_threshold()
    with rare_gc():
        rare = gc.get_threshold()[0]
        assert rare > before[0]
        with no_gc():
            assert gc.get_threshold()[0] == 0
            with rare_gc():
                assert gc.get_threshold()[0] == 0
        assert gc.get_threshold() == (rare, *before[1:])
    assert gc.get_threshold() == before


@pytest.mark.parametrize("own", [0, 10**8])
def test_a_program_that_collects_less_keeps_that(own: int) -> None:
    before = gc.get_threshold()
    gc.set_threshold(own)
    try:
        with rare_gc():
            assert gc.get_threshold()[0] == own
        assert gc.get_threshold()[0] == own
    finally:
        gc.set_threshold(*before)


def test_pauses_of_many_threads() -> None:
    before = gc.get_threshold()

    def pause() -> None:
        for number in range(300):
            with (no_gc, rare_gc)[number % 2](), (rare_gc, no_gc)[number % 3 % 2]():
                assert gc.get_threshold()[0] in (0, 1_000_003)

    threads = [threading.Thread(target=pause) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert gc.get_threshold() == before


def test_a_program_that_restores_what_it_found_in_a_pause() -> None:
    before = gc.get_threshold()
    try:
        with rare_gc():
            found = gc.get_threshold()
            gc.set_threshold(5000, 7, 8)
        assert gc.get_threshold() == (5000, 7, 8)
        gc.set_threshold(*found)
        with rare_gc():
            pass
        assert gc.get_threshold() == (5000, *before[1:])
    finally:
        gc.set_threshold(*before)


def test_one_that_has_set_0_in_between() -> None:
    before = gc.get_threshold()
    try:
        with rare_gc():
            found = gc.get_threshold()
            gc.set_threshold(0)
            with no_gc():
                pass
        assert gc.get_threshold()[0] == 0
        gc.set_threshold(*found)
        for _ in range(2):
            with rare_gc():
                pass
            assert gc.get_threshold() == before
    finally:
        gc.set_threshold(*before)


@pytest.mark.parametrize("call", ["save", "async_save", "async_save local", "load", "load local"])
def test_many_tensors_are_rarely_collected(call: str, tmp_path: Path) -> None:
    """2,000 of them, and as often as before afterwards. What happens in the background is not looked at."""
    before, collected = gc.get_threshold(), list[int]()
    state = {f"t{number}": torch.zeros(2) for number in range(2000)}
    place, name, near = tmp_path / "far", call.split()[0], tmp_path / "near"
    options: dict[str, Any] = {"local": ckpt.LocalTier(near)} if "local" in call else {}
    # What is imported the first time makes objects too.
    ckpt.save(state, place / "step-1")
    ckpt.async_save(state, place / "step-2", **options).result()
    ckpt.load(state, place / "step-2", **options)

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "stop" and threading.current_thread() is threading.main_thread():
            collected.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        result = getattr(ckpt, name)(state, place / ("step-2" if name == "load" else "step-3"), **options)
    finally:
        gc.callbacks.remove(note)
    if name == "async_save":
        result.result()
    assert len(collected) <= 3
    assert gc.get_threshold() == before


@pytest.mark.parametrize("is_local", [False, True])
def test_the_copy_of_async_save_is_made_with_few_collections(
    is_local: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thresholds: list[int] = []

    def noting(*arguments: Any, **options: Any) -> Any:
        thresholds.append(gc.get_threshold()[0])
        return prepare_save(*arguments, **options)

    for module in (api, saving):
        monkeypatch.setattr(module, "prepare_save", noting)
    options: dict[str, Any] = {"local": ckpt.LocalTier(tmp_path / "near")} if is_local else {}
    ckpt.async_save({"t": torch.zeros(2)}, tmp_path / "far" / "step-1", **options).result()
    assert thresholds == [1_000_003]


def test_a_forked_child_collects() -> None:
    assert exit_code_of(_fork_in_a_pause) == 0


def _fork_in_a_pause() -> None:
    gc.enable()
    with paused_by_another_thread():
        child = os.fork()
    if not child:
        collected: list[object] = []
        gc.callbacks.append(lambda phase, info: collected.append(phase))
        garbage: list[list[int]] = [[] for _ in range(5000)]
        with no_gc():
            pass
        garbage += [[] for _ in range(5000)]
        os._exit(0 if collected else 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
