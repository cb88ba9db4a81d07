"""Make and parse the names of stored objects (`docs/format.md`)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckpt.backends.base import is_key

_RANK = r"rank-([0-9]{5}|[1-9][0-9]{5,})"
_TOKEN = r"([0-9a-f]{16})"
_NAME = re.compile(rf"{_RANK}/{_TOKEN}(?:-(0|[1-9][0-9]*)\.(distcp|pin)|\.(json|index|metadata|probe|sig))")
_MODEL_FILE = rf"model-{_TOKEN}-([0-9]{{5,9}})-of-([0-9]{{5,9}})\.safetensors"
_MODEL_NAME = re.compile(_MODEL_FILE)
_RANK_DIRECTORY = re.compile(_RANK)
_RANK_OF_FILE = re.compile(rf"{_RANK}/[^/]*|__([0-9]+)_[0-9]+\.distcp")
_PLACE_AND_KEY = re.compile(rf"(?:(.*)/)?({_RANK}/[^/]+|{_MODEL_FILE}|\.metadata|commit\.json)")

_OWNER = re.compile(r"\.\./([^/]*)/(.*)", re.DOTALL)
_SIBLING = re.compile(r"[\w.=+@, -]+")

_NAMED_STEP = re.compile(r"(?:.*[^a-zA-Z])?step[-_=]?(\d{1,18})(?!\d).*")
_LAST_NUMBER = re.compile(r"(?:.*[-_=. ])?(?:checkpoint|ckpt|epoch|iter)?(\d{1,18})(?:\.[a-z]+)?")

MODEL_PREFIX = "model-"
"""How the names of a model's files begin; those of this library go on with a token."""

INDEX_SUFFIX = ".safetensors.index.json"
MODEL_INDEX_KEY = f"model{INDEX_SUFFIX}"
SINGLE_MODEL_KEY = "model.safetensors"
"""How transformers names the files of a model."""

_NOT_OF_CONFIGURATION = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".index.json",
    ".distcp", ".ckpt-tmp", ".pkl", ".pickle", "commit.json",
)  # fmt: skip

SCRUB_KEY = "ckpt-scrub.json"
"""At a root: what of it was checked when. It belongs to no checkpoint."""

DATA_KEY_IN_BYTES = re.compile(rf"{_RANK}/{_TOKEN}-[0-9]+\.distcp".encode())
"""Finds the name of a data file of ours in a pickle without decoding it."""


@dataclass(frozen=True)
class ObjectName:
    """The parsed name of an object that a save writes once, relative to its checkpoint.

    Attributes:
        rank: the rank that wrote it; of a model's file that whose manifest lists it.
        token: 16 hexadecimal digits that only this rank's part of this save has.
        kind: `distcp` (data), `safetensors` (a model's data), `json` (manifest), `index`, `metadata`
            (its predecessor), `sig` (a signature of the commit), `probe`, or `pin`, whose token is that
            of the save that refers to this checkpoint.
        number: of a data file or pin, counted from 0; None for the other kinds.
    """

    rank: int
    token: str
    kind: str
    number: int | None = None

    @staticmethod
    def parse(key: str) -> ObjectName | None:
        """Parse a key; None if it is not a name that this library gives."""
        if key.startswith(MODEL_PREFIX) and (match := _MODEL_NAME.fullmatch(key)) is not None:
            return ObjectName(0, match[1], "safetensors", int(match[2]) - 1)
        match = _NAME.fullmatch(key)
        if match is None:
            return None
        rank, token, number, numbered, kind = match.groups()
        if number is None:
            return ObjectName(int(rank), token, kind)
        return ObjectName(int(rank), token, numbered, int(number))

    @property
    def is_data(self) -> bool:
        """True for a data file, which a manifest lists."""
        return self.kind in ("distcp", "safetensors")

    @property
    def stem(self) -> str:
        """The part of the key that all objects of one rank in one save share."""
        return f"{rank_directory(self.rank)}/{self.token}"


def rank_directory(rank: int) -> str:
    """Name the folder of a rank."""
    return f"rank-{rank:05d}"


