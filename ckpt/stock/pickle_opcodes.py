"""Name the opcodes of pickles and tell how long their arguments are, by Python's own table."""

from __future__ import annotations

import pickletools

_COUNT_BYTES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_CODES = {opcode.name: ord(opcode.code) for opcode in pickletools.opcodes}

ARGUMENTS = [(0, 0)] * 256
"""By opcode: the bytes of its argument, or else those of the count before its argument; (0, 0) for lines of text."""

for _opcode in pickletools.opcodes:
    if _opcode.arg is not None:
        ARGUMENTS[ord(_opcode.code)] = (max(_opcode.arg.n, 0), _COUNT_BYTES.get(_opcode.arg.n, 0))


def code(name: str) -> int:
    """Return the opcode of that name."""
    return _CODES[name]


def codes(names: str) -> list[int]:
    """Return the opcodes of these names, which spaces separate."""
    return [_CODES[name] for name in names.split()]
