"""Acceptance of a storage: a model's worth of known values saved by some ranks, loaded by others, compared element by element."""
