"""The code in the documentation is right: every block compiles, every command exists, and whole pages run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from support.servers import IamServer
from support.snippets import PAGES, data, reader, run_page, snippets
from support.strict_s3 import StrictS3

import ckpt
from ckpt.backends.base import put_bytes
from ckpt.backends.registry import open_store
from ckpt.cli.app import app
from ckpt.state import training_state
from ckpt.trainer_integration.token_files import write_token_file

GUIDES = tuple(page for page in PAGES if page.startswith("docs/guides/") and not page.endswith("README.md"))
"""Every block of theirs runs: Python, the new lines of diffs, and commands."""

_WITH_COMMANDS = (*GUIDES, "docs/failures.md", "docs/start.md")

RUN = (
    *GUIDES,
    "README.md",
    "docs/README.md",
    "docs/cli.md",
    "docs/clusters.md",
    "docs/dataloader.md",
    "docs/failures.md",
    "docs/only-what-changed.md",
    "docs/servable.md",
    "docs/start.md",
    "docs/storage.md",
    "docs/trainer.md",
    "docs/trainers/dcp.md",
)

_QUICK = ("README.md", "docs/guides/from-torch-save.md")

NOT_RUN = {
    "docs/content.md": "the arguments of a call: tests/content runs the same",
    "docs/provenance.md": "a bucket: tests/provenance runs the same",
    "docs/local-first.md": "the disk of a node: tests/local_first runs the same",
    "docs/tables.md": "RPC between trainers and servers: tests/embeddings and examples/recommender run the same",
    "docs/trainers/huggingface.md": "transformers and accelerate: `make test-adapters` runs the same",
    "docs/trainers/torch_checkpointing.md": "the faults of another library",
}
"""Pages with Python that only compiles here, and why."""


def test_every_page_with_python_runs_or_says_why_not() -> None:
    pages = {snippet.page for snippet in snippets("python")}
    assert pages - {*RUN} == {*NOT_RUN}


def test_every_block_compiles() -> None:
    found = snippets("python")
    assert len(found) > 40
    for snippet in found:
        compile(snippet.text, str(snippet), "exec", dont_inherit=True)
    for snippet in snippets("json"):
        json.loads(snippet.text)
    for snippet in snippets("diff"):
        if snippet.page in GUIDES:
            compile(snippet.written(), str(snippet), "exec", dont_inherit=True)


def test_every_command_exists_with_these_arguments() -> None:
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    count = 0
    with group.make_context("ckpt", ["ls", "x"]) as context:
        for snippet in snippets("sh", "console", "diff"):
            for name, *arguments in snippet.commands():
                if name.startswith("-"):
                    continue
                command = group.get_command(context, name)
                assert command is not None, (str(snippet), name)
                with command.make_context(name, arguments, parent=context):
                    count += 1
    assert count > 60


@pytest.fixture
def elsewhere(
    server: StrictS3, iam: IamServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """A new folder, in which s3:// and cos:// lead to an embedded server, with the SDKs' own settings."""
    server.requires_checksums = False  # s3fs and the SDK of IBM send none
    credentials = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
    cos = {
        "IBM_API_KEY_ID": iam.api_key,
        "IBM_AUTH_ENDPOINT": iam.url,
        "COS_ENDPOINT_URL": server.endpoint_url,
    }
    for name, value in {
        "AWS_ENDPOINT_URL": server.endpoint_url, "AWS_DEFAULT_REGION": "us-east-1", **credentials, **cos,
        "IBM_SERVICE_INSTANCE_ID": "crn:v1:bluemix:public:cloud-object-storage:global:a/1:2::",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ckpt.uninstall()
    logging.getLogger("ckpt").handlers.clear()


@pytest.mark.parametrize(
    "page", [page if page in _QUICK else pytest.param(page, marks=pytest.mark.long) for page in RUN]
)
def test_a_page_runs_from_top_to_bottom(page: str, elsewhere: Path, iam: IamServer) -> None:
    mine = reader(elsewhere) | {"api_key": iam.api_key, "instance_crn": "crn:v1:x"}
    _leave_what_the_page_had_before(page, mine)
    commands = ("sh", "console") if page in _WITH_COMMANDS else ()
    diffs = ("diff",) if page in GUIDES else ()
    run_page(page, ("python", *diffs, *commands), mine)


def _upload_data(url: str) -> None:
    write_token_file("stored.bin", [[n + 1] * 5000 for n in range(8)])
    store = open_store(url)
    for name in ("web-00000.bin", "web-00001.bin"):
        put_bytes(store, name, Path("stored.bin").read_bytes())
        put_bytes(store, f"{name}.offsets.npy", Path("stored.bin.offsets.npy").read_bytes())


def _leave_what_the_page_had_before(page: str, mine: dict[str, Any]) -> None:
    """Put what earlier runs of the reader have left to where the page reads it."""
    state = mine["state_dict"]
    before = {
        "docs/cli.md": ["s3://bucket/run/step-1000"],
        "docs/trainers/dcp.md": ["s3://bucket/run/step-1000"],
    }
    for url in before.get(page, ()):
        ckpt.save({**state}, url)
    if page == "docs/dataloader.md":
        mine |= data(Path.cwd())
        _upload_data("s3://bucket/corpus")
        parts = {name: mine[name] for name in ("model", "optimizer")}
        ckpt.save({**parts, "loader": mine["positions"]}, f"{mine['run']}/step-1000")
    if page == "docs/trainer.md":
        parts = training_state(model=mine["model"], optimizer=mine["optimizer"])
        ckpt.save(dict(parts), "s3://bucket/old/step-7")
    if page == "docs/servable.md":
        ckpt.save(state["model"], "s3://bucket/models/Llama-3.1-8B", format="safetensors")
    if page in ("docs/guides/from-fsspec-writer.md", "docs/guides/from-s3torchconnector.md"):
        ckpt.convert("old/step-7", "s3://bucket/old/step-7", to="dcp")
        ckpt.convert("last.pt", "s3://bucket/files/last.pt")
    if page == "docs/guides/from-hugging-face.md":
        ckpt.save({**state}, "run/step-00000500")
