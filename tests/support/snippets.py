"""The code in the documentation: find it, and run it as a reader would, page by page, from top to bottom."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from markdown_it import MarkdownIt
from safetensors.torch import load_file, save_file

import ckpt
from ckpt.trainer_integration import keeping, saving
from ckpt.trainer_integration.dataset import ShardedDataset
from ckpt.trainer_integration.token_files import TokenFiles, write_token_file
from support.commands import run
from support.rooms import ROOT

PAGES = tuple(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
)


@dataclass(frozen=True)
class Snippet:
    """A block of code on a page; `line` is where it begins."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    def written(self) -> str:
        """Return what a reader ends up with: of a diff the new lines, without those that stand for more."""
        if self.language != "diff":
            return self.text
        kept = [line[1:] for line in self.text.splitlines() if line[:1] in ("+", " ", "")]
        return "\n".join(line for line in kept if line.strip() != "...") + "\n"

    def commands(self) -> Iterator[list[str]]:
        """Yield the arguments of each `ckpt` command; what a line goes on with after it does not count."""
        for line in self.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True) if "ckpt " in line else []
            if "ckpt" in words and words[0] in ("ckpt", "torchrun"):
                arguments = words[words.index("ckpt") + 1 :]
                stops = [index for index, word in enumerate(arguments) if word in ("|", "&&", ">", "#")]
                yield arguments[: min(stops, default=len(arguments))]


def snippets(*languages: str) -> list[Snippet]:
    """List the blocks in these languages on all pages."""
    found = []
    for page in PAGES:
        for token in MarkdownIt().parse((ROOT / page).read_text()):
            if token.type == "fence" and token.map is not None and token.info.split()[:1]:
                found.append(Snippet(page, token.map[0] + 2, token.info.split()[0], token.content))
    return [each for each in found if each.language in languages]


class Over(Exception):
    """Raised by what a snippet calls in a loop that has no end."""


def reader(folder: Path) -> dict[str, Any]:
    """Return what is the reader's own on every page: a model that trains, and checkpoints of other programs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step() -> None:
        model(torch.randn(2, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def over(*_: Any) -> None:
        raise Over

    train_step()
    loader = SimpleNamespace(state_dict=lambda: {"at": 7}, load_state_dict=lambda state: None)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    mine = {
        "ckpt": ckpt, "dcp": dcp, "torch": torch, "keeping": keeping, "saving": saving, "load_file": load_file,
        "model": model, "module": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader,
        "train_step": train_step, "evaluate": over, "steps": 3, "step": 1, "root": str(folder / "root"),
        "state_dict": {"model": model.state_dict()}, "state": {"model": model.state_dict()},
        "CheckpointManager": ckpt.CheckpointManager, "folder": str(folder / "exported-by-ranks"), "rank": 1,
        "__name__": "snippet",
    }  # fmt: skip
    _leave_checkpoints_of_others(folder, model, optimizer)
    return mine


def data(folder: Path) -> dict[str, Any]:
    """Return what is the reader's own on the page of the data loader: two files of tokens, and a step."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    documents = [np.arange(1, 9000, dtype=np.uint16) for _ in range(2000)]
    paths = [folder / f"{name}.bin" for name in ("web", "code")]
    for path in paths:
        write_token_file(path, documents)
    web, code = (TokenFiles([path]) for path in paths)
    dataset = ShardedDataset(TokenFiles(paths), sequence_length=4097, eos_token=0, seed=0)

    def over(*_: Any) -> None:
        raise Over

    return {
        "paths": paths, "web": web, "code": code, "run": "run", "url": "run/step-1000", "train_step": over,
        "positions": dataset.positions, "StatefulDataLoader": StatefulDataLoader,
    }  # fmt: skip


def _leave_checkpoints_of_others(folder: Path, model: Any, optimizer: Any) -> None:
    parts = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 500}
    torch.save(parts, folder / "last.pt")
    lightning = {
        "state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()], "epoch": 3,
        "global_step": 500, "pytorch-lightning_version": "2.6.6", "hyper_parameters": {"lr": 1e-3},
    }  # fmt: skip
    torch.save(lightning, folder / "last.ckpt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "old" / "step-7")
    for name in ("pretrained", "from-jax"):
        (folder / name).mkdir()
        save_file(model.state_dict(), folder / name / "model.safetensors")
    (folder / "pretrained" / "config.json").write_text("{}")


def run_page(page: str, languages: tuple[str, ...], mine: dict[str, Any]) -> None:
    """Run all blocks of a page, with what is the reader's own."""
    blocks = [snippet for snippet in snippets(*languages) if snippet.page == page]
    assert blocks
    for snippet in blocks:
        if snippet.language in ("python", "diff"):
            code = compile(snippet.written(), str(snippet), "exec", dont_inherit=True)
            try:
                exec(code, mine)  # noqa: S102
            except Over:
                continue
        else:
            for arguments in snippet.commands():
                ran = run(*arguments)
                assert ran.code in (0, 1 if arguments[0] == "diff" else 0), (str(snippet), arguments, ran.err)


def printed_texts(source: str) -> Iterator[str]:
    """Yield the clauses of the texts that a page quotes as printed: what `<...>` stands for differs."""
    for line in source.splitlines():
        clauses = (clause.strip(" :;.,") for clause in re.split(r"<[^>]*>|[;:,] ", line))
        yield from (clause for clause in clauses if len(clause) > 3)
