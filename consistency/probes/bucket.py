"""Read the settings of a bucket, and say which of them would take checkpoints away, or keep what was removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt.backends.base import RawRequests
from ckpt.consistency.probes.examine import Finding, Subject, Verdict
from ckpt.errors import AccessDenied, StorageError, StorageUnavailable

_PERMISSIONS = {
    "versioning": "s3:GetBucketVersioning",
    "object_lock": "s3:GetBucketObjectLockConfiguration",
    "lifecycle": "s3:GetLifecycleConfiguration",
    "encryption": "s3:GetEncryptionConfiguration",
    "protection": "the right to read a bucket's protection",
}
"""What allows to read each; only COS has the last one."""
_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE", "ACCELERATED"})
"""Classes whose objects must be restored before they can be read; the last one is IBM's."""
_LONG_DAYS = 365
"""A rule that waits longer is one of the house, not one that eats the checkpoints of a run."""

_Setting = Mapping[str, Any]


def settings(subject: Subject) -> Iterator[Finding]:
    """Read versioning, object lock, lifecycle rules and default encryption; what may not be read is a note."""
    raw = subject.first.store.raw_requests()
    if raw is None:
        return
    read: dict[str, _Setting] = {}
    for name, permission in _PERMISSIONS.items():
        try:
            read[name] = raw.setting(name)
        except StorageError as error:
            is_denied = isinstance(error, AccessDenied)
            # Only COS has protection: a server that does not know of it has nothing to tell.
            if name == "protection" and not is_denied and not isinstance(error, StorageUnavailable):
                continue
            advice = f"to have it looked at, grant {permission}" if is_denied else ""
            yield Finding(f"bucket: {name.replace('_', ' ')}", Verdict.UNKNOWN, error.message, advice)
    place = _place(raw)
    rules = _rules_of(read.get("lifecycle") or {}, place)
    for_all = [rule for rule in rules if _is_for_all_of(place, rule) and not _is_for_some(rule)]
    if "versioning" in read:
        yield _versioning(read["versioning"], for_all, known="lifecycle" in read)
    if "object_lock" in read:
        yield _object_lock(read["object_lock"])
    if "lifecycle" in read:
        yield from _lifecycle(rules, place)
        yield _unfinished_uploads(for_all)
    if "encryption" in read:
        yield _encryption(read["encryption"])
    yield from _protection(read.get("protection") or {})


def _place(raw: RawRequests) -> str:
    """Return the prefix to which the user asked: the probes have a folder of their own in it."""
    folder, slash, _ = raw.name_of("").rstrip("/").rpartition("/")
    return folder + slash


def _rules_of(lifecycle: _Setting, place: str) -> list[_Setting]:
    """List the rules in force for some of the objects whose names begin with `place`."""
    return [
        rule
        for rule in lifecycle.get("Rules", ())
        if rule.get("Status") == "Enabled"
        and (place.startswith(_prefix(rule)) or _prefix(rule).startswith(place))
    ]


def _prefix(rule: _Setting) -> str:
    chosen = rule.get("Filter") or rule
    return str((chosen.get("And") or chosen).get("Prefix") or "")


def _tags(rule: _Setting) -> list[str]:
    chosen = rule.get("Filter") or {}
    tags = [*(chosen.get("And") or {}).get("Tags", ()), *([chosen["Tag"]] if chosen.get("Tag") else [])]
    return [f"{tag.get('Key')}={tag.get('Value')}" for tag in tags]


def _is_for_some(rule: _Setting) -> bool:
    """Tell whether a rule goes by tags or sizes too, so that some objects stay."""
    chosen = rule.get("Filter") or {}
    sizes = {"ObjectSizeGreaterThan", "ObjectSizeLessThan"}
    return bool(_tags(rule) or (chosen.keys() | (chosen.get("And") or {}).keys()) & sizes)


