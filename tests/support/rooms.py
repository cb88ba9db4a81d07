"""Say what each room of the code is for, and which rooms it may use: the table that a test enforces.

`docs/design.md` shows `mermaid()` of it; `python tests/support/rooms.py` prints that.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = {
    "ckpt": "ckpt",
    "backends": "ckpt.backends",
    "consistency": "ckpt.consistency",
    "trainer_integration": "ckpt.trainer_integration",
}
"""Folders at the root of the repository, and the packages that they install as."""


@dataclass(frozen=True)
class Room:
    """A package, or a module that stands for one.

    Attributes:
        about: what it is for, in one sentence.
        uses: the rooms that its files may import; a module's full name admits that module alone.
    """

    about: str
    uses: tuple[str, ...]


_CONTRACT = ("ckpt.backends.base", "ckpt.backends.bodies", "ckpt.backends.options")
_FLOOR = (
    "ckpt.errors",
    "ckpt.gc_pause",
    "ckpt.lanes",
    "ckpt.torch_private",
    "ckpt.whole_files",
    "ckpt.consistency",
    *_CONTRACT,
)
_REGISTRY = "ckpt.backends.registry"

ROOMS: Mapping[str, Room] = {
    "ckpt.errors": Room("the error tree", ("ckpt.logs", "ckpt.words")),
    "ckpt.logs": Room("log lines without control characters", ("ckpt.words",)),
    "ckpt.words": Room("sizes, ages and names, written for people", ()),
    "ckpt.notebook": Room("small tables as HTML", ("ckpt.words",)),
    "ckpt.gc_pause": Room("no garbage collection while many objects are made", ()),
    "ckpt.lanes": Room("transfers in as many threads as help", ()),
    "ckpt.torch_private": Room("the private names of torch that are used", ()),
    "ckpt.geometry": Room(
        "chunks that a tensor gives by its own hooks or fields", ("ckpt.errors", "ckpt.torch_private")
    ),
    "ckpt.whole_files": Room("files that appear whole", ()),
    "ckpt.child_processes": Room("Python processes that import nothing from the working directory", ()),
    "ckpt.settings": Room("ckpt.toml: how bytes move to each place", ("ckpt.errors",)),
    "ckpt.backends": Room(
        "storage systems behind one small contract",
        ("ckpt.errors", "ckpt.settings", "ckpt.backends.s3_protocol"),
    ),
    "ckpt.backends.s3_protocol": Room(
        "S3 requests and replies, for boto3 and ibm-cos-sdk",
        (
            "ckpt.errors",
            "ckpt.lanes",
            *_CONTRACT,
            "ckpt.backends.cancellable_reads",
            "ckpt.backends.fsspec_listings",
            "ckpt.backends.retries",
        ),
    ),
    "ckpt.consistency": Room("the commit protocol, checksums, time and chance", ("ckpt.errors", *_CONTRACT)),
    "ckpt.consistency.probes": Room(
        "what a storage really guarantees, measured",
        ("ckpt.child_processes", "ckpt.errors", "ckpt.consistency", *_CONTRACT, "ckpt.backends.paths"),
    ),
    "ckpt.format": Room("what this library stores: names, records, index", _FLOOR),
    "ckpt.ranks": Room(
        "ranks agree, are missed, and give up in time",
        (*_FLOOR, "ckpt.backends.wrapper", "ckpt.backends.cancellable_reads"),
    ),
    "ckpt.testing": Room(
        "a conformance suite for stores, and storage that lies", (*_FLOOR, "ckpt.backends.cancellable_reads")
    ),
    "ckpt.stock": Room("what stock PyTorch stores, read without running code", (*_FLOOR, "ckpt.format")),
    "ckpt.transfer": Room("bytes between memory and stores", (*_FLOOR, "ckpt.geometry", "ckpt.format")),
    "ckpt.siblings": Room(
        "objects of the checkpoints beside one, which it names",
        (*_FLOOR, "ckpt.backends.wrapper", "ckpt.format"),
    ),
    "ckpt.dcp_storage": Room(
        "what DCP's writer and reader have in common",
        (*_FLOOR, "ckpt.settings", "ckpt.transfer", "ckpt.ranks", _REGISTRY),
    ),
    "ckpt.save_plans": Room(
        "which rank writes what, agreed by columns and rules",
        (*_FLOOR, "ckpt.geometry", "ckpt.format", "ckpt.ranks", "ckpt.transfer.boxes"),
    ),
    "ckpt.load_plans": Room(
        "which stored chunks a rank reads, found by columns; the steps of a load",
        ("ckpt.errors", "ckpt.geometry", "ckpt.torch_private", "ckpt.format", "ckpt.ranks"),
    ),
    "ckpt.content": Room(
        "whether the content of a save can be right, told from few figures",
        (
            "ckpt.errors",
            "ckpt.consistency.checksums",
            "ckpt.format",
            "ckpt.save_plans",
            "ckpt.transfer.tensor_memory",
        ),
    ),
    "ckpt.writing": Room(
        "a save, from DCP's plan to the commit",
        (
            "ckpt.geometry",
            "ckpt.content",
            "ckpt.save_plans",
            *_FLOOR,
            "ckpt.backends.wrapper",
            "ckpt.dcp_storage",
            "ckpt.format",
            "ckpt.siblings",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.ranks",
        ),
    ),
    "ckpt.models": Room(
        "models as safetensors files, which all ranks write together",
        (
            *_FLOOR,
            "ckpt.format",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.ranks",
            "ckpt.save_plans",
            "ckpt.writing",
            _REGISTRY,
        ),
    ),
    "ckpt.reading": Room(
        "a load, from the commit to the last element",
        (
            "ckpt.content.memory",
            *_FLOOR,
            "ckpt.dcp_storage",
            "ckpt.format",
            "ckpt.siblings",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.ranks",
            _REGISTRY,
        ),
    ),
    "ckpt.tools": Room(
        "one file for each verb: ls, inspect, verify, copy, gc, ...",
        (
            "ckpt.words",
            "ckpt.notebook",
            *_FLOOR,
            "ckpt.consistency.probes",
            "ckpt.backends.wrapper",
            _REGISTRY,
            "ckpt.format",
            "ckpt.siblings",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.ranks",
            "ckpt.writing",
            "ckpt.reading",
            "ckpt.collective",
            "ckpt.load_plans",
            "ckpt.options",
            "ckpt.state",
        ),
    ),
    "ckpt.conversion": Room(
        "to and from DCP, torch.save and safetensors",
        (
            *_FLOOR,
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format",
            "ckpt.save_plans.receipt_messages",
            "ckpt.state",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.ranks",
            "ckpt.writing",
            "ckpt.reading",
        ),
    ),
    "ckpt.references": Room(
        "only what changed: what a save takes over from an earlier one",
        (
            "ckpt.content.replicas",
            *_FLOOR,
            "ckpt.backends.paths",
            "ckpt.backends.wrapper",
            _REGISTRY,
            "ckpt.format",
            "ckpt.transfer",
            "ckpt.ranks",
            "ckpt.reading",
            "ckpt.save_plans",
            "ckpt.writing",
        ),
    ),
    "ckpt.options": Room("option dataclasses of the public calls", ("ckpt.errors",)),
    "ckpt.ops": Room("public operations beyond save and load", ("ckpt.tools",)),
    "ckpt.state": Room(
        "states of models, optimizers and parts, by name and with the structure they were saved with",
        (
            "ckpt.errors",
            "ckpt.gc_pause",
            "ckpt.geometry",
            "ckpt.torch_private",
            "ckpt.options",
            "ckpt.format",
            "ckpt.geometry",
            "ckpt.load_plans",
            "ckpt.save_plans",
            "ckpt.ranks",
            "ckpt.transfer",
            "ckpt.words",
            "ckpt.stock",
        ),
    ),
    "ckpt.arguments": Room("what is easily mistaken in a call, refused", ("ckpt.errors",)),
    "ckpt.collective": Room(
        "a save or a load begun on all ranks, carried out, failing alike",
        (
            "ckpt.content.checks",
            *_FLOOR,
            "ckpt.arguments",
            "ckpt.dcp_storage",
            "ckpt.format.names",
            "ckpt.options",
            "ckpt.state",
            "ckpt.ranks",
            "ckpt.load_plans",
            "ckpt.writing",
            "ckpt.models",
            "ckpt.reading",
            "ckpt.references",
        ),
    ),
    "ckpt.api": Room(
        "ckpt.save, ckpt.load, ckpt.async_save",
        (
            "ckpt.content.checks",
            "ckpt.errors",
            "ckpt.gc_pause",
            "ckpt.collective",
            "ckpt.local_first",
            "ckpt.options",
            "ckpt.ranks",
            "ckpt.reading",
            "ckpt.writing",
        ),
    ),
    "ckpt.embeddings": Room(
        "tables of rows, saved by what changed, on any number of processes",
        (
            "ckpt.errors",
            "ckpt.arguments",
            _REGISTRY,
            "ckpt.collective",
            "ckpt.format",
            "ckpt.options",
            "ckpt.state",
            "ckpt.ranks",
            "ckpt.reading",
            "ckpt.references",
        ),
    ),
    "ckpt.local_first": Room(
        "saves on the nodes' own disks, carried behind the trainer, restored from the nearest",
        (
            *_FLOOR,
            "ckpt.child_processes",
            "ckpt.collective",
            "ckpt.backends.wrapper",
            _REGISTRY,
            "ckpt.draining",
            "ckpt.format",
            "ckpt.siblings",
            "ckpt.options",
            "ckpt.ranks",
            "ckpt.reading",
            "ckpt.tools.gc",
            "ckpt.tools.remove",
            "ckpt.transfer",
            "ckpt.writing",
        ),
    ),
    "ckpt.dcp_hook": Room(
        "ckpt.install()",
        (
            "ckpt.errors",
            "ckpt.torch_private",
            "ckpt.backends.fsspec_listings",
            "ckpt.backends.options",
            "ckpt.collective",
            "ckpt.dcp_storage",
            "ckpt.format",
            "ckpt.options",
            "ckpt.ranks",
            "ckpt.state",
            "ckpt.writing",
            "ckpt.reading",
            "ckpt.collective",
            "ckpt.format",
            "ckpt.options",
            "ckpt.ranks",
            "ckpt.state",
        ),
    ),
    "ckpt.acceptance": Room(
        "a model's worth of known values saved, loaded, compared",
        (
            *_FLOOR,
            "ckpt.child_processes",
            "ckpt.dcp_storage",
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format",
            "ckpt.transfer",
            "ckpt.writing",
            "ckpt.reading",
            "ckpt.tools",
        ),
    ),
    "ckpt.trainer_integration": Room(
        "the checkpoint manager, the training state, the data loader",
        (
            "ckpt.child_processes",
            "ckpt.consistency.block_digests",
            "ckpt.content.checks",
            "ckpt.errors",
            "ckpt.whole_files",
            "ckpt.api",
            "ckpt.collective",
            "ckpt.embeddings",
            "ckpt.local_first.options",
            "ckpt.options",
            "ckpt.writing.stock_metadata",
            "ckpt.options",
            "ckpt.state",
            "ckpt.ranks",
            "ckpt.references.frozen",
            "ckpt.tools",
            "ckpt.format.run_record",
            "ckpt.words",
            "ckpt.backends.options",
            _REGISTRY,
            "ckpt.trainer_integration.run",
            "ckpt.trainer_integration.data_order",
            "ckpt.trainer_integration.data_store",
        ),
    ),
    "ckpt.trainer_integration.data_store": Room(
        "files of data in stores, read ahead of use in checked blocks",
        (
            "ckpt.errors",
            *_CONTRACT,
            "ckpt.backends.paths",
            _REGISTRY,
            "ckpt.consistency.checksums",
            "ckpt.whole_files",
            "ckpt.trainer_integration.sources",
        ),
    ),
    "ckpt.trainer_integration.run": Room(
        "one run's saves: decide, upload, keep, restore",
        (
            "ckpt.child_processes",
            "ckpt.words",
            "ckpt.notebook",
            "ckpt.arguments",
            "ckpt.errors",
            "ckpt.torch_private",
            "ckpt.api",
            "ckpt.collective",
            "ckpt.embeddings",
            "ckpt.load_plans",
            "ckpt.local_first",
            "ckpt.options",
            "ckpt.state",
            "ckpt.ranks",
            "ckpt.references",
            "ckpt.tools",
            "ckpt.writing",
            "ckpt.reading.latest",
            "ckpt.backends.wrapper",
            "ckpt.format",
            _REGISTRY,
            "ckpt.trainer_integration",
        ),
    ),
    "ckpt.trainer_integration.sinks": Room(
        "events for Prometheus, MLflow, Weights & Biases and Kubeflow",
        ("ckpt.errors", "ckpt.whole_files", "ckpt.trainer_integration.events"),
    ),
    "ckpt.trainer_integration.data_order": Room(
        "samples in an order that any number of ranks can go on with",
        ("ckpt.errors", "ckpt.torch_private", "ckpt.format", "ckpt.options", "ckpt.trainer_integration"),
    ),
    "ckpt.trainer_integration.adapters": Room(
        "the frameworks that people train with, one file each",
        (
            *_FLOOR,
            "ckpt.api",
            "ckpt.collective",
            "ckpt.dcp_hook",
            "ckpt.dcp_storage",
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format",
            "ckpt.options",
            "ckpt.state",
            "ckpt.ranks",
            "ckpt.stock",
            "ckpt.transfer",
            "ckpt.writing",
            "ckpt.reading",
            "ckpt.tools",
            "ckpt.conversion",
            "ckpt.trainer_integration",
            "ckpt.trainer_integration.run",
        ),
    ),
    "ckpt.planning": Room(
        "what checkpoints cost, computed beforehand",
        (
            "ckpt.errors",
            "ckpt.consistency.checksums",
            *_CONTRACT,
            "ckpt.acceptance.models",
            "ckpt.embeddings.chain",
            "ckpt.embeddings.shard",
            "ckpt.format.dtypes",
            "ckpt.format.runs",
            "ckpt.tools.inspect",
        ),
    ),
    "ckpt.tuning": Room(
        "the settings with which a storage is fastest, found by saves and loads",
        (
            *_FLOOR,
            "ckpt.settings",
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format.names",
            "ckpt.ranks",
            "ckpt.transfer.buffer_pool",
            "ckpt.writing",
            "ckpt.reading.reader",
            "ckpt.tools",
        ),
    ),
    "ckpt.provenance": Room(
        "who made a checkpoint, and whether it is still that one: signatures of commits",
        (
            *_FLOOR,
            "ckpt.backends.wrapper",
            _REGISTRY,
            "ckpt.format",
            "ckpt.reading",
            "ckpt.tools",
            "ckpt.transfer.reports",
        ),
    ),
    "ckpt.watching": Room(
        "each new checkpoint of a root once, in order",
        (
            *_FLOOR,
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format",
            "ckpt.transfer",
            "ckpt.reading.latest",
            "ckpt.tools.ls",
        ),
    ),
    "ckpt.draining": Room(
        "the checkpoints of a node's own disk, carried to the durable place",
        (
            *_FLOOR,
            "ckpt.backends.wrapper",
            _REGISTRY,
            "ckpt.format",
            "ckpt.siblings",
            "ckpt.transfer",
            "ckpt.reading",
            "ckpt.writing",
            "ckpt.tools",
        ),
    ),
    "ckpt.scrubbing": Room(
        "what is stored, checked again and again, and mended from a second place",
        (
            *_FLOOR,
            _REGISTRY,
            "ckpt.backends.wrapper",
            "ckpt.format",
            "ckpt.transfer",
            "ckpt.reading",
            "ckpt.draining.marker",
            "ckpt.tools",
        ),
    ),
    "ckpt.report": Room(
        "a checkpoint or a run as one page to look at",
        (
            "ckpt.errors",
            *_CONTRACT,
            _REGISTRY,
            "ckpt.format",
            "ckpt.reading.checkpoint",
            "ckpt.reading.opening",
            "ckpt.tools",
            "ckpt.transfer.reports",
        ),
    ),
    "ckpt.cli.printing": Room(
        "lines, columns, outlines and errors for people",
        ("ckpt.words", "ckpt.errors", "ckpt.backends.retries", "ckpt.planning", "ckpt.transfer.reports"),
    ),
    "ckpt.cli.measuring": Room(
        "commands that measure a storage",
        (
            "ckpt.words",
            "ckpt",
            "ckpt.errors",
            "ckpt.cli.options",
            "ckpt.cli.printing",
            "ckpt.acceptance",
            "ckpt.consistency.probes",
            "ckpt.tools",
            "ckpt.tuning",
        ),
    ),
    "ckpt.cli.signing": Room(
        "commands about signatures",
        (
            "ckpt.words",
            "ckpt",
            "ckpt.errors",
            "ckpt.cli.options",
            "ckpt.cli.printing",
            "ckpt.provenance",
        ),
    ),
    "ckpt.cli.upkeep": Room(
        "commands that keep what is stored sound, and small",
        (
            "ckpt.words",
            "ckpt",
            "ckpt.errors",
            "ckpt.cli.options",
            "ckpt.cli.printing",
            "ckpt.cli.verify",
            "ckpt.backends.options",
            "ckpt.scrubbing",
            "ckpt.tools",
        ),
    ),
    "ckpt.cli": Room(
        "the ckpt command, one file a verb",
        (
            "ckpt.whole_files",
            "ckpt.words",
            "ckpt",
            "ckpt.errors",
            "ckpt.cli.measuring",
            "ckpt.cli.printing",
            "ckpt.cli.signing",
            "ckpt.cli.upkeep",
            "ckpt.consistency.sampling",
            "ckpt.draining",
            "ckpt.local_first",
            "ckpt.watching",
            "ckpt.backends.options",
            "ckpt.backends.retries",
            "ckpt.format",
            "ckpt.reading",
            "ckpt.tools",
            "ckpt.conversion",
            "ckpt.acceptance",
            "ckpt.planning",
            "ckpt.report",
            "ckpt.tuning",
        ),
    ),
    "ckpt": Room("public names, imported when first used", ("*",)),
}


def modules() -> dict[str, Path]:
    """Find every module that is installed, and its file."""
    files: dict[str, Path] = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT / folder).with_suffix("")
            if folder == "ckpt" and inside.parts[0] in FOLDERS:
                continue  # a link
            name = ".".join([package, *inside.parts])
            files[name.removesuffix(".__init__")] = path
    return files


def imports(path: Path, known: Mapping[str, Path]) -> Iterator[tuple[str, bool]]:
    """List the modules that a file imports, also those inside of functions, and whether each is at the top."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            for alias in node.names:
                module = f"{node.module}.{alias.name}"
                names.append(module if module in known else node.module or "")
        for name in names:
            yield name, node in tree.body


