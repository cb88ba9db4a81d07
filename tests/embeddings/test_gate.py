"""An update gate lets through to a cut the updates of its epoch, each once, and none later."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from ckpt.embeddings import UpdateGate
from ckpt.errors import CheckpointError, ConfigurationError


class Applied(list[str]):
    """The names of updates, in the order in which they were applied."""

    def update(self, name: str) -> Callable[[], None]:
        return lambda: self.append(name)


def test_updates_of_the_next_epoch_wait_for_the_cut() -> None:
    gate, applied = UpdateGate([0, 1], epoch=7), Applied()
    assert gate.submit(0, 7, applied.update("a")).done()
    early = gate.submit(1, 8, applied.update("c"))
    later = gate.submit(0, 8, applied.update("d"))
    gate.mark(1, 7, 1)
    gate.mark(0, 7, 1)
    gate.mark(0, 7, 1)  # sent again
    gate.submit(1, 7, applied.update("b"))  # after its mark
    with gate.cut() as epoch:
        assert (epoch, gate.queued, applied) == (7, 2, ["a", "b"])
        assert not early.done()
    gate.mark(0, 7, 1)  # once more
    assert applied == ["a", "b", "c", "d"]
    assert early.done()
    assert later.done()
    assert (gate.epoch, gate.queued) == (8, 0)
    gate.submit(0, 8, applied.update("e"))
    assert applied[-1] == "e"


def test_sources_that_sent_nothing_mark_none() -> None:
    gate = UpdateGate([0, 1])
    for epoch in range(3):
        for source in (0, 1):
            gate.mark(source, epoch, 0)
        with gate.cut(timeout_s=5) as cut:
            assert cut == epoch


def test_a_mark_of_the_next_epoch_may_come_before_the_cut() -> None:
    gate, applied = UpdateGate([0]), Applied()
    gate.submit(0, 1, applied.update("b"))
    gate.mark(0, 1, 1)
    gate.submit(0, 0, applied.update("a"))
    gate.mark(0, 0, 1)
    for expected in (["a"], ["a", "b"]):
        with gate.cut(timeout_s=5):
            assert applied == expected


def test_what_the_cut_waits_for_is_named_in_time() -> None:
    gate, applied = UpdateGate([3, 4, 5, 6]), Applied()
    gate.submit(3, 0, applied.update("a"))
    gate.mark(4, 0, 5)
    gate.submit(4, 0, applied.update("b"))
    begun, end = threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        end.wait(20)

    gate.mark(6, 0, 0)
    gate.mark(5, 0, 1)
    thread = threading.Thread(target=gate.submit, args=(5, 0, slow))
    thread.start()
    begun.wait(20)
    expected = (
        "the cut of epoch 0 cannot be taken, after 0.01 s: source 3 has not marked it (1 updates have come), "
        "4 of 5 updates of source 4 have not come, 1 of 1 updates of source 5 are being applied"
    )
    try:
        with pytest.raises(CheckpointError) as raised, gate.cut(timeout_s=0.01):
            pass
        assert raised.value.message == expected
    finally:
        end.set()
        thread.join(20)
    gate.mark(3, 0, 1)
    for _ in range(4):
        gate.submit(4, 0, applied.update("c"))
    with gate.cut(timeout_s=5):  # tried again
        assert len(applied) == 6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda gate: gate.submit(0, 3, list), "another update of epoch 3 after it had marked"),
        (lambda gate: gate.mark(0, 3, 2), "another mark of epoch 3 after it had marked"),
        (lambda gate: gate.submit(1, 4, list), "marked 1 updates of epoch 4, and 2 have come"),
        (lambda gate: gate.mark(1, 4, 2), "marked 2 updates of epoch 4, after 1"),
        (lambda gate: [gate.submit(0, 4, list) for _ in range(3)] and gate.mark(0, 4, 2), "and 3 have come"),
    ],
)
def test_a_wrong_count_fails_the_gate(wrong: Callable[[UpdateGate], object], message: str) -> None:
    gate = UpdateGate([0, 1], epoch=3)
    gate.submit(0, 3, list)
    gate.mark(0, 3, 1)
    gate.mark(1, 3, 0)
    with gate.cut(timeout_s=5):
        pass
    gate.mark(1, 4, 1)
    gate.submit(1, 4, list)
    waiting = gate.submit(0, 5, list)
    for again in range(2):
        with pytest.raises(ConfigurationError, match=message):
            wrong(gate) if not again else gate.mark(1, 4, 1)
    with pytest.raises(ConfigurationError, match=message):
        waiting.result(timeout=5)
    with pytest.raises(ConfigurationError, match=message), gate.cut(timeout_s=5):
        pass


def test_misuse_is_one_clear_error_and_the_gate_goes_on() -> None:
    for sources in ([], [0, 0]):
        with pytest.raises(ConfigurationError, match="sources must name"):
            UpdateGate(sources)
    with pytest.raises(ConfigurationError, match="max_queued"):
        UpdateGate([0], max_queued=0)
    gate, applied = UpdateGate([0], max_queued=2), Applied()
    with pytest.raises(ConfigurationError, match="source 1 is not among this gate's: \\[0\\]"):
        gate.submit(1, 0, applied.update("x"))
    with pytest.raises(ConfigurationError, match="is of epoch 2, and the cut of epoch 0"):
        gate.submit(0, 2, applied.update("x"))
    with pytest.raises(ConfigurationError, match="the mark of source 0 is of epoch 2"):
        gate.mark(0, 2, 0)
    with pytest.raises(ConfigurationError, match="marked -1 updates"):
        gate.mark(0, 0, -1)
    for name in "bc":
        gate.submit(0, 1, applied.update(name))
    with pytest.raises(ConfigurationError, match=r"2 updates of epoch 1 wait .* larger max_queued"):
        gate.submit(0, 1, applied.update("x"))
    gate.submit(0, 0, applied.update("a"))
    gate.mark(0, 0, 1)
    with (
        gate.cut(timeout_s=5),
        pytest.raises(ConfigurationError, match="a cut of this gate is under way"),
        gate.cut(timeout_s=5),
    ):
        pass
    gate.mark(0, 1, 2)
    with gate.cut(timeout_s=5):
        assert applied == ["a", "b", "c"]


def test_a_cut_that_fails_begins_the_next_epoch() -> None:
    gate, applied = UpdateGate([0]), Applied()
    gate.submit(0, 1, applied.update("a"))
    gate.mark(0, 0, 0)
    with pytest.raises(OSError, match="no disk"), gate.cut(timeout_s=5):
        raise OSError("no disk")
    assert (gate.epoch, applied) == (1, ["a"])


def test_an_update_that_raises_fails_the_gate() -> None:
    gate, applied = UpdateGate([0]), Applied()

    def fails() -> None:
        raise ValueError("row 7")

    queued = [gate.submit(0, 1, apply) for apply in (applied.update("a"), fails, applied.update("b"))]
    gate.mark(0, 0, 0)
    with pytest.raises(ValueError, match="row 7"), gate.cut(timeout_s=5):
        pass
    assert applied == ["a"]
    assert [type(future.exception(timeout=5)) for future in queued] == [type(None), ValueError, ValueError]
    with pytest.raises(ValueError, match="row 7"):
        gate.submit(0, 1, applied.update("c"))


def test_who_waits_is_woken_with_the_error() -> None:
    gate = UpdateGate([0])
    waiting = gate.submit(0, 1, list)
    told: Future[BaseException] = Future()

    def cut() -> None:
        try:
            with gate.cut(timeout_s=30):
                pass
        except BaseException as error:
            told.set_result(error)

    thread = threading.Thread(target=cut)
    thread.start()
    error = RuntimeError("trainer 0 has died")
    gate.fail(error)
    gate.fail(RuntimeError("a second one"))
    assert told.result(timeout=20) is error
    assert waiting.exception(timeout=20) is error
    thread.join(20)


def test_an_update_that_is_interrupted_fails_the_gate() -> None:
    gate = UpdateGate([0])

    def stop() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        gate.submit(0, 0, stop)
    with pytest.raises(CheckpointError, match="an update was interrupted"):
        gate.mark(0, 0, 1)
