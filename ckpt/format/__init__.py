"""Describe what this library stores: names, records, the columnar index. No I/O."""
