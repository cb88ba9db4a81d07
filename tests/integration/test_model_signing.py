"""OpenSSF's own tool verifies what we sign, also with a key in a token of SoftHSM2; and finds what was changed."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from needs import needs
from support.signing import keys

import ckpt
from ckpt.provenance.keys import open_public_key, pem_of

pytestmark = needs("model-signing", "softhsm2-util")

_PIN = "1234"


@pytest.fixture(scope="module")
def tool(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tool, as `tests/integration/model_signing.txt` pins it."""
    folder = tmp_path_factory.mktemp("model_signing") / "environment"
    venv.create(folder, symlinks=True)
    requirements = Path(__file__).with_name("model_signing.txt")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin/python"),
        "install",
        "--quiet",
        "-r",
        str(requirements),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode:
        pytest.skip(f"model_signing cannot be installed: {done.stderr.strip()[-200:]}")
    return folder / "bin/model_signing"


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    weights = {f"layers.{number}.weight": torch.randn(300, 300) for number in range(4)}
    ckpt.save(weights, tmp_path / "run/step-1", no_dist=True, format="safetensors", block_digests="sha256")
    ckpt.convert(tmp_path / "run/step-1", tmp_path / "exported", to="safetensors", no_dist=True)
    (tmp_path / "exported/config.json").write_text("{}")
    return tmp_path / "exported"


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URI of a key in a token."""
    pytest.importorskip("PyKCS11", reason="PyKCS11 is not installed (ckpt-storage[pkcs11])")
    (tmp_path / "tokens").mkdir()
    (tmp_path / "softhsm2.conf").write_text(f"directories.tokendir = {tmp_path}/tokens\nlog.level = ERROR\n")
    monkeypatch.setenv("SOFTHSM2_CONF", str(tmp_path / "softhsm2.conf"))
    key, _ = keys(tmp_path, "token")
    for words in (
        ["--init-token", "--free", "--label", "release", "--pin", _PIN, "--so-pin", _PIN],
        ["--import", str(key), "--token", "release", "--label", "models", "--id", "01", "--pin", _PIN],
    ):
        subprocess.run(["softhsm2-util", *words], check=True, capture_output=True, timeout=60)
    return f"pkcs11:token=release;object=models;id=%01?module-name=softhsm2&pin-value={_PIN}"


def verify(tool: Path, folder: Path, public: Path) -> subprocess.CompletedProcess[str]:
    words = ["verify", "key", "--signature", folder / "model.sig", "--public_key", public, folder]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(tool), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environ)


def test_the_stock_tool_accepts_an_export_and_finds_what_was_changed(
    tool: Path, exported: Path, tmp_path: Path
) -> None:
    key, public = keys(tmp_path)
    ckpt.sign_export(exported, key)
    done = verify(tool, exported, public)
    assert (done.returncode, "Verification succeeded" in done.stdout) == (0, True), done.stderr
    _, stranger = keys(tmp_path, "stranger")
    assert verify(tool, exported, stranger).returncode != 0
    (shard,) = exported.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    done = verify(tool, exported, public)
    assert (done.returncode, "Hash mismatch" in done.stderr) == (1, True)


def test_keys_in_a_token_sign_checkpoints_and_exports(
    tool: Path, exported: Path, token: str, tmp_path: Path
) -> None:
    public = tmp_path / "token.pub.pem"
    assert pem_of(open_public_key(public)) == public.read_bytes()
    ckpt.sign(tmp_path / "run/step-1", token)
    assert ckpt.verify_signed(tmp_path / "run", public).ok
    ckpt.sign_export(exported, token)
    done = verify(tool, exported, public)
    assert (done.returncode, "Verification succeeded" in done.stdout) == (0, True), done.stderr
    for wrong, message in (
        (token.replace("release", "other"), "no token of that name"),
        (token.replace("models", "other"), "0 private keys of that name"),
        (token.replace(f"pin-value={_PIN}", "pin-value=9"), "cannot be used"),
        (token.partition("?")[0], "name the token's library"),
    ):
        with pytest.raises(ckpt.errors.ConfigurationError, match=message) as raised:
            ckpt.sign(tmp_path / "run/step-1", wrong)
        assert "pin-value" not in raised.value.message, "a PIN is a secret"
