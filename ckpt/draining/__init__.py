"""Carry the checkpoints of a node's own disk to the durable place."""
