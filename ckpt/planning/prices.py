"""Read prices of stores from a TOML file, and compute what stored bytes and requests cost."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from ckpt.errors import ConfigurationError
from ckpt.planning.requests import Requests

GB, TB = 1 << 30, 1 << 40
MONTH_S = 730 * 3600.0
_BUILT_IN = Path(__file__).with_name("prices.toml")


class Prices(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prices of one store, in dollars; `prices.toml` says what the fields mean."""

    name: str
    source: str
    checked: str
    storage: list[tuple[float, float]]
    writes: float
    reads: float
    writes_per_s: float = 0.0
    reads_per_s: float = 0.0
    note: str = ""

    def __post_init__(self) -> None:
        ends = [end for end, _ in self.storage]
        if not ends or ends != sorted(set(ends)) or ends[-1] != math.inf:
            raise ValueError("the rows of `storage` must rise, and the last one must end at inf")
        numbers = [self.writes, self.reads, self.writes_per_s, self.reads_per_s, ends[0]]
        if any(not number >= 0 for number in [*numbers, *(price for _, price in self.storage)]):
            raise ValueError("a price or rate is negative")

    def storage_dollars(self, nbytes: float) -> float:
        """Return the price of so many bytes for a month."""
        dollars = begin = 0.0
        for end_tb, price in self.storage:
            dollars += max(0.0, min(nbytes, end_tb * TB) - begin) / GB * price
            begin = end_tb * TB
        return dollars

    def request_dollars(self, requests: Requests) -> float:
        """Return the price of some requests; deletes are free."""
        return (requests.writes * self.writes + requests.reads * self.reads) / 1000


def price_text() -> str:
    """Return the built-in file, for people to edit."""
    return _BUILT_IN.read_text(encoding="utf-8")


def prices_of(store: str, path: str | None = None) -> Prices:
    """Read the prices of one store.

    Args:
        path: of a file to use in the place of the built-in one.

    Raises:
        ConfigurationError: the file cannot be read, is not right, or lacks the store.
    """
    try:
        text = Path(path).read_text(encoding="utf-8") if path is not None else price_text()
        stores = msgspec.toml.decode(text, type=dict[str, Prices])
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise ConfigurationError(f"the prices in {path} cannot be read: {error}") from None
    except ImportError:
        raise ConfigurationError("to read prices, Python 3.10 needs tomli: pip install tomli") from None
    if store not in stores:
        raise ConfigurationError(
            f"there are no prices for {store[:40]!r}; there are for {', '.join(stores) or 'none'}"
        )
    return stores[store]
