"""Acceptance of a storage: some ranks save known values, others load and compare every element."""
