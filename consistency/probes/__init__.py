"""Measure what a bucket or a mount really guarantees."""
