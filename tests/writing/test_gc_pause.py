"""Pausing the garbage collector: for all threads until the last has ended, and never for a forked child."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Iterator

import pytest
from support.ranks import exit_code_of

from ckpt.gc_pause import no_gc


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
