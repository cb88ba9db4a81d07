"""Who can write the storage, but has not the key, rewrites signed checkpoints: everything is found."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.rewriting import force_same_checksum, read_record, write_record
from support.signing import STEPS, keys, signed_run, state

import ckpt
from ckpt.consistency.block_digests import DIGEST_BYTES, digest_of
from ckpt.consistency.checksums import BLOCK_SIZE_BYTES, crc64nvme, crc_text
from ckpt.consistency.seal import seal_pickle, unseal_pickle
from ckpt.format.figures import BlockDigests

Mutation = Callable[["Attacker"], bool | None]


class Attacker:
    """Rewrites a run, and makes all checksums, digests and seals fit again: all but the signature.

    `signed` are the folders of the run as it was signed; `other` those of another run by the same key, `older` those
    of this one before its last checkpoint was saved again.
    """

    def __init__(self, root: Path, signed: Path, other: Path, older: Path, seed: int) -> None:
        self.root, self.signed, self.other, self.older = root, signed, other, older
        self.random = random.Random(seed)
        self.folder = root / f"step-{self.random.choice(STEPS)}"

    def files(self, pattern: str = "*") -> list[Path]:
        return sorted(path for path in self.folder.rglob(pattern) if path.is_file())

    @property
    def data(self) -> Path:
        return self.files("*.distcp")[0]

    def fix(self, *, digests: bool = True) -> None:
        """Make manifest and commit fit the data, the index and each other."""
        (manifest,) = (path for path in self.files("rank-*/*.json"))
        record, data = read_record(manifest), self.data.read_bytes()
        blocks = [data[at : at + BLOCK_SIZE_BYTES] for at in range(0, len(data), BLOCK_SIZE_BYTES)]
        crcs = b"".join(crc64nvme(block).to_bytes(8, "little") for block in blocks)
        record["files"][0] |= {"size_bytes": len(data), "blocks": base64.b64encode(crcs).decode()}
        if digests:
            packed = b"".join(digest_of("sha256", block) for block in blocks)
            record["files"][0]["digests"] = base64.b64encode(packed).decode()
        write_record(manifest, record)
        self.fix_commit(digests=digests)

    def fix_commit(self, *, digests: bool = True) -> None:
        path = self.folder / "commit.json"
        commit = read_record(path)
        for ref in (commit["index"], *commit["manifests"]):
            stored = (self.folder / ref["path"]).read_bytes()
            ref |= {"size_bytes": len(stored), "crc64nvme": crc_text(crc64nvme(stored))}
            if digests:
                ref["digest"] = digest_of("sha256", stored).hex()
        if digests:
            named = [commit["index"]["digest"], *(ref["digest"] for ref in commit["manifests"])]
            commit["block_digests"]["root"] = BlockDigests("sha256").root_of(named)
        write_record(path, commit)

    def replace(self, other: Path) -> None:
        shutil.rmtree(self.folder)
        shutil.copytree(other, self.folder)


def flip(attacker: Attacker) -> None:
    path = attacker.random.choice(attacker.files())
    data = bytearray(path.read_bytes())
    data[attacker.random.randrange(len(data))] ^= 1 << attacker.random.randrange(8)
    path.write_bytes(data)


def cut(attacker: Attacker) -> None:
    path = attacker.random.choice(attacker.files())
    data = path.read_bytes()
    path.write_bytes(data[: attacker.random.randrange(len(data))])


def remove_object(attacker: Attacker) -> None:
    attacker.random.choice([path for path in attacker.files() if path.name != "commit.json"]).unlink()


def poke(attacker: Attacker, data: bytearray) -> None:
    """Write a value into the middle of a tensor."""
    at = attacker.random.randrange(len(data) // 4, len(data) // 2)
    data[at] ^= 1 + attacker.random.randrange(255)


def changed_data(attacker: Attacker) -> None:
    data = bytearray(attacker.data.read_bytes())
    poke(attacker, data)
    attacker.data.write_bytes(data)
    attacker.fix(digests=attacker.random.random() < 0.7)


def same_checksum(attacker: Attacker) -> None:
    """Change a block so that its checksum stays: nothing else has to be touched."""
    data = bytearray(attacker.data.read_bytes())
    force_same_checksum(memoryview(data)[:BLOCK_SIZE_BYTES], attacker.random.randrange(200_000, 400_000))
    attacker.data.write_bytes(data)


def swapped_blocks(attacker: Attacker) -> None:
    data = bytearray(attacker.data.read_bytes())
    a, b = slice(0, BLOCK_SIZE_BYTES), slice(BLOCK_SIZE_BYTES, 2 * BLOCK_SIZE_BYTES)
    data[a], data[b] = data[b], data[a]
    attacker.data.write_bytes(data)
    attacker.fix()


def swapped_digests(attacker: Attacker) -> None:
    (manifest,) = (path for path in attacker.files("rank-*/*.json"))
    record = read_record(manifest)
    packed = base64.b64decode(record["files"][0]["digests"])
    turned = packed[DIGEST_BYTES:] + packed[:DIGEST_BYTES]
    record["files"][0]["digests"] = base64.b64encode(turned).decode()
    write_record(manifest, record)
    attacker.fix_commit(digests=attacker.random.random() < 0.5)


def swapped_items(attacker: Attacker) -> None:
    """Give two tensors each other's bytes, in the manifest and in the index."""
    (manifest,) = (path for path in attacker.files("rank-*/*.json"))
    record = read_record(manifest)
    a, b = (n for n, item in enumerate(record["items"]) if item[0] in ("model.a", "model.b"))
    items = record["items"]
    items[a][0], items[b][0] = items[b][0], items[a][0]
    write_record(manifest, record)
    (index,) = attacker.files("*.index")
    data = index.read_bytes()
    data = (
        data.replace(b"model.a", b"model.?").replace(b"model.b", b"model.a").replace(b"model.?", b"model.b")
    )
    index.write_bytes(data)
    attacker.fix_commit()


