"""Say what limits bars where they were missed: a profile of those runs. Markdown, with links as from `docs/`."""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["LIMITS"]

_CHECKS = (
    "Checks take 0.03 to 0.06 s of CPU for a GB where the processor has AVX-512, 0.10 to 0.19 s where it has not "
    "([decision 070](decisions/070-one-checksum.md)); the other side makes none."
)
_PLAN = (
    "DCP's plan, opening and commit are Python: 10 to 25 ms, whatever the size, and 0.1 to 0.5 ms for each tensor of a load, beside "
    "its reads."
)
_SDK = (
    "The SDK's client and its requests that are not parts or ranges take 20 to 80 ms of CPU, by the machine "
    "([decision 069](decisions/069-parts-and-ranges-go-without-the-sdk.md))."
)
_ENCRYPTED = (
    "Encryption takes more than all else, in the client and in the server on the same cores, which both are busy from the first byte to "
    "the last; this kernel has no TLS of its own ([decision 074](decisions/074-tls-in-large-pieces.md))."
)
_MAPPED = (
    f"The best peer maps its file, and copies from there, as fast as memory is copied. {_CHECKS} They take a third of that where the bytes "
    f"are still in the cache ([decision 075](decisions/075-checked-while-in-the-cache.md)). {_PLAN}"
)
_ONE_THREAD = (
    f"{_CHECKS} The best peer writes from one thread, which takes less CPU than several that share a core."
)
_WRITTEN_BACK = (
    f"{_CHECKS} A save begins to write back with each part, which takes a fifth less time; the CPU of that is counted here or in "
    "the kernel's own threads, and differs by a factor of two from one round to the next "
    "([decision 071](decisions/071-through-the-page-cache.md))."
)
_BEGINNING = (
    "A save begins with 2 to 4 ms of Python (arguments, opening, the walk through the state), whatever its size. The rest is the copy, of which "
    "the speed changes: this machine moves 512 MB in 14 or in 26 ms, by phases, and the warm copy beside it may fall into another one."
)

_FRESH = (
    "Memory is fresh, and the system clears it before the copy: in huge pages at hand that is 2 to 3 times a warm copy (0.3 s for 2 GB). "
    "This virtual machine's host takes free memory back, and gives it anew 4 KiB at a time, which takes 2 s; small pages, as stock "
    "takes them, cost as much where none is left. A choice between both in the midst of the copy was tried: it took a fifth of the time "
    "where small pages were left, and as long where none were. After a restore `CheckpointManager` has the memory ready."
)

LIMITS: Mapping[str, str] = {
    "S3 save: CPU/GB over plain sockets with checksums": f"{_SDK} {_PLAN}",
    "S3 save: times faster than FsspecWriter + s3fs": (
        f"A save takes 0.05 to 0.08 s more than sockets and checksums alone (0.16 s), whatever FsspecWriter takes. {_SDK}"
    ),
    "S3 load, verified: CPU/GB over plain sockets with checksums": f"{_SDK} {_PLAN}",
    "S3 save: CPU/GB over plain socket": f"{_CHECKS} {_SDK}",
    "S3 load, verified: CPU/GB over plain socket": f"{_CHECKS} {_SDK}",
    "S3 save, TLS: times faster than the best peer": _ENCRYPTED,
    "S3 save, TLS: times less CPU/GB than the best peer": _ENCRYPTED,
    "S3 load, TLS, verified: times faster than the best peer": (
        f"Without checks a load takes what plain sockets take, and the best peer, which checks nothing: 0.62 s. {_CHECKS} {_ENCRYPTED}"
    ),
    "S3 load, TLS, verified: times less CPU/GB than the best peer": _ENCRYPTED,
    "Checksums over TLS: CPU/GB more than without": (
        "Checks take what they did before, 0.05 s for a GB; the rest takes less since decision [074](decisions/074-tls-in-large-pieces.md), so "
        "that they are a larger share of it."
    ),
    "POSIX save, no fsync: times faster than the best peer": _ONE_THREAD,
    "POSIX save, no fsync: times less CPU/GB than the best peer": _ONE_THREAD,
    "POSIX save, no fsync: speed relative to os.write": f"{_CHECKS} {_PLAN}",
    "POSIX save, fsync: times less CPU/GB than the best peer": _WRITTEN_BACK,
    "POSIX load, verified, warm: times faster than the best peer": _MAPPED,
    "POSIX load, verified, warm: times less CPU/GB than the best peer": _MAPPED,
    "POSIX load, verified, warm: speed relative to readinto": f"{_CHECKS} {_PLAN}",
    "POSIX load, verified, warm: speed relative to readinto with checksums": _PLAN,
    "POSIX load, verified, cold: speed relative to the disk": (f"{_PLAN} The disk waits meanwhile."),
    "POSIX load, verified, cold: times faster than the best peer": "Both wait for the same disk.",
    "20,000 x 4 KB: CPU outside the planner, times less than stock": (
        "Each tensor takes some 35 us beyond the planner, in Python: its plan, and its places in the manifest, the index and `.metadata`. "
        "The first save of a process, which is measured, takes half as much again as the next."
    ),
    **{
        f"{call} stall{size}, second save, over warm memcpy{mode}": _BEGINNING
        for size in ("", " of 2 GB")
        for call, mode in (("async_save", ""), ("manager.save", ": thread"), ("manager.save", ": process"))
    },
    **{f"async_save stall{size}, first save, over warm memcpy": _FRESH for size in ("", " of 2 GB")},
}
"""By the names of bars in `benchmarks.report.targets`."""
