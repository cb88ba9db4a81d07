"""A checkpoint is named by its digest: anything else is refused, and with block digests every byte counts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from support.commands import run, run_json
from support.ranks import run_ranks
from support.rewriting import force_same_checksum
from support.signing import digest_in, state

import ckpt
from ckpt.backends.posix import PosixStore
from ckpt.consistency.block_digests import FileBlockDigests, block_digests, digest_of, tree_root
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES
from ckpt.errors import ConfigurationError, DigestMismatch, FormatError, IntegrityError, LoadFailed
from ckpt.format.records import FORMAT_VERSION, read_commit


def save(url: Path, seed: int = 0, **options: Any) -> str:
    saved = ckpt.save(state(seed), url, no_dist=True, **options)
    return digest_in(saved)


def load(url: Path, **options: Any) -> dict[str, Any]:
    loaded = copy.deepcopy(state(77))
    ckpt.load(loaded, url, no_dist=True, **options)
    return loaded


def same(loaded: dict[str, Any], seed: int) -> bool:
    return all(torch.equal(loaded["model"][name], value) for name, value in state(seed)["model"].items())


def test_only_the_expected_checkpoint_is_read(tmp_path: Path) -> None:
    first = save(tmp_path / "a", block_digests="sha256")
    other = save(tmp_path / "b", 1)  # without digests of blocks it has a digest too
    assert ckpt.inspect(tmp_path / "a").digest == ckpt.verify(tmp_path / "a").digest == first != other
    assert same(load(tmp_path / "a", expect=first), 0)
    assert same(load(tmp_path / "b", expect=other), 1)
    with pytest.raises(DigestMismatch, match=f"this is {first}, not {other}") as raised:
        load(tmp_path / "a", expect=other)
    error = pickle.loads(pickle.dumps(raised.value))
    assert (error.expected, error.found, error.key) == (other, first, "commit.json")
    for refused in (
        lambda: ckpt.inspect(tmp_path / "a", expect=other),
        lambda: ckpt.copy(tmp_path / "a", tmp_path / "c", expect=other),
        lambda: ckpt.convert(tmp_path / "a", tmp_path / "c", expect=other, no_dist=True),
    ):
        with pytest.raises(DigestMismatch):
            refused()
        assert not (tmp_path / "c").exists()
    assert not ckpt.verify(tmp_path / "a", expect=other).ok
    assert ckpt.verify(tmp_path / "a", expect=first).block_digests == "sha256"
    with pytest.raises(ConfigurationError, match="expect must be the digest"):
        load(tmp_path / "a", expect=first.upper())
    with pytest.raises(ConfigurationError, match="verify=False"):
        load(tmp_path / "a", expect=first, verify=False)
    torch.save({"model": {}}, tmp_path / "file.pt")
    (tmp_path / "a/commit.json").unlink()
    with pytest.raises((DigestMismatch, LoadFailed, ckpt.errors.NotCommitted)):
        load(tmp_path / "a", expect=first)


@pytest.mark.parametrize("form", ["ckpt", "safetensors"])
def test_what_has_the_same_checksum_is_found_by_its_digest(
    tmp_path: Path, form: Literal["ckpt", "safetensors"]
) -> None:
    values = state(0)["model"]
    saved = ckpt.save(values, tmp_path / "a", no_dist=True, format=form, block_digests="sha256")
    digest = digest_in(saved)
    assert ckpt.verify(tmp_path / "a", expect=digest).ok
    (data,) = [*(tmp_path / "a").rglob("*.distcp"), *(tmp_path / "a").glob("*.safetensors")]
    forged = bytearray(data.read_bytes())
    force_same_checksum(memoryview(forged)[:BLOCK_SIZE_BYTES], 300_000)
    data.write_bytes(forged)
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    ckpt.load(loaded, tmp_path / "a", no_dist=True)
    assert not all(torch.equal(loaded[name], values[name]) for name in values), "checksums find it"
    with pytest.raises(IntegrityError, match="do not match their digest") as raised:
        ckpt.load(loaded, tmp_path / "a", no_dist=True, expect=digest)
    assert (raised.value.start, raised.value.stop) == (0, BLOCK_SIZE_BYTES)
    (damage,) = ckpt.verify(tmp_path / "a").damages
    assert (damage.kind, damage.start, damage.stop) == ("checksum", 0, BLOCK_SIZE_BYTES)
    with pytest.raises(IntegrityError, match="do not match their digest"):
        ckpt.copy(tmp_path / "a", tmp_path / "c", expect=digest)


def test_copies_and_references_have_digests_too(tmp_path: Path) -> None:
    run_folder = tmp_path / "run"
    save(run_folder / "step-1", digests=True)
    with pytest.raises(ConfigurationError, match="save everything anew"):
        save(run_folder / "step-2", 1, base=run_folder / "step-1", block_digests="sha256")
    save(run_folder / "step-1", digests=True, block_digests="sha256")
    values = state(1)
    values["model"] = state(0)["model"]  # more than half of the base
    ckpt.save(values, run_folder / "step-2", no_dist=True, base=run_folder / "step-1", block_digests="sha256")
    ckpt.copy(run_folder / "step-2", tmp_path / "alone", materialise=True)
    for url in (run_folder / "step-2", tmp_path / "alone"):
        result = ckpt.verify(url, expect=ckpt.inspect(url).digest)
        assert (result.ok, result.block_digests) == (True, "sha256")
        loaded = load(url, expect=ckpt.inspect(url).digest)
        assert torch.equal(loaded["model"]["a"], values["model"]["a"])
    commit = read_commit(PosixStore(str(run_folder / "step-2"), {}))
    assert commit is not None
    assert {ref.owner for ref in commit.record.manifests} == {"", "step-1"}
    # Readers of the versions before ignore what is new.
    assert commit.record.version == 4
    save(tmp_path / "plain", block_digests="sha256")
    plain = read_commit(PosixStore(str(tmp_path / "plain"), {}))
    assert plain is not None
    assert plain.record.version == FORMAT_VERSION == 2


def test_a_record_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    from support.rewriting import read_record, write_record

    save(tmp_path / "a", block_digests="sha256")
    commit = tmp_path / "a/commit.json"
    record = read_record(commit)
    for change, error in (
        ({"block_digests": {"algorithm": "sha256", "root": "0" * 64}}, IntegrityError),
        ({"manifests": [{**record["manifests"][0], "digest": "xyz"}]}, FormatError),
        ({"block_digests": {"algorithm": "md5", "root": "0" * 64}}, ConfigurationError),
    ):
        write_record(commit, {**record, **change})
        digest = ckpt.inspect(tmp_path / "a").digest
        with pytest.raises(error):
            load(tmp_path / "a", expect=digest)
        assert same(load(tmp_path / "a"), 0), "who does not ask is not kept from loading"
    write_record(commit, {**record, "block_digests": {"algorithm": "md5", "root": "0" * 64}})
    assert (ckpt.verify(tmp_path / "a").ok, ckpt.verify(tmp_path / "a").block_digests) == (True, None)


def test_the_tree_has_the_shape_of_rfc_6962() -> None:
    def plain(leaves: list[bytes]) -> bytes:
        if len(leaves) == 1:
            return digest_of("sha256", b"\0" + leaves[0])
        split = 1 << (len(leaves) - 1).bit_length() - 1
        return digest_of("sha256", b"\1" + plain(leaves[:split]) + plain(leaves[split:]))

    leaves = [digest_of("sha256", bytes([number])) for number in range(40)]
    for count in range(1, 40):
        assert tree_root("sha256", leaves[:count]) == plain(leaves[:count])
    # Of the test vectors of Certificate Transparency: the empty tree.
    assert tree_root("sha256", []).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_pieces_in_any_order_have_the_digests_of_whole_blocks(algorithm: str) -> None:
    if algorithm == "blake3":
        pytest.importorskip("blake3")
    data = memoryview(bytes(range(256)) * 10)
    digests = FileBlockDigests(algorithm, data.nbytes, 1000)
    for start, stop in ((1000, 1500), (0, 1000), (1500, 2000), (1000, 1200), (1200, 2000), (2000, 2560)):
        digests.see(start, data[start:stop])
    whole = [digest_of(algorithm, data[at : at + 1000]) for at in (0, 1000, 2000)]
    assert digests.packed() == b"".join(whole)
    assert block_digests(algorithm, [data[:1700], data[1700:1701], data[1701:]], 1000) == whole
    with pytest.raises(ConfigurationError, match="'blake3' or 'sha256', not 'md5'"):
        FileBlockDigests("md5", 0, 1000)


def _on_each_rank(rank: int, url: str) -> tuple[str, str]:
    values = {"shared": torch.arange(300_000.0), f"own.{rank}": torch.full((200_000,), float(rank))}
    saved = ckpt.save(values, url, block_digests="sha256")
    digest = digest_in(saved)
    loaded = {name: torch.zeros_like(value) for name, value in values.items()}
    ckpt.load(loaded, url, expect=digest)
    assert all(torch.equal(loaded[name], values[name]) for name in values)
    try:
        ckpt.load(loaded, url, expect="sha256:" + "0" * 64)
    except DigestMismatch as error:
        return digest, error.found
    return digest, ""


def test_ranks_save_with_digests_and_expect_them(tmp_path: Path) -> None:
    answers = run_ranks(2, _on_each_rank, str(tmp_path / "a"))
    digest = ckpt.inspect(tmp_path / "a").digest
    assert answers == [(digest, digest)] * 2
    assert ckpt.verify(tmp_path / "a", expect=digest).block_digests == "sha256"


def test_managers_save_with_digests_and_restore_the_expected(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    with ckpt.CheckpointManager(
        tmp_path, save=1, async_mode="off", block_digests="sha256", preflight=False
    ) as manager:
        for step in (1, 2):
            manager.step(step, model=model)
        digests = {step: ckpt.inspect(tmp_path / f"step-{step:08}").digest for step in (1, 2)}
        restored = manager.restore(model=model, step=1, expect=digests[1])
        assert restored is not None
        assert restored.step == 1
        with pytest.raises(DigestMismatch):
            manager.restore(model=model, step=2, expect=digests[1])
        with pytest.raises(DigestMismatch):  # and does not go back to an older one
            manager.restore(model=model, expect=digests[1])
        assert manager.restore(model=model, expect=digests[2]) is not None
    assert ckpt.verify(tmp_path / "step-00000002").block_digests == "sha256"


def test_commands_tell_and_expect_digests(tmp_path: Path) -> None:
    digest = save(tmp_path / "a", block_digests="sha256")
    assert run_json("inspect", tmp_path / "a")["digest"] == digest
    assert digest in run("inspect", tmp_path / "a", "--expect", digest).out
    other = "sha256:" + "0" * 64
    for words in (["inspect", tmp_path / "a"], ["cp", tmp_path / "a", tmp_path / "c"], ["verify", tmp_path / "a"],
                  ["convert", tmp_path / "a", tmp_path / "c"]):  # fmt: skip
        done = run(*words, "--expect", other)
        assert (done.code, "another checkpoint than the one expected" in done.out + done.err) == (1, True), (
            words
        )