def _named(rule: _Setting, when: _Setting) -> str:
    """Name a rule, what it is for, and when it acts."""
    name = f"rule {rule['ID']!r}" if rule.get("ID") else "a rule"
    prefix, tags = _prefix(rule), _tags(rule)
    about = f" for {prefix}*" if prefix else ""
    about += f" for objects tagged {', '.join(tags)}" if tags else ""
    after = f"after {when['Days']} days" if when.get("Days") is not None else f"on {when.get('Date')}"
    return f"{name}{about}, {after}"


def _is_for_all_of(place: str, rule: _Setting) -> bool:
    """Tell whether a rule is for whatever lies at a place, not for a folder in it that may hold no checkpoint."""
    return place.startswith(_prefix(rule))


def _verdict(acting: Sequence[tuple[_Setting, _Setting]], place: str) -> Verdict:
    """Judge rules that take objects away: of those by tag, or for a folder, nobody knows whether they apply."""
    surely = [
        when
        for rule, when in acting
        if not _tags(rule) and _is_for_all_of(place, rule) and (when.get("Days") or 0) < _LONG_DAYS
    ]
    return Verdict.PROBLEM if surely else Verdict.CAREFUL


def _objects(acting: Sequence[tuple[_Setting, _Setting]], place: str) -> str:
    """Name what rules take: checkpoints, or what may be something else."""
    return "checkpoints" if any(_is_for_all_of(place, rule) for rule, _ in acting) else "objects below here"


def _lifecycle(rules: Sequence[_Setting], place: str) -> Iterator[Finding]:
    expirations = [(rule, rule["Expiration"]) for rule in rules if rule.get("Expiration")]
    expirations = [each for each in expirations if each[1].keys() & {"Days", "Date"}]
    check = "bucket: expiration"
    if expirations:
        result = f"deletes {_objects(expirations, place)}: {'; '.join(_named(*each) for each in expirations)}"
        advice = (
            "a rule takes single files out of checkpoints that are kept, also out of the newest: take the rule away, "
            "or except this prefix, and give the manager keep="
        )
        yield Finding(check, _verdict(expirations, place), result, advice, {"rules": len(expirations)})
    else:
        yield Finding(check, Verdict.FINE, "no rule deletes objects here", measured={"rules": 0})
    moves = [(rule, when) for rule in rules for when in rule.get("Transitions", ())]
    archives = [(rule, when) for rule, when in moves if when.get("StorageClass") in _ARCHIVES]
    others = sorted({str(when.get("StorageClass")) for _, when in moves} - _ARCHIVES)
    check = "bucket: transitions"
    if archives:
        result = f"archives {_objects(archives, place)}: {'; '.join(_named(*each) for each in archives)}"
        advice = "what is archived cannot be loaded until it is restored, for hours: except this prefix from the rule"
        yield Finding(check, _verdict(archives, place), result, advice, {"archives": len(archives)})
    elif others:
        advice = "loads work, and each read of it is paid for; some classes bill a month at least"
        yield Finding(check, Verdict.CAREFUL, f"moves objects to {', '.join(others)}", advice)
    else:
        yield Finding(check, Verdict.FINE, "no rule moves objects here", measured={"archives": 0})


def _unfinished_uploads(rules: Sequence[_Setting]) -> Finding:
    """Look for one that aborts them, among the rules that are in force for all."""
    check = "bucket: unfinished uploads"
    aborts = [(rule.get("AbortIncompleteMultipartUpload") or {}).get("DaysAfterInitiation") for rule in rules]
    days = min((int(each) for each in aborts if each is not None), default=None)
    measured = {"abort_days": days}
    if days is not None:
        return Finding(check, Verdict.FINE, f"aborted after {days} days", measured=measured)
    advice = "what dead uploads leave is paid for until ckpt gc runs: a rule that aborts them after 7 days does it too"
    return Finding(check, Verdict.FINE, "no rule aborts them", advice, measured)


