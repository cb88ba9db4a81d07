"""Measure: each job is a function from a task to its figures, run in a process of its own."""
