"""What `ckpt doctor` says of a bucket's settings: versions, lock, lifecycle rules, encryption."""

from __future__ import annotations

from typing import Any

import pytest
from support.strict_s3 import Request, StrictS3

import ckpt
from ckpt.backends.base import Store
from ckpt.backends.registry import open_store
from ckpt.consistency.probes import bucket
from ckpt.consistency.probes.clients import Client
from ckpt.consistency.probes.examine import Finding, Subject, Verdict

FINE, CAREFUL, PROBLEM, UNKNOWN = Verdict.FINE, Verdict.CAREFUL, Verdict.PROBLEM, Verdict.UNKNOWN
ENABLED = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"

SUSPENDED = ENABLED.replace("Enabled", "Suspended")
LISTING = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"


def rule(inner: str, about: str = "<Filter/>", status: str = "Enabled") -> str:
    return f"<Rule><ID>r1</ID><Status>{status}</Status>{about}{inner}</Rule>"


def lifecycle(*rules: str) -> dict[str, str]:
    return {"lifecycle": f"<LifecycleConfiguration>{''.join(rules)}</LifecycleConfiguration>"}


def prefix(name: str) -> str:
    return f"<Filter><Prefix>{name}</Prefix></Filter>"


def moves(to: str, days: int = 30) -> str:
    return f"<Transition><Days>{days}</Days><StorageClass>{to}</StorageClass></Transition>"


def lock(retention: str) -> dict[str, str]:
    inner = f"<ObjectLockEnabled>Enabled</ObjectLockEnabled>{retention}"
    return {"object-lock": f"<ObjectLockConfiguration>{inner}</ObjectLockConfiguration>"}


EXPIRES = "<Expiration><Days>30</Days></Expiration>"
NONCURRENT = "<NoncurrentVersionExpiration><NoncurrentDays>7</NoncurrentDays></NoncurrentVersionExpiration>"
KEEPS_SOME = NONCURRENT.replace(
    "<NoncurrentDays>", "<NewerNoncurrentVersions>3</NewerNoncurrentVersions><NoncurrentDays>"
)
ABORTS = "<AbortIncompleteMultipartUpload><DaysAfterInitiation>7</DaysAfterInitiation></AbortIncompleteMultipartUpload>"
TAG = "<Tag><Key>tmp</Key><Value>yes</Value></Tag>"
LARGER = "<ObjectSizeGreaterThan>500</ObjectSizeGreaterThan>"
RETENTION = "<Rule><DefaultRetention><Mode>COMPLIANCE</Mode><Days>90</Days></DefaultRetention></Rule>"
KMS = (
    "<ServerSideEncryptionConfiguration><Rule><ApplyServerSideEncryptionByDefault><SSEAlgorithm>aws:kms</SSEAlgorithm>"
    "<KMSMasterKeyID>key-1</KMSMasterKeyID></ApplyServerSideEncryptionByDefault></Rule></ServerSideEncryptionConfiguration>"
)


def found(server: StrictS3, url: str = "s3://bucket/run/a") -> dict[str, Finding]:
    store: Store = open_store(f"{url}/.ckpt-doctor-1", server.options)
    findings = [*bucket.settings(Subject(Client(store, "this"), None, 1.0))]
    store.close()
    return {finding.check.removeprefix("bucket: "): finding for finding in findings}


