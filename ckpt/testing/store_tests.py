"""The conformance suite of `ckpt.backends.base.Store`, for pytest: what this library relies on, executable.

A store's author subclasses it and runs it:

    class TestMyStore(ckpt.testing.StoreTests):
        def make_store(self, **options):
            return MyStore(fresh_url(), options, threads=4)

        def raw_get(self, store, key):
            ...  # the object's bytes or None, read without going through the store

        def raw_put(self, store, key, data):
            ...

`raw_get` and `raw_put` go around the store under test, so that two errors of it cannot cancel out.
"""

from __future__ import annotations

from ckpt.testing.place_tests import PlaceTests
from ckpt.testing.transfer_tests import TransferTests

__all__ = ["StoreTests"]


class StoreTests(TransferTests, PlaceTests):
    """Subclass, implement the three methods, and let pytest collect it."""
