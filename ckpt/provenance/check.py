"""Check the signatures of a checkpoint, or of all in a folder, and every byte below: `ckpt.verify_signed`."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ckpt.backends.base import Store
from ckpt.backends.registry import normal_url, open_store
from ckpt.backends.wrapper import PrefixStore
from ckpt.consistency.expected import commit_digest
from ckpt.errors import (
    AccessDenied,
    CommitConflict,
    ConfigurationError,
    FormatError,
    IntegrityError,
    NotCommitted,
    NotFound,
    UnsafeContent,
    short_traceback,
)
from ckpt.format.names import last_segment, step_of
from ckpt.format.records import StoredCommit, read_commit
from ckpt.provenance.keys import open_public_key
from ckpt.provenance.memory import Memory, Seen, read_memory, write_memory
from ckpt.provenance.statement import Statement, read_signed
from ckpt.tools.ls import ListedCheckpoint, find_folders
from ckpt.tools.verify import verify
from ckpt.transfer.reports import ReportBytes, no_report

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric import ec

_MAX_FAULTS = 100
_EXPECTED_STATES = ("committed", "incomplete")


@dataclass
class CheckedSignature:
    """A checkpoint under check.

    Attributes:
        path: its folder, relative to the root; empty for the root itself.
        digest: of its commit record, `sha256:...`; empty if it has none that can be read.
        run, step, signed_at_s: as they were signed.
        faults: what is wrong; empty if nothing is.
        checked_bytes: of its data, read and compared.
    """

    path: str
    url: str
    digest: str = ""
    run: str = ""
    step: int | None = None
    signed_at_s: float | None = None
    faults: list[str] = field(default_factory=list)
    checked_bytes: int = 0
    statement: Statement | None = field(default=None, repr=False)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults

    @property
    def folder(self) -> str:
        """The name of its folder."""
        return last_segment(self.url)

    @property
    def seen(self) -> Seen:
        """How a memory keeps it."""
        return Seen(self.digest, self.signed_at_s or 0.0)

    @property
    def is_moved(self) -> bool:
        """True if it was signed in a folder of another name."""
        return self.statement is not None and self.statement.name != self.folder

    def take(self, statement: Statement) -> None:
        """Keep what was signed."""
        self.statement, self.run, self.step = statement, statement.predicate.run, statement.predicate.step
        self.signed_at_s = statement.predicate.signed_at_s


@dataclass
class SignedVerification:
    """The result of `ckpt.verify_signed`.

    Attributes:
        checkpoints: by step.
        faults: what is wrong with all of them together, such as a newest one that was seen before and is gone.
    """

    url: str
    quick: bool
    checkpoints: list[CheckedSignature] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """True if nothing is wrong."""
        return not self.faults and all(each.ok for each in self.checkpoints)


@short_traceback
def verify_signed(
    url: str | os.PathLike[str],
    key: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    quick: bool = False,
    threads: int | None = None,
    progress: ReportBytes | None = None,
    run: str | None = None,
    not_before: int | None = None,
    memory: str | os.PathLike[str] | None = None,
) -> SignedVerification:
    """Check that the checkpoint at `url`, and each in that folder, is signed, and every byte what was signed.

    That all of them are older ones, put back, or that the newest was taken away, only somebody can tell who knows
    more than the storage does: say `not_before`, or keep a `memory`.

    Args:
        key: the path of the public key, PEM.
        storage_options: of the place, by name, as for a save there.
        quick: check signatures and records, and read no data.
        threads, progress: as for `ckpt.verify`; progress begins anew with each checkpoint.
        run: the id of the run that all must be of; default that of most of them.
        not_before: the step that the newest one must have at least.
        memory: a file of this machine, made if it is not there: what was seen there stays, or is newer.

    Raises:
        ConfigurationError: the key or the memory cannot be used, or the memory is of another run than `run`; or digests of
            that kind cannot be computed here.
        FormatError: the file of the memory is something else, or damaged.
        NotFound, NotCommitted: there is no checkpoint.
        StorageError: the storage refused, or could not be reached.
    """
    public_key = open_public_key(key)
    remembered = Memory.empty() if memory is None else _remembered(memory, run)
    with contextlib.closing(open_store(url, storage_options)) as store:
        result = SignedVerification(store.url, quick)
        base = normal_url(url)
        options: dict[str, Any] = {
            "storage_options": storage_options, "quick": quick, "threads": threads, "progress": progress,
        }  # fmt: skip
        for path, commit, problem in _found(store):
            folder = PrefixStore(store, path)
            checked = CheckedSignature(path, folder.url)
            result.checkpoints.append(checked)
            if commit is None:
                checked.faults.append(problem)
            elif _check_signature(folder, commit, public_key, checked):
                _check_bytes(f"{base.rstrip('/')}/{path}" if path else base, checked, options)
        if not result.checkpoints:
            raise NotFound("there is no checkpoint here to be checked", url=store.url)
    result.checkpoints.sort(key=lambda each: (-1 if each.step is None else each.step, each.path))
    wanted = run or remembered.run or _most_common(result.checkpoints)
    _check_runs(result.checkpoints, wanted)
    _check_order(result.checkpoints)
    _check_newest(result, not_before, remembered)
    if memory is not None and result.ok:
        steps = {each.step: each.seen for each in result.checkpoints if each.step is not None}
        folders = {each.folder: each.seen for each in result.checkpoints}
        # Another check may have ended meanwhile, and seen more.
        write_memory(memory, _remembered(memory, wanted).with_seen(wanted, steps, folders))
    return result


def _remembered(path: str | os.PathLike[str], run: str | None) -> Memory:
    memory = read_memory(path)
    if run and memory.run not in ("", run):
        raise ConfigurationError(
            f"{os.fspath(path)} remembers the run {memory.run}, not {run}: keep a file for each run"
        )
    return memory


def _found(store: Store) -> list[tuple[str, StoredCommit | None, str]]:
    """List the checkpoint at the root, and those in its folders: path, commit, or what is wrong instead.

    One at the root does not hide the others: who can write could put it there for that.
    """
    commit = read_commit(store)
    found: list[tuple[str, StoredCommit | None, str]] = [] if commit is None else [("", commit, "")]
    folders = find_folders(store, depth=1, report=no_report)
    # Who may read a checkpoint, but not list it, checks it alone.
    with contextlib.nullcontext() if commit is None else contextlib.suppress(AccessDenied):
        found += _in_folders(store, folders, is_alone=commit is None)
    return found


def _in_folders(
    store: Store, folders: Iterable[tuple[Store, ListedCheckpoint]], *, is_alone: bool
) -> list[tuple[str, StoredCommit | None, str]]:
    """List those in folders; what is at the root too, unless it is not `is_alone`."""
    found: list[tuple[str, StoredCommit | None, str]] = []
    for folder, listed in folders:
        if not listed.path and not is_alone:
            continue
        if listed.state == "committed":
            found.append((listed.path, read_commit(folder), "it is gone, while it was being checked"))
        elif listed.state not in _EXPECTED_STATES:
            found.append(
                (
                    listed.path,
                    None,
                    f"it is {listed.state}, and not signed: {listed.problem or 'of another program'}",
                )
            )
        elif not listed.path:
            raise NotCommitted("no checkpoint is committed here", url=store.url)
    return found


def _check_signature(
    store: Store, commit: StoredCommit, public_key: ec.EllipticCurvePublicKey, checked: CheckedSignature
) -> bool:
    """Check one signature, and whether the checkpoint stands where it was signed for; return whether to go on."""
    checked.digest = commit_digest(commit.raw)
    try:
        record = commit.record
        checked.take(read_signed(store, commit, public_key).statement)
    except (NotFound, IntegrityError, FormatError, UnsafeContent) as error:
        checked.faults.append(str(error))
        return False
    if not record.block_digests:
        checked.faults.append(
            "it is signed, but has no digests of its blocks: the signature does not cover its data"
        )
        return False
    step = step_of(store.url)
    signed = checked.statement
    if signed is None or signed.name == checked.folder:  # the number in a name may be that of an epoch
        return True
    if None not in (step, checked.step) and step != checked.step:
        checked.faults.append(
            f"it was signed as step {checked.step}, and stands in the folder of step {step}: another in its place"
        )
    if checked.step is None and checked.path:
        checked.faults.append(
            f"it has no step, was signed in the folder {signed.name!r:.100}, and stands in "
            f"{checked.folder!r:.100}: another in its place"
        )
    return True


def _check_bytes(url: str, checked: CheckedSignature, options: Mapping[str, Any]) -> None:
    """Check every byte, and what is there for other programs."""
    try:
        found = verify(url, expect=checked.digest, **options)
    except (CommitConflict, NotFound, NotCommitted) as error:
        checked.faults.append(str(error))
        return
    checked.checked_bytes = found.checked_bytes
    problems = [*found.damages, *found.warnings]
    checked.faults += [f"{each.key}: {each.message}" for each in problems[:_MAX_FAULTS]]
    hidden = len(problems) + found.damages_omitted - _MAX_FAULTS
    if hidden > 0:
        checked.faults.append(f"and {hidden:,} more")


def _most_common(checkpoints: Sequence[CheckedSignature]) -> str:
    """Return the run of most of them; of two that have as many, that of the one signed first."""
    signed = sorted(each.signed_at_s or 0.0 for each in checkpoints if each.statement is not None)
    order = {
        each.run: signed.index(each.signed_at_s or 0.0) for each in reversed(checkpoints) if each.statement
    }
    runs = Counter(each.run for each in checkpoints if each.statement is not None)
    return min(runs, key=lambda run: (-runs[run], order[run]), default="")


def _check_runs(checkpoints: Sequence[CheckedSignature], run: str) -> None:
    for each in checkpoints:
        if each.statement is not None and each.run != run:
            each.faults.append(
                f"it is of the run {each.run or '(none)'}, not of {run or '(none)'}: another in its place"
            )


def _check_order(checkpoints: Sequence[CheckedSignature]) -> None:
    """Check that each names the one before it that is here."""
    by_step: dict[int, CheckedSignature] = {}
    for each in checkpoints:
        if each.step is None or each.statement is None:
            continue
        if each.step in by_step:
            each.faults.append(
                f"another checkpoint here is signed as step {each.step} too: {by_step[each.step].folder}"
            )
        by_step.setdefault(each.step, each)
        before = each.statement.predicate.before
        other = None if before is None else by_step.get(before.step)
        if before is not None and other is not None and other.digest != before.digest:
            other.faults.append(
                f"step {each.step} was signed after another step {before.step}, {before.digest}: an older one was put "
                "back, or it was saved again and not what came after it"
            )


def _check_newest(result: SignedVerification, not_before: int | None, memory: Memory) -> None:
    """Check against what is known from elsewhere."""
    steps = {each.step: each for each in result.checkpoints if each.step is not None and each.ok}
    newest = max(steps, default=None)
    shown = "none has a step" if newest is None else f"the newest is of step {newest}"
    if not_before is not None and (newest is None or newest < not_before):
        result.faults.append(
            f"of those that are right, {shown}, before step {not_before}: newer ones were taken away, or put back"
        )
    # One that stands where it was signed may be an older one, checked alone; the folder of a run has no such name.
    is_whole = any(each.path or each.is_moved for each in result.checkpoints)
    if is_whole and memory.newest is not None and (newest is None or newest < memory.newest):
        result.faults.append(
            f"step {memory.newest} was seen here before, and now {shown}: newer ones were taken away, or put back"
        )
    for each in result.checkpoints:
        known = [memory.folders.get(each.folder)]
        if each.step is not None:
            known.append(memory.steps.get(each.step))
        for seen in known if each.ok else ():
            if seen is not None and seen.digest != each.digest and each.seen.signed_at_s <= seen.signed_at_s:
                each.faults.append(
                    f"{seen.digest} was seen here before, which was signed later: an older one was put back"
                )
                break
