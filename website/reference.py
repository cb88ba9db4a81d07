"""Say which public names the API reference describes, and on which page: the table that a test enforces.

mkdocstrings reads signatures and docstrings from the source; nothing is imported for it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_T = "ckpt.trainer_integration"

PUBLIC_MODULES = (
    "ckpt",
    "ckpt.errors",
    "ckpt.options",
    "ckpt.ops",
    "ckpt.state",
    "ckpt.embeddings",
    "ckpt.testing",
    "ckpt.backends.base",
    "ckpt.backends.registry",
    f"{_T}.keeping",
    f"{_T}.saving",
    f"{_T}.events",
    f"{_T}.dataloader",
    f"{_T}.dataset",
    f"{_T}.sources",
    f"{_T}.token_files",
    f"{_T}.parquet_files",
    *(
        f"{_T}.adapters.{each}"
        for each in (
            "accelerate", "fms_fsdp", "huggingface", "lightning", "megatron", "pytorch_lightning", "ray",
            "torch_checkpointing", "torchtitan",
        )
    ),
)  # fmt: skip
"""Every name of their `__all__` is on a page."""

_FOR_DCP = {"ckpt.CheckpointWriter", "ckpt.CheckpointReader", "ckpt.Stager"}
"""Classes whose methods DCP calls, and nobody else."""

_MADE = {
    "CheckpointIO": "Saving", "FSDPStrategy": "Sharded", "ModelCheckpoint": "Finding", "ModelParallelStrategy": "Sharded",
}  # fmt: skip
"""Classes that `lightning_parts` makes when it is imported, and the part that describes each."""


@dataclass(frozen=True)
class ReferencePage:
    """A page of the reference.

    Attributes:
        title, intro: how it begins.
        names: what it describes: names, or modules, of which it describes `__all__`.
    """

    title: str
    intro: str
    names: tuple[str, ...]


PAGES: Mapping[str, ReferencePage] = {
    "saving-and-loading": ReferencePage(
        "Saving and loading",
        "Called on all ranks. `url` is a path or URL ([places and options](../storage.md)), sizes are in bytes, "
        "times in seconds. Tensors keep shape and dtype; a load fills the tensors that you pass, in place.",
        (
            "ckpt.save", "ckpt.load", "ckpt.async_save", "ckpt.SaveFuture", "ckpt.frozen", "ckpt.install", "ckpt.uninstall",
            "ckpt.CheckpointWriter", "ckpt.CheckpointReader", "ckpt.Stager", "ckpt.Checks", "ckpt.per_rank", "ckpt.options",
        ),
    ),
    "manager": ReferencePage(
        "The manager",
        "Decides when to save, what to keep and where to go on. The guide: [in the trainer](../trainer.md).",
        (
            "ckpt.CheckpointManager", f"{_T}.run.restore.Restored", f"{_T}.saving", f"{_T}.keeping",
            "ckpt.state", "ckpt.LocalTier",
        ),
    ),
    "events": ReferencePage(
        "Events",
        "Callables for `events=` of the manager. The guide: [watching](../trainer.md#watching).",
        (
            f"{_T}.events", f"{_T}.sinks.prometheus.Prometheus", f"{_T}.sinks.prometheus.PrometheusTextfile",
            f"{_T}.sinks.trainjob.TrainJobStatus", f"{_T}.sinks.mlflow.MLflow", f"{_T}.sinks.wandb.WeightsAndBiases",
        ),
    ),
    "tools": ReferencePage(
        "Tools",
        "What the [commands](../cli.md) do, as functions. They print nothing, and return what they found out.",
        (
            "ckpt.list_checkpoints", "ckpt.tools.ls.ListedCheckpoint",
            "ckpt.inspect", "ckpt.tools.inspect.Inspection", "ckpt.tools.inspect.TensorInfo",
            "ckpt.tools.inspect.ObjectInfo", "ckpt.tools.inspect.SliceInfo", "ckpt.tools.inspect.RankInfo",
            "ckpt.verify", "ckpt.tools.findings.Verification", "ckpt.tools.findings.Damage",
            "ckpt.tools.findings.Stray", "ckpt.consistency.sampling.Sampled",
            "ckpt.scrub", "ckpt.scrubbing.scrub.Scrubbed", "ckpt.scrubbing.scrub.ScrubbedCheckpoint",
            "ckpt.scrubbing.mending.Mended",
            "ckpt.sign", "ckpt.provenance.sign.Signature", "ckpt.sign_export", "ckpt.provenance.export.SignedExport",
            "ckpt.verify_signed", "ckpt.provenance.check.SignedVerification", "ckpt.provenance.check.CheckedSignature",
            "ckpt.diff", "ckpt.tools.diff.Comparison", "ckpt.tools.diff.Difference",
            "ckpt.convert", "ckpt.conversion.convert.Converted",
            "ckpt.copy", "ckpt.tools.findings.Copied",
            "ckpt.remove", "ckpt.tools.remove.Removed",
            "ckpt.collect_garbage", "ckpt.tools.gc.Garbage", "ckpt.tools.gc.GarbageItem",
            "ckpt.watch", "ckpt.drain", "ckpt.draining.drain.Drained",
            "ckpt.doctor", "ckpt.tools.doctor.Diagnosis",
            "ckpt.roundtrip", "ckpt.acceptance.roundtrip.Roundtrip",
            "ckpt.tune", "ckpt.tuning.tune.Tuned",
            "ckpt.ops", "ckpt.tools.certificate.Certificate", "ckpt.tools.certificate.Cast",
        ),
    ),
    "errors": ReferencePage(
        "Errors",
        "Every error that this library raises on purpose. What each one means, and what to do: "
        "[troubleshooting](../troubleshooting.md).",
        ("ckpt.errors",),
    ),
    "data-loader": ReferencePage(
        "The data loader",
        "The guide: [the data loader](../dataloader.md).",
        (
            f"{_T}.dataloader", f"{_T}.dataset", f"{_T}.sources", f"{_T}.token_files", f"{_T}.parquet_files",
        ),
    ),
    "tables": ReferencePage(
        "Tables of embeddings",
        "The guide: [tables](../tables.md).",
        ("ckpt.embeddings",),
    ),
    "stores": ReferencePage(
        "Stores",
        "The contract between this library and a storage system. The guide: [add a store](../guides/add-a-store.md).",
        ("ckpt.backends.registry", "ckpt.backends.retries.retry_policy", "ckpt.backends.base", "ckpt.testing"),
    ),
    "adapters": ReferencePage(
        "Adapters",
        "Each is imported by you alone, and needs its framework. The guides: [in the trainer that you use]"
        "(../trainers/README.md).",
        tuple(name for name in PUBLIC_MODULES if ".adapters." in name),
    ),
}  # fmt: skip


_OPTIONS = """\
    options:
      heading_level: {}
