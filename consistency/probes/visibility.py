"""Probe when a client sees its own writes, and those of another client.

Everything is written once, and looked for until it is seen; the delay is that of the first look that saw it. What
is looked for lies in folders of its own, so that one look does not refresh what another one remembers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from ckpt.consistency import environment
from ckpt.consistency.probes.clients import Client
from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AccessDenied, ConfigurationError, IntegrityError, NotFound, StorageError

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
    """A change that `observer` is to see; `after_s` is None until it has, `trouble` the last error of a look."""

    what: str
    writer: Client
    observer: Client
    act: Callable[[], object]
    seen: Callable[[], bool]
    since_s: float = 0.0
    after_s: float | None = None
    trouble: str = ""

    def look(self) -> None:
        now_s = environment.monotonic()
        try:
            if self.seen():
                self.after_s = max(0.0, now_s - self.since_s)
        except (NotFound, IntegrityError):  # not there, or a part of it: yet
            pass
        except (AccessDenied, ConfigurationError):
            raise
        except StorageError as error:
            self.trouble = error.message


def own_writes(subject: Subject) -> Iterator[Finding]:
    """Measure when the first client sees its own writes."""
    lists = "list" in subject.allowed
    sights = _watch_all(subject, [(subject.first, subject.first)], "own", lists=lists)
    late = [sight for sight in sights if not _is_fine(sight)]
    measured = {sight.what: sight.after_s for sight in sights}
    serious = [sight for sight in late if sight.what not in _HARMLESS]
    if not late:
        yield Finding("own writes", Verdict.FINE, "read, listed and overwritten at once", measured=measured)
        return
    verdict = Verdict.PROBLEM if serious else Verdict.CAREFUL
    seen = ", ".join(f"{sight.what} {_seen(sight, subject.wait_s)}" for sight in late)
    advice = "saves can fail: they look at what they wrote" if serious else _ADVICE[late[0].what]
    yield Finding("own writes", verdict, seen, advice, measured)


def writes_of_others(subject: Subject) -> Iterator[Finding]:
    """Measure when each client sees the writes of the other."""
    if subject.second is None:
        advice = "name a second mount of the same place, or --second-client"
        yield Finding("others", Verdict.UNKNOWN, "there is one client only", advice)
        return
    pairs = [(subject.first, subject.second), (subject.second, subject.first)]
    sights = _watch_all(subject, pairs, "others", lists="list" in subject.allowed)
    late_s = [sight.after_s for sight in sights if not _is_fine(sight)]
    subject.lag_s = max((subject.wait_s if after_s is None else after_s for after_s in late_s), default=0.0)
    prompt = subject.first.store.capabilities.cross_client_visibility
    for what in dict.fromkeys(sight.what for sight in sights):
        yield _finding([sight for sight in sights if sight.what == what], subject.wait_s, prompt)
    here, there = (client.store.directory for client in subject.clients)
    if here is not None and here == there and not prompt:
        result, advice = (
            "both clients are on one mount",
            "name a second mount, of another machine or of this one",
        )
        yield Finding("others: other machines", Verdict.UNKNOWN, result, advice)


def _finding(sights: Sequence[_Sight], wait_s: float, prompt: bool) -> Finding:
    what = sights[0].what
    late = [sight for sight in sights if not _is_fine(sight)] or sights
    worst = max(late, key=lambda sight: float("inf") if sight.after_s is None else sight.after_s)
    measured = {f"{sight.writer.name} to {sight.observer.name}": sight.after_s for sight in sights}
    result = _seen(worst, wait_s)
    if _is_fine(worst):
        return Finding(f"others: {what}", Verdict.FINE, result, measured=measured)
    verdict, advice = Verdict.CAREFUL, _ADVICE[what]
    if what not in _HARMLESS and worst.after_s is None:
        verdict = Verdict.PROBLEM
    elif what not in _HARMLESS and prompt:
        verdict = Verdict.PROBLEM
        advice = (
            "loads do not expect this here and may find nothing, or what was there before: give ckpt.load a "
        )
        advice += "visibility_timeout_s, and every save a place of its own"
    if len(sights) > 1:
        result += f" ({worst.writer.name} to {worst.observer.name})"
    return Finding(f"others: {what}", verdict, result, advice, measured)


def _is_fine(sight: _Sight) -> bool:
    return sight.after_s is not None and sight.after_s <= _AT_ONCE_S and not sight.trouble


def _seen(sight: _Sight, wait_s: float) -> str:
    trouble = f", {sight.trouble}" if sight.trouble else ""
    if sight.after_s is None:
        return f"not seen in {wait_s:g} s{trouble}"
    if sight.after_s <= _AT_ONCE_S:
        return f"seen at once{trouble}"
    return f"seen after {sight.after_s:.1f} s{trouble}"


# -- looking -------------------------------------------------------------------------------------------


def _watch_all(
    subject: Subject, pairs: Iterable[tuple[Client, Client]], tag: str, *, lists: bool
) -> list[_Sight]:
    """Watch everything for each (writer, observer), until something was never seen."""
    first: list[_Sight] = []
    then: list[_Sight] = []
    last: list[_Sight] = []
    for number, (writer, observer) in enumerate(pairs):
        where = f"{tag}-{number}"
        key = f"{where}-file/f"
        first += _new(writer, observer, where, lists=lists)
        then.append(
            _Sight(_OVERWRITE, writer, observer, _put(writer, key, _NEW), _reads(observer, key, _NEW))
        )
        if "delete" in subject.allowed:
            last.append(_Sight(_DELETE, writer, observer, _delete(writer, key), _is_gone(observer, key)))
    sights: list[_Sight] = []
    for phase in (first, then, last):
        _watch(phase, subject.wait_s)
        sights += phase
        if any(sight.after_s is None and sight.what == _FILE for sight in phase):
            break
    return sights


def _new(writer: Client, observer: Client, where: str, *, lists: bool) -> list[_Sight]:
    """Return sights of objects that do not exist yet."""
    file, early = f"{where}-file/f", f"{where}-early/f"
    observer.exists(early)
    sights = [
        _Sight(_FILE, writer, observer, _put(writer, file, _OLD), _reads(observer, file, _OLD)),
        _Sight(_EARLY, writer, observer, _put(writer, early, _OLD), _reads(observer, early, _OLD)),
    ]
    if not lists:
        return sights
    prefix, folders = f"{where}-list/", f"{where}-folders/"
    listed = f"{prefix}f"
    sights.append(
        _Sight(
            _LISTING, writer, observer, _put(writer, listed, _OLD), lambda: listed in observer.names(prefix)
        )
    )
    writer.prepare(f"{folders}d")
    if "d" in writer.folders(folders):  # elsewhere folders are but parts of names
        make = functools.partial(writer.prepare, f"{folders}e")
        sights.append(_Sight(_FOLDER, writer, observer, make, lambda: "e" in observer.folders(folders)))
    return sights


def _watch(sights: Sequence[_Sight], wait_s: float) -> None:
    """Make the changes, and look until all are seen or `wait_s` seconds are over."""
    for sight in sights:
        sight.act()
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


def _put(writer: Client, key: str, data: bytes) -> Callable[[], object]:
    return lambda: writer.put(key, data)


def _delete(writer: Client, key: str) -> Callable[[], object]:
    return lambda: writer.delete([key])


def _reads(observer: Client, key: str, data: bytes) -> Callable[[], bool]:
    return lambda: observer.read(key) == data


def _is_gone(observer: Client, key: str) -> Callable[[], bool]:
    return lambda: not observer.exists(key)