def data_key(rank: int, token: str, number: int) -> str:
    """Name a data file."""
    return f"{rank_directory(rank)}/{token}-{number}.distcp"


def model_key(token: str, number: int, count: int) -> str:
    """Name the data file `number`, from 0, of the `count` that hold a model: as transformers does, with a token."""
    return f"{MODEL_PREFIX}{token}-{number + 1:05d}-of-{count:05d}.safetensors"


def manifest_key(rank: int, token: str) -> str:
    """Name a rank's manifest."""
    return f"{rank_directory(rank)}/{token}.json"


def index_key(rank: int, token: str) -> str:
    """Name the index."""
    return f"{rank_directory(rank)}/{token}.index"


def signature_key(described_by: str) -> str:
    """Name the signature of the commit whose index is at `described_by`."""
    return f"{described_by.rpartition('.')[0]}.sig"


def probe_key(rank: int, token: str) -> str:
    """Name an object that is deleted at once: it shows how the storage treats "only if absent"."""
    return f"{rank_directory(rank)}/{token}.probe"


def pin_key(token: str, number: int) -> str:
    """Name an object by which the save `token` says that it refers to the checkpoint in this folder."""
    return f"{rank_directory(0)}/{token}-{number}.pin"


def is_sibling(name: str) -> bool:
    """Tell whether checkpoints beside a folder of this name can refer to it.

    It must mean the same to every store and in every URL: no `:`, `?`, `#`, `%`, `*` or brackets.
    """
    return _SIBLING.fullmatch(name) is not None and is_key(name)


def owned_path(owner: str, key: str) -> str:
    """Name an object as records do: by its key, below `../OWNER/` if it lies in the sibling folder `owner`."""
    return f"../{owner}/{key}" if owner else key


def split_path(path: str) -> tuple[str, str]:
    """Split a path of a record into its owner, empty for the checkpoint itself, and the key there."""
    match = _OWNER.fullmatch(path)
    return ("", path) if match is None else (match[1], match[2])


def is_path(path: str) -> bool:
    """Tell whether a record may name an object so: in the checkpoint, or one of this library's in a sibling folder."""
    owner, key = split_path(path)
    if not path.startswith("../"):
        return is_key(path)
    return is_sibling(owner) and is_our_name(key)


def is_config_name(key: str) -> bool:
    """Tell whether a file directly in a model's folder can be of its configuration or its tokenizer, by its name."""
    is_other = "/" in key or key.startswith((".", "ckpt-")) or is_rank_directory(key)
    return not is_other and not key.endswith(_NOT_OF_CONFIGURATION)


def is_our_name(key: str) -> bool:
    """Tell whether this library gives such a name to an object that it writes once."""
    return ObjectName.parse(key) is not None


def is_data_key(key: str) -> bool:
    """Tell whether this library gives such a name to a data file."""
    name = ObjectName.parse(key)
    return name is not None and name.is_data


def is_rank_directory(folder: str) -> bool:
    """Tell whether a folder's name is that of a rank's folder."""
    return _RANK_DIRECTORY.fullmatch(folder) is not None


def rank_of(file: str) -> int | None:
    """Tell which rank wrote a data file, ours or stock's, by its name; None where the name does not tell."""
    match = _RANK_OF_FILE.fullmatch(file)
    return None if match is None else int(match[1] or match[2])


def split_place(key: str) -> tuple[str, str] | None:
    """Split a key below a root into a checkpoint's folder and a key in it; None if it fits no checkpoint."""
    match = _PLACE_AND_KEY.fullmatch(key)
    return None if match is None else (match[1] or "", match[2])


def last_segment(url: str) -> str:
    """Name a checkpoint's folder: the same on all ranks, however each sees the storage."""
    return url.rstrip("/").rpartition("/")[2]


def step_of(path: str) -> int | None:
    """Parse the step in a folder's name (`100`, `epoch=3-step=100`, `step_4_ckp`); None if there is none."""
    name = path.rstrip("/").rpartition("/")[2]
    match = _NAMED_STEP.fullmatch(name) or _LAST_NUMBER.fullmatch(name)
    return int(match[1]) if match else None
