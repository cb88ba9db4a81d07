"""Judge a run by the project's bars, most of them ratios within one run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.cases import CASES
from benchmarks.report.results import Results

__all__ = ["BARS", "Bar", "Verdict", "judge"]

_STOCK = ("stock, 1 thread", "stock, 2 threads", "stock, 4 threads")
_FSSPEC_WRITERS = ("FsspecWriter + s3fs", "FsspecWriter + s3fs, 4 threads")
_S3TC_WRITERS = ("s3torchconnector", "s3torchconnector, 4 threads")


@dataclass(frozen=True)
class Bar:
    """A bound on one value; `value` gives None where the run has not measured what it needs."""

    what: str
    unit: str
    bound: float
    at_most: bool
    value: Callable[[Results], float | None]


@dataclass(frozen=True)
class Verdict:
    """A bar and its measured value."""

    bar: Bar
    value: float | None

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.bar.bound if self.bar.at_most else self.value >= self.bar.bound


def judge(results: Results) -> list[Verdict]:
    return [Verdict(bar, bar.value(results)) for bar in BARS]


def _figure(case: str, entry: str, key: str, scale: float = 1.0) -> Callable[[Results], float | None]:
    def value(results: Results) -> float | None:
        median = results.median(case, entry, key)
        return None if median is None else median * scale

    return value


def _ratio(
    case: str, key: str, above: Iterable[str], below: Iterable[str]
) -> Callable[[Results], float | None]:
    """Divide the least median of `above` by that of `below`: the best setting of each counts."""

    def value(results: Results) -> float | None:
        top, bottom = _least(results, case, key, above), _least(results, case, key, below)
        return None if top is None or not bottom else top / bottom

    return value


def _least(results: Results, case: str, key: str, entries: Iterable[str]) -> float | None:
    medians = [median for entry in entries if (median := results.median(case, entry, key)) is not None]
    return min(medians, default=None)


def _outside_planner(results: Results) -> float | None:
    planner = results.median("small-tensors", "planner alone", "cpu_s")
    ours = results.median("small-tensors", "ours", "cpu_s")
    stock = _least(results, "small-tensors", "cpu_s", _STOCK)
    if planner is None or ours is None or stock is None or ours <= planner:
        return None
    return (stock - planner) / (ours - planner)


def _checksum_cost(results: Results) -> float | None:
    with_them = results.median("s3-save-tls", "ours", "cpu_s_per_gb")
    without = results.median("s3-save-tls", "ours, no checksums", "cpu_s_per_gb")
    return None if with_them is None or not without else 100 * (with_them / without - 1)


def _slowest_open(results: Results) -> float | None:
    medians = [results.median("metadata-1024", "ours", key) for key in ("open_s", "adopt_s")]
    return max((value for value in medians if value is not None), default=None)


_FLOORS = ("sockets", "files", "obstore")
_CPU, _WALL = "cpu_s_per_gb", "wall_s"


def _best_peer(case: str, key: str) -> Callable[[Results], float | None]:
    """Divide the least median of all peers by ours. A client that only moves bytes in a compiled language is a floor."""
    entries = next(each for each in CASES if each.name == case).entries
    peers = [each.name for each in entries if each.contender not in ("ours", *_FLOORS)]
    return _ratio(case, key, peers, ["ours"])


def _ahead(case: str, what: str) -> tuple[Bar, Bar]:
    return (
        Bar(f"{what}: times faster than the best peer", "x", 1, False, _best_peer(case, _WALL)),
        Bar(f"{what}: times less CPU/GB than the best peer", "x", 1, False, _best_peer(case, _CPU)),
    )


def _stalls(case: str, size: str) -> tuple[Bar, ...]:
    def over_copy(entry: str, key: str = _WALL) -> Callable[[Results], float | None]:
        def value(results: Results) -> float | None:
            stall, copied = results.median(case, entry, key), results.median(case, "memcpy, warm", _WALL)
            return None if stall is None or not copied else stall / copied

        return value

    second = f"manager.save stall{size}, second save, over warm memcpy"
    return (
        Bar(f"async_save stall{size}, second save, over warm memcpy", "x", 1.1, True, over_copy("ours")),
        Bar(
            f"async_save stall{size}, first save, over warm memcpy",
            "x",
            1.5,
            True,
            over_copy("ours", "first_s"),
        ),
        Bar(f"{second}: thread", "x", 1.1, True, over_copy("manager, thread")),
        Bar(f"{second}: process", "x", 1.1, True, over_copy("manager, process")),
    )


BARS = (
    *_ahead("s3-save", "S3 save"),
    *_ahead("s3-load", "S3 load, verified"),
    *_ahead("s3-save-tls", "S3 save, TLS"),
    *_ahead("s3-load-tls", "S3 load, TLS, verified"),
    *_ahead("posix-save", "POSIX save, no fsync"),
    *_ahead("posix-save-fsync", "POSIX save, fsync"),
    *_ahead("posix-load", "POSIX load, verified, warm"),
    *_ahead("posix-load-cold", "POSIX load, verified, cold"),
    Bar("S3 save: CPU/GB over plain sockets with checksums", "x", 1.5, True,
        _ratio("s3-save", _CPU, ["ours"], ["plain sockets + CRC"])),
    Bar("S3 load, verified: CPU/GB over plain sockets with checksums", "x", 1.5, True,
        _ratio("s3-load", _CPU, ["ours"], ["plain sockets + CRC"])),
    Bar("POSIX load, verified, warm: speed relative to readinto with checksums", "x", 0.9, False,
        _ratio("posix-load", _WALL, ["readinto + CRC"], ["ours"])),
    Bar("POSIX load, verified, cold: speed relative to the disk", "x", 0.95, False,
        _ratio("posix-load-cold", _WALL, ["readinto", "O_DIRECT"], ["ours"])),
    Bar("S3 save: CPU/GB over plain socket", "x", 2.2, True, _ratio("s3-save", _CPU, ["ours"], ["plain sockets"])),
    Bar("S3 save: times faster than s3torchconnector", "x", 3, False, _ratio("s3-save", _WALL, _S3TC_WRITERS, ["ours"])),
    Bar("S3 save: times faster than FsspecWriter + s3fs", "x", 8, False,
        _ratio("s3-save", _WALL, _FSSPEC_WRITERS, ["ours"])),
    Bar("S3 save: extra peak RSS", "MB", 64, True, _figure("s3-save", "ours", "peak_mb")),
    Bar("S3 load, verified: CPU/GB over plain socket", "x", 2.2, True,
        _ratio("s3-load", _CPU, ["ours"], ["plain sockets"])),
    Bar("S3 load, verified: times faster than s3torchconnector", "x", 1.7, False,
        _ratio("s3-load", _WALL, ["s3torchconnector"], ["ours"])),
    Bar("S3 load, verified: times faster than FsspecReader + s3fs", "x", 5, False,
        _ratio("s3-load", _WALL, ["FsspecReader + s3fs"], ["ours"])),
    Bar("S3 load: extra peak RSS", "MB", 64, True, _figure("s3-load", "ours", "peak_mb")),
    Bar("POSIX save, no fsync: speed relative to os.write", "x", 0.85, False,
        _ratio("posix-save", _WALL, ["os.write"], ["ours"])),
    Bar("POSIX save, no fsync: times faster than stock at its best", "x", 1, False,
        _ratio("posix-save", _WALL, _STOCK, ["ours"])),
    Bar("POSIX save, fsync: speed relative to write + fsync", "x", 0.9, False,
        _ratio("posix-save-fsync", _WALL, ["os.write + fsync"], ["ours"])),
    Bar("POSIX load, verified, warm: speed relative to readinto", "x", 0.7, False,
        _ratio("posix-load", _WALL, ["readinto"], ["ours"])),
    Bar("POSIX load, verified, warm: times faster than stock", "x", 1.5, False,
        _ratio("posix-load", _WALL, ["stock"], ["ours"])),
    Bar("20,000 x 4 KB: CPU outside the planner, times less than stock", "x", 3, False, _outside_planner),
    Bar("20,000 x 4 KB: times faster than stock at its best", "x", 1.5, False,
        _ratio("small-tensors", _WALL, _STOCK, ["ours"])),
    Bar("Reshard 8 -> 3: bytes read per byte needed", "x", 1.05, True, _figure("reshard", "ours", "read_per_needed")),
    Bar("256 KiB slice of a 16 MiB shard: data read", "MiB", 2, True,
        _figure("slice", "ours", "read_data_bytes", 1 / (1 << 20))),
    *_stalls("async-stall", ""),
    *_stalls("async-stall-large", " of 2 GB"),
    Bar("Training steps while a process uploads: slower", "%", 5, True,
        _figure("async-steps", "manager, process", "slower_percent")),
    Bar("1,024 ranks x 500: index size", "MB", 6, True, _figure("metadata-1024", "ours", "opened_mb")),
    Bar("1,024 ranks x 500: load time per rank", "s", 2, True, _slowest_open),
    Bar("1,024 ranks x 500: commit on the coordinator", "s", 4, True, _figure("metadata-1024", "ours", "commit_s")),
    Bar("Checksums over TLS: CPU/GB more than without", "%", 10, True, _checksum_cost),
)  # fmt: skip
