"""Measure what is below all of them: the same bytes, and nothing around it."""
