"""Probe when a client sees its own writes, and those of another client.

Everything is written once, and looked for until it is seen; the delay is that of the first look
that saw it. Each look has a folder of its own, not to refresh what another one remembers.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.consistency import environment
from ckpt.consistency.probes.clients import Client
from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AccessDenied, IntegrityError, NotFound, StorageError

_AT_ONCE_S = 0.5
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_OLD, _NEW = b"old", b"new, and longer"

_FILE, _EARLY, _FOLDER, _LISTING = "new file", "new file, looked up early", "new folder", "listing"
_OVERWRITE, _DELETE = "overwritten file", "deleted file"

_ADVICE = {
    _FILE: "loads on another machine wait for it (visibility_timeout_s, 60 s by default). Of a mount with a write-back cache: "
    "a save reports success before anybody can see it; turn the cache off (rclone: --vfs-write-back 0s)",
    _EARLY: "this client remembers that a name was missing. Mount without negative caching: s3fs without enable_noobj_cache "
    "or with stat_cache_expire=3, NFS with lookupcache=positive, rclone with a short --dir-cache-time",
    _FOLDER: "programs fail that let one rank make the directories; this library lets each rank make its own",
    _LISTING: "nothing is lost: saves and loads list nothing. ckpt ls, gc and the search for the latest checkpoint lag",
    _OVERWRITE: "a load on another machine may find the checkpoint that was there before: give every save a place of its own",
    _DELETE: "a checkpoint that was removed can seem to be there still",
}
_HARMLESS = frozenset({_FOLDER, _LISTING, _DELETE})


@dataclass
class _Sight:
    """A change that `observer` saw after `after_s`; `trouble` is the last error of a look."""

    writer: Client
    observer: Client
    kind: str
    change: Callable[[], object]
    is_seen: Callable[[], bool]
    since_s: float = 0.0
    after_s: float | None = None
    trouble: str = ""

    def look(self) -> None:
        now_s = environment.monotonic()
        try:
            if self.is_seen():
                self.after_s = max(0.0, now_s - self.since_s)
        except (NotFound, IntegrityError):  # not there, or a part of it: yet
            pass
        except AccessDenied:
            raise
        except StorageError as error:
            self.trouble = error.message

    @property
    def is_fine(self) -> bool:
        return self.after_s is not None and self.after_s <= _AT_ONCE_S and not self.trouble

    def describe(self, wait_s: float) -> str:
        if self.after_s is None:
            text = f"not seen in {wait_s:g} s"
        else:
            text = "seen at once" if self.after_s <= _AT_ONCE_S else f"seen after {self.after_s:.1f} s"
        return f"{text}, {self.trouble}" if self.trouble else text


def own_writes(subject: Subject) -> Iterator[Finding]:
    """Measure when the first client sees its own writes."""
    sights = _watch_all(subject, [(subject.first, subject.first)], "own")
    late = [sight for sight in sights if not sight.is_fine]
    measured = {sight.kind: sight.after_s for sight in sights}
    if not late:
        yield Finding("own writes", Verdict.FINE, "read, listed and overwritten at once", measured=measured)
        return
    verdict, advice = Verdict.CAREFUL, _ADVICE[late[0].kind]
    if not _HARMLESS.issuperset(sight.kind for sight in late):
        verdict, advice = Verdict.PROBLEM, "saves can fail: they look at what they wrote"
    result = ", ".join(f"{sight.kind} {sight.describe(subject.wait_s)}" for sight in late)
    yield Finding("own writes", verdict, result, advice, measured)


def writes_of_others(subject: Subject) -> Iterator[Finding]:
    """Measure when each client sees the writes of the other."""
    first, second = subject.first, subject.second
    if second is None:
        advice = "name a second mount of the same place, or --second-client"
        yield Finding("others", Verdict.UNKNOWN, "there is one client only", advice)
        return
    sights = _watch_all(subject, [(first, second), (second, first)], "others")
    late_s = [sight.after_s for sight in sights if not sight.is_fine]
    subject.lag_s = max((subject.wait_s if after_s is None else after_s for after_s in late_s), default=0.0)
    prompt = first.store.capabilities.cross_client_visibility
    for kind in dict.fromkeys(sight.kind for sight in sights):
        yield _finding([sight for sight in sights if sight.kind == kind], subject.wait_s, prompt)
    if first.store.directory is not None and first.store.directory == second.store.directory and not prompt:
        advice = "name a second mount, of another machine or of this one"
        yield Finding("others: other machines", Verdict.UNKNOWN, "both clients are on one mount", advice)


def _finding(sights: Sequence[_Sight], wait_s: float, prompt: bool) -> Finding:
    kind = sights[0].kind
    late = [sight for sight in sights if not sight.is_fine] or sights
    worst = max(late, key=lambda sight: float("inf") if sight.after_s is None else sight.after_s)
    measured = {f"{sight.writer.name} to {sight.observer.name}": sight.after_s for sight in sights}
    result = worst.describe(wait_s)
    if worst.is_fine:
        return Finding(f"others: {kind}", Verdict.FINE, result, measured=measured)
    verdict, advice = Verdict.CAREFUL, _ADVICE[kind]
    if kind not in _HARMLESS and worst.after_s is None:
        verdict = Verdict.PROBLEM
    elif kind not in _HARMLESS and prompt:
        verdict = Verdict.PROBLEM
        advice = (
            "loads do not expect this here and may find nothing, or what was there before: give ckpt.load a "
            "visibility_timeout_s, and every save a place of its own"
        )
    if len(sights) > 1:
        result += f" ({worst.writer.name} to {worst.observer.name})"
    return Finding(f"others: {kind}", verdict, result, advice, measured)


# -- looking ---------------------------------------------------------------------------------------


def _watch_all(subject: Subject, pairs: Iterable[tuple[Client, Client]], tag: str) -> list[_Sight]:
    """Watch everything for each (writer, observer), until a new file was never seen."""
    of_pairs = [_phases(subject, *pair, f"{tag}-{number}") for number, pair in enumerate(pairs)]
    watched: list[_Sight] = []
    for phase in zip(*of_pairs, strict=True):
        sights = list(itertools.chain(*phase))
        _watch(sights, subject.wait_s)
        watched += sights
        if any(sight.after_s is None and sight.kind == _FILE for sight in sights):
            break
    return watched


def _phases(subject: Subject, writer: Client, observer: Client, where: str) -> Sequence[list[_Sight]]:
    """Return what to watch in turn: new objects, an overwritten one, a deleted one."""
    file, early, listed = f"{where}-file/f", f"{where}-early/f", f"{where}-list/f"
    folders, listing = f"{where}-folders/", f"{where}-list/"
    sight = functools.partial(_Sight, writer, observer)

    def put(kind: str, key: str, data: bytes) -> _Sight:
        return sight(kind, lambda: writer.put(key, data), lambda: observer.read(key) == data)

    observer.exists(early)
    new = [put(_FILE, file, _OLD), put(_EARLY, early, _OLD)]
    if "list" in subject.allowed:
        put_listed = functools.partial(writer.put, listed, _OLD)
        new.append(sight(_LISTING, put_listed, lambda: listed in observer.names(listing)))
        writer.prepare(f"{folders}d")
        if "d" in writer.folders(folders):  # elsewhere folders are but parts of names
            make_folder = functools.partial(writer.prepare, f"{folders}e")
            new.append(sight(_FOLDER, make_folder, lambda: "e" in observer.folders(folders)))
    deleted = sight(_DELETE, lambda: writer.delete([file]), lambda: not observer.exists(file))
    return new, [put(_OVERWRITE, file, _NEW)], [deleted] if "delete" in subject.allowed else []


def _watch(sights: Sequence[_Sight], wait_s: float) -> None:
    """Make the changes, and look until all are seen or `wait_s` seconds are over."""
    for sight in sights:
        sight.change()
        sight.since_s = environment.monotonic()
        sight.look()
    pause_s = _FIRST_PAUSE_S
    while True:
        pending = [sight for sight in sights if sight.after_s is None]
        pending = [sight for sight in pending if environment.monotonic() - sight.since_s < wait_s]
        if not pending:
            return
        environment.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
        for sight in pending:
            sight.look()
