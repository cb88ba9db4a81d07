"""Signatures: by which key, of which commit, in which place of a run; and what commands say of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from support.commands import file_names, run, run_json
from support.signing import STEPS, digest_in, keys, signed_run, state

import ckpt
from ckpt.errors import ConfigurationError, DigestMismatch, FormatError, NotFound
from ckpt.provenance.check import SignedVerification


def faults(result: SignedVerification) -> str:
    return "\n".join([*result.faults, *(fault for each in result.checkpoints for fault in each.faults)])


def test_signatures_are_a_chain_that_is_checked(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    root = tmp_path / "run"
    digests = signed_run(root, key)
    result = ckpt.verify_signed(root, public)
    assert (result.ok, [each.digest for each in result.checkpoints]) == (True, digests)
    befores = [each.statement and each.statement.predicate.before for each in result.checkpoints]
    assert befores[0] is None
    assert [each and (each.step, each.digest) for each in befores[1:]] == [
        *zip(STEPS, digests, strict=False)
    ][:2]
    (identity,) = {each.run for each in result.checkpoints}
    assert len(identity) == 16, "the commits name no run: who signed the first one drew an id"
    # Retention may remove old ones, and a copy of the bytes is signed as they are.
    shutil.rmtree(root / f"step-{STEPS[0]}")
    shutil.copytree(root / f"step-{STEPS[1]}", tmp_path / "best")
    assert ckpt.verify_signed(root, public).ok
    assert ckpt.verify_signed(tmp_path / "best", public).ok
    (single,) = ckpt.verify_signed(root / f"step-{STEPS[1]}", public, quick=True, not_before=7).checkpoints
    assert (single.ok, single.step, single.checked_bytes) == (True, 7, 0)
    # Another step, another run, and one that is not new enough.
    shutil.copytree(root / f"step-{STEPS[1]}", root / "step-11")
    assert "signed as step 7, and stands in the folder of step 11" in faults(ckpt.verify_signed(root, public))
    shutil.rmtree(root / "step-11")
    assert "it is of the run" in faults(ckpt.verify_signed(root, public, run="0123456789abcdef"))
    assert "the newest is of step 9, before step 10" in faults(
        ckpt.verify_signed(root, public, not_before=10)
    )
    _, stranger = keys(tmp_path, "stranger")
    assert "not signed by this key" in faults(ckpt.verify_signed(root, stranger))
    with pytest.raises(NotFound):
        ckpt.verify_signed(tmp_path / "nothing", public)


def test_what_was_seen_is_remembered(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    root, memory = tmp_path / "run", tmp_path / "seen.json"
    signed_run(root, key)
    newest = root / f"step-{STEPS[-1]}"
    shutil.copytree(newest, tmp_path / "older")
    assert ckpt.verify_signed(root, public, memory=memory).ok
    ckpt.save(state(3), newest, no_dist=True, tags={"step": "9"}, block_digests="sha256")
    assert "not signed" in faults(ckpt.verify_signed(root, public, memory=memory))
    ckpt.sign(newest, key)
    assert ckpt.verify_signed(root, public, memory=memory).ok, "saved and signed again, later"
    shutil.rmtree(newest)
    shutil.copytree(tmp_path / "older", newest)
    assert ckpt.verify_signed(root, public).ok, "only who remembers can tell"
    assert "an older one was put back" in faults(ckpt.verify_signed(root, public, memory=memory))
    shutil.rmtree(newest)
    assert "step 9 was seen here before" in faults(ckpt.verify_signed(root, public, memory=memory))
    memory.write_text("{}x")
    with pytest.raises(FormatError, match="not a memory"):
        ckpt.verify_signed(root, public, memory=memory)


def test_only_what_can_be_vouched_for_is_signed(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    ckpt.save(state(0), tmp_path / "a", no_dist=True)
    with pytest.raises(ConfigurationError, match="no digests of its blocks"):
        ckpt.sign(tmp_path / "a", key)
    saved = ckpt.save(state(0), tmp_path / "a", no_dist=True, block_digests="sha256")
    with pytest.raises(DigestMismatch):
        ckpt.sign(tmp_path / "a", key, expect="sha256:" + "0" * 64)
    curve, encoding = ec.generate_private_key(ec.SECP384R1()), serialization.Encoding.PEM
    form, locked = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    other = tmp_path / "other.pem"
    other.write_bytes(curve.private_bytes(encoding, form, locked))
    with pytest.raises(ConfigurationError, match="private key is encrypted; it is that in CKPT_KEY_PASSWORD"):
        ckpt.sign(tmp_path / "a", other)
    signature = ckpt.sign(tmp_path / "a", other, password="secret", run="0123456789abcdef")
    assert (signature.digest, signature.run, signature.step) == (
        digest_in(saved), "0123456789abcdef", None,
    )  # fmt: skip
    edwards = ed25519.Ed25519PrivateKey.generate()
    other.write_bytes(edwards.private_bytes(encoding, form, serialization.NoEncryption()))
    for wrong, message in ((other, "no key of an elliptic curve"), (public, "not a private key"), (tmp_path / "no", "cannot be read")):  # fmt: skip
        with pytest.raises(ConfigurationError, match=message):
            ckpt.sign(tmp_path / "a", wrong)
    with pytest.raises(ConfigurationError, match="is a private key; to check signatures give the public one"):
        ckpt.verify_signed(tmp_path / "a", key)


def test_signatures_go_with_their_checkpoint(tmp_path: Path) -> None:
    key, _ = keys(tmp_path)
    place = tmp_path / "run/step-1"

    def save_and_sign() -> str:
        ckpt.save(state(0), place, no_dist=True, block_digests="sha256")
        return ckpt.sign(place, key).key

    first = save_and_sign()
    assert (place / first).exists()
    assert ckpt.verify(place).strays == []
    second = save_and_sign()
    assert not (place / first).exists(), "that of the checkpoint that was replaced"
    (place / first).write_bytes(b"{}")  # left by an interrupted save
    garbage = ckpt.collect_garbage(tmp_path / "run", grace_s=-1)
    assert [item.key for item in garbage.items] == [first]
    assert (place / second).exists()
    ckpt.remove(place)
    assert not file_names(tmp_path / "run")


def test_commands_sign_and_verify(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    place = tmp_path / "run/step-3"
    saved = ckpt.save(state(0), place, no_dist=True, block_digests="sha256")
    digest = digest_in(saved)
    told = run_json("sign", place, "--key", key, "--expect", digest)
    assert (told["digest"], told["step"], told["before"]) == (digest, 3, None)
    done = run("verify", tmp_path / "run", "--signed", "--key", public, "--memory", tmp_path / "seen.json")
    assert (done.code, "ok: 1 checkpoint" in done.out, digest in done.out) == (0, True, True)
    found = run_json("verify", place, "--signed", "--key", public, "--quick", "--not-before", 4, code=1)
    assert (found["ok"], found["checkpoints"][0]["ok"], len(found["faults"])) == (False, True, 1)
    (place / told["key"]).unlink()
    done = run("verify", tmp_path / "run", "--signed", "--key", public)
    assert (done.code, "it is not signed; sign it with `ckpt sign`" in " ".join(done.out.split())) == (
        1,
        True,
    )
    for words in (
        ["--signed"],
        ["--key", public],
        ["--memory", "x"],
        ["--signed", "--key", public, "--expect", digest],
        ["--signed", "--key", public, "--seed", 5],
    ):
        assert run("verify", place, *words).code == 2
    assert run("sign", place, "--key", key, "--export", "--expect", digest).code == 2


def test_exports_are_signed_as_model_signing_reads_them(tmp_path: Path) -> None:
    """That it accepts them is tested with the tool itself (tests/integration/test_model_signing.py)."""
    key, _ = keys(tmp_path)
    folder = tmp_path / "exported"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "sub/a.txt", ".gitignore"):
        (folder / name).write_text(name)
    told = run_json("sign", folder, "--key", key, "--export")
    assert told["files"] == 2
    bundle = json.loads((folder / "model.sig").read_bytes())
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert ckpt.sign_export(folder, key).digest == told["digest"], "its own signature is not signed"
    (folder / "link").symlink_to("b.txt")
    with pytest.raises(ConfigurationError, match="is a link"):
        ckpt.sign_export(folder, key)
    with pytest.raises(ConfigurationError, match="no folder of this machine"):
        ckpt.sign_export("s3://bucket/exported", key)
