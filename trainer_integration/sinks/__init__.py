"""Tell platforms about checkpoints: each module has a callable for `CheckpointManager(events=...)`."""
