"""Test a store of your own: the conformance suite, and the simulator of storage that lies.

`StoreTests` needs pytest; the simulator needs greenlet. Both come with the extra `testing`.
"""

from __future__ import annotations

from ckpt.backends.bodies import CheckedBody
from ckpt.testing.store_tests import StoreTests

__all__ = ["CheckedBody", "StoreTests"]
