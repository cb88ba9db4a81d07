"""Test a store of your own: the conformance suite, and the simulator of storage that lies.

`StoreTests` needs pytest; the simulator needs greenlet. Both come with the extra `testing`.
"""

from __future__ import annotations

from ckpt.backends.bodies import CheckedBody
from ckpt.testing.place_tests import PlaceTests
from ckpt.testing.resume_tests import ResumeTests
from ckpt.testing.transfer_tests import TransferTests

__all__ = ["CheckedBody", "StoreTests"]


class StoreTests(TransferTests, ResumeTests, PlaceTests):
    """The conformance suite of `ckpt.backends.base.Store`, for pytest.

    A store's author subclasses it and runs it:

        class TestMyStore(ckpt.testing.StoreTests):
            def make_store(self):
                return MyStore(fresh_url(), threads=4)

            def raw_get(self, store, key):
                ...  # the object's bytes or None

            def raw_put(self, store, key, data):
                ...

    `raw_get` and `raw_put` go around the store, so that two errors of it cannot cancel out.
    """
