import numpy as np
import pytest
import torch

from ckpt.embeddings import touched as module
from ckpt.embeddings.touched import Touched, as_set, ids_of
from ckpt.errors import ConfigurationError


def test_it_is_a_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_PENDING", 100)
    random = np.random.default_rng(0)
    touched, expected = Touched(), set()
    for _ in range(50):
        batch = random.integers(0, 500, size=random.integers(0, 40))
        touched.add(batch)
        expected.update(batch.tolist())
        if random.random() < 0.2:
            gone = random.integers(0, 500, size=20)
            touched.discard(gone)
            expected.difference_update(gone.tolist())
    assert touched.ids().tolist() == sorted(expected)


def test_batches_bitmaps_and_sparse_gradients_name_rows() -> None:
    table = torch.nn.Embedding(10, 2, sparse=True)
    table(torch.tensor([3, 7, 3])).sum().backward()
    assert sorted(set(ids_of(table.weight.grad).tolist())) == [3, 7]
    assert ids_of(torch.tensor([[1, 2], [3, 1]])).tolist() == [1, 2, 3, 1]
    assert ids_of(torch.tensor([False, True, True])).tolist() == [1, 2]
    assert ids_of(torch.tensor([False, True, True]), first_id=100).tolist() == [101, 102]
    assert sorted(set(ids_of(table.weight.grad, first_id=100).tolist())) == [103, 107]
    assert ids_of([5, 6], first_id=100).tolist() == [5, 6]
    assert ids_of([5, 6]).tolist() == [5, 6]
    assert ids_of([]).tolist() == []


def test_what_names_no_rows_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="float32"):
        ids_of(torch.tensor([1.0]))


def test_ids_are_any_64_bits() -> None:
    patterns = np.array([7, 1 << 63, (1 << 64) - 1], dtype=np.uint64)
    assert ids_of(patterns).tolist() == ids_of(torch.from_numpy(patterns)).tolist() == [7, -(1 << 63), -1]
    far = np.array([3 << 61, -3 << 61])  # their difference is positive in 64 bits
    assert as_set(far).tolist() == far.tolist()[::-1]