def room_of(module: str, known: Mapping[str, Path]) -> str:
    """Name the room that a module stands in."""
    if module in ROOMS:
        return module
    return module.rpartition(".")[0] if known[module].stem != "__init__" else module


def may_use(module: str, imported: str, known: Mapping[str, Path]) -> bool:
    """Tell whether the table lets `module` import `imported`."""
    room, target = room_of(module, known), room_of(imported, known)
    uses = ROOMS[room].uses
    return room == target or "*" in uses or imported in uses or target in uses


def mermaid() -> str:
    """Draw the table for `docs/design.md`: top-level rooms, and the arrows that are not implied by others."""
    arrows: dict[str, set[str]] = {}
    for room, about in ROOMS.items():
        if room not in _NOT_DRAWN:
            arrows.setdefault(_drawn(room), set()).update(map(_drawn, about.uses))
    for room, uses in arrows.items():
        uses -= {room, *_NOT_DRAWN}
    below = {room: _reachable(room, arrows) for room in arrows}
    lines = ["```mermaid", "flowchart TD"]
    lines += [f'    {_title(room)}["<b>{_title(room)}</b><br/>{ROOMS[room].about}"]' for room in arrows]
    for room, uses in arrows.items():
        direct = {use for use in uses if not any(use in below[other] for other in uses - {use})}
        lines += [f"    {_title(room)} --> {_title(use)}" for use in sorted(direct)]
    return "\n".join([*lines, "```"])


_NOT_DRAWN = (
    "ckpt",
    "ckpt.errors",
    "ckpt.gc_pause",
    "ckpt.torch_private",
    "ckpt.whole_files",
    "ckpt.child_processes",
    "ckpt.words",
)  # the floor under all rooms


def _drawn(name: str) -> str:
    """Name the top-level room of a module or room."""
    return name if name in _NOT_DRAWN else ".".join(name.split(".")[:2])


def _reachable(room: str, arrows: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    todo = list(arrows.get(room, ()))
    while todo:
        other = todo.pop()
        if other not in reached:
            reached.add(other)
            todo += arrows.get(other, ())
    return reached - {room}


def _title(room: str) -> str:
    return room.removeprefix("ckpt.")


if __name__ == "__main__":
    print(mermaid())
