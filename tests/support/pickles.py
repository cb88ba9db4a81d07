"""Write pickles by hand, in archives as `torch.save` makes them."""

from __future__ import annotations

import io
import struct

import torch


def archive(pickled: bytes, **storages: bytes) -> bytes:
    """A `torch.save` archive with any pickle in it."""
    file = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(file)
    records = {"data.pkl": pickled, "byteorder": b"little"}
    records |= {f"data/{key[1:]}": data for key, data in storages.items()}
    for name, data in records.items():
        writer.write_record(name, data, len(data))
    writer.write_end_of_file()
    return file.getvalue()


def name(full: str) -> bytes:
    module, _, attribute = full.rpartition(".")
    return f"c{module}\n{attribute}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"\x8a\x0a" + value.to_bytes(10, "little", signed=True)


def call(function: str, *arguments: bytes) -> bytes:
    return name(function) + b"(" + b"".join(arguments) + b"tR"
