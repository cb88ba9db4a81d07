"""Stand in for path objects of a pickle, of any class: pathlib's, and those that other programs define.

Stock PyTorch stores the path that its writer was given. Its class may belong to a package that is not
installed here, such as `multistorageclient.pathlib.MultiStoragePath` or universal_pathlib's `UPath`.
"""

from __future__ import annotations

import sys
from typing import Any

from ckpt.errors import UnsafeContent

_MAX_PARTS = 8
_MAX_FOREIGN_CLASSES = 8
_PATH_MODULES = ("pathlib", "pathlib._local")
_PATH_CLASSES = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_OWN_MODULES = frozenset({"torch", "ckpt"})


class StoredPath:
    """A path object of a pickle: the texts that its class was called with, up to 8, and nothing else.

    The pickle may call it, make an instance, and give it any state, which is dropped.
    """

    __slots__ = ("parts",)
    class_name = ""
    parts: tuple[str, ...]

    def __init__(self, *arguments: Any) -> None:
        # No more of them: a pickle repeats a long tuple in two bytes.
        is_short = len(arguments) <= _MAX_PARTS and all(type(each) is str for each in arguments)
        self.parts = arguments if is_short else ()

    def __setstate__(self, state: Any) -> None:
        """Drop the state: a path is known by the arguments of its class."""


def is_pathlib(module: str, name: str) -> bool:
    """Return whether a name is that of a path class of the standard library."""
    return module in _PATH_MODULES and name in _PATH_CLASSES


class PathClasses:
    """The stand-ins for the path classes that one pickle names."""

    def __init__(self) -> None:
        self._foreign: dict[tuple[str, str], type[StoredPath]] = {}

    def pathlib(self, module: str, name: str) -> type[StoredPath]:
        """Make a stand-in for a class of pathlib."""
        return _stand_in(f"{module}.{name}")

    def foreign(self, module: str, name: str) -> type[StoredPath]:
        """Return the stand-in for what may be a path class of another package, or a function that makes such paths.

        Raises UnsafeContent for names of the standard library and of torch, and for the ninth name.
        """
        package = module.partition(".")[0]
        if package in sys.stdlib_module_names or package in _OWN_MODULES:
            raise UnsafeContent(refusal(f"{module}.{name}"))
        if (module, name) not in self._foreign:
            if len(self._foreign) == _MAX_FOREIGN_CLASSES:
                raise UnsafeContent(refusal(f"{module}.{name}"))
            self._foreign[module, name] = _stand_in(f"{module}.{name}")
        return self._foreign[module, name]


def path_text(path: StoredPath, max_characters: int) -> str:
    """Join the parts of a path. Raises UnsafeContent if it has none, ValueError if the text is too long."""
    parts: tuple[str, ...] = getattr(path, "parts", ())  # a pickle can make an instance without a call
    if not parts:
        raise UnsafeContent(refusal(path.class_name))
    if sum(map(len, parts)) + len(parts) > max_characters:
        raise ValueError("paths far longer than what is stored of them")
    return "/".join(parts)


def refusal(name: str) -> str:
    """Describe a pickle that is refused for a name."""
    module, _, name = name.rpartition(".")
    return f"a pickle that asks for {module[:80]}.{name[:80]}"


def _stand_in(class_name: str) -> type[StoredPath]:
    return type("StoredPath", (StoredPath,), {"__slots__": (), "class_name": class_name})