"""


def public_names(module: str) -> list[str]:
    """List `__all__` of a module, without importing it: an adapter needs its framework for that."""
    path = _ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__all__":
            return [str(name) for name in ast.literal_eval(node.value)]
    raise ValueError(f"{module} has no __all__")


def names_on() -> dict[str, set[str]]:
    """Return the full names that each page describes."""
    return {name: {each for part in page.names for each in _expanded(part)} for name, page in PAGES.items()}


def page_text(name: str) -> str:
    """Return the Markdown of a page, from which mkdocstrings makes the reference."""
    page = PAGES[name]
    lines = [f"# {page.title}", "", page.intro, ""]
    for part in page.names:
        if part not in PUBLIC_MODULES:
            hidden = ["    options:", "      members: false"] if part in _FOR_DCP else []
            lines += [f"::: {part}", *hidden, ""]
            continue
        lines += [f"## {part}", "", _about(part), ""]
        for each in _expanded(part):
            lines += (
                _made(each) if "lightning." in each else [f"::: {each}", *_OPTIONS.format(3).splitlines(), ""]
            )
    return "\n".join(lines)


def _expanded(part: str) -> list[str]:
    return [f"{part}.{name}" for name in public_names(part)] if part in PUBLIC_MODULES else [part]


def _made(name: str) -> list[str]:
    part = f"{_T}.adapters.lightning_parts.{_MADE[name.rpartition('.')[2]]}"
    hidden = [*_OPTIONS.format(4).splitlines(), "      show_root_heading: false", "      members: false"]
    return [f"### {name} {{: #{name} }}", "", f"::: {part}", *hidden, "      show_root_toc_entry: false", ""]


def _about(module: str) -> str:
    """Return the first paragraph of a module's docstring."""
    path = _ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0]