CASES: list[tuple[dict[str, str], str, Verdict, str]] = [
    ({}, "expiration", FINE, "no rule deletes"),
    ({}, "transitions", FINE, "no rule moves"),
    ({}, "unfinished uploads", FINE, "no rule aborts them"),
    ({}, "versions", FINE, "off: what is deleted is gone"),
    ({}, "object lock", FINE, "off"),
    ({}, "encryption", FINE, "by default none"),
    ({"encryption": KMS}, "encryption", FINE, "by default aws:kms with the key key-1"),
    (lifecycle(rule(EXPIRES)), "expiration", PROBLEM, "deletes checkpoints: rule 'r1', after 30 days"),
    (lifecycle(rule(EXPIRES, prefix("run/"))), "expiration", PROBLEM, "rule 'r1' for run/*, after 30 days"),
    (lifecycle(rule(EXPIRES, prefix("run/a/step-1/"))), "expiration", CAREFUL, "deletes objects below here: rule 'r1' for run/a/step-1/*"),
    (lifecycle(rule(moves("GLACIER"), prefix("run/a/logs/"))), "transitions", CAREFUL, "archives objects below here"),
    (lifecycle(rule(EXPIRES, prefix("run/a/logs/")), rule(EXPIRES)), "expiration", PROBLEM, "deletes checkpoints"),
    (lifecycle(rule(EXPIRES, "<Prefix>ru</Prefix>")), "expiration", PROBLEM, "for ru*"),
    (lifecycle(rule(EXPIRES, f"<Filter><And><Prefix>run/</Prefix>{LARGER}</And></Filter>")), "expiration", PROBLEM, "run/*"),
    (lifecycle(rule(EXPIRES, prefix("run/ab/"))), "expiration", FINE, "no rule deletes"),
    (lifecycle(rule(EXPIRES, status="Disabled")), "expiration", FINE, "no rule deletes"),
    (lifecycle(rule(EXPIRES, f"<Filter>{TAG}</Filter>")), "expiration", CAREFUL, "for objects tagged tmp=yes"),
    (lifecycle(rule(EXPIRES, f"<Filter><And><Prefix>run/</Prefix>{TAG}</And></Filter>")), "expiration", CAREFUL, "run/* for objects tagged"),
    (lifecycle(rule(EXPIRES.replace("30", "2555"))), "expiration", CAREFUL, "after 2555 days"),
    (lifecycle(rule("<Expiration><Date>2030-01-01T00:00:00Z</Date></Expiration>")), "expiration", PROBLEM, "on 2030-01-01"),
    (lifecycle(rule("<Expiration><ExpiredObjectDeleteMarker>true</ExpiredObjectDeleteMarker></Expiration>")), "expiration", FINE, "no rule"),
    (lifecycle(rule(moves("GLACIER"))), "transitions", PROBLEM, "archives checkpoints: rule 'r1', after 30 days"),
    (lifecycle(rule(moves("DEEP_ARCHIVE", 400))), "transitions", CAREFUL, "after 400 days"),
    (lifecycle(rule(moves("STANDARD_IA"))), "transitions", CAREFUL, "moves objects to STANDARD_IA"),
    (lifecycle(rule(ABORTS)), "unfinished uploads", FINE, "aborted after 7 days"),
    ({"versioning": ENABLED}, "versions", CAREFUL, "and no rule deletes those"),
    ({"versioning": ENABLED, **lifecycle(rule(NONCURRENT))}, "versions", FINE, "deleted after 7 days"),
    ({"versioning": ENABLED, **lifecycle(rule(NONCURRENT, f"<Filter>{TAG}</Filter>"))}, "versions", CAREFUL, "no rule deletes those"),
    ({"versioning": ENABLED, **lifecycle(rule(NONCURRENT, prefix("run/a/b/")))}, "versions", CAREFUL, "no rule deletes those"),
    ({"versioning": ENABLED, **lifecycle(rule(KEEPS_SOME))}, "versions", CAREFUL, "keeps some of each name"),
    ({"versioning": ENABLED, **lifecycle(rule(KEEPS_SOME), rule(NONCURRENT))}, "versions", FINE, "deleted after 7 days"),
    ({"versioning": ENABLED, **lifecycle(rule(NONCURRENT.replace("7", "3650")))}, "versions", CAREFUL, "for 3650 days"),
    ({"versioning": SUSPENDED}, "versions", FINE, "what was written before that stays"),
    ({"versioning": LISTING}, "versioning", UNKNOWN, "knows no versioning"),
    ({"object-lock": LISTING}, "object lock", UNKNOWN, "knows no object lock"),
    ({"lifecycle": LISTING}, "lifecycle", UNKNOWN, "knows no lifecycle"),
    (lifecycle(rule(ABORTS, prefix("run/a/b/"))), "unfinished uploads", FINE, "no rule aborts them"),
    (lifecycle(rule(ABORTS, prefix("run/"))), "unfinished uploads", FINE, "aborted after 7 days"),
    (lock(""), "object lock", FINE, "without a default retention"),
    (lock(RETENTION), "object lock", CAREFUL, "locked for 90 days (COMPLIANCE)"),
]  # fmt: skip


@pytest.mark.slow
def test_what_the_settings_mean(server: StrictS3) -> None:
    for settings, check, verdict, text in CASES:
        server.settings = settings
        finding = found(server)[check]
        assert (finding.verdict, text in finding.result) == (verdict, True), (settings, finding)
        assert finding.advice or verdict in (FINE, UNKNOWN)
    server.settings = lifecycle(rule(EXPIRES, prefix("run/")))
    assert found(server, "s3://bucket")["expiration"].verdict is CAREFUL  # which checkpoints may not be in
    assert all(request.method == "GET" for request in server.requests)


@pytest.mark.slow
@pytest.mark.parametrize(
    "refusal", [(403, "AccessDenied"), (404, "NotFound"), (501, "NotImplemented"), (500, "InternalError")]
)
def test_what_may_not_be_read_is_a_note(server: StrictS3, refusal: Any) -> None:
    server.settings = {"versioning": ENABLED}

    def denies(request: Request) -> Any:
        is_setting = request.operation == "GetSetting" and "versioning" not in request.query
        return refusal if is_setting else "pass"

    server.rule, server.requires_checksums = denies, False
    findings = found(server)
    assert {name for name, finding in findings.items() if finding.verdict is UNKNOWN} == {
        "object lock", "lifecycle", "encryption",
    }  # fmt: skip
    assert ("s3:GetLifecycleConfiguration" in findings["lifecycle"].advice) == (refusal[0] == 403)
    assert "and no rule" not in findings["versions"].result
    server.settings = {}
    options = {**server.options, "max_attempts": 1}
    assert ckpt.doctor("s3://bucket/x", storage_options=options).verdict is not PROBLEM


def test_cos_says_what_its_sdk_can_ask(server: StrictS3) -> None:
    protection = "<ProtectionConfiguration><Status>COMPLIANCE</Status><DefaultRetention><Days>90</Days></DefaultRetention>"
    server.settings = lifecycle(rule(moves("ACCELERATED"))) | {
        "protection": f"{protection}</ProtectionConfiguration>"
    }
    with_cos = found(server, "cos://bucket/run")
    assert with_cos["transitions"].verdict is PROBLEM
    assert with_cos["encryption"].verdict is UNKNOWN
    assert "its SDK, knows no encryption of buckets" in with_cos["encryption"].result
    protection_found = with_cos["protection"]
    assert protection_found.verdict is CAREFUL
    assert "immutable (COMPLIANCE): every object is kept for 90 days" in protection_found.result
    server.settings = {}
    assert "protection" not in found(server, "cos://bucket/run")
