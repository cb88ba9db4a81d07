"""Objects of the checkpoints beside one, which it names."""
