"""Measure what a bucket or a mount guarantees, and advise: `ckpt.doctor`."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt.backends.base import Capabilities, Store
from ckpt.backends.options import options_dict
from ckpt.backends.registry import normal_url, open_store
from ckpt.consistency import environment
from ckpt.consistency.probes import access, bucket, files, races, requests, speed, visibility
from ckpt.consistency.probes.clients import CLEANING_LIMIT_S, Client, ProcessClient
from ckpt.consistency.probes.examine import Finding, Probe, Subject, Verdict, examine
from ckpt.errors import ConfigurationError, NotFound, short_traceback

_logger = logging.getLogger(__name__)

_FOLDER = ".ckpt-doctor-"
_LONGEST_SETTLING_S = 10.0
_IMPATIENT = {"max_attempts": 3, "connect_timeout_s": 5.0, "read_timeout_s": 20.0}
"""Options for stores that know them: no answer within this time is an answer."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`.

    Attributes:
        url, second: the clients that were compared; `second` is None if there was one only.
        findings: the answers, in the order of the checks.
        capabilities: the capabilities that the library assumes at this place.
        left_behind: names below the URL that could not be removed, or the reason.
        took_s: duration in seconds.
    """

    url: str
    second: str | None
    findings: Sequence[Finding]
    capabilities: Capabilities
    left_behind: Sequence[str]
    took_s: float

    @property
    def verdict(self) -> Verdict:
        """The worst of all findings: FINE, CAREFUL or PROBLEM."""
        verdicts = {finding.verdict for finding in self.findings}
        worst = (verdict for verdict in (Verdict.PROBLEM, Verdict.CAREFUL) if verdict in verdicts)
        return next(worst, Verdict.FINE)

    @property
    def may_put(self) -> bool:
        """True if the storage allowed a put."""
        return not any(finding.check == "permission to put" for finding in self.findings)


@short_traceback
def doctor(
    url: str | os.PathLike[str],
    second_url: str | os.PathLike[str] | None = None,
    *,
    storage_options: Mapping[str, Any] | None = None,
    second_storage_options: Mapping[str, Any] | None = None,
    second_client: bool = False,
    wait_s: float = 60.0,
    timeout_s: float = 300.0,
    progress: Callable[[str], None] | None = None,
) -> Diagnosis:
    """Measure what the storage at `url` guarantees, in a folder that is removed afterwards.

    Args:
        second_url: the same place as another mount or gateway shows it.
        second_storage_options: for `second_url`; by default `storage_options`.
        second_client: compare with another process that has its own connections.
        wait_s: how long to wait until one client sees a change by the other, for each kind of
            change.
        timeout_s: limit for all checks; those that do not fit are not measured.
        progress: called with the name of each check.

    Raises:
        ConfigurationError: a URL, an option or an argument is wrong.
        NotFound: the directory or bucket does not exist.
        StorageError: the storage cannot be reached, or failed the very first put.
    """
    if second_client and second_url is not None:
        raise ConfigurationError("give a second URL or a second client, not both")
    if second_client and normal_url(url).startswith("memory://"):
        raise ConfigurationError("memory:// is this process's own memory: another process cannot see it")
    if not (wait_s > 0 and timeout_s > 0):
        raise ConfigurationError("wait_s and timeout_s must be positive")
    began_s, folder = environment.monotonic(), _FOLDER + environment.token()
    left_behind: list[str] = []
    with contextlib.ExitStack() as clients:
        store = _open(url, folder, storage_options)
        first = Client(store, "this process" if second_url is None else _parent(store.url))
        clients.callback(first.close)
        second: Client | None = None
        if second_url is not None:
            options = storage_options if second_storage_options is None else second_storage_options
            second_store = _open(second_url, folder, options)
            name = _parent(second_store.url)
            second = Client(second_store, name if name != first.name else f"{name} (again)")
        elif second_client:
            second = ProcessClient(store, "another process")
        if second is not None:
            clients.callback(second.close)
        subject = Subject(first, second, wait_s)
        with _cleaning(subject, left_behind):
            findings = examine(
                subject, _probes(wait_s), timeout_s=timeout_s, progress=progress or (lambda check: None)
            )
        capabilities = store.capabilities
    findings += _remains(left_behind)
    return Diagnosis(
        url=_parent(store.url),
        second=None if second is None else second.name,
        findings=findings,
        capabilities=capabilities,
        left_behind=left_behind,
        took_s=environment.monotonic() - began_s,
    )


def _parent(url: str) -> str:
    return url.rpartition("/")[0] or "/"


def _probes(wait_s: float) -> list[Probe]:
    watching_s = 3 * wait_s + 30.0
    return [
        Probe("permissions", access.permissions, needs=frozenset(), vital=True),
        Probe("own writes", visibility.own_writes, watching_s),
        Probe("others", visibility.writes_of_others, watching_s),
        Probe("conditional put", requests.conditions),
        Probe("create races", races.exclusive_creates),
        Probe("hard links", files.names),
        Probe("fsync", files.durability),
        Probe("checksums sent along", requests.checksums),
        Probe("uploads in parts", requests.limits),
        Probe("unfinished uploads", requests.uploads),
        Probe("bucket settings", bucket.settings, needs=frozenset()),
        Probe("clock", speed.clock),
        Probe("latency", speed.latency),
        Probe("throughput", speed.throughput),
        Probe("free space", files.space, needs=frozenset()),
    ]


def _open(url: str | os.PathLike[str], folder: str, options: Mapping[str, Any] | None) -> Store:
    """Open the store of a new folder at `url`."""
    text = normal_url(url)
    impatient = _IMPATIENT if text.partition("://")[0] in ("s3", "cos") else {}
    store = open_store(f"{text.rstrip('/')}/{folder}", {**impatient, **options_dict(options)})
    if store.directory is not None and not os.path.isdir(os.path.dirname(store.directory)):
        store.close()
        text = (
            "there is no such directory; create it, or mount the file system (doctor creates no mount point)"
        )
        raise NotFound(text, url=os.path.dirname(store.directory))
    return store


@contextlib.contextmanager
def _cleaning(subject: Subject, left_behind: list[str]) -> Iterator[None]:
    """Remove all that the clients wrote, whatever happens; put into `left_behind` what remains."""
    try:
        yield
    finally:
        cleaner = threading.Thread(
            target=_clean, args=(subject, left_behind), name="ckpt-probe-clean", daemon=True
        )
        cleaner.start()
        cleaner.join(CLEANING_LIMIT_S + _LONGEST_SETTLING_S)
        if cleaner.is_alive():
            left_behind.append(f"the storage did not answer within {CLEANING_LIMIT_S:.0f} s")
        if left_behind:
            _logger.warning(
                "doctor could not remove these objects at %s: %s",
                subject.first.store.url,
                ", ".join(left_behind),
            )


def _clean(subject: Subject, left_behind: list[str]) -> None:
    names = set().union(*(client.written for client in subject.clients))
    with contextlib.suppress(Exception):
        # Each client first removes its own objects: others may not see them yet.
        for client in subject.clients:
            client.clean(client.written)
        if subject.lag_s:
            # A cache that writes back late can bring back a removed object (rclone, after a
            # rename).
            environment.sleep(min(2 * subject.lag_s, _LONGEST_SETTLING_S))
    try:
        left_behind += subject.first.clean(names)
    except Exception as error:
        left_behind.append(f"{type(error).__name__}: {error}")


def _remains(left_behind: Sequence[str]) -> list[Finding]:
    if not left_behind:
        return []
    shown = ", ".join(left_behind[:3]) + (f" and {len(left_behind) - 3} more" if len(left_behind) > 3 else "")
    advice = f"remove the folder at the URL whose name begins with {_FOLDER}"
    result = f"could not be removed: {shown}"
    return [Finding("what doctor wrote", Verdict.CAREFUL, result, advice, {"left": [*left_behind]})]
