"""Checkpointing from a training loop."""
