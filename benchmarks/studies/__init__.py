"""Measure what takes hours or a special set-up; not part of `make bench`."""