def other_data_file(attacker: Attacker) -> None:
    others = [step for step in STEPS if attacker.root / f"step-{step}" != attacker.folder]
    other = attacker.root / f"step-{attacker.random.choice(others)}"
    (data,) = other.rglob("*.distcp")
    shutil.copy(data, attacker.data)
    attacker.fix(digests=attacker.random.random() < 0.7)


def rewritten_commit(attacker: Attacker) -> None:
    path = attacker.folder / "commit.json"
    commit = read_record(path)
    kind = attacker.random.choice(["tags", "created_at", "run", "no digests", "stock", "algorithm"])
    if kind == "tags":
        commit["tags"]["step"] = str(attacker.random.randrange(100, 200))
    elif kind == "created_at":
        commit["created_at"] = "2020-01-01T00:00:00+00:00"
    elif kind == "run":
        commit["run"] = "0123456789abcdef"
    elif kind == "no digests":
        del commit["block_digests"]
    elif kind == "stock":
        commit["stock_metadata"] = False
        (attacker.folder / ".metadata").unlink()
    else:
        commit["block_digests"]["algorithm"] = "blake3"
    write_record(path, commit)


def resealed_stock_metadata(attacker: Attacker) -> None:
    """Give stock PyTorch other tensors: its pickle is not named by the commit."""
    path = attacker.folder / ".metadata"
    pickled = bytes(unseal_pickle(path.read_bytes(), url="", key=""))
    path.write_bytes(seal_pickle(pickled.replace(b"model.a", b"model.c")))


def unsealed_stock_metadata(attacker: Attacker) -> None:
    path = attacker.folder / ".metadata"
    path.write_bytes(bytes(unseal_pickle(path.read_bytes(), url="", key="")).replace(b"model.a", b"model.c"))


def another_step(attacker: Attacker) -> None:
    others = [step for step in STEPS if attacker.root / f"step-{step}" != attacker.folder]
    attacker.replace(attacker.signed / f"step-{attacker.random.choice(others)}")


def another_run(attacker: Attacker) -> None:
    attacker.replace(attacker.other / attacker.folder.name)


def older_save(attacker: Attacker) -> None:
    """Put back what this step was before it was saved and signed again: its signature is right."""
    attacker.folder = attacker.root / f"step-{STEPS[-1]}"
    attacker.replace(attacker.older / attacker.folder.name)


