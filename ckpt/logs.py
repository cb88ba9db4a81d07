"""Keep control characters out of what this library logs: names and texts of a checkpoint may be hostile."""

from __future__ import annotations

import logging
from typing import Any

from ckpt.words import printable

_make_record = logging.getLogRecordFactory()


def _plain(argument: Any) -> Any:
    """Return an argument of a log line; as text, without control characters, if it has some."""
    if argument is None or isinstance(argument, int | float):
        return argument
    text = str(argument)
    plain = printable(text, keep="\n")
    return argument if plain == text else plain


def _plain_record(name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
    record = _make_record(name, *args, **kwargs)
    if name.partition(".")[0] == "ckpt" and isinstance(record.args, tuple):
        record.args = tuple(map(_plain, record.args))
    return record


def keep_lines_plain() -> None:
    """Apply this to all loggers below `ckpt`, whatever handlers a program has."""
    logging.setLogRecordFactory(_plain_record)
