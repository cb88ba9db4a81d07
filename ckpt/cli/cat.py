"""`ckpt cat`: values of one tensor, or of a slice of it."""

from __future__ import annotations

import math
import reprlib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckpt.cli.common import Json, Output, StorageOptions, Url, command, parse_storage_options, shown

if TYPE_CHECKING:
    from ckpt.reading.slices import OpenCheckpoint
    from ckpt.tools.cat import Selection

__all__ = ["cat"]

_MAX_VALUES = 1024
_MAX_TEXT = 10_000


def cat(
    url: Url,
    what: Annotated[
        str, typer.Argument(metavar="FQN[SLICE]", help="As in 'model.head.weight[:10, -1]'; quote it.")
    ],
    stats: Annotated[bool, typer.Option("--stats", help="Statistics, however few values there are.")] = False,
    npy: Annotated[
        str | None, typer.Option("--npy", metavar="FILE", help="Write the values to a NumPy file.")
    ] = None,
    storage_options: StorageOptions = None,
    json: Json = False,
) -> None:
    """Show the values of a tensor or slice, or statistics where there are more than 1,024; reads only its bytes.

    A non-tensor object is shown if it loads with torch's safe types alone.
    """
    with command(json, to_go_on="Nothing was written.") as output:
        from ckpt.format.columns import ObjectRow
        from ckpt.reading.slices import OpenCheckpoint

        with OpenCheckpoint(url, parse_storage_options(storage_options)) as checkpoint:
            if what in checkpoint.names and isinstance(checkpoint.find(what)[3], ObjectRow):
                _show_object(output, what, checkpoint.read_object(what))
            else:
                _show_tensor(output, checkpoint, what, stats, npy)


def _show_object(output: Output, name: str, value: object) -> None:
    limited = reprlib.Repr()
    limited.maxdict = limited.maxlist = limited.maxtuple = limited.maxset = 50
    limited.maxstring = limited.maxother = 2000
    text = limited.repr(value)[:_MAX_TEXT]
    if output.as_json:
        output.json({"fqn": name, "kind": "object", "type": type(value).__name__, "repr": text})
    else:
        output.print(shown(text))


def _show_tensor(output: Output, checkpoint: OpenCheckpoint, what: str, stats: bool, npy: str | None) -> None:
    from ckpt.format.stored_tensor import dtype_name
    from ckpt.tools import cat as values

    selection = values.select(checkpoint, what)
    dtype = dtype_name(checkpoint.tensor(selection.name).dtype)
    facts = {
        "fqn": selection.name, "kind": "tensor", "dtype": dtype, "shape": list(selection.shape),
        "offsets": list(selection.offsets), "lengths": list(selection.lengths),
    }  # fmt: skip
    if npy is not None:
        values.write_npy(checkpoint, selection, npy)
        if output.as_json:
            output.json({**facts, "npy": npy})
        else:
            output.print(f"{dtype} {tuple(selection.shape)} written to {shown(npy)}")
    elif stats or math.prod(selection.lengths) > _MAX_VALUES:
        _show_statistics(output, checkpoint, selection, facts)
    else:
        found = values.as_numpy(values.read(checkpoint, selection))
        if output.as_json:
            output.json({**facts, "values": _plain(found.tolist())})
        else:
            import numpy as np

            output.print(f"{dtype} {tuple(selection.shape)}")
            for line in np.array2string(found, threshold=_MAX_VALUES + 1, max_line_width=100).split("\n"):
                output.print(shown(line))


def _show_statistics(
    output: Output, checkpoint: OpenCheckpoint, selection: Selection, facts: dict[str, Any]
) -> None:
    from ckpt.tools import cat as values

    found = values.statistics(checkpoint, selection)
    described = {name: _plain(value) for name, value in vars(found).items()}
    if output.as_json:
        output.json({**facts, "statistics": described})
        return
    output.print(f"{facts['dtype']} {tuple(selection.shape)}")
    for name, value in described.items():
        output.print(f"{name:<6}{'-' if value is None else value}")


def _plain(value: Any) -> Any:
    """Values for JSON, which knows no NaN and no complex numbers: those become texts, and pairs."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, complex):
        return [_plain(value.real), _plain(value.imag)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
