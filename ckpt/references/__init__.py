"""Save only what changed: what a save takes over from an earlier checkpoint, as it is stored there."""
