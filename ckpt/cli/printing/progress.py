"""Draw progress on standard error, if that is a terminal: one line, after half a second, gone at the end."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ckpt.transfer.reports import Amount
from ckpt.words import age, count, shown, size

if TYPE_CHECKING:  # rich takes longer to import than most commands take to run
    from rich.progress import Progress, Task

    Amounts = Callable[[Task, bool], str]

_AFTER_S = 0.5
_FAST = 10.0
"""Things a second, from which on fractions say nothing."""
_NARROW = 64
"""Columns of a terminal that has room for a bar."""


def _is_watched() -> bool:
    """Tell whether somebody sees a line that changes."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


class Line:
    """A line that is drawn from half a second on, so that quick commands neither flicker nor import rich.

    `amounts` writes what stands right of the bar.
    """

    def __init__(self, action: str, amounts: Amounts) -> None:
        self._facts: dict[str, Any] = {"description": shown(action), "completed": 0, "total": None}
        self._amounts = amounts
        self._lock = threading.Lock()
        self._bar: Progress | None = None
        self._timer = threading.Timer(_AFTER_S, self._begin)
        self._timer.daemon = True
        self._is_over = not _is_watched()
        if not self._is_over:
            self._timer.start()

    def __call__(
        self, action: str | None = None, done: float | None = None, total: float | None = None
    ) -> None:
        """Say what is new; what is done and the total are bytes, seconds or an `Amount` of something else."""
        news = {"description": None if action is None else shown(action), "completed": done, "total": total}
        with self._lock:
            is_another = total is not None and _noun(total) != _noun(self._facts["total"])
            self._facts |= {name: value for name, value in news.items() if value is not None}
            if self._bar is not None:
                # The rate of what was counted before says nothing of something else.
                renew = self._bar.reset if is_another else self._bar.update
                renew(self._bar.task_ids[0], **self._facts)

    def _begin(self) -> None:
        bar = _bar(self._amounts)
        with self._lock:
            if not self._is_over:
                bar.add_task(**self._facts)
                bar.start()
                self._bar = bar

    def end(self) -> None:
        """Take the line away."""
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()
                self._bar = None


def _bar(amounts: Amounts) -> Progress:
    """Make a bar that is as wide as the terminal leaves it."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column
    from rich.text import Text

    console = Console(stderr=True, emoji=False)
    is_narrow = console.width < _NARROW
    console.width -= len("^C")  # which terminals add at the end of the line

    class AmountsColumn(progress.ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(amounts(task, is_narrow), no_wrap=True)

    bar = progress.BarColumn(bar_width=None, table_column=Column(ratio=1))
    return progress.Progress(
        progress.TextColumn("{task.description}", table_column=Column(no_wrap=True)),
        *([] if is_narrow else [bar]),
        AmountsColumn(Column(no_wrap=True)),
        console=console,
        transient=True,
        expand=not is_narrow,
        redirect_stdout=False,  # it may be a file
    )


def _noun(amount: float | None) -> str | None:
    return amount.noun if isinstance(amount, Amount) else None


def work_done(task: Task, is_narrow: bool) -> str:
    """Write what is done, the rate and the time that is left: `1.02 of 3.40 GiB, 210.00 MiB/s, 12 s left`.

    Of what is not bytes: `120 of 400 objects, 1.02 of 3.40 GiB, 31/s, 9 s left`.
    """
    done, total = task.completed, task.total
    if not total:
        return seconds_gone(task, is_narrow)
    gone_s, speed = _AFTER_S + (task.elapsed or 0.0), task.speed or 0.0
    if isinstance(total, Amount):
        speed = speed or done / gone_s  # else known from the second report on, and two may be all
        parts = [f"{done:,.0f} of {count(total, total.noun)}"]
        done_bytes = done.size_bytes if isinstance(done, Amount) else None
        if total.size_bytes and done_bytes is not None and not is_narrow:
            parts.append(_of(done_bytes, total.size_bytes))
        rate = f"{speed:,.0f}/s" if speed >= _FAST else f"{speed:.1f}/s"
    else:
        parts, rate = [_of(done, total)], f"{size(speed)}/s"
    if speed and not is_narrow:
        parts.append(rate)
    if speed:
        parts.append(f"{age(math.ceil((total - done) / speed))} left")
    else:  # a storage that shows writes late is waited for before anything is done
        parts.append(f"{age(gone_s)} so far")
    return ", ".join(parts)


def _of(done_bytes: float, total_bytes: float) -> str:
    total, done = size(total_bytes), size(done_bytes)
    number, _, unit = done.partition(" ")
    return f"{number if total.endswith(f' {unit}') else done} of {total}"


def seconds_gone(task: Task, is_narrow: bool) -> str:
    """Write the time since the line began."""
    return age(_AFTER_S + (task.elapsed or 0.0))


def seconds_left(task: Task, is_narrow: bool) -> str:
    """Write the time that is left, where what is done and the total are seconds."""
    return "" if task.total is None else f"{age(task.total - task.completed)} left"