def _versioning(versioning: _Setting, rules: Sequence[_Setting], *, known: bool) -> Finding:
    check, status = "bucket: versions", str(versioning.get("Status") or "off")
    ends = [rule.get("NoncurrentVersionExpiration") or {} for rule in rules]
    # Names are used once, so the one old version of each is among the newer ones that such a rule keeps.
    days = [end.get("NoncurrentDays") for end in ends if not end.get("NewerNoncurrentVersions")]
    gone = [int(each) for each in days if each is not None]
    measured = {"versioning": status, "noncurrent_days": min(gone, default=None)}
    if status == "off":
        return Finding(check, Verdict.FINE, "off: what is deleted is gone", measured=measured)
    if status == "Suspended":
        result = "Suspended: what is deleted is gone; what was written before that stays as an old version"
        return Finding(check, Verdict.FINE, result, measured=measured)
    if gone and min(gone) <= _LONG_DAYS:
        result = f"{status}: old versions are deleted after {min(gone)} days"
        return Finding(check, Verdict.FINE, result, measured=measured)
    result = f"{status}: what is deleted stays as an old version"
    if gone:
        result += f" for {min(gone)} days"
    elif any(end.get("NewerNoncurrentVersions") for end in ends):
        result += ", as the rule keeps some of each name (NewerNoncurrentVersions)"
    elif known:
        result += ", and no rule deletes those"
    advice = (
        "retention, ckpt rm and ckpt gc free no room: add a lifecycle rule with NoncurrentVersionExpiration after 7 "
        "days, without NewerNoncurrentVersions"
    )
    return Finding(check, Verdict.CAREFUL, result, advice, measured)


def _object_lock(setting: _Setting) -> Finding:
    check = "bucket: object lock"
    lock = setting.get("ObjectLockConfiguration") or {}
    default = (lock.get("Rule") or {}).get("DefaultRetention") or {}
    if lock.get("ObjectLockEnabled") != "Enabled":
        return Finding(check, Verdict.FINE, "off", measured={"enabled": False})
    if not default:
        return Finding(check, Verdict.FINE, "on, without a default retention", measured={"enabled": True})
    time = f"{default['Years']} years" if default.get("Years") else f"{default.get('Days')} days"
    result = f"every object is locked for {time} ({default.get('Mode')})"
    advice = (
        "before that, retention, ckpt rm and ckpt gc free no room: a delete leaves the old version, or is refused, and "
        "they go on; plan for the bytes of all saves in that time"
    )
    return Finding(check, Verdict.CAREFUL, result, advice, {"enabled": True, "default": dict(default)})


def _protection(setting: _Setting) -> Iterator[Finding]:
    """Tell of an immutable bucket of COS, which says so here alone."""
    protection = setting.get("ProtectionConfiguration") or {}
    if not protection.get("Status"):
        return
    days = (protection.get("DefaultRetention") or {}).get("Days", "some")
    result = f"immutable ({protection['Status']}): every object is kept for {days} days"
    advice = (
        "before that, retention, ckpt rm and ckpt gc free no room: each delete is refused, and they go on; plan for "
        "the bytes of all saves in that time"
    )
    yield Finding("bucket: protection", Verdict.CAREFUL, result, advice, {"default_days": days})


def _encryption(setting: _Setting) -> Finding:
    rules = (setting.get("ServerSideEncryptionConfiguration") or {}).get("Rules") or [{}]
    default = rules[0].get("ApplyServerSideEncryptionByDefault") or {}
    blocked = (rules[0].get("BlockedEncryptionTypes") or {}).get("EncryptionType") or []
    result = f"by default {default.get('SSEAlgorithm') or 'none that the bucket names'}"
    result += f" with the key {default['KMSMasterKeyID']}" if default.get("KMSMasterKeyID") else ""
    result += f"; {', '.join(blocked)} is refused" if blocked and blocked != ["NONE"] else ""
    return Finding(
        "bucket: encryption", Verdict.FINE, result, measured={"algorithm": default.get("SSEAlgorithm")}
    )