def newest_removed(attacker: Attacker) -> None:
    count = attacker.random.choice([1, 2])
    for step in STEPS[-count:]:
        shutil.rmtree(attacker.root / f"step-{step}")


def inserted_unsigned(attacker: Attacker) -> None:
    ckpt.save(state(99), attacker.root / "step-11", no_dist=True, tags={"step": "11"}, block_digests="sha256")


def inserted_from_other_run(attacker: Attacker) -> None:
    """A checkpoint of another run, for a step that this one has not: its signature is right, its place too."""
    folder = attacker.root / f"step-{STEPS[0]}"
    shutil.rmtree(folder)
    shutil.copytree(attacker.other / f"step-{STEPS[0]}", folder)


def signature(attacker: Attacker) -> None:
    (path,) = attacker.files("*.sig")
    bundle = json.loads(path.read_bytes())
    envelope = bundle["dsseEnvelope"]
    payload = json.loads(base64.b64decode(envelope["payload"]))
    kind = attacker.random.choice(["digest", "step", "before", "none", "two", "other", "own key", "type"])
    if kind == "digest":
        changed_data(attacker)
        raw = (attacker.folder / "commit.json").read_bytes()
        payload["subject"][0]["digest"]["sha256"] = digest_of("sha256", raw).hex()
    elif kind == "step":
        payload["predicate"]["step"] += 1
    elif kind == "before":
        payload["predicate"]["before"] = {"step": 1, "digest": "sha256:" + "0" * 64}
    elif kind == "type":
        payload["predicateType"] = "https://model_signing/signature/v1.0"
    if kind == "none":
        envelope["signatures"] = []
    elif kind == "two":
        envelope["signatures"] *= 2
    elif kind == "other":
        (other,) = (attacker.other / attacker.folder.name).rglob("*.sig")
        bundle = json.loads(other.read_bytes())
        envelope = {}
    if envelope:
        envelope["payload"] = base64.b64encode(json.dumps(payload).encode()).decode()
    path.write_bytes(json.dumps(bundle).encode())
    if kind == "own key":
        private, _ = keys(attacker.root.parent, "attacker")
        ckpt.sign(attacker.folder, private)


MUTATIONS: tuple[Mutation, ...] = (
    same_checksum, changed_data, rewritten_commit, another_step, another_run, older_save, newest_removed, signature,
    flip, cut, remove_object, swapped_blocks, swapped_digests, swapped_items, other_data_file, flip,
    resealed_stock_metadata, unsealed_stock_metadata, inserted_unsigned, inserted_from_other_run,
)  # fmt: skip
_QUICK = 8


@pytest.mark.parametrize("count", [_QUICK, pytest.param(300, marks=pytest.mark.long)])
def test_every_mutation_of_a_signed_run_is_found(tmp_path: Path, count: int) -> None:
    key, public = keys(tmp_path)
    root, signed, other, older = (tmp_path / name for name in ("run", "signed", "other", "older"))
    signed_run(root, key)
    shutil.copytree(root, older)
    newest = root / f"step-{STEPS[-1]}"
    ckpt.save(state(1000), newest, no_dist=True, tags={"step": str(STEPS[-1])}, block_digests="sha256")
    ckpt.sign(newest, key)
    signed_run(other, key, seed=50)
    shutil.copytree(root, signed)
    memory = tmp_path / "seen.json"
    assert ckpt.verify_signed(root, public, memory=memory).ok
    seen = memory.read_bytes()
    found: Counter[str] = Counter()
    for seed in range(count):
        shutil.rmtree(root)
        shutil.copytree(signed, root)
        mutate = MUTATIONS[seed % len(MUTATIONS)]
        mutate(Attacker(root, signed, other, older, seed))
        result = ckpt.verify_signed(root, public, memory=memory)
        assert not result.ok, f"{mutate.__name__} with the seed {seed} was not found"
        assert memory.read_bytes() == seen, "what is wrong was remembered"
        found[mutate.__name__] += 1
    assert found.total() == count
    shutil.rmtree(root)
    shutil.copytree(signed, root)
    assert ckpt.verify_signed(root, public, memory=memory).ok
