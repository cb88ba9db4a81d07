"""`ckpt cat`: show the values of a tensor."""

from __future__ import annotations

import fnmatch
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.options import Json, StorageOptions, Url, parse_storage_options
from ckpt.cli.printing.outline import natural
from ckpt.cli.printing.output import Output, command
from ckpt.errors import ConfigurationError
from ckpt.words import shown

if TYPE_CHECKING:
    from ckpt.reading.slices import OpenCheckpoint

_MAX_VALUES = 1024
_MAX_NAMES = 20

EXAMPLES = """
ckpt cat runs/step-100 'model.head.weight[:10, -1]'
ckpt cat runs/step-100 '*.lr'
ckpt cat runs/step-100 model.head.weight --npy head.npy
"""


def cat(
    url: Url,
    name: Annotated[
        str,
        typer.Argument(
            metavar="FQN[SLICE]",
            help="A name, a slice of a tensor ('model.head.weight[:10, -1]', in quotes), or a group of "
            "names: model.head, '*.lr'.",
        ),
    ],
    stats: Annotated[bool, typer.Option("--stats", help="Show statistics, not values.")] = False,
    npy: Annotated[str | None, typer.Option(metavar="FILE", help="Write the values to a NumPy file.")] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show the values of a tensor or of a slice of it.

    Shows statistics instead if there are more than 1,024 values. Reads only the bytes it needs. An
    object is shown if it loads with torch's safe types alone. Of a group of names, the first are
    listed, with their values if these are small.
    """
    with command(json, if_interrupted="Nothing was written.") as output:
        from ckpt.format.columns import ObjectRow
        from ckpt.reading.slices import OpenCheckpoint

        options = parse_storage_options(storage_options)
        with (
            output.progress("reading records") as progress,
            OpenCheckpoint(url, options, models=True, report=progress) as checkpoint,
        ):
            names = checkpoint.names
            if name not in names:
                group = fnmatch.filter(names, name) if "*" in name or "?" in name else []
                group = group or [each for each in names if each.startswith(f"{name}.")]
                if len(group) > 1 and (npy is not None or stats):
                    text = f"{name!r} is a group of {len(group):,} names; --npy and --stats take one tensor"
                    raise ConfigurationError(text)
                if len(group) > 1:
                    _show_group(output, checkpoint, name, sorted(group, key=natural))
                    return
                name = group[0] if group else name
            if name in names and isinstance(checkpoint.find(name)[3], ObjectRow):
                _show_object(output, name, checkpoint.read_object(name))
            else:
                _show_tensor(output, checkpoint, name, stats, npy)


def _show_group(output: Output, checkpoint: OpenCheckpoint, name: str, names: list[str]) -> None:
    """Show the first names of a group, and those of their values that are small."""
    from ckpt.tools.cat import short_text
    from ckpt.tools.inspect import ObjectInfo, describe

    if output.as_json:
        output.json({"fqn": name, "kind": "group", "count": len(names), "names": names[:_MAX_VALUES]})
        return
    inspection = describe(checkpoint.store.url, checkpoint.parts)
    infos = [inspection.tensors.get(each) or inspection.objects[each] for each in names[:_MAX_NAMES]]
    small = checkpoint.peek(info.fqn for info in infos if info.is_small)
    texts = {each: short_text(value) for each, value in small}
    output.print(f"{shown(name)} is a group of {len(names):,} names:")
    rows = []
    for info in infos:
        kind = "object" if isinstance(info, ObjectInfo) else f"{info.dtype} {info.shape}"
        rows.append((info.fqn, kind, texts.get(info.fqn, "")))
    output.print_columns(rows, heading=False)
    if len(names) > len(infos):
        output.print(f"... and {len(names) - len(infos):,} more; `ckpt inspect` shows them")


def _show_object(output: Output, name: str, value: object) -> None:
    from ckpt.tools.cat import object_text

    text = object_text(value)
    if output.as_json:
        output.json({"fqn": name, "kind": "object", "type": type(value).__name__, "repr": text})
    else:
        output.print(shown(text))


def _show_tensor(output: Output, checkpoint: OpenCheckpoint, name: str, stats: bool, npy: str | None) -> None:
    from ckpt.tools import cat as tensor_values

    selection = tensor_values.select(checkpoint, name)
    dtype = checkpoint.tensor(selection.name).dtype
    facts: dict[str, Any] = {
        "fqn": selection.name, "kind": "tensor", "dtype": dtype, "shape": list(selection.shape),
        "offsets": list(selection.offsets), "lengths": list(selection.lengths),
    }  # fmt: skip
    title = f"{dtype} {tuple(selection.shape)}"
    if npy is not None:
        with output.progress("writing") as progress:
            tensor_values.write_npy(checkpoint, selection, npy, progress)
        facts["npy"] = npy
        lines = [f"{title} written to {npy}"]
    elif stats or math.prod(selection.lengths) > _MAX_VALUES:
        with output.progress("reading") as progress:
            statistics = tensor_values.statistics(checkpoint, selection, progress)
        facts["statistics"] = {key: _for_json(value) for key, value in vars(statistics).items()}
        numbers = facts["statistics"].items()
        lines = [title, *(f"{key:<6}{'-' if value is None else value}" for key, value in numbers)]
    else:
        import numpy as np

        array = tensor_values.read(checkpoint, selection)
        # A few bytes of records can list no elements in any number of rows.
        facts["values"] = _for_json(array.tolist()) if array.size else []
        text = np.array2string(array, threshold=_MAX_VALUES + 1, max_line_width=min(100, output.width))
        lines = [title, *text.split("\n")]
    if output.as_json:
        output.json(facts)
    else:
        output.print(*map(shown, lines))


def _for_json(value: Any) -> Any:
    """Replace what JSON cannot hold: NaN and Inf become texts, complex numbers pairs."""
    if isinstance(value, list):
        return [_for_json(item) for item in value]
    if isinstance(value, complex):
        return [_for_json(value.real), _for_json(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
