"""What somebody puts beside, into or in the place of signed checkpoints, and what must not be taken for that."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import run
from support.rewriting import force_same_checksum, read_record, write_record
from support.signing import STEPS, digest_in, keys, signed_run, state

import ckpt
from ckpt.consistency import block_digests as digests
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, crc64nvme, crc_text
from ckpt.errors import ConfigurationError, FormatError, IntegrityError
from ckpt.provenance import check
from ckpt.provenance.check import SignedVerification
from ckpt.tools.findings import Verification

RUN = "0123456789abcdef"


def faults(result: SignedVerification) -> str:
    return "\n".join([*result.faults, *(fault for each in result.checkpoints for fault in each.faults)])


def save_signed(url: Path, key: Path, seed: int = 0, run: str | None = None, **options: object) -> str:
    ckpt.save(state(seed), url, no_dist=True, block_digests="sha256", **options)  # type: ignore[arg-type]
    return ckpt.sign(url, key, run=run).run


def replace(place: Path, other: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(other, place)


def forge(checkpoint: Path) -> None:
    """Change a block, and keep its checksum."""
    (data,) = checkpoint.rglob("*.distcp")
    forged = bytearray(data.read_bytes())
    force_same_checksum(memoryview(forged)[:BLOCK_SIZE_BYTES], 300_000)
    data.write_bytes(forged)


def test_a_checkpoint_at_the_root_hides_no_others(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    root, memory = tmp_path / "run", tmp_path / "seen.json"
    signed_run(root, key)
    assert ckpt.verify_signed(root, public, memory=memory).ok
    shutil.copytree(root / f"step-{STEPS[0]}", root, dirs_exist_ok=True)
    forge(root / f"step-{STEPS[1]}")
    found = faults(ckpt.verify_signed(root, public))
    assert "do not match their digest" in found
    assert f"another checkpoint here is signed as step {STEPS[0]} too: run" in found
    for step in STEPS:
        shutil.rmtree(root / f"step-{step}")
    assert "step 9 was seen here before" in faults(ckpt.verify_signed(root, public, memory=memory))


def test_a_memory_knows_what_stood_in_a_folder(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    place, old = tmp_path / "runs/latest", tmp_path / "old"
    for tags in ({}, {"step": "7"}):
        memory = tmp_path / f"seen{len(tags)}.json"
        save_signed(place, key, run=RUN, tags=tags)
        shutil.copytree(place, old)
        save_signed(place, key, 1, run=RUN, tags=tags and {"step": "9"})
        assert ckpt.verify_signed(place, public, memory=memory).ok
        replace(place, old)
        assert "an older one was put back" in faults(ckpt.verify_signed(place, public, memory=memory))
        shutil.rmtree(old)


def test_a_memory_is_of_one_run_and_of_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, public = keys(tmp_path)
    place, memory = tmp_path / "run/step-1", tmp_path / "seen.json"
    save_signed(place, key, run=RUN)
    other = tmp_path / "package.json"
    other.write_text('{"name": "of somebody"}')
    with pytest.raises(FormatError, match=r"is not a memory .* name another file"):
        ckpt.verify_signed(place, public, memory=other)
    assert other.read_text() == '{"name": "of somebody"}'
    with pytest.raises(ConfigurationError, match="no folder that you may write to"):
        ckpt.verify_signed(place, public, memory=tmp_path / "no/seen.json")
    assert ckpt.verify_signed(place, public, memory=memory).ok
    with pytest.raises(ConfigurationError, match=f"remembers the run {RUN}, not ffff"):
        ckpt.verify_signed(place, public, memory=memory, run="f" * 16)
    # One that takes long does not forget what another has seen meanwhile.
    verify = ckpt.verify

    def slowly(*arguments: object, **options: object) -> Verification:
        seen = json.loads(memory.read_bytes())
        seen["steps"]["9"] = seen["steps"]["1"]
        memory.write_text(json.dumps(seen))
        return verify(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(check, "verify", slowly)
    assert ckpt.verify_signed(place, public, memory=memory).ok
    assert set(json.loads(memory.read_bytes())["steps"]) == {"1", "9"}


def test_what_is_signed_right_is_not_reported(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    models = tmp_path / "models"
    first = save_signed(models / "a", key)
    assert save_signed(models / "b", key, 1) == first, "also without steps they are of one run"
    assert ckpt.sign(models / "a", key).run == first
    assert ckpt.verify_signed(models, public).ok
    alone = save_signed(tmp_path / "alone/step-1", key)
    assert ckpt.sign(tmp_path / "alone/step-1", key).run == alone, "signed twice it is of the same run"
    save_signed(tmp_path / "epochs/epoch-1", key, tags={"step": "700"})
    assert ckpt.verify_signed(tmp_path / "epochs", public).ok, "the number in the name is not the step"
    # Without steps, what was swapped has other names.
    for source, target in (("a", "c"), ("b", "a"), ("c", "b")):
        (models / source).rename(models / target)
    found = faults(ckpt.verify_signed(models, public))
    assert found.count("another in its place") == 2
    assert ckpt.verify_signed(models / "a", public).ok


def rewrite(checkpoint: Path) -> None:
    """Change a byte of its data, and make all records fit but the digests of whole tensors, which no reader needs."""
    (data,) = checkpoint.rglob("*.distcp")
    forged = bytearray(data.read_bytes())
    forged[300_000] ^= 0x40
    data.write_bytes(forged)
    (path,) = (checkpoint / "rank-00000").glob("*.json")
    manifest, commit = read_record(path), read_record(checkpoint / "commit.json")
    (file,), size = manifest["files"], manifest["block_size_bytes"]
    blocks = [forged[start : start + size] for start in range(0, len(forged), size)]
    file["blocks"] = b64encode(b"".join(crc64nvme(block).to_bytes(8, "little") for block in blocks)).decode()
    file["digests"] = b64encode(b"".join(hashlib.sha256(block).digest() for block in blocks)).decode()
    write_record(path, manifest)
    raw, (ref,) = path.read_bytes(), commit["manifests"]
    ref |= {
        "size_bytes": len(raw),
        "crc64nvme": crc_text(crc64nvme(raw)),
        "digest": hashlib.sha256(raw).hexdigest(),
    }
    named = [bytes.fromhex(each["digest"]) for each in (commit["index"], ref)]
    commit["block_digests"]["root"] = digests.tree_root("sha256", named).hex()
    write_record(checkpoint / "commit.json", commit)


def test_a_base_is_signed_before_what_names_its_bytes(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    base, place = tmp_path / "run/step-1", tmp_path / "run/step-2"
    ckpt.save(state(0), base, no_dist=True, digests=True, block_digests="sha256")
    values = {**state(1), "model": state(0)["model"]}

    def save() -> None:
        ckpt.save(values, place, no_dist=True, base=base, block_digests="sha256")

    save()
    with pytest.raises(ConfigurationError, match=r"names bytes of ../step-1, which this key has not signed"):
        ckpt.sign(place, key)
    ckpt.sign(base, key)
    ckpt.sign(place, key)
    assert ckpt.verify_signed(tmp_path / "run", public).ok
    # The save finds by the records of its base that nothing has changed, and names forged bytes.
    shutil.copytree(base, tmp_path / "right")
    rewrite(base)
    assert ckpt.verify(base).ok
    save()
    with pytest.raises(ConfigurationError, match="which this key has not signed"):
        ckpt.sign(place, key)
    (commit,) = (tmp_path / "right").glob("commit.json")
    shutil.copy(commit, base)
    with pytest.raises(IntegrityError, match=r"names other bytes of ../step-1 than are signed there"):
        ckpt.sign(place, key)


def test_a_signature_that_is_a_link_is_a_fault(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    for number in (1, 2):
        save_signed(tmp_path / f"run/step-{number}", key)
    (signature,) = (tmp_path / "run/step-1").rglob("*.sig")
    signature.unlink()
    signature.symlink_to(key)
    result = ckpt.verify_signed(tmp_path / "run", public)
    assert [each.ok for each in result.checkpoints] == [False, True]
    assert "link that leads out of the checkpoint" in faults(result)


def test_digests_that_cannot_be_computed_are_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("blake3")
    key, public = keys(tmp_path)
    ckpt.save(state(0), tmp_path / "a", no_dist=True, block_digests="blake3")
    ckpt.sign(tmp_path / "a", key)

    def missing() -> None:
        raise ImportError

    monkeypatch.setattr(digests, "_blake3", missing)
    with pytest.raises(ConfigurationError, match="need the package blake3"):
        ckpt.verify_signed(tmp_path / "a", public)
    result = ckpt.verify(tmp_path / "a")
    assert (result.ok, result.block_digests, result.unchecked_digests) == (True, None, "blake3")
    shown = " ".join(run("verify", tmp_path / "a").out.split())
    assert (
        "(blake3) were not checked; that needs the package blake3: pip install './ckpt-storage[sign]'"
        in shown
    )
    assert ckpt.scrub(tmp_path).checkpoints[0].unchecked_digests == "blake3"
    shown = " ".join(run("scrub", tmp_path).out.split())
    assert "the digests of the blocks of 1 checkpoint (blake3) were not checked; that needs" in shown


def test_a_model_that_is_read_in_the_place_of_the_signed_one_is_found(tmp_path: Path) -> None:
    key, public = keys(tmp_path)
    place = tmp_path / "model"
    ckpt.save(state(0)["model"], place, no_dist=True, format="safetensors", block_digests="sha256")
    ckpt.sign(place, key)
    assert ckpt.verify_signed(place, public).ok
    (data,) = place.glob("model-*.safetensors")
    shutil.copy(data, place / "model.safetensors")
    assert "transformers reads it in the place of this model" in faults(ckpt.verify_signed(place, public))
    assert [each.key for each in ckpt.verify(place).warnings] == ["model.safetensors"]


def test_what_is_mended_or_kept_has_its_digest(tmp_path: Path) -> None:
    place, second = tmp_path / "run/step-1", tmp_path / "second"
    saved = ckpt.save(state(0), place, no_dist=True, block_digests="sha256")
    shutil.copytree(place, second / "step-1")

    def scrub() -> list[tuple[str, int]]:
        (checked,) = ckpt.scrub(place.parent, repair_from=second).checkpoints
        return [(each.state, each.blocks) for each in checked.mended]

    forge(place)
    assert scrub() == [("mended", 1)]
    assert ckpt.verify(place, expect=digest_in(saved)).ok
    forge(second / "step-1")
    (data,) = place.rglob("*.distcp")
    damaged = bytearray(data.read_bytes())
    damaged[100] ^= 1
    data.write_bytes(damaged)
    assert scrub() == [("not mended", 0)], "the second place is forged"
    # What an interrupted copy has left.
    damaged[100] ^= 1
    data.write_bytes(damaged)
    copied = tmp_path / "copied"
    ckpt.copy(place, copied)
    forge(copied)
    for path in (copied / "commit.json", copied / ".metadata", *copied.rglob("*.index")):
        path.unlink()
    done = ckpt.copy(place, copied, expect=digest_in(saved))
    assert (done.kept_files, done.sent_files) == (0, 1)
    assert ckpt.verify(copied).ok


def _fifo(folder: Path) -> None:
    os.mkfifo(folder / "fifo")


def _bytes_for_a_name(folder: Path) -> None:
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff")).touch()


@pytest.mark.parametrize(
    ("put", "message"), [(_fifo, "no regular file"), (_bytes_for_a_name, "has a name that is not UTF-8")]
)
def test_what_no_export_can_hold_is_refused(
    tmp_path: Path, put: Callable[[Path], None], message: str
) -> None:
    key, _ = keys(tmp_path)
    folder = tmp_path / "exported"
    folder.mkdir()
    (folder / "weights").write_text("w")
    put(folder)
    with pytest.raises(ConfigurationError, match=message):
        ckpt.sign_export(folder, key)


def test_an_export_is_signed_after_a_kill_and_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, _ = keys(tmp_path)
    folder = tmp_path / "exported"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub/weights").write_text("w")
    (folder / "model.sig.new").symlink_to(tmp_path / "elsewhere")  # left, or put there
    assert ckpt.sign_export(folder, key).files == 1
    assert sorted(os.listdir(folder)) == ["model.sig", "sub"]
    assert not (tmp_path / "elsewhere").exists()
    scandir = os.scandir

    def refusing(path: str) -> object:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    with pytest.raises(ConfigurationError, match="sub cannot be read: Permission denied"):
        ckpt.sign_export(folder, key)


def test_uris_of_tokens_are_told_from_files(tmp_path: Path) -> None:
    pytest.importorskip("PyKCS11")
    for uri, message in (("PKCS11:object=k?pin-value=1234", "library"), ("pkcs11:token=%ff", "not UTF-8")):
        with pytest.raises(ConfigurationError, match=message) as raised:
            ckpt.sign(tmp_path, uri)
        assert "1234" not in str(raised.value)
