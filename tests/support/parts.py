"""Parts of a state for tests."""

from __future__ import annotations

from typing import Any


class Part:
    """A part whose state is one value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, state: Any) -> None:
        self.value = state
